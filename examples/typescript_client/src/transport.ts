import { ArgumentError, MessageError, ProblemError, Stopped, TransportError } from "./errors.js";
import type { Signer } from "./signing.js";

/** What the client asks of `fetch`: the platform's own, or one of the app's. */
export type Fetch = (url: string, init: RequestInit) => Promise<Response>;

/** An answer that is no refusal. */
export interface Reply {
  readonly status: number;
  readonly text: string;
  /** The wait that the server asks for, seconds; undefined where it does not say. */
  readonly retryAfterS?: number;
}

/** One request. */
export interface Request {
  readonly method: "GET" | "POST";
  /** Path and query, from `/v1`. */
  readonly path: string;
  /** The bearer token. */
  readonly token: string;
  /** The JSON, as it is sent. */
  readonly body?: string;
  /** How much longer than usual the answer may take, seconds. */
  readonly patienceS?: number;
  /** The signer; undefined for an unsigned request. */
  readonly clientId?: string;
  readonly signal?: AbortSignal | undefined;
}

const PROTOCOL_VERSION = "1";
const MAX_ANSWER_CHARS = 32 * 1024 * 1024;
const MAX_RETRY_AFTER_S = 3600;

/** The protocol over HTTP: requests in, answers or typed refusals out. */
export class Transport {
  readonly #base: string;
  readonly #path: string;
  #skewS = 0;

  /**
   * @param server Base URL of the aggregator.
   * @param fetch Sends a request.
   * @param signer Signs requests; undefined sends them unsigned.
   * @param timeoutS How long an answer may take, seconds.
   * @throws ArgumentError The URL cannot be used.
   */
  constructor(
    server: string,
    readonly fetch: Fetch,
    readonly signer: Signer | undefined,
    readonly timeoutS: number,
  ) {
    const found = /^https?:\/\/[^/?#@\s]+(\/[^?#\s]*)?$/.exec(server);
    if (!found) {
      throw new ArgumentError(`server: ${JSON.stringify(server)} is not an http(s) URL`);
    }
    this.#base = server.replace(/\/+$/, "");
    this.#path = (found[1] ?? "").replace(/\/+$/, "");
  }

  /**
   * Sends a request once; one whose clock is off is signed again by the server's.
   *
   * @throws ProblemError The aggregator refuses.
   * @throws TransportError It cannot be reached, or something in between is overloaded.
   * @throws MessageError What answers is no aggregator.
   * @throws Stopped The signal was aborted.
   */
  async send(request: Request): Promise<Reply> {
    try {
      return await this.#once(request);
    } catch (error) {
      if (!(error instanceof Skewed)) throw error;
      this.#skewS = error.skewS;
      return this.#once(request);
    }
  }

  async #once(request: Request): Promise<Reply> {
    const { method, path, body, signal } = request;
    const headers: Record<string, string> = {
      Authorization: `Bearer ${request.token}`,
      Accept: "application/json",
      "FedOne-Protocol": PROTOCOL_VERSION,
      ...(body !== undefined && { "Content-Type": "application/json" }),
    };
    if (this.signer && request.clientId !== undefined) {
      const signed = await this.signer.headers({
        method,
        target: this.#path + path,
        body: new TextEncoder().encode(body ?? ""),
        clientId: request.clientId,
        createdS: Math.floor(Date.now() / 1000 + this.#skewS),
      });
      Object.assign(headers, signed);
    }
    const timeout = new AbortController();
    const abort = (): void => timeout.abort();
    const timer = setTimeout(abort, 1000 * (this.timeoutS + (request.patienceS ?? 0)));
    signal?.addEventListener("abort", abort);
    try {
      if (signal?.aborted) throw new Stopped("stopped");
      const response = await this.fetch(this.#base + path, {
        method,
        headers,
        ...(body !== undefined && { body }),
        signal: timeout.signal,
        redirect: "error", // a redirect would carry the credential elsewhere
        credentials: "omit",
        cache: "no-store",
      });
      if (Number(response.headers.get("Content-Length")) > MAX_ANSWER_CHARS) {
        timeout.abort();
        throw new MessageError(`${path}: the answer is too long`);
      }
      const text = await response.text();
      const retryAfterS = readRetryAfter(response.headers);
      if (!response.ok) throw this.#refusal(path, response, text, retryAfterS);
      return { status: response.status, text, ...(retryAfterS !== undefined && { retryAfterS }) };
    } catch (error) {
      if (signal?.aborted) throw new Stopped("stopped");
      if (error instanceof ProblemError || error instanceof MessageError) throw error;
      if (error instanceof TransportError || error instanceof Skewed) throw error;
      const reason = timeout.signal.aborted ? "no answer in time" : String(error);
      throw new TransportError(`${this.#base}: cannot be reached: ${reason}`);
    } finally {
      clearTimeout(timer);
      signal?.removeEventListener("abort", abort);
    }
  }

  #refusal(path: string, response: Response, text: string, retryAfterS?: number): Error {
    const { status, headers } = response;
    let problem: { code?: unknown; detail?: unknown } | null = null;
    try {
      problem = JSON.parse(text);
    } catch {
      // Not ours; said below.
    }
    if (typeof problem?.code !== "string") {
      // A proxy between here and there. Its 5xx will pass.
      return status >= 500 || status === 429
        ? new TransportError(`${path}: answered ${status}`, retryAfterS)
        : new MessageError(`${path}: answered ${status}, and not as an aggregator does`);
    }
    const theirs = Date.parse(headers.get("Date") ?? "");
    const skewS = (theirs - Date.now()) / 1000;
    if (problem.code === "clock_skew" && Math.abs(skewS - this.#skewS) > 1) {
      return new Skewed(skewS);
    }
    return new ProblemError(problem.code, status, String(problem.detail), retryAfterS);
  }
}

/** Correction of the device's clock, for signatures only. */
class Skewed extends Error {
  constructor(readonly skewS: number) {
    super("clock_skew");
  }
}

/** Seconds; a date, which proxies may send, is relative to the sender's clock. */
function readRetryAfter(headers: Headers): number | undefined {
  const asked = headers.get("Retry-After");
  if (asked === null) return undefined;
  let seconds = Number(asked);
  if (Number.isNaN(seconds)) {
    seconds = (Date.parse(asked) - Date.parse(headers.get("Date") ?? "")) / 1000;
  }
  return Number.isNaN(seconds) ? 1 : Math.min(Math.max(seconds, 0), MAX_RETRY_AFTER_S);
}
