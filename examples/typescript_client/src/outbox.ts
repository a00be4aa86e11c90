import { Kept } from "./storage.js";
import type { EdgeStorage } from "./storage.js";

/** Finished work on its way to the server. */
export interface Unsent {
  readonly runId: string;
  readonly assignmentId: string;
  readonly round: number;
  /** The update as it is sent: a retry has the same bytes, so that it gets the same receipt. */
  readonly body: string;
}

/** Each is for an assignment with a deadline, so that an old one is worth less than a new one. */
const MOST = 16;

/** Finished work that the server has not got yet, the oldest first: it was paid for. */
export class Outbox {
  readonly #kept: Kept<{ unsent: Unsent[] }>;
  #unsent: Unsent[] = [];
  #loaded = false;

  constructor(storage: EdgeStorage, server: string) {
    this.#kept = new Kept(storage, server, "outbox", ({ unsent }) =>
      Array.isArray(unsent) ? { unsent: unsent.filter(isUnsent) } : undefined,
    );
  }

  /** What waits, as far as it has been read. */
  get size(): number {
    return this.#unsent.length;
  }

  async waiting(): Promise<readonly Unsent[]> {
    if (!this.#loaded) this.#unsent = (await this.#kept.load())?.unsent ?? [];
    this.#loaded = true;
    return this.#unsent;
  }

  /** Keeps finished work until it is dropped; beyond a bound the oldest makes room. */
  async put(unsent: Unsent): Promise<void> {
    const others = (await this.waiting()).filter((other) => !isFor(other, unsent.assignmentId));
    await this.#save([...others, unsent].slice(-MOST));
  }

  /** Removes work that the server has taken or refused. */
  async drop(assignmentId: string): Promise<void> {
    await this.#save((await this.waiting()).filter((other) => !isFor(other, assignmentId)));
  }

  /** Removes all. */
  async clear(): Promise<void> {
    await this.#save([]);
  }

  async #save(unsent: Unsent[]): Promise<void> {
    this.#unsent = unsent;
    this.#loaded = true;
    await (unsent.length > 0 ? this.#kept.save({ unsent }) : this.#kept.remove());
  }
}

function isFor(unsent: Unsent, assignmentId: string): boolean {
  return unsent.assignmentId === assignmentId;
}

function isUnsent(found: unknown): found is Unsent {
  const { runId, assignmentId, body } = (found ?? {}) as Partial<Unsent>;
  return [runId, assignmentId, body].every((text) => typeof text === "string");
}
