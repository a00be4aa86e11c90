/** Margin for rounding the noise to a grid; `fedone_sdk/accountant.py` has the proof. */
const MARGIN = 1e-6;

/**
 * Epsilon of several messages with discrete Gaussian noise, as in `fedone_sdk.accountant`. With
 * noise multipliers s, they are together one Gaussian with 1 / s^2 = the sum of all 1 / s^2. Its
 * epsilon is known (Balle and Wang 2018).
 *
 * @param precision The sum of all 1 / s^2.
 * @param delta From 0 to 1, both excluded.
 */
export function epsilonOf(precision: number, delta: number): number {
  if (precision === 0) return 0;
  const sigma = 1 / Math.sqrt(precision);
  const aim = delta * (1 - MARGIN);
  let [low, high] = [0, 1];
  if (deltaOf(0, sigma) <= aim) return MARGIN;
  while (deltaOf(high, sigma) > aim) [low, high] = [high, 2 * high];
  while (high - low > 1e-12 * high) {
    const middle = (low + high) / 2;
    if (deltaOf(middle, sigma) > aim) low = middle;
    else high = middle;
  }
  return high + MARGIN;
}

function deltaOf(epsilon: number, sigma: number): number {
  const half = 0.5 / sigma;
  return (
    Math.exp(logNormal(half - epsilon * sigma)) -
    Math.exp(epsilon + logNormal(-half - epsilon * sigma))
  );
}

/** The logarithm of the normal distribution function. */
function logNormal(x: number): number {
  const logDensity = -(x * x) / 2 - Math.log(2 * Math.PI) / 2;
  if (x > 8) return 0;
  if (x < -3) {
    let ratio = -x; // Laplace's continued fraction.
    for (let k = 200; k > 0; k--) ratio = -x + k / ratio;
    return logDensity - Math.log(ratio);
  }
  let [sum, term] = [x, x]; // Marsaglia 2004.
  for (let k = 3; sum + term !== sum; k += 2) {
    term *= (x * x) / k;
    sum += term;
  }
  return Math.log(0.5 + sum * Math.exp(logDensity));
}
