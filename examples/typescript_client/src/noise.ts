import { Declining } from "./errors.js";
import type { PrivacySpec } from "./messages.js";
import type { Random } from "./random.js";

/** Grid steps of a clip; `fedone_sdk/client/noise.py` has the same. */
const GRID = 2 ** 30;

/** What an update can carry. */
const MAX_LOSS = 1e6;

/**
 * Mean losses with each example's loss clipped to [0, C], and discrete Gaussian noise
 * (docs/explanation/privacy.md).
 *
 * Clipped losses are rounded to a grid, and the noise is added in exact integer arithmetic, so that
 * no parameter makes it vanish and the low bits of a result reveal nothing. Another example moves
 * each of the I sums by at most a clip, so the vector by sqrt(I) of them.
 *
 * @param losses Per prompt the loss of each of the same b examples.
 * @param privacy The run's.
 * @param random The platform's secure randomness: noise that the server can compute is no noise.
 */
export function privateLosses(
  losses: readonly (readonly number[])[],
  { clip, noise_multiplier: multiplier }: Pick<PrivacySpec, "clip" | "noise_multiplier">,
  random: Random,
): number[] {
  const variance = BigInt(Math.ceil(multiplier * multiplier * losses.length * GRID * GRID));
  return losses.map((row) => {
    let sum = 0;
    for (const loss of row) {
      sum += Math.floor(Math.min(Math.max(loss / clip, 0), 1) * GRID + 0.5);
    }
    const total = Number(BigInt(sum) + discreteGaussian(variance, random));
    const mean = (total * clip) / (GRID * row.length);
    return Math.min(Math.max(mean, -MAX_LOSS), MAX_LOSS);
  });
}

/** @throws Declining The clip or the noise is outside of what is allowed: a server may lie. */
export function checkPrivacy({ clip, noise_multiplier: multiplier }: PrivacySpec): void {
  if (!(clip >= 1e-3 && clip <= 1e3 && multiplier >= 0.1 && multiplier <= 1e3)) {
    throw new Declining(
      "the run's privacy has a clip outside of 0.001 to 1000, or a noise multiplier outside of " +
        "0.1 to 1000",
    );
  }
}

/**
 * An integer k with probability proportional to exp(-k^2 / (2 variance)), exactly: by rejection
 * from a discrete Laplace distribution of a similar scale (Canonne, Kamath and Steinke 2020).
 */
export function discreteGaussian(variance: bigint, random: Random): bigint {
  const scale = BigInt(Math.floor(Math.sqrt(Number(variance)))) + 1n;
  for (;;) {
    const drawn = discreteLaplace(scale, random);
    const gap = (drawn < 0n ? -drawn : drawn) * scale - variance;
    if (expCoin(gap * gap, 2n * variance * scale * scale, random)) return drawn;
  }
}

/** An integer k with probability proportional to exp(-|k| / scale). */
function discreteLaplace(scale: bigint, random: Random): bigint {
  for (;;) {
    let size = below(scale, random);
    if (!expCoin(size, scale, random)) continue;
    while (expCoin(1n, 1n, random)) size += scale;
    if (bits(1, random) === 0n) return size;
    if (size !== 0n) return -size;
  }
}

/** True with probability exp(-numerator / denominator). */
function expCoin(numerator: bigint, denominator: bigint, random: Random): boolean {
  for (; numerator > denominator; numerator -= denominator) {
    if (!expCoin(1n, 1n, random)) return false;
  }
  let count = 1n;
  while (below(denominator * count, random) < numerator) count++;
  return count % 2n === 1n;
}

/** An integer from 0 up to a bound, each equally likely. */
function below(bound: bigint, random: Random): bigint {
  const length = bound.toString(2).length;
  for (;;) {
    const found = bits(length, random);
    if (found < bound) return found;
  }
}

/** An integer of so many random bits. */
function bits(length: number, random: Random): bigint {
  const bytes = random(new Uint8Array(Math.ceil(length / 8)));
  const value = bytes.reduce((sum, byte) => (sum << 8n) | BigInt(byte), 0n);
  return value >> BigInt(8 * bytes.length - length);
}
