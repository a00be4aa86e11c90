import type { EdgeStorage } from "../../src/index.js";

const STORE = "texts";

/** Stores the client's state in the browser's IndexedDB, separately for each origin. */
export class IndexedDbStorage implements EdgeStorage {
  /** @param name Name of the database. */
  constructor(readonly name = "fedone-edge") {}

  async get(key: string): Promise<string | undefined> {
    return this.#ask("readonly", (store) => store.get(key));
  }

  async set(key: string, value: string): Promise<void> {
    await this.#ask("readwrite", (store) => store.put(value, key));
  }

  async remove(key: string): Promise<void> {
    await this.#ask("readwrite", (store) => store.delete(key));
  }

  async #ask<T>(
    mode: IDBTransactionMode,
    act: (store: IDBObjectStore) => IDBRequest<T>,
  ): Promise<T> {
    // Opened for each call: browsers close the connections of a page in the background, and an open
    // connection would delay the deletion of the database.
    const opening = indexedDB.open(this.name, 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore(STORE);
    const database = await done(opening);
    try {
      const transaction = database.transaction(STORE, mode, { durability: "strict" });
      const request = act(transaction.objectStore(STORE));
      await new Promise<void>((resolve, reject) => {
        transaction.oncomplete = () => resolve();
        transaction.onabort = transaction.onerror = () => reject(transaction.error);
      });
      return request.result;
    } finally {
      database.close();
    }
  }
}

/**
 * Runs `work` in one tab of this origin at a time, because two clients must not share a storage.
 *
 * @param options.signal Ends the wait for the other tab.
 */
export async function inOneTab(
  work: () => Promise<void>,
  { name = "fedone-edge", signal }: { name?: string; signal?: AbortSignal } = {},
): Promise<void> {
  await navigator.locks.request(name, { ...(signal && { signal }) }, work);
}

function done<T>(request: IDBRequest<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
