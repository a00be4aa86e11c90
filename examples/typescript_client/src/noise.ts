import type { PrivacySpec } from "./messages.js";
import { exactSum } from "./numbers.js";
import type { Random } from "./random.js";

/**
 * Mean losses with each example's loss clipped to [0, C], and Gaussian noise
 * (docs/explanation/privacy.md).
 *
 * Each of the I means moves by at most C / b with another example, so the vector by sqrt(I) C / b.
 *
 * @param losses Per prompt the loss of each of the same b examples.
 * @param privacy The run's.
 * @param random The platform's secure randomness: noise that the server can compute is no noise.
 */
export function privateLosses(
  losses: readonly (readonly number[])[],
  privacy: PrivacySpec,
  random: Random,
): number[] {
  const size = losses[0]!.length;
  const sensitivity = (Math.sqrt(losses.length) * privacy.clip) / size;
  const std = privacy.noise_multiplier * sensitivity;
  return losses.map((row) => {
    const clipped = row.map((loss) => Math.min(Math.max(loss, 0), privacy.clip));
    // The sum of four draws: the last bits of a result do not give the noise away (Holohan and
    // Braghin 2021).
    const noise = exactSum([0, 1, 2, 3].map(() => gaussian(random)));
    return exactSum(clipped) / size + (std / 2) * noise;
  });
}

/** A standard normal number (Box and Muller 1958). */
function gaussian(random: Random): number {
  const radius = Math.sqrt(-2 * Math.log(1 - uniform(random)));
  return radius * Math.cos(2 * Math.PI * uniform(random));
}

/** From 0 up to 1, in steps of 2^-53. */
function uniform(random: Random): number {
  const view = new DataView(random(new Uint8Array(8)).buffer);
  return ((view.getUint32(0) >>> 5) * 67108864 + (view.getUint32(4) >>> 6)) / 9007199254740992;
}
