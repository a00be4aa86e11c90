import { pack, rowsOf } from "./array.js";
import { Minibatch } from "./batch.js";
import type { BeforeSend } from "./batch.js";
import { Declining } from "./errors.js";
import type { KnownRuns } from "./known.js";
import type { Link } from "./link.js";
import { classMeans, lossTerms, numGroups } from "./loss.js";
import type { ScoreFunction } from "./loss.js";
import type { LossesAssignment, LossesUpdate } from "./messages.js";
import { drawMinibatch } from "./minibatch.js";
import { checkPrivacy, privateLosses, privateTerms } from "./noise.js";
import { crc32, mean } from "./numbers.js";
import type { Oracle } from "./oracle.js";
import type { Account } from "./policy.js";
import type { Random } from "./random.js";
import type { CurrentWork } from "./state.js";
import { Step } from "./step.js";
import { isBias } from "./task.js";
import type { Example, Run } from "./task.js";
import { sizesOf } from "./vocabulary.js";

/** An assignment of the exchange `losses`. */
export interface Work {
  readonly run: Run;
  readonly assignment: LossesAssignment;
  /** The checked prompts. */
  readonly prompts: readonly number[][];
  /** The device's examples that take part in the run. */
  readonly examples: readonly Example[];
  readonly beforeSend: BeforeSend | undefined;
  readonly score: ScoreFunction | undefined;
  readonly journal: CurrentWork;
  readonly account: Account;
  /** Whether a model on the device is used, whose queries must be reported. */
  readonly ownModel: boolean;
  readonly random: () => Random;
  /** Called with the number of prompts that were newly scored. */
  readonly onScored: (count: number) => void;
  readonly reflect: Reflect | undefined;
  /** For `reflect`: all rows of the device, and the requests to the server. */
  readonly held: readonly Example[];
  readonly known: KnownRuns;
  readonly link: Link;
  readonly signal: AbortSignal | undefined;
}

/** Writes a candidate and tests it; if it is better, returns additional fields of the update. */
export type Reflect = (
  work: Work,
  step: Step,
  update: LossesUpdate,
  oracle: Oracle,
) => Promise<Partial<LossesUpdate> | undefined>;

/**
 * Scores the prompts of an assignment.
 *
 * @param work The work.
 * @param oracle The loss oracle.
 * @returns The update.
 * @throws Declining The work cannot be completed.
 */
export async function lossesUpdate(work: Work, oracle: Oracle): Promise<LossesUpdate> {
  const { run, assignment, examples, journal, prompts } = work;
  const rows = drawMinibatch(examples.length, run.method.batch_size!, assignment.minibatch_seed);
  const drawn = rows.map((row) => examples[row]!);
  const batch = await Minibatch.of(run.task, drawn, work.beforeSend, run.privacy != null);
  // Some platforms return the keys of a row in any order.
  const entries = batch.examples.map((row) => Object.entries(row).sort());
  const content = new TextEncoder().encode(JSON.stringify([prompts, batch.texts, entries]));
  journal.open(`${content.length}.${crc32(content)}`);
  const { dtype } = assignment.prompts;
  const step = new Step(run, batch, prompts, dtype, journal, work.score, work.onScored);
  const missing = step.missing();
  work.onScored(prompts.length - missing.length);
  if (missing.length > 0) {
    await work.account.pay(missing.length);
    await oracle(step, missing);
  }
  const numExamples = run.privacy == null ? examples.length : 1;
  const update = { num_examples: numExamples, ...(await summed(step, work)) };
  return { ...update, ...(await work.reflect?.(work, step, update, oracle)) };
}

/** The losses of a step whose prompts are all scored. */
async function summed(step: Step, work: Work): Promise<Omit<LossesUpdate, "num_examples">> {
  const { batch, journal, prompts, run } = step;
  const found = prompts.map((_, place) => journal.row(place) ?? []);
  // An example counts for all prompts or for none, so that all prompts have the same examples.
  const positions = batch.texts.map((_, at) => at);
  const failed = new Set(positions.filter((at) => found.some((row) => row[at] == null)));
  const scored = batch.check(failed);
  const kept = positions.filter((at) => !failed.has(at));
  const { privacy } = run;
  const noised = (draw: () => number[]) =>
    journal.noised(draw, () => work.account.release(privacy!));
  const queries = work.ownModel ? prompts.length : 0;
  const rest = {
    scored,
    usage: work.account.shown({ ...journal.usage, queries }),
    model: journal.model!,
    exchange: "losses" as const,
  };
  if (step.byClass) return { ...rest, ...(await byClass(step, work, kept, scored.scored, noised)) };
  const rows = found.map((row) => kept.map((at) => row[at]!));
  // An example without a loss counts as 0 for all prompts, so that noise and counts do not reveal
  // whether examples failed.
  const none = new Array<number>(scored.scored - kept.length).fill(0);
  const losses = privacy
    ? await noised(() =>
        privateLosses(
          rows.map((row) => [...row, ...none]),
          privacy,
          work.random(),
        ),
      )
    : rows.map(mean);
  return { ...rest, losses: [...losses] };
}

/** The losses with the assignment's label biases, and the update's values for fitting biases. */
async function byClass(
  { batch, journal, prompts, run }: Step,
  { assignment, random }: Work,
  kept: readonly number[],
  size: number,
  noised: (draw: () => number[]) => Promise<readonly number[]>,
): Promise<Pick<LossesUpdate, "losses" | "by_class" | "class_counts">> {
  const { privacy, task } = run;
  const biases = rowsOf(assignment.biases!);
  const targets = kept.map((at) => task.targetOf(batch.examples[at]!));
  const terms = prompts.map((_, place) => {
    const answers = journal.answers(place);
    return kept.map((at, n) => lossTerms(task, answers[at]!, targets[n]!, biases[place]!));
  });
  const labels = task.labels.length;
  const groups = numGroups(labels, privacy != null);
  const shape = [prompts.length, groups, 2 + labels];
  if (!privacy) {
    const cells = terms.flatMap((own) => classMeans(own, targets, groups));
    return {
      losses: terms.map((own) => mean(own.map((row) => row[0]!))),
      by_class: pack(cells, shape, "float32"),
      class_counts: task.labels.map((_, label) => targets.filter((one) => one === label).length),
    };
  }
  // An example without a loss counts as 0.
  const none = Array.from({ length: size - targets.length }, () => new Array(2 + labels).fill(0));
  const padded = terms.map((own) => [...own, ...none]);
  const labelled = [...targets, ...none.map(() => -1)];
  const found = await noised(() => privateTerms(padded, labelled, privacy, random()));
  const losses = found.slice(0, prompts.length);
  // The unknown trace is replaced by its maximum, 1.
  const cells = losses.flatMap((loss, place) => {
    const start = prompts.length + place * labels;
    return [loss, 1, ...found.slice(start, start + labels)];
  });
  return { losses, by_class: pack(cells, shape, "float32"), class_counts: found.slice(-labels) };
}

/**
 * Returns the prompts if the assignment fits its run and this client; the server may be faulty.
 *
 * @throws Declining The assignment does not fit.
 */
export function checkedPrompts(work: Omit<Work, "examples" | "prompts">): number[][] {
  const { run, assignment, account, journal, score } = work;
  const { task } = run;
  const { dtype, shape } = assignment.prompts;
  const prompts = rowsOf(assignment.prompts);
  const sizes = sizesOf(run);
  const isPrompt = (row: number[]): boolean =>
    row.length === sizes.length && row.every((index, at) => index >= 0 && index < sizes[at]!);
  if (
    !prompts.every(isPrompt) ||
    shape.length !== 2 ||
    shape[0]! < 1 ||
    dtype.startsWith("float")
  ) {
    throw new Declining("the assignment does not fit its run");
  }
  if (!(prompts.length <= assignment.leased_queries)) {
    throw new Declining(
      `the assignment has ${prompts.length} prompts, but reserves ${assignment.leased_queries} ` +
        "queries",
    );
  }
  if (run.privacy?.target === "alpha") {
    throw new Declining("the run's privacy does not fit its exchange"); // no loss has noise
  }
  if (run.privacy != null) checkPrivacy(run.privacy);
  account.check(run, journal.isNoised);
  if (task.loss === "score" && score === undefined) {
    throw new Declining("loss score needs a score function, and this client has none");
  }
  const { biases } = assignment;
  if ((run.calibration?.kind === "labels") !== (biases != null)) {
    throw new Declining("the assignment does not fit its run");
  }
  if (biases != null) {
    const fits =
      task.loss === "cross_entropy" &&
      biases.dtype === "float32" &&
      biases.shape.join() === [prompts.length, task.labels.length].join() &&
      rowsOf(biases).flat().every(isBias);
    if (!fits) throw new Declining("the run's calibration does not fit its task");
  }
  return prompts;
}
