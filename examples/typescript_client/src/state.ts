import { Declining } from "./errors.js";
import type { Enrolled, Usage } from "./messages.js";
import { secret } from "./random.js";
import type { Random } from "./random.js";

/**
 * Where a device keeps its identity, its unsent update and paid losses: texts by key.
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

/** One JSON document of a device for one server, read once; a damaged one counts as absent. */
class Stored<T extends object> {
  readonly #key: string;
  #loaded = false;

  /**
   * @param storage Where it lies.
   * @param server The server that it concerns.
   * @param name Which document.
   * @param value The document while nothing is stored.
   * @param fits Whether what was stored is one.
   */
  constructor(
    readonly storage: EdgeStorage,
    server: string,
    name: string,
    public value: T,
    readonly fits: (found: Record<string, unknown>) => boolean,
  ) {
    const place = server.replace(/\/+$/, "").replace(/[^A-Za-z0-9.-]/g, "_");
    this.#key = `fedone.${place}.${name}`;
  }

  async load(): Promise<void> {
    if (this.#loaded) return;
    const text = (await this.storage.get(this.#key)) ?? "null";
    this.#loaded = true;
    try {
      const found: unknown = JSON.parse(text);
      const isDocument = found !== null && typeof found === "object";
      if (isDocument && this.fits(found as Record<string, unknown>)) this.value = found as T;
    } catch {
      // Damaged.
    }
  }

  async save(value: T): Promise<void> {
    this.value = value;
    this.#loaded = true;
    await this.storage.set(this.#key, JSON.stringify(value));
  }
}

interface Secrets {
  readonly server: string;
  readonly client_id?: string;
  readonly credential?: string;
  readonly nonce?: string;
}

/** A device's identity at one server: credential and enrolment nonce, kept across restarts. */
export class Identity {
  readonly #stored: Stored<Secrets>;

  constructor(
    storage: EdgeStorage,
    readonly server: string,
    readonly random: () => Random,
  ) {
    this.#stored = new Stored<Secrets>(storage, server, "identity", { server }, (found) => {
      const texts = ["client_id", "credential", "nonce"].filter((key) => key in found);
      // Another server's, whose name differs in characters that keys do not have, does not fit.
      return found["server"] === server && texts.every((key) => typeof found[key] === "string");
    });
  }

  /** The device's public name; undefined until it has enrolled. */
  get clientId(): string | undefined {
    return this.#stored.value.client_id;
  }

  /** Its secret; undefined until it has enrolled. */
  get credential(): string | undefined {
    return this.#stored.value.credential;
  }

  /** Reads what was kept, once. */
  load(): Promise<void> {
    return this.#stored.load();
  }

  /**
   * The secret to enrol with, kept before it is used: sent again with it, after an answer that was
   * lost or a restart, the enrolment gives the same client.
   */
  async nonce(): Promise<string> {
    const nonce = this.#stored.value.nonce ?? secret(this.random());
    await this.#stored.save({ server: this.server, nonce });
    return nonce;
  }

  /** Keeps a new identity. */
  enrolled({ client_id, credential }: Enrolled): Promise<void> {
    return this.#stored.save({ server: this.server, client_id, credential });
  }

  /** Removes an identity that the server refuses. */
  forget(): Promise<void> {
    return this.#stored.save({ server: this.server });
  }
}

/** One prompt's losses on each example of its mini-batch; null where the model failed. */
export type Row = readonly (number | null)[];

/** The label log-probabilities that a row is of; null where the model failed. */
export type LogProbs = readonly (readonly number[] | null)[];

/** Finished work on its way to the server. */
export interface Unsent {
  readonly runId: string;
  readonly assignmentId: string;
  readonly round: number;
  /** The update as it is sent: a retry has the same bytes, so that it gets the same receipt. */
  readonly body: string;
}

interface Journal {
  readonly assignmentId: string;
  /** What the device's own model has spent. */
  readonly usage: Required<Usage>;
  /** Names prompts and mini-batch, so that losses on other examples never mix. */
  readonly digest: string;
  readonly rows: (Row | null)[];
  readonly answers: (LogProbs | null)[];
  readonly model?: string;
  readonly written?: string;
  readonly noised?: readonly number[];
}

interface Found {
  readonly row: Row;
  readonly answers: LogProbs | null;
  readonly model: string;
  readonly written?: string;
  readonly usage?: Usage | undefined;
}

interface Work {
  /** Of open assignments, the current one first. */
  readonly journals: readonly Journal[];
  readonly unsent?: Unsent;
  /** Assignments whose noise was drawn, the oldest first. */
  readonly noised: readonly string[];
}

const NOTHING: Required<Usage> = {
  queries: 0,
  requests: 0,
  prompt_tokens: 0,
  completion_tokens: 0,
  usd: 0,
};

const MOST_NOISED = 1000;

/** There are several journals if a run pauses, and the device works for another. */
const MOST_JOURNALS = 8;

/**
 * The paid losses of open assignments, and the update until the server has it, in one document: a
 * device that dies has one or the other. It holds numbers, digests, and the text that a reflection
 * wrote.
 */
export class CurrentWork {
  readonly #stored: Stored<Work>;

  constructor(storage: EdgeStorage, server: string) {
    this.#stored = new Stored<Work>(
      storage,
      server,
      "work",
      { journals: [], noised: [] },
      (found) => {
        const { journals, unsent, noised } = found as Partial<Work>;
        const texts = [unsent?.runId, unsent?.assignmentId, unsent?.body];
        return (
          Array.isArray(noised) &&
          Array.isArray(journals) &&
          journals.every((each) => Array.isArray(each?.rows) && Array.isArray(each.answers)) &&
          (unsent === undefined || texts.every((text) => typeof text === "string"))
        );
      },
    );
  }

  /** The finished update that waits to be sent, as far as it has been read. */
  get unsent(): Unsent | undefined {
    return this.#stored.value.unsent;
  }

  /** Reads what was kept, once. */
  load(): Promise<void> {
    return this.#stored.load();
  }

  /**
   * Turns to an assignment; the least recent one of too many is deleted.
   *
   * @throws Declining Its noise was drawn before, and is not known any more.
   */
  async begin(assignmentId: string): Promise<void> {
    await this.load();
    const { journals, noised } = this.#stored.value;
    const known = journals.find((each) => each.assignmentId === assignmentId);
    this.#journal = known ?? blank(assignmentId);
    if (known?.noised === undefined && noised.includes(assignmentId)) {
      throw new Declining("noise was drawn before, and the noised result is lost");
    }
  }

  /** Turns to the losses of a mini-batch; of those on another one, what they cost remains. */
  open(digest: string): void {
    const { assignmentId, usage } = this.#journal;
    if (this.#journal.digest !== digest) {
      this.#journal = { ...blank(assignmentId), usage, digest };
    }
  }

  /** The model that the rows are of; undefined while there are none. */
  get model(): string | undefined {
    return this.#journal.model;
  }

  /** Whether the work's noise is drawn. */
  get isNoised(): boolean {
    return this.#journal.noised !== undefined;
  }

  /** What the device's own model has spent on the work, queries apart. */
  get usage(): Required<Usage> {
    return this.#journal.usage;
  }

  /** What the device's own model has spent on an assignment. */
  usageOf(assignmentId: string): Required<Usage> {
    const { journals, unsent } = this.#stored.value;
    if (unsent?.assignmentId === assignmentId) return JSON.parse(unsent.body).usage;
    return journals.find((each) => each.assignmentId === assignmentId)?.usage ?? NOTHING;
  }

  /** What the reflection of the work wrote; undefined before. */
  get written(): string | undefined {
    return this.#journal.written;
  }

  row(place: number): Row | null {
    return this.#journal.rows[place] ?? null;
  }

  answers(place: number): LogProbs {
    return this.#journal.answers[place] ?? [];
  }

  /** Keeps the losses of a prompt, or what a reflection wrote, and what they have cost. */
  async keep(
    places: readonly number[],
    { row, answers, usage = NOTHING, ...more }: Found,
  ): Promise<void> {
    const journal = this.#journal;
    for (const place of places) {
      journal.rows[place] = row;
      journal.answers[place] = answers;
    }
    this.#journal = { ...journal, ...more, usage: sum(journal.usage, usage) };
    await this.#save();
  }

  /** The losses with noise: drawn once, or a server that asks twice could average it away. */
  async noised(
    draw: () => readonly number[],
    count: () => Promise<void>,
  ): Promise<readonly number[]> {
    const { assignmentId } = this.#journal;
    if (this.#journal.noised === undefined) await count();
    const losses = this.#journal.noised ?? draw();
    if (this.#journal.noised === undefined) {
      const noised = [...this.#stored.value.noised, assignmentId].slice(-MOST_NOISED);
      this.#journal = { ...this.#journal, noised: losses };
      this.#set({ noised });
    }
    await this.#save(); // also what an earlier turn drew, and did not see stored
    return losses;
  }

  /** Keeps finished work in place of its losses, until it is dropped. */
  async put(unsent: Unsent): Promise<void> {
    this.#set({ unsent, journals: this.#without(unsent.assignmentId) });
    await this.#save();
  }

  /** Removes all about work that is over. */
  async drop(assignmentId: string): Promise<void> {
    const { unsent, noised } = this.#stored.value;
    this.#set({
      journals: this.#without(assignmentId),
      ...(unsent?.assignmentId === assignmentId && { unsent: undefined }),
      noised: noised.filter((other) => other !== assignmentId),
    });
    await this.#save();
  }

  /** Removes all. */
  async clear(): Promise<void> {
    this.#set({ journals: [], unsent: undefined, noised: [] });
    await this.#save();
  }

  get #journal(): Journal {
    return this.#stored.value.journals[0] ?? blank("");
  }

  set #journal(journal: Journal) {
    const others = this.#without(journal.assignmentId);
    this.#set({ journals: [journal, ...others].slice(0, MOST_JOURNALS) });
  }

  #without(assignmentId: string): Journal[] {
    return this.#stored.value.journals.filter((each) => each.assignmentId !== assignmentId);
  }

  #set(changes: { [key in keyof Work]?: Work[key] | undefined }): void {
    this.#stored.value = { ...this.#stored.value, ...changes } as Work;
  }

  #save(): Promise<void> {
    return this.#stored.save(this.#stored.value);
  }
}

function blank(assignmentId: string): Journal {
  return { assignmentId, usage: NOTHING, digest: "", rows: [], answers: [] };
}

function sum(one: Required<Usage>, other: Usage): Required<Usage> {
  const total = { ...one };
  for (const unit of Object.keys(NOTHING) as (keyof Usage)[]) total[unit] += other[unit] ?? 0;
  return { ...total, queries: 0 };
}
