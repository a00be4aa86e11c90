/** Base of all errors that this package throws on purpose. */
export class FedOneError extends Error {
  override name = "FedOneError";
}

/** An argument cannot be used; the message names it and says what is allowed. */
export class ArgumentError extends FedOneError {
  override name = "ArgumentError";
}

/** The run asks for something that this client does not do, such as the `alpha` exchange. */
export class UnsupportedError extends FedOneError {
  override name = "UnsupportedError";
}

/** The aggregator cannot be reached. */
export class TransportError extends FedOneError {
  override name = "TransportError";

  constructor(
    message: string,
    /** How long to wait before the same call, seconds; undefined does not say. */
    readonly retryAfterS?: number,
  ) {
    super(message);
  }
}

/** What came is not an aggregator's answer: the login page of a network, for example. */
export class MessageError extends FedOneError {
  override name = "MessageError";
}

/** A proxy refuses a request by a 4xx of its own, which the same request meets again. */
export class RefusedBetween extends MessageError {
  override name = "RefusedBetween";
}

/** A refusal of the aggregator: RFC 9457 `application/problem+json` with a stable `code`. */
export class ProblemError extends FedOneError {
  override name = "ProblemError";

  constructor(
    /** Stable; programs branch on it (docs/reference/errors.md). */
    readonly code: string,
    /** The HTTP status. */
    readonly status: number,
    /** What happened, for a person. */
    readonly detail: string,
    /** How long to wait before the same call, seconds; undefined does not say. */
    readonly retryAfterS?: number,
  ) {
    super(`${code}: ${detail}`);
  }
}

/** Work that cannot be completed; it is declined. */
export class Declining extends FedOneError {
  constructor(
    message: string,
    /** Whether the device fits no work of the run; nothing was asked then. */
    readonly unfit = false,
  ) {
    super(message);
  }
}

/** A failure that may depend on private rows: the server learns only that work is declined. */
export class Withheld extends FedOneError {
  constructor(override readonly cause: unknown) {
    super("withheld");
  }
}

/** The app's condition does not hold: the work waits. */
export class PutOff extends FedOneError {}

/** The app's signal, or the end of the work's time, has ended a wait; names what was waited for. */
export class Stopped extends FedOneError {}

/** Whether the same call, sent again later, may succeed. */
export function isRetryable(error: unknown): boolean {
  if (error instanceof ProblemError) {
    const passes = error.status >= 500 && error.code !== "backend_failed";
    return passes || error.status === 408 || error.status === 429;
  }
  return error instanceof TransportError;
}

/** Whether the aggregator refuses for good. */
export function isRefusal(error: unknown): error is ProblemError {
  return error instanceof ProblemError && !isRetryable(error);
}

/** The wait that the server asks for, seconds; 0 where it does not say. */
export function askedS(error: unknown): number {
  const says = error instanceof ProblemError || error instanceof TransportError;
  return says ? (error.retryAfterS ?? 0) : 0;
}

/** The kind of an error that an app's function threw: its words may quote private text. */
export function kindOf(error: unknown): string {
  return error instanceof Error ? error.name : typeof error;
}
