import type { Backend } from "./backend.js";
import type { BeforeSend } from "./batch.js";
import type { Clock } from "./clock.js";
import type { Columns } from "./consent.js";
import { ArgumentError } from "./errors.js";
import type { OnEvent } from "./events.js";
import type { ScoreFunction } from "./loss.js";
import type { WorkPolicy } from "./policy.js";
import type { Random } from "./random.js";
import type { EdgeStorage } from "./state.js";
import type { Example } from "./task.js";
import type { Fetch } from "./transport.js";

/** The options of an `EdgeClient`. */
export interface EdgeClientOptions extends Columns {
  /** Base URL of the aggregator. */
  readonly server: string;
  /** Enrolment token; needed until the device has enrolled. */
  readonly token?: string | undefined;
  /** The device's labelled examples, or a function that returns the current examples. */
  readonly data: readonly Example[] | (() => readonly Example[] | Promise<readonly Example[]>);
  /** Receives every text before it leaves the device; see `BeforeSend`. */
  readonly beforeSend?: BeforeSend;
  /**
   * Returns whether the device may work now, for example whether it charges and its network is free
   * of charge. Called before each request for work and for scores. If it returns false, an
   * assignment waits, and keeps its seat until its deadline.
   */
  readonly onlyWhen?: () => boolean | Promise<boolean>;
  /** Stores identity, unsent update and paid losses across restarts, for one client at a time. */
  readonly storage: EdgeStorage;
  /** A model on the device; by default the gateway scores prompts. */
  readonly backend?: Backend;
  /** The work that the device accepts. */
  readonly policy?: WorkPolicy;
  /** The score function, for runs with the loss `score`. */
  readonly score?: ScoreFunction;
  /** Called with events; it should return at once. */
  readonly onEvent?: OnEvent;
  /** The only run that the device works for. */
  readonly runId?: string;
  /** The device's name for people, 1 to 200 characters. */
  readonly name?: string;
  /** Sends requests; by default the platform's `fetch`. */
  readonly fetch?: Fetch;
  /** The time; by default the platform's. */
  readonly clock?: Clock;
  /** Secure random numbers; by default from `crypto.getRandomValues`. */
  readonly random?: Random;
  /**
   * Time limit of a response of the server, and of a call of `data`, `onlyWhen` or `storage`,
   * seconds. Long polls and requests to the gateway may take longer.
   */
  readonly timeoutS?: number;
}

/** @throws ArgumentError An argument cannot be used. */
export function check({ data, token, runId, name }: EdgeClientOptions): void {
  if (Array.isArray(data) && data.length === 0) {
    throw new ArgumentError("data: has no examples");
  }
  if (token !== undefined && !/^[\x21-\x7e]+$/.test(token.trim())) {
    throw new ArgumentError("token: must be printable ASCII without blanks");
  }
  if (runId !== undefined && !/^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$/.test(runId)) {
    throw new ArgumentError("runId: must be 1 to 64 letters, digits, dots, dashes and underscores");
  }
  if (name !== undefined && (name.length < 1 || name.length > 200)) {
    throw new ArgumentError("name: must have 1 to 200 characters");
  }
}
