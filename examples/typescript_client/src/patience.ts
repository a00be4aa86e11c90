import type { Clock } from "./clock.js";
import { askedS, isRetryable, Stopped } from "./errors.js";

/** Maximum wait for a `Retry-After`, seconds. */
export const MAX_WAIT_S = 3600;

/**
 * A turn waits for a `Retry-After` of at most this many seconds; a longer one ends the turn. An app
 * that the system has woken has only a few minutes.
 */
export const PATIENCE_S = 3;

const ATTEMPTS = 5;

/**
 * Repeats a call with temporary failures a few times.
 *
 * @param call The call.
 * @param failed Called after each failure.
 * @throws TransportError The server cannot be reached.
 * @throws ProblemError The server refuses, or is unavailable for a longer time.
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
 * Waits that grow while turns are not successful: exponential, with full jitter and a maximum
 * (Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015).
 */
export class Backoff {
  #failures = 0;

  /**
   * @param firstS Maximum of the first wait, seconds.
   * @param maxS Maximum of all waits, seconds.
   */
  constructor(
    readonly firstS = 1,
    readonly maxS = 300,
  ) {}

  /** Resets the waits after a success. */
  reset(): void {
    this.#failures = 0;
  }

  /**
   * The wait after a failure, seconds.
   *
   * @param askedS The wait that the server requests, which is added.
   */
  nextS(askedS = 0): number {
    const bound = Math.min(this.maxS, this.firstS * 2 ** Math.min(this.#failures++, 32));
    return Math.min(askedS, MAX_WAIT_S) + Math.random() * bound;
  }
}
