import type { Usage } from "./messages.js";
import { Kept } from "./storage.js";
import type { EdgeStorage } from "./storage.js";

/** One prompt's losses on each example of its mini-batch; null where the model failed. */
export type Row = readonly (number | null)[];

/** The label log-probabilities that a row is of; null where the model failed. */
export type LogProbs = readonly (readonly number[] | null)[];

interface Pages {
  readonly assignmentId: string;
  /** What the device's own model has spent. */
  readonly usage: Required<Usage>;
  /** Names prompts and mini-batch, so that losses on other examples never mix. */
  readonly digest: string;
  readonly rows: (Row | null)[];
  readonly answers: (LogProbs | null)[];
  readonly model?: string;
  readonly noised?: readonly number[];
}

const NOTHING: Required<Usage> = {
  queries: 0,
  requests: 0,
  prompt_tokens: 0,
  completion_tokens: 0,
  usd: 0,
};

/**
 * The losses and the usage of the current work, until it is finished. It holds numbers and
 * digests, no text.
 */
export class Journal {
  readonly #kept: Kept<Pages>;
  #pages = blank("");
  #writing: Promise<void> = Promise.resolve();

  constructor(storage: EdgeStorage, server: string) {
    this.#kept = new Kept(storage, server, "journal", (found) =>
      Array.isArray(found["rows"]) && Array.isArray(found["answers"])
        ? (found as unknown as Pages)
        : undefined,
    );
  }

  /** Loads the pages of a piece of work, or begins new ones. */
  async begin(assignmentId: string): Promise<void> {
    const kept = await this.#kept.load();
    this.#pages = kept?.assignmentId === assignmentId ? kept : blank(assignmentId);
  }

  /** Turns to the losses of a mini-batch; of those on another one, what they cost remains. */
  open(digest: string): void {
    const { assignmentId, usage } = this.#pages;
    if (this.#pages.digest !== digest) this.#pages = { ...blank(assignmentId), usage, digest };
  }

  /** The model that the rows are of; undefined while there are none. */
  get model(): string | undefined {
    return this.#pages.model;
  }

  /** What the device's own model has spent on the work, queries apart. */
  get usage(): Required<Usage> {
    return this.#pages.usage;
  }

  row(place: number): Row | null {
    return this.#pages.rows[place] ?? null;
  }

  answers(place: number): LogProbs {
    return this.#pages.answers[place] ?? [];
  }

  /** Keeps the losses of a prompt, and what they have cost. */
  async keep(
    places: readonly number[],
    found: { row: Row; answers: LogProbs | null; model: string; usage?: Usage },
  ): Promise<void> {
    const { rows, answers } = this.#pages;
    for (const place of places) {
      rows[place] = found.row;
      answers[place] = found.answers;
    }
    const usage = sum(this.#pages.usage, found.usage ?? NOTHING);
    this.#pages = { ...this.#pages, model: found.model, usage };
    await this.#save();
  }

  /** The losses with noise: drawn once, or a server that asks twice could average it away. */
  async noised(draw: () => readonly number[]): Promise<readonly number[]> {
    if (this.#pages.noised === undefined) {
      this.#pages = { ...this.#pages, noised: draw() };
      await this.#save();
    }
    return this.#pages.noised ?? [];
  }

  /** Removes the pages: the work is finished, or gone. */
  async drop(): Promise<void> {
    await this.#writing.catch(() => undefined);
    await this.#kept.remove();
  }

  /** Writes in the order of the calls, also where the storage answers out of order. */
  #save(): Promise<void> {
    const before = this.#writing.catch(() => undefined);
    this.#writing = before.then(() => this.#kept.save(this.#pages));
    return this.#writing;
  }
}

function blank(assignmentId: string): Pages {
  return { assignmentId, usage: NOTHING, digest: "", rows: [], answers: [] };
}

function sum(one: Required<Usage>, other: Usage): Required<Usage> {
  const add = (unit: keyof Usage): number => one[unit] + Number(other[unit] ?? 0);
  return {
    queries: 0,
    requests: add("requests"),
    prompt_tokens: add("prompt_tokens"),
    completion_tokens: add("completion_tokens"),
    usd: add("usd"),
  };
}
