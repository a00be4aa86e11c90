/**
 * The exact sum, rounded once (Shewchuk 1997), as Python's `math.fsum`: the same in every language
 * and in any order of the terms.
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
  // Half-way cases round to even only where the rest is known to be zero.
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

/**
 * A name for a text, 106 bits by cyrb53 with two seeds: for finding again what was kept. It does
 * not resist a search for collisions.
 */
export function fingerprint(text: string): string {
  return `${hash(text, 0).toString(36)}.${hash(text, 1).toString(36)}`;
}

function hash(text: string, seed: number): number {
  let [a, b] = [0xdeadbeef ^ seed, 0x41c6ce57 ^ seed];
  for (let at = 0; at < text.length; at++) {
    const code = text.charCodeAt(at);
    a = Math.imul(a ^ code, 2654435761);
    b = Math.imul(b ^ code, 1597334677);
  }
  a = Math.imul(a ^ (a >>> 16), 2246822507) ^ Math.imul(b ^ (b >>> 13), 3266489909);
  b = Math.imul(b ^ (b >>> 16), 2246822507) ^ Math.imul(a ^ (a >>> 13), 3266489909);
  return 4294967296 * (2097151 & b) + (a >>> 0);
}
