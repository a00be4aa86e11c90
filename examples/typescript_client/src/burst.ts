import type { EdgeClient, Outcome } from "./client.js";
import { systemClock } from "./clock.js";
import { Ending } from "./waits.js";

/**
 * Works for as long as the system lets a background job: turn after turn while there is work.
 *
 * @param client Works.
 * @param options.seconds Maximum duration of the turn; its results so far are kept.
 * @param options.signal Ends it at once, as the system does when the time is over.
 * @param options.waitS How long each request for work may stay open, seconds.
 * @returns What the last turn came to.
 * @throws Error As `EdgeClient.run`.
 */
export async function burst(
  client: EdgeClient,
  { seconds, signal, waitS = 2 }: { seconds: number; signal?: AbortSignal; waitS?: number },
): Promise<Outcome> {
  const over = new Ending(signal);
  const timer = setTimeout(over.stop, 1000 * seconds);
  const until = systemClock.now() + seconds;
  try {
    for (;;) {
      const outcome = await client.runOnce({ waitS, signal: over.signal });
      if (outcome !== "worked" || systemClock.now() + waitS >= until) return outcome;
    }
  } finally {
    clearTimeout(timer);
    over.release();
  }
}
