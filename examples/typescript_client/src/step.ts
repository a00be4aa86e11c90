import type { Minibatch } from "./batch.js";
import { Declining, Stopped } from "./errors.js";
import { exampleLoss, MAX_LOSS } from "./loss.js";
import type { ModelOutput, ScoreFunction } from "./loss.js";
import type { Tensor, Proposal, Usage } from "./messages.js";
import type { CurrentWork, Row } from "./state.js";
import type { Run } from "./task.js";
import type { Vocabulary } from "./vocabulary.js";

/** Returns why a device with another model cannot work for a run. */
export function mismatch(run: string, device: string): string {
  return `the run scores with '${run}', the device with '${device}'`;
}

/** Prompts to score on one mini-batch. */
export class Step {
  /** The model's answers to each prompt, in this process. */
  readonly answered: (readonly (ModelOutput | null)[])[] = [];
  /** For the test of a candidate: the fields of its request to the gateway. */
  declare readonly trial?: { readonly prompts: null; readonly proposal: Proposal };
  declare readonly vocabulary?: Vocabulary;

  /** @param onScored Called with the number of prompts that were newly scored. */
  constructor(
    readonly run: Run,
    readonly batch: Minibatch,
    readonly prompts: readonly number[][],
    readonly dtype: Tensor["dtype"],
    readonly journal: CurrentWork,
    readonly score: ScoreFunction | undefined,
    readonly onScored: (count: number) => void,
  ) {}

  /** Whether the update has losses by class and label bias. */
  get byClass(): boolean {
    return this.run.calibration?.kind === "labels";
  }

  /** The indices of the prompts without losses. */
  missing(): number[] {
    const places = this.prompts.map((_, place) => place);
    return places.filter((place) => this.journal.row(place) === null);
  }

  /**
   * Computes losses from a model's answers, and stores them.
   *
   * @param places The indices of the prompt in the step.
   * @param answers The answer for each example; null if the model failed.
   * @param model Fingerprint of the model.
   * @throws Declining The model is not the run's, or the score function fails.
   */
  async keep(
    places: readonly number[],
    answers: readonly (ModelOutput | null)[],
    model: string,
    usage?: Usage,
  ): Promise<void> {
    const expected = this.run.model ?? model;
    if (expected !== model) throw new Declining(mismatch(expected, model));
    if ((this.journal.model ?? model) !== model) {
      throw new Declining("the model changed while the work was under way");
    }
    const { task } = this.run;
    const losses = answers.map(async (answer, at) => {
      if (answer === null) return null;
      try {
        const loss = await exampleLoss(task, answer, this.batch.examples[at]!, this.score);
        // A malicious gateway could send a huge number for a single label.
        if (!Number.isNaN(loss)) return Math.min(Math.max(loss, -MAX_LOSS), MAX_LOSS);
        throw new Declining("the model's answer gives no loss");
      } catch (error) {
        if (error instanceof Stopped) throw error;
        if (this.batch.isPrivate) return null; // A decline could reveal the row.
        throw error;
      }
    });
    const row: Row = await Promise.all(losses);
    for (const place of places) this.answered[place] = answers;
    const logProbs = answers.map((answer) => (typeof answer === "string" ? null : answer));
    await this.journal.keep(places, { row, answers: this.byClass ? logProbs : null, model, usage });
    this.onScored(places.length);
  }
}
