import type { Clock } from "./clock.js";
import { askedS, isRetryable, MessageError } from "./errors.js";
import type { Renewal } from "./messages.js";

const RETRY_S = 3;
const RETRY_SHARE = 0.1;

/** Bounds of the time between two renewals, whatever the server says; a timer has an upper one. */
const LEAST_S = 0.2;
const MOST_S = 86_400;

/** How long before its deadline a seat is given up, seconds, or this share of a short deadline. */
const MARGIN_S = 2;

/**
 * Puts off an assignment's deadline while the work takes longer: a renewal is asked for at half
 * time, and again soon where that fails. Deadlines are spans from now; no clock is compared with
 * the server's.
 *
 * @param deadlineS Seconds that the server gives.
 * @param renew Asks the server for another deadline.
 * @param over Called when the time is nearly over, and the server renews no more.
 * @returns Ends the renewals.
 */
export function keepLease(
  deadlineS: number,
  renew: (signal: AbortSignal) => Promise<Renewal>,
  clock: Clock,
  over: () => void = () => undefined,
): () => void {
  const ended = new AbortController();
  const sleep = (seconds: number): Promise<void> =>
    clock.sleep(Math.min(Math.max(seconds, LEAST_S), MOST_S), ended.signal);
  const keep = async (): Promise<void> => {
    let since = clock.now();
    let waitS = deadlineS / 2;
    for (;;) {
      await sleep(waitS);
      const askedAt = clock.now();
      try {
        deadlineS = (await renew(ended.signal)).deadline_s;
        since = askedAt;
        waitS = deadlineS / 2;
      } catch (error) {
        // Renewed as often as the run allows, or the seat is lost.
        if (!isRetryable(error) && !(error instanceof MessageError)) break;
        waitS = Math.max(Math.min(RETRY_S, RETRY_SHARE * deadlineS), askedS(error));
      }
    }
    const marginS = Math.min(MARGIN_S, RETRY_SHARE * deadlineS);
    await sleep(since + deadlineS - marginS - clock.now());
    over();
  };
  keep().catch(() => undefined); // the clock's, once it is ended
  return () => ended.abort();
}
