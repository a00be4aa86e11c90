import type { Clock } from "./clock.js";
import { askedS, isRetryable, MessageError } from "./errors.js";
import type { Renewal } from "./messages.js";

const RETRY_S = 3;
const RETRY_SHARE = 0.1;

/** Limits of the time between two renewals. (A timer has a maximum delay.) */
const LEAST_S = 0.2;
const MOST_S = 86_400;

/** The seat is given up this long before its deadline, seconds, or at this share of a short one. */
const MARGIN_S = 2;

/**
 * Renews an assignment while its work takes longer: at half of the time, and again soon after a
 * failed renewal. A deadline is a duration from now, so the clocks of device and server are never
 * compared.
 *
 * @param deadlineS Seconds until the deadline.
 * @param renew Requests a renewal.
 * @param over Called shortly before the deadline if the server does not renew again.
 * @returns A function that ends the renewals.
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
        // The assignment was renewed as often as the run allows, or the seat is lost.
        if (!isRetryable(error) && !(error instanceof MessageError)) break;
        waitS = Math.max(Math.min(RETRY_S, RETRY_SHARE * deadlineS), askedS(error));
      }
    }
    const marginS = Math.min(MARGIN_S, RETRY_SHARE * deadlineS);
    await sleep(since + deadlineS - marginS - clock.now());
    over();
  };
  keep().catch(() => undefined); // ended during a wait
  return () => ended.abort();
}
