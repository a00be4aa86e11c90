import { Declining, kindOf, Stopped } from "./errors.js";
import { exactSum, mean } from "./numbers.js";
import type { Example, Task } from "./task.js";

/** A model's answer to one input: log-probabilities in nats, or a text. */
export type ModelOutput = readonly number[] | string;

/** The value of a text, from 0 (useless) to 1 (perfect), and feedback for a model that reflects. */
export interface Score {
  readonly value: number;
  readonly feedback: string;
}

/** A score function of the app. */
export type ScoreFunction = (
  generated: string,
  example: Example,
) => number | Score | Promise<number | Score>;

/** Maximum loss of an example, and of an update. */
export const MAX_LOSS = 1e6;

/** The log-probability of a label that the model did not write, in place of -infinity. */
const LOG_ZERO = -1000;

/**
 * The training loss of one example (docs/explanation/losses.md).
 *
 * @throws Declining The score function is missing or fails.
 */
export async function exampleLoss(
  task: Task,
  answer: ModelOutput,
  example: Example,
  score?: ScoreFunction,
): Promise<number> {
  if (typeof answer === "string") return 1 - (await scored(answer, example, score));
  if (task.loss === "nll") return -answer[0]!;
  return labelLoss(task, answer, task.targetOf(example), task.spec.bias);
}

/**
 * The loss from label log-probabilities.
 *
 * @param bias Added to the log-probabilities first, one number per label, nats.
 * @returns `cross_entropy`: nats, over the label words only. `brier`: 0 to 2, over the label words
 *   only. `hinge`: margin 1, divided by the label count. `zero_one`: 1 for a wrong label.
 */
export function labelLoss(
  task: Task,
  logProbs: readonly number[],
  target: number,
  bias?: readonly number[] | null,
): number {
  const values = biased(logProbs, bias);
  if (task.loss === "zero_one") return predicted(logProbs, values) === target ? 0 : 1;
  const own = values[target]!;
  if (task.loss === "hinge") {
    const others = values.filter((_, at) => at !== target);
    return exactSum(others.map((value) => Math.max(0, 1 - own + value))) / values.length;
  }
  const highest = Math.max(...values);
  const odds = values.map((value) => Math.exp(value - highest));
  const total = exactSum(odds);
  if (task.loss === "brier") {
    return exactSum(odds.map((odd, at) => (odd / total - Number(at === target)) ** 2));
  }
  return Math.log(total) + highest - own;
}

/** Label log-probabilities plus a bias; labels that the model did not write are not changed. */
export function biased(logProbs: readonly number[], bias?: readonly number[] | null): number[] {
  return logProbs.map((value, at) =>
    bias == null || value <= LOG_ZERO ? value : value + bias[at]!,
  );
}

/** Index of the likeliest label (at a tie, the first); -1 if the model wrote no label. */
export function predicted(logProbs: readonly number[], values: readonly number[]): number {
  let found = -1;
  values.forEach((value, at) => {
    if (logProbs[at]! > LOG_ZERO && (found < 0 || value > values[found]!)) found = at;
  });
  return found;
}

async function scored(text: string, example: Example, score?: ScoreFunction): Promise<number> {
  let value: number;
  try {
    const given = await score!(text, example);
    value = typeof given === "number" ? given : given.value;
  } catch (error) {
    if (error instanceof Stopped) throw error;
    throw new Declining(`task.score: the score function failed with ${kindOf(error)}`);
  }
  if (!(value >= 0 && value <= 1)) {
    throw new Declining("task.score: the score function gave a value outside of 0 to 1");
  }
  return value;
}

/** Up to this number of labels, the device reports mean losses per class. */
const MAX_CLASSES = 4;

/** Number of groups of examples with a mean loss each: one per class, or one for all. */
export function numGroups(numLabels: number, isPrivate: boolean): number {
  return isPrivate || numLabels > MAX_CLASSES ? 1 : numLabels;
}

/**
 * One example's cross-entropy, and what its derivatives by the label bias need.
 *
 * @returns The loss, the trace of its Hessian, and the probability of each label.
 */
export function lossTerms(
  task: Task,
  logProbs: readonly number[],
  target: number,
  bias: readonly number[],
): number[] {
  const values = biased(logProbs, bias);
  const highest = Math.max(...values);
  const odds = values.map((value) => Math.exp(value - highest));
  const total = exactSum(odds);
  const probabilities = odds.map((value) => value / total);
  const trace = 1 - exactSum(probabilities.map((value) => value * value));
  return [labelLoss(task, logProbs, target, bias), Math.max(trace, 0), ...probabilities];
}

/**
 * The mean of `lossTerms` over each group of examples.
 *
 * @param terms `lossTerms` of each example.
 * @returns K x (2 + C) numbers, flat; 0 for a class without examples.
 */
export function classMeans(
  terms: readonly (readonly number[])[],
  targets: readonly number[],
  groups: number,
): number[] {
  return Array.from({ length: groups }, (_, group) => {
    const own = terms.filter((_, at) => groups === 1 || targets[at] === group);
    return terms[0]!.map((_, column) =>
      own.length === 0 ? 0 : mean(own.map((row) => row[column]!)),
    );
  }).flat();
}
