/**
 * Where a device keeps its identity, unsent updates and paid losses: texts by key.
 *
 * Keys have the characters `A-Z a-z 0-9 . _ -` only. What `set` was given must be there after a
 * crash; values hold a credential, so the place must be private to the app and out of backups.
 */
export interface EdgeStorage {
  get(key: string): string | null | undefined | Promise<string | null | undefined>;
  set(key: string, value: string): void | Promise<void>;
  remove(key: string): void | Promise<void>;
}

/** Keeps texts as long as the process lives; the device then enrols at each start. */
export class MemoryStorage implements EdgeStorage {
  readonly #values = new Map<string, string>();

  get(key: string): string | undefined {
    return this.#values.get(key);
  }

  set(key: string, value: string): void {
    this.#values.set(key, value);
  }

  remove(key: string): void {
    this.#values.delete(key);
  }
}

/** One JSON document of a device; a damaged one counts as absent. */
export class Kept<T> {
  readonly #key: string;

  /**
   * @param storage Where it lies.
   * @param server The server that it concerns.
   * @param name Which document.
   * @param read Makes it of what was stored; undefined where that is none.
   */
  constructor(
    readonly storage: EdgeStorage,
    server: string,
    name: string,
    readonly read: (found: Record<string, unknown>) => T | undefined,
  ) {
    const place = server.replace(/\/+$/, "").replace(/[^A-Za-z0-9.-]/g, "_");
    this.#key = `fedone.${place}.${name}`;
  }

  async load(): Promise<T | undefined> {
    const text = (await this.storage.get(this.#key)) ?? "null";
    let found: unknown;
    try {
      found = JSON.parse(text);
    } catch {
      return undefined;
    }
    return found !== null && typeof found === "object"
      ? this.read(found as Record<string, unknown>)
      : undefined;
  }

  async save(value: T): Promise<void> {
    await this.storage.set(this.#key, JSON.stringify(value));
  }

  async remove(): Promise<void> {
    await this.storage.remove(this.#key);
  }
}
