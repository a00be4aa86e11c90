/** Base of all errors that this package throws on purpose. */
export class FedOneError extends Error {
  override name = "FedOneError";
}

/** An argument cannot be used; the message names the argument and the allowed values. */
export class ArgumentError extends FedOneError {
  override name = "ArgumentError";
}

/** The run needs a feature that this client does not have, such as the exchange `alpha`. */
export class UnsupportedError extends FedOneError {
  override name = "UnsupportedError";
}

/** The aggregator cannot be reached. */
export class TransportError extends FedOneError {
  override name = "TransportError";

  constructor(
    message: string,
    /** Delay before the same call, seconds; undefined if unknown. */
    readonly retryAfterS?: number,
  ) {
    super(message);
  }
}

/** The response is not an aggregator's, for example the login page of a network. */
export class MessageError extends FedOneError {
  override name = "MessageError";
}

/** A proxy refused a request with a 4xx status; a repetition would be refused too. */
export class RefusedBetween extends MessageError {
  override name = "RefusedBetween";
}

/** A refusal of the aggregator: RFC 9457 `application/problem+json` with a stable `code`. */
export class ProblemError extends FedOneError {
  override name = "ProblemError";

  constructor(
    /** Stable code, which programs can rely on (docs/reference/errors.md). */
    readonly code: string,
    /** The HTTP status. */
    readonly status: number,
    /** The problem, in words for people. */
    readonly detail: string,
    /** Delay before the same call, seconds; undefined if unknown. */
    readonly retryAfterS?: number,
  ) {
    super(`${code}: ${detail}`);
  }
}

/** Work that the client cannot complete, and therefore declines. */
export class Declining extends FedOneError {
  constructor(
    message: string,
    /** Whether no work of the run fits the device; then nothing was requested. */
    readonly unfit = false,
  ) {
    super(message);
  }
}

/** A failure that may depend on private rows. The server learns only that work is declined. */
export class Withheld extends FedOneError {
  constructor(override readonly cause: unknown) {
    super("withheld");
  }
}

/** The app's condition is false, so the work waits. */
export class PutOff extends FedOneError {}

/** The app's signal, or the deadline of the work, has ended a wait; the message says of what. */
export class Stopped extends FedOneError {}

/** Whether the same call may succeed later. */
export function isRetryable(error: unknown): boolean {
  if (error instanceof ProblemError) {
    const passes = error.status >= 500 && error.code !== "backend_failed";
    return passes || error.status === 408 || error.status === 429;
  }
  return error instanceof TransportError;
}

/** Whether the aggregator refuses permanently. */
export function isRefusal(error: unknown): error is ProblemError {
  return error instanceof ProblemError && !isRetryable(error);
}

/** The wait that the server requests, seconds; 0 if it requests none. */
export function askedS(error: unknown): number {
  const says = error instanceof ProblemError || error instanceof TransportError;
  return says ? (error.retryAfterS ?? 0) : 0;
}

/** The type of an app function's error, without the message, which may quote private text. */
export function kindOf(error: unknown): string {
  return error instanceof Error ? error.name : typeof error;
}
