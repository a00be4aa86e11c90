import { Stopped } from "./errors.js";

/** The device's time; tests replace it to avoid waiting. */
export interface Clock {
  /** Seconds of a clock that never goes back, from any starting point. */
  now(): number;

  /**
   * Waits.
   *
   * @param seconds Duration of the wait.
   * @param signal Ends the wait early.
   * @throws Stopped The signal was aborted.
   */
  sleep(seconds: number, signal?: AbortSignal): Promise<void>;
}

/** The platform's own clock. */
export const systemClock: Clock = {
  now: () => performance.now() / 1000,
  sleep: (seconds, signal) =>
    new Promise((resolve, reject) => {
      if (signal?.aborted) return reject(new Stopped("stopped"));
      const stop = (): void => {
        clearTimeout(timer);
        reject(new Stopped("stopped"));
      };
      const timer = setTimeout(() => {
        signal?.removeEventListener("abort", stop);
        resolve();
      }, 1000 * seconds);
      signal?.addEventListener("abort", stop, { once: true });
    }),
};
