// The HTTP client. The token is stored only in this tab's session storage, and sent in headers.

const KEY = "fedone.token";

export const token = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  clear: () => sessionStorage.removeItem(KEY),
};

// A problem response (RFC 9457).
export class Problem extends Error {
  constructor(status, body, retryAfter) {
    super(body.detail || body.title || `HTTP ${status}`);
    this.status = status;
    this.code = body.code ?? "";
    this.title = body.title || "The server refused";
    this.retryAfter = retryAfter;
  }
}

// There was no response, or it did not come from an aggregator.
export class Unreachable extends Error {}

export async function open(method, path, signal, body) {
  let response;
  try {
    response = await fetch(path, {
      method,
      signal,
      headers: { Authorization: `Bearer ${token.get()}`, ...(body && { "Content-Type": "application/json" }) },
      body: body && JSON.stringify(body),
      cache: "no-store",
      credentials: "omit",
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Unreachable("The server cannot be reached.");
  }
  if (response.ok) return response;
  let problem = null;
  try {
    problem = await response.json();
  } catch {
    signal?.throwIfAborted();
  }
  if (problem === null || response.status >= 500) {
    throw new Unreachable(problem?.detail ?? `The server answered HTTP ${response.status}.`);
  }
  throw new Problem(response.status, problem, Number(response.headers.get("Retry-After")) || 0);
}

const PATIENCE_MS = 20_000;

export async function call(method, path, signal, body) {
  const late = AbortSignal.timeout(PATIENCE_MS);
  try {
    const response = await open(method, path, signal ? AbortSignal.any([signal, late]) : late, body);
    return await response.json();
  } catch (error) {
    if (signal?.aborted || error instanceof Problem || error instanceof Unreachable) throw error;
    throw new Unreachable("The server's answer did not arrive.");
  }
}

export const get = (path, signal) => call("GET", path, signal);
export const post = (path, signal, body) => call("POST", path, signal, body);
export const runPath = (id, rest = "") => `v1/runs/${encodeURIComponent(id)}${rest}`;
