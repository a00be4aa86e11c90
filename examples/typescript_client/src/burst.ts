import type { EdgeClient, Outcome } from "./client.js";
import { systemClock } from "./clock.js";
import { Ending } from "./waits.js";

/**
 * Works as long as the system allows a background job: one turn after another while there is work.
 *
 * @param client The client.
 * @param options.seconds Maximum duration of the turns; results so far are kept.
 * @param options.signal Stops the work at once, for example when the system ends the job.
 * @param options.waitS How long each request for work may stay open, seconds.
 * @returns The outcome of the last turn.
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
