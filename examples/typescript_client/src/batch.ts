import { Declining, Stopped } from "./errors.js";
import type { Scored } from "./messages.js";
import { isSendable } from "./task.js";
import type { Example, Task } from "./task.js";

/**
 * Receives every text before it leaves the device, and returns the text, a redacted text, or null.
 * If it returns null or throws, the example is not sent.
 */
export type BeforeSend = (text: string) => string | null | Promise<string | null>;

/** Minimum share of the mini-batch that must be scored. */
const MIN_SCORED_SHARE = 0.8;

/** The examples of one step that may leave the device. */
export class Minibatch {
  private constructor(
    /** The text fields of each example, after the hook. */
    readonly texts: readonly Record<string, string>[],
    /** The reference text of each example, after the hook, for loss `nll`; else empty. */
    readonly references: readonly string[],
    /** The same examples with all their columns; their labels are not sent. */
    readonly examples: readonly Example[],
    /** Number of examples that the hook withheld, or whose filtered texts cannot be used. */
    readonly vetoed: number,
    /** Whether the server learns only the number of examples, and not how many failed. */
    readonly isPrivate: boolean,
  ) {}

  /**
   * Applies the hook to the examples of a step.
   *
   * @throws Declining The hook withheld too many examples.
   */
  static async of(
    task: Task,
    examples: readonly Example[],
    beforeSend: BeforeSend | undefined,
    isPrivate: boolean,
  ): Promise<Minibatch> {
    const kept: Example[] = [];
    for (const example of examples) {
      const passed: Record<string, unknown> = { ...example };
      if (beforeSend) {
        for (const name of task.shown) {
          passed[name] = await passedBy(beforeSend, String(example[name]));
        }
      }
      if (task.usable(passed)) kept.push(passed);
    }
    const texts = kept.map((example) =>
      Object.fromEntries(task.fields.map((name) => [name, String(example[name])])),
    );
    const references =
      task.loss === "nll" ? kept.map((example) => String(example[task.labelField])) : [];
    const batch = new Minibatch(texts, references, kept, examples.length - kept.length, isPrivate);
    batch.check(new Set());
    return batch;
  }

  /**
   * Counts scored, failed and withheld examples. If they are private, all count as scored.
   *
   * @param failed Positions of the examples for which the model failed.
   * @throws Declining Too few examples were scored, and they are not private.
   */
  check(failed: ReadonlySet<number>): Scored {
    const total = this.texts.length + this.vetoed;
    const scored = this.texts.length - failed.size;
    if (this.isPrivate) return { scored: total };
    if (scored === 0 || scored < MIN_SCORED_SHARE * total) {
      throw new Declining(
        `only ${scored} of ${total} examples could be scored ` +
          `(${failed.size} failed, ${this.vetoed} vetoed)`,
      );
    }
    return { scored, failed: failed.size, vetoed: this.vetoed };
  }
}

async function passedBy(beforeSend: BeforeSend, text: string): Promise<string | null> {
  try {
    const passed = await beforeSend(text);
    return isSendable(passed) ? passed : null;
  } catch (error) {
    if (error instanceof Stopped) throw error;
    return null;
  }
}
