import {
  ArgumentError,
  MessageError,
  ProblemError,
  RefusedBetween,
  Stopped,
  TransportError,
} from "./errors.js";
import type { Problem } from "./messages.js";
import { Ending, raced } from "./waits.js";

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
  readonly signal?: AbortSignal | undefined;
}

const PROTOCOL_VERSION = "1";
const MAX_ANSWER_CHARS = 32 * 1024 * 1024;
const MAX_RETRY_AFTER_S = 3600;

/** Of what a proxy answers, besides 5xx, the statuses that another attempt may not meet. */
const PASSING = [408, 421, 425, 429];

/** Browsers hide why a request of a page failed. */
const HINT = "; or the path is wrong, or the server's `cors` lacks this origin";

const KNOWN = [MessageError, ProblemError, Stopped, TransportError];

/** The protocol over HTTP: requests in, answers or typed refusals out. */
export class Transport {
  readonly #base: string;

  /**
   * @param server Base URL of the aggregator.
   * @param fetch Sends a request.
   * @param timeoutS How long an answer may take, seconds.
   * @throws ArgumentError The URL cannot be used.
   */
  constructor(
    server: string,
    readonly fetch: Fetch,
    readonly timeoutS: number,
  ) {
    if (!/^https?:\/\/[^/?#@\s]+(\/[^?#\s]*)?$/.test(server)) {
      throw new ArgumentError(`server: ${JSON.stringify(server)} is not an http(s) URL`);
    }
    this.#base = server.replace(/\/+$/, "");
  }

  /**
   * Sends a request once.
   *
   * @throws ProblemError The aggregator refuses.
   * @throws TransportError It cannot be reached, or something in between is overloaded.
   * @throws RefusedBetween Something in between refuses.
   * @throws MessageError What answers is no aggregator.
   * @throws Stopped The signal was aborted.
   */
  async send(request: Request): Promise<Reply> {
    const { method, path, body, signal } = request;
    const headers: Record<string, string> = {
      Authorization: `Bearer ${request.token}`,
      Accept: "application/json",
      "FedOne-Protocol": PROTOCOL_VERSION,
      ...(body !== undefined && { "Content-Type": "application/json" }),
    };
    const ending = new Ending(signal);
    const seconds = this.timeoutS + (request.patienceS ?? 0);
    const exchange = async (): Promise<Reply> => {
      const response = await this.fetch(this.#base + path, {
        method,
        headers,
        ...(body !== undefined && { body }),
        signal: ending.signal,
        redirect: "error", // a redirect would carry the credential elsewhere
        credentials: "omit",
        cache: "no-store",
      });
      if (Number(response.headers.get("Content-Length")) > MAX_ANSWER_CHARS) {
        throw new MessageError(`${path}: the answer is too long`);
      }
      const text = await textOf(response, path);
      const retryAfterS = readRetryAfter(response.headers);
      if (!response.ok) throw refusal(path, response.status, text, retryAfterS);
      return { status: response.status, text, ...(retryAfterS !== undefined && { retryAfterS }) };
    };
    try {
      if (signal?.aborted) throw new Stopped(path);
      return await raced(path, exchange, { signal, seconds });
    } catch (error) {
      const isKnown = KNOWN.some((kind) => error instanceof kind);
      if (isKnown) throw error;
      const hint = "document" in globalThis ? HINT : "";
      throw new TransportError(`${this.#base}: cannot be reached: ${error}${hint}`);
    } finally {
      ending.release();
      ending.abort(); // what has not answered, and what is left of an answer that is not read
    }
  }
}

/** What a refusal is: the aggregator's, or of something in between. */
function refusal(path: string, status: number, text: string, retryAfterS?: number): Error {
  let problem: Partial<Problem> | null = null;
  try {
    problem = JSON.parse(text);
  } catch {
    // Not ours; said below.
  }
  const { type, title, code, detail } = problem ?? {};
  const isOurs = [type, title, code, detail].every((each) => typeof each === "string");
  if (isOurs && problem?.status === status) {
    return new ProblemError(code!, status, detail!, retryAfterS);
  }
  if (status >= 500 || PASSING.includes(status)) {
    return new TransportError(`${path}: answered ${status}`, retryAfterS);
  }
  const kind = status >= 400 ? RefusedBetween : MessageError;
  return new kind(`${path}: answered ${status}, but the answer is not from an aggregator`);
}

/**
 * The text of an answer, which may be compressed: only what was read is bounded.
 *
 * @throws MessageError It is too long.
 */
async function textOf(response: Response, path: string): Promise<string> {
  const reader = response.body?.getReader();
  if (reader === undefined) return response.text(); // React Native has no streams.
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return text + decoder.decode();
    text += decoder.decode(value, { stream: true });
    if (text.length > MAX_ANSWER_CHARS) {
      await reader.cancel();
      throw new MessageError(`${path}: the answer is too long`);
    }
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
