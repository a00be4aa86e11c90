import { ArgumentError, MessageError, ProblemError, Stopped, TransportError } from "./errors.js";

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
      const text = await textOf(response, path);
      const retryAfterS = readRetryAfter(response.headers);
      if (!response.ok) throw this.#refusal(path, response, text, retryAfterS);
      return { status: response.status, text, ...(retryAfterS !== undefined && { retryAfterS }) };
    } catch (error) {
      if (signal?.aborted) throw new Stopped("stopped");
      if (error instanceof ProblemError || error instanceof MessageError) throw error;
      if (error instanceof TransportError) throw error;
      const reason = timeout.signal.aborted ? "no answer in time" : String(error);
      throw new TransportError(`${this.#base}: cannot be reached: ${reason}`);
    } finally {
      clearTimeout(timer);
      signal?.removeEventListener("abort", abort);
    }
  }

  #refusal(path: string, response: Response, text: string, retryAfterS?: number): Error {
    const { status } = response;
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
    return new ProblemError(problem.code, status, String(problem.detail), retryAfterS);
  }
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
