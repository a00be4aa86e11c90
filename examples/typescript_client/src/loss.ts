import { Declining, kindOf } from "./errors.js";
import { exactSum, mean } from "./numbers.js";
import type { Example, Task } from "./task.js";

/** What a model said of one input: log-probabilities in nats, or a text. */
export type ModelOutput = readonly number[] | string;

/** A score function of the app's: from 0 (useless) to 1 (perfect). */
export type ScoreFunction = (generated: string, example: Example) => number | Promise<number>;

/** Stands for the logarithm of probability zero: a label that the model did not write. */
const LOG_ZERO = -1000;

/** What a label after the first may get, nats, by the number of labels. */
const OFFSETS: Readonly<Record<number, readonly number[]>> = {
  2: [-4, -3, -2, -1, 0, 1, 2, 3, 4],
  3: [-3, -2, -1, 0, 1, 2, 3],
  4: [-2, -1, 0, 1, 2],
};

/**
 * The training loss of one example (docs/explanation/losses.md).
 *
 * @throws Declining The score function is missing or broken.
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
 * The loss of label log-probabilities.
 *
 * @param bias Added to them before, one number per label, nats.
 * @returns `cross_entropy`: nats, over the label words only. `hinge`: with margin 1, over the label
 *   count. `zero_one`: 1 for a wrong label.
 */
export function labelLoss(
  task: Task,
  logProbs: readonly number[],
  target: number,
  bias?: readonly number[] | null,
): number {
  const values = logProbs.map((value, at) =>
    bias == null || value <= LOG_ZERO ? value : value + bias[at]!,
  );
  if (task.loss === "zero_one") return predicted(logProbs, values) === target ? 0 : 1;
  const own = values[target]!;
  if (task.loss === "hinge") {
    const others = values.filter((_, at) => at !== target);
    return exactSum(others.map((value) => Math.max(0, 1 - own + value))) / values.length;
  }
  const highest = Math.max(...values);
  return Math.log(exactSum(values.map((value) => Math.exp(value - highest)))) + highest - own;
}

/** The index of the likeliest label, the first of several; -1 where the model wrote none. */
function predicted(logProbs: readonly number[], values: readonly number[]): number {
  let found = -1;
  values.forEach((value, at) => {
    if (logProbs[at]! > LOG_ZERO && (found < 0 || value > values[found]!)) found = at;
  });
  return found;
}

async function scored(text: string, example: Example, score?: ScoreFunction): Promise<number> {
  if (score === undefined) {
    throw new Declining("loss score needs a score function, and this client has none");
  }
  let value: number;
  try {
    value = await score(text, example);
  } catch (error) {
    throw new Declining(`task.score: the score function failed with ${kindOf(error)}`);
  }
  if (!(value >= 0 && value <= 1)) {
    throw new Declining(`task.score: the score function gave ${value}; it must be from 0 to 1`);
  }
  return value;
}

/** Whether there is a grid of biases for so many labels. */
export function hasBiasGrid(numLabels: number): boolean {
  return numLabels in OFFSETS;
}

/** The biases that losses are reported at, G of them; the last label's runs fastest. */
export function biasGrid(numLabels: number): number[][] {
  const offsets = OFFSETS[numLabels] ?? [];
  let grid = [[0]];
  for (let label = 1; label < numLabels; label++) {
    grid = grid.flatMap((bias) => offsets.map((offset) => [...bias, offset]));
  }
  return grid;
}

/**
 * One prompt's mean losses by class, at each bias of the grid.
 *
 * @returns C x G numbers, flat; 0 for a class without examples.
 */
export function classLosses(
  task: Task,
  rows: readonly (readonly number[])[],
  targets: readonly number[],
): number[] {
  const grid = biasGrid(task.labels.length);
  return task.labels.flatMap((_, label) => {
    const own = rows.filter((_, at) => targets[at] === label);
    return grid.map((bias) =>
      own.length === 0 ? 0 : mean(own.map((row) => labelLoss(task, row, label, bias))),
    );
  });
}
