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

/** What an `EdgeClient` is made of. */
export interface EdgeClientOptions extends Columns {
  /** Base URL of the aggregator. */
  readonly server: string;
  /** Enrolment token; needed until the device has an identity. */
  readonly token?: string | undefined;
  /** The device's labelled examples, or a function that is asked for those of this moment. */
  readonly data: readonly Example[] | (() => readonly Example[] | Promise<readonly Example[]>);
  /** Sees every text before it is scored; see `BeforeSend`. */
  readonly beforeSend?: BeforeSend;
  /**
   * Whether the device may work now: it charges, its network costs nothing. Asked before work is
   * claimed and before each request for scores. Work that is put off keeps its place until its
   * deadline.
   */
  readonly onlyWhen?: () => boolean | Promise<boolean>;
  /** Keeps identity, unsent updates and paid losses across restarts, for one client at a time. */
  readonly storage: EdgeStorage;
  /** A model of the device's own; by default the aggregator's gateway scores. */
  readonly backend?: Backend;
  /** Which work the device accepts. */
  readonly policy?: WorkPolicy;
  /** For runs whose loss is `score`. */
  readonly score?: ScoreFunction;
  /** Gets progress; it should return at once. */
  readonly onEvent?: OnEvent;
  /** Work only for this run. */
  readonly runId?: string;
  /** What people may call this device, 1 to 200 characters. */
  readonly name?: string;
  /** Sends requests; by default the platform's `fetch`. */
  readonly fetch?: Fetch;
  /** The platform's time. */
  readonly clock?: Clock;
  /** Secure randomness; by default `crypto.getRandomValues`. */
  readonly random?: Random;
  /**
   * How long an answer of the server, `data`, `onlyWhen` or `storage` may take, seconds; a long
   * poll and the gateway take longer.
   */
  readonly timeoutS?: number;
}

/** @throws ArgumentError An argument cannot be used. */
export function check({ data, token, runId, name }: EdgeClientOptions): void {
  if (Array.isArray(data) && data.length === 0) {
    throw new ArgumentError("data: this client has no examples; it needs at least one");
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
