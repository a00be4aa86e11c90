import type { Clock } from "./clock.js";
import { askedS, isRetryable, Stopped } from "./errors.js";

/** The longest `Retry-After` that is honoured, seconds. */
export const MAX_WAIT_S = 3600;

/**
 * The longest `Retry-After` that a call waits for, seconds; a longer one ends the turn. An app that
 * the system has woken has no more than some minutes.
 */
export const PATIENCE_S = 3;

const ATTEMPTS = 5;

/**
 * Repeats a call that fails for reasons that pass: a few times at once, for blips.
 *
 * @param call The call.
 * @param failed Told of each failure.
 * @throws TransportError The server cannot be reached.
 * @throws ProblemError The server refuses, or is not able to answer for some time.
 */
export async function persist<T>(
  call: () => Promise<T>,
  clock: Clock,
  signal: AbortSignal | undefined,
  failed: (error: unknown) => void,
): Promise<T> {
  for (let attempt = 1; ; attempt++) {
    try {
      return await call();
    } catch (error) {
      if (!(error instanceof Stopped)) failed(error);
      const over = attempt >= ATTEMPTS || askedS(error) > PATIENCE_S;
      if (over || !isRetryable(error)) throw error;
      const jitterS = Math.random() * Math.min(20, 0.2 * 2 ** (attempt - 1));
      await clock.sleep(askedS(error) + jitterS, signal);
    }
  }
}

/**
 * Waits that grow while turns come to nothing: exponential, with full jitter and a cap (Brooker,
 * "Exponential Backoff And Jitter", AWS Architecture Blog, 2015).
 */
export class Backoff {
  #failures = 0;

  /**
   * @param firstS Bound of the first wait, seconds.
   * @param maxS Bound of all, seconds.
   */
  constructor(
    readonly firstS = 1,
    readonly maxS = 300,
  ) {}

  /** Something worked. */
  reset(): void {
    this.#failures = 0;
  }

  /**
   * How long to wait after one more failure, seconds.
   *
   * @param askedS The wait that the server asks for; honoured on top.
   */
  nextS(askedS = 0): number {
    const bound = Math.min(this.maxS, this.firstS * 2 ** Math.min(this.#failures++, 32));
    return Math.min(askedS, MAX_WAIT_S) + Math.random() * bound;
  }
}
