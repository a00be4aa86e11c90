import { Declining } from "./errors.js";
import { MAX_LOSS } from "./loss.js";
import type { PrivacySpec } from "./messages.js";
import type { Random } from "./random.js";

/** Number of grid steps of a clip, as in `fedone_sdk/client/noise.py`. */
const GRID = 2 ** 30;

/** Weight of label probabilities in an update, as in `fedone_sdk/client/noise.py`. */
const BIAS_WEIGHT = 0.25;

type Noise = Pick<PrivacySpec, "clip" | "noise_multiplier">;

/**
 * Mean losses with discrete Gaussian noise; first each example's loss is clipped to [0, C]
 * (docs/explanation/privacy.md).
 *
 * Clipped losses are rounded to a grid, and the noise is added in exact integer arithmetic. The low
 * bits of a result therefore reveal nothing. If an example is replaced, each of the I sums changes
 * by at most a clip, and the vector of sums by at most sqrt(I) clips.
 *
 * @param losses For each prompt, the losses of the same b examples.
 * @param privacy The privacy of the run.
 * @param random The platform's secure random numbers, which the server cannot compute.
 */
export function privateLosses(
  losses: readonly (readonly number[])[],
  { clip, noise_multiplier: multiplier }: Noise,
  random: Random,
): number[] {
  const square = losses.length * GRID * GRID;
  return noisedMeans(
    losses,
    losses.map(() => clip),
    multiplier * multiplier * square,
    random,
  );
}

/**
 * Mean losses, mean label probabilities and label counts, with noise.
 *
 * Units are C for losses, 1 / w for probabilities and 1 / (w sqrt(I)) for counts. If an example is
 * replaced, the sums then change by at most sqrt(I (1 + 4 w^2)) in L2 norm.
 *
 * @param terms `lossTerms` of each prompt and example.
 * @param targets The true labels; -1 for an example without a loss, whose terms are 0.
 * @returns I losses, then I x C probabilities, then C counts.
 */
export function privateTerms(
  terms: readonly (readonly (readonly number[])[])[],
  targets: readonly number[],
  { clip, noise_multiplier: multiplier }: Noise,
  random: Random,
): number[] {
  const labels = Array.from({ length: terms[0]![0]!.length - 2 }, (_, label) => label);
  const of = (rows: readonly (readonly number[])[], at: number) => rows.map((row) => row[at]!);
  const rows = [
    ...terms.map((own) => of(own, 0)),
    ...terms.flatMap((own) => labels.map((label) => of(own, 2 + label))),
    ...labels.map((label) => targets.map((target) => Number(target === label))),
  ];
  const share = Math.max(1, 1 / (BIAS_WEIGHT * Math.sqrt(terms.length))); // Counts are not clipped.
  const widths = [
    ...terms.map(() => clip),
    ...terms.flatMap(() => labels.map(() => 1 / BIAS_WEIGHT)),
    ...labels.map(() => share),
  ];
  const sensitivity = Math.sqrt(terms.length * (1 + 4 * BIAS_WEIGHT ** 2));
  const square = (sensitivity * GRID + Math.sqrt(rows.length)) ** 2;
  const means = noisedMeans(rows, widths, multiplier * multiplier * square, random);
  const first = rows.length - labels.length;
  return means.map((mean, at) => bounded(at < first ? mean : targets.length * mean));
}

/** Means of values that are clipped to [0, width], plus noise; its variance is in grid steps. */
function noisedMeans(
  rows: readonly (readonly number[])[],
  widths: readonly number[],
  variance: number,
  random: Random,
): number[] {
  const steps = BigInt(Math.ceil(variance));
  return rows.map((row, at) => {
    const width = widths[at]!;
    let sum = 0;
    for (const value of row) {
      sum += Math.floor(Math.min(Math.max(value / width, 0), 1) * GRID + 0.5);
    }
    const total = Number(BigInt(sum) + discreteGaussian(steps, random));
    return bounded((total * width) / (GRID * row.length));
  });
}

function bounded(value: number): number {
  return Math.min(Math.max(value, -MAX_LOSS), MAX_LOSS);
}

/** @throws Declining The clip or the noise is outside of the allowed range. */
export function checkPrivacy({ clip, noise_multiplier: multiplier }: PrivacySpec): void {
  const isWithin = (value: unknown, low: number, high: number): boolean =>
    typeof value === "number" && value >= low && value <= high;
  if (!isWithin(clip, 1e-3, 1e3) || !isWithin(multiplier, 0.1, 1e3)) {
    throw new Declining(
      "the run's privacy has a clip outside of 0.001 to 1000, or a noise multiplier outside of " +
        "0.1 to 1000",
    );
  }
}

/**
 * Draws an integer k with probability exactly proportional to exp(-k^2 / (2 variance)), by
 * rejection from a discrete Laplace distribution (Canonne, Kamath and Steinke 2020).
 */
export function discreteGaussian(variance: bigint, random: Random): bigint {
  const scale = BigInt(Math.floor(Math.sqrt(Number(variance)))) + 1n;
  for (;;) {
    const drawn = discreteLaplace(scale, random);
    const gap = (drawn < 0n ? -drawn : drawn) * scale - variance;
    if (expCoin(gap * gap, 2n * variance * scale * scale, random)) return drawn;
  }
}

/** Draws an integer k with probability proportional to exp(-|k| / scale). */
function discreteLaplace(scale: bigint, random: Random): bigint {
  for (;;) {
    let size = below(scale, random);
    if (!expCoin(size, scale, random)) continue;
    while (expCoin(1n, 1n, random)) size += scale;
    if (bits(1, random) === 0n) return size;
    if (size !== 0n) return -size;
  }
}

/** Returns true with probability exp(-numerator / denominator). */
function expCoin(numerator: bigint, denominator: bigint, random: Random): boolean {
  for (; numerator > denominator; numerator -= denominator) {
    if (!expCoin(1n, 1n, random)) return false;
  }
  let count = 1n;
  while (below(denominator * count, random) < numerator) count++;
  return count % 2n === 1n;
}

/** Draws an integer from 0 to below `bound`; all are equally likely. */
function below(bound: bigint, random: Random): bigint {
  const length = bound.toString(2).length;
  for (;;) {
    const found = bits(length, random);
    if (found < bound) return found;
  }
}

/** Draws an integer of `length` random bits. */
function bits(length: number, random: Random): bigint {
  const bytes = random(new Uint8Array(Math.ceil(length / 8)));
  const value = bytes.reduce((sum, byte) => (sum << 8n) | BigInt(byte), 0n);
  return value >> BigInt(8 * bytes.length - length);
}
