/**
 * The exact sum, rounded once (Shewchuk 1997), like Python's `math.fsum`. It is equal in all
 * languages, and for any order of the terms.
 */
export function exactSum(values: Iterable<number>): number {
  const partials: number[] = [];
  for (let x of values) {
    let kept = 0;
    for (let y of partials) {
      if (Math.abs(x) < Math.abs(y)) [x, y] = [y, x];
      const high = x + y;
      const low = y - (high - x);
      if (low !== 0) partials[kept++] = low;
      x = high;
    }
    partials.length = kept;
    partials.push(x);
  }
  let high = partials.pop() ?? 0;
  let low = 0;
  while (partials.length > 0 && low === 0) {
    const x = high;
    const y = partials.pop()!;
    high = x + y;
    low = y - (high - x);
  }
  // A sum half-way between two numbers is rounded to even only if no partial sum is left.
  const rest = partials[partials.length - 1] ?? 0;
  if ((low < 0 && rest < 0) || (low > 0 && rest > 0)) {
    const twice = 2 * low;
    const next = high + twice;
    if (next - high === twice) high = next;
  }
  return high;
}

/** The mean of at least one number. */
export function mean(values: readonly number[]): number {
  return exactSum(values) / values.length;
}

/** CRC-32 of bytes, as in zlib. */
export function crc32(bytes: Uint8Array): number {
  let crc = ~0;
  for (const byte of bytes) {
    crc ^= byte;
    for (let bit = 0; bit < 8; bit++) crc = (crc >>> 1) ^ (crc & 1 ? 0xedb88320 : 0);
  }
  return ~crc >>> 0;
}
