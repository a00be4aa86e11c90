import { Declining } from "./errors.js";
import type { Enrolled, Usage } from "./messages.js";
import { secret } from "./random.js";
import type { Random } from "./random.js";

/**
 * Stores a device's identity, unsent update and paid losses: texts by key.
 *
 * Keys have only the characters `A-Z a-z 0-9 . _ -`. When `set` has returned, the value must be on
 * the disk. Values contain a credential: only the app may read them, and backups must omit them.
 */
export interface EdgeStorage {
  get(key: string): string | null | undefined | Promise<string | null | undefined>;
  set(key: string, value: string): void | Promise<void>;
  remove(key: string): void | Promise<void>;
}

/** Stores texts in memory; a device then enrols at each start. */
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

/** A JSON document of a device for one server. It is read once; a damaged document is ignored. */
class Stored<T extends object> {
  readonly #key: string;
  #loaded = false;

  /**
   * @param storage The storage.
   * @param server The server of the document.
   * @param name The name of the document.
   * @param value The value if nothing is stored.
   * @param fits Whether a stored value is valid.
   */
  constructor(
    readonly storage: EdgeStorage,
    server: string,
    name: string,
    public value: T,
    readonly fits: (found: Record<string, unknown>) => boolean,
  ) {
    const place = server.replace(/[^A-Za-z0-9.-]/g, "_");
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
      // Two servers may share a key, because keys have few characters; so the name is compared too.
      return found["server"] === server && texts.every((key) => typeof found[key] === "string");
    });
  }

  /** The device's public name; undefined until it has enrolled. */
  get clientId(): string | undefined {
    return this.#stored.value.client_id;
  }

  /** The device's secret; undefined until it has enrolled. */
  get credential(): string | undefined {
    return this.#stored.value.credential;
  }

  /** Reads the stored identity, once. */
  load(): Promise<void> {
    return this.#stored.load();
  }

  /**
   * The nonce for the enrolment, which is stored before it is sent. After a lost response or a
   * restart it is sent again, and the server returns the same client.
   */
  async nonce(): Promise<string> {
    const nonce = this.#stored.value.nonce ?? secret(this.random());
    await this.#stored.save({ server: this.server, nonce });
    return nonce;
  }

  /** Stores a new identity. */
  enrolled({ client_id, credential }: Enrolled): Promise<void> {
    return this.#stored.save({ server: this.server, client_id, credential });
  }

  /** Removes an identity that the server rejects. */
  forget(): Promise<void> {
    return this.#stored.save({ server: this.server });
  }
}

/** A prompt's losses on the examples of a mini-batch; null if the model failed. */
export type Row = readonly (number | null)[];

/** The label log-probabilities behind these losses; null if the model failed. */
export type LogProbs = readonly (readonly number[] | null)[];

/** A finished update that is not sent yet. */
export interface Unsent {
  readonly runId: string;
  readonly assignmentId: string;
  readonly round: number;
  /** The bytes to send; a retry has the same bytes, so that it gets the same receipt. */
  readonly body: string;
}

interface Journal {
  readonly assignmentId: string;
  /** The usage of the model on the device. */
  readonly usage: Required<Usage>;
  /** Digest of prompts and mini-batch, so that losses on other examples are never mixed in. */
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
  /** The journals of open assignments, the current one first. */
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

/** Maximum number of journals; several exist if a run pauses and the device works for another. */
const MOST_JOURNALS = 8;

/**
 * The paid losses of open assignments, and later the update until the server has accepted it. Both
 * are in one document, so that a crash never loses both. It contains numbers, digests, and the text
 * that a reflection has written.
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

  /** The update that was read from the storage and is not sent yet. */
  get unsent(): Unsent | undefined {
    return this.#stored.value.unsent;
  }

  /** Reads the stored work, once. */
  load(): Promise<void> {
    return this.#stored.load();
  }

  /**
   * Makes an assignment the current one.
   *
   * @throws Declining Its noise was drawn before, but the result is lost.
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

  /** Opens the losses of a mini-batch; drops losses on other mini-batches, but keeps their cost. */
  open(digest: string): void {
    const { assignmentId, usage } = this.#journal;
    if (this.#journal.digest !== digest) {
      this.#journal = { ...blank(assignmentId), usage, digest };
    }
  }

  /** The model of the losses; undefined if there are none. */
  get model(): string | undefined {
    return this.#journal.model;
  }

  /** Whether the noise of the work is drawn. */
  get isNoised(): boolean {
    return this.#journal.noised !== undefined;
  }

  /** The usage of the model on the device for the work, without queries. */
  get usage(): Required<Usage> {
    return this.#journal.usage;
  }

  /** The usage of the model on the device for an assignment. */
  usageOf(assignmentId: string): Required<Usage> {
    const { journals, unsent } = this.#stored.value;
    if (unsent?.assignmentId === assignmentId) return JSON.parse(unsent.body).usage;
    return journals.find((each) => each.assignmentId === assignmentId)?.usage ?? NOTHING;
  }

  /** The text that a reflection has written for the work, if any. */
  get written(): string | undefined {
    return this.#journal.written;
  }

  row(place: number): Row | null {
    return this.#journal.rows[place] ?? null;
  }

  answers(place: number): LogProbs {
    return this.#journal.answers[place] ?? [];
  }

  /** Stores the losses of a prompt, or the text of a reflection, with their cost. */
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

  /** The losses with noise, which is drawn once: a server could average over several draws. */
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
    await this.#save(); // stores also the noise of an earlier, interrupted turn
    return losses;
  }

  /** Stores a finished update in place of its losses, until `drop`. */
  async put(unsent: Unsent): Promise<void> {
    this.#set({ unsent, journals: this.#without(unsent.assignmentId) });
    await this.#save();
  }

  /** Removes everything about finished work. */
  async drop(assignmentId: string): Promise<void> {
    const { unsent, noised } = this.#stored.value;
    this.#set({
      journals: this.#without(assignmentId),
      ...(unsent?.assignmentId === assignmentId && { unsent: undefined }),
      noised: noised.filter((other) => other !== assignmentId),
    });
    await this.#save();
  }

  /** Removes everything. */
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
