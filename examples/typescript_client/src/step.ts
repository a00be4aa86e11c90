import type { Minibatch } from "./batch.js";
import { Declining, Stopped } from "./errors.js";
import { exampleLoss, MAX_LOSS } from "./loss.js";
import type { ModelOutput, ScoreFunction } from "./loss.js";
import type { Tensor, Proposal, Usage } from "./messages.js";
import type { CurrentWork, Row } from "./state.js";
import type { Run } from "./task.js";
import type { Vocabulary } from "./vocabulary.js";

/** Why a device cannot work for a run of another model. */
export function mismatch(run: string, device: string): string {
  return `the run scores with '${run}', the device with '${device}'`;
}

/** Prompts to score on one mini-batch. */
export class Step {
  /** What the model answered to each prompt, in this process. */
  readonly answered: (readonly (ModelOutput | null)[])[] = [];
  /** Of the trial of a candidate: what its request to the gateway has, and the candidates with it. */
  declare readonly trial?: { readonly prompts: null; readonly proposal: Proposal };
  declare readonly vocabulary?: Vocabulary;

  /** @param onScored Called with how many more prompts have their losses. */
  constructor(
    readonly run: Run,
    readonly batch: Minibatch,
    readonly prompts: readonly number[][],
    readonly dtype: Tensor["dtype"],
    readonly journal: CurrentWork,
    readonly score: ScoreFunction | undefined,
    readonly onScored: (count: number) => void,
  ) {}

  /** Whether the losses are wanted by class and label bias, too. */
  get byClass(): boolean {
    return this.run.calibration?.kind === "labels";
  }

  /** The places of the prompts whose losses are not known yet. */
  missing(): number[] {
    const places = this.prompts.map((_, place) => place);
    return places.filter((place) => this.journal.row(place) === null);
  }

  /**
   * Turns what a model answered into losses, and keeps them.
   *
   * @param places Where the prompt stands in the step.
   * @param answers Per example what the model answered; null where it failed.
   * @param model Fingerprint of the model.
   * @throws Declining The model is another one than the run's, or the score function is broken.
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
        // A hostile gateway's numbers can be huge for one label only.
        if (!Number.isNaN(loss)) return Math.min(Math.max(loss, -MAX_LOSS), MAX_LOSS);
        throw new Declining("the model's answer gives no loss");
      } catch (error) {
        if (error instanceof Stopped) throw error;
        if (this.batch.isPrivate) return null; // A decline would say something of the row.
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
