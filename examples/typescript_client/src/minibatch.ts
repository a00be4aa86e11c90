const MASK = (1n << 64n) - 1n;

/** SplitMix64 (Steele, Lea and Flood 2014): 64-bit numbers from a seed. */
export function* splitMix64(seed: number): Generator<bigint, never> {
  let state = BigInt(seed);
  for (;;) {
    state = (state + 0x9e3779b97f4a7c15n) & MASK;
    let z = ((state ^ (state >> 30n)) * 0xbf58476d1ce4e5b9n) & MASK;
    z = ((z ^ (z >> 27n)) * 0x94d049bb133111ebn) & MASK;
    yield z ^ (z >> 31n);
  }
}

/**
 * The rows of one mini-batch, drawn without replacement: a partial Fisher-Yates shuffle
 * (docs/reference/protocol.md#the-mini-batch).
 *
 * @param numExamples M, rows that the device holds.
 * @param batchSize B.
 * @param seed From 0 to 2^53 - 1.
 * @returns `min(B, M)` distinct row numbers below M, in draw order.
 */
export function drawMinibatch(numExamples: number, batchSize: number, seed: number): number[] {
  const rows = Array.from({ length: numExamples }, (_, row) => row);
  const numbers = splitMix64(seed);
  const count = Math.min(batchSize, numExamples);
  for (let i = 0; i < count; i++) {
    const j = i + Number((numbers.next().value * BigInt(numExamples - i)) >> 64n);
    [rows[i], rows[j]] = [rows[j]!, rows[i]!];
  }
  return rows.slice(0, count);
}
