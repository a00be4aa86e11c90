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

/** The part of `fetch` that the client uses: the platform's function, or the app's. */
export type Fetch = (url: string, init: RequestInit) => Promise<Response>;

/** A successful response. */
export interface Reply {
  readonly status: number;
  readonly text: string;
  /** The delay that the server requests, seconds; undefined if it requests none. */
  readonly retryAfterS?: number;
}

/** One request. */
export interface Request {
  readonly method: "GET" | "POST";
  /** Path and query, from `/v1`. */
  readonly path: string;
  /** The bearer token. */
  readonly token: string;
  /** The JSON text. */
  readonly body?: string;
  /** Additional time limit for the response, seconds. */
  readonly patienceS?: number;
  readonly signal?: AbortSignal | undefined;
}

const PROTOCOL_VERSION = "1";
const MAX_ANSWER_CHARS = 32 * 1024 * 1024;
const MAX_RETRY_AFTER_S = 3600;

/** Statuses of a proxy, besides 5xx, after which another attempt may succeed. */
const PASSING = [408, 421, 425, 429];

/** Added in browsers, which hide the reason of a failed request. */
const HINT = "; or the path is wrong, or the server's `cors` lacks this origin";

const KNOWN = [MessageError, ProblemError, Stopped, TransportError];

/** Sends requests over HTTP, and returns responses or throws typed errors. */
export class Transport {
  readonly #base: string;

  /**
   * @param server Base URL of the aggregator, without a slash at its end.
   * @param fetch Sends a request.
   * @param timeoutS Time limit of a response, seconds.
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
    this.#base = server;
  }

  /**
   * Sends a request once.
   *
   * @throws ProblemError The aggregator refuses.
   * @throws TransportError The aggregator cannot be reached, or a proxy is overloaded.
   * @throws RefusedBetween A proxy refuses.
   * @throws MessageError The response is not from an aggregator.
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
        redirect: "error", // a redirect would send the credential to another address
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
      ending.abort(); // also cancels a response that was not read to its end
    }
  }
}

/** Returns the error for a refusal, of the aggregator or of a proxy. */
function refusal(path: string, status: number, text: string, retryAfterS?: number): Error {
  let problem: Partial<Problem> | null = null;
  try {
    problem = JSON.parse(text);
  } catch {
    // Not from the aggregator; see below.
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
 * Returns the text of a response. It may be compressed, so the limit applies to the read text.
 *
 * @throws MessageError The text is too long.
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

/** Returns seconds. A date, which proxies may send, is compared with the sender's clock. */
function readRetryAfter(headers: Headers): number | undefined {
  const asked = headers.get("Retry-After");
  if (asked === null) return undefined;
  let seconds = Number(asked);
  if (Number.isNaN(seconds)) {
    seconds = (Date.parse(asked) - Date.parse(headers.get("Date") ?? "")) / 1000;
  }
  return Number.isNaN(seconds) ? 1 : Math.min(Math.max(seconds, 0), MAX_RETRY_AFTER_S);
}
