// Server-sent events over fetch: EventSource cannot send the token's header.

import { open, Problem, Unreachable } from "./api.js";

const SILENCE_MS = 40_000; // The server sends a comment every 15 s.
const FIRST_WAIT_MS = 1_000;
const LONGEST_WAIT_MS = 15_000;

async function* events(path, signal) {
  const silence = new AbortController();
  let timer = setTimeout(() => silence.abort(), SILENCE_MS);
  try {
    const response = await open("GET", path, AbortSignal.any([signal, silence.signal]));
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    yield { name: "open" };
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(), SILENCE_MS);
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const event = /^event: (.*)\ndata: (.*)$/.exec(block);
        if (event) yield { name: event[1], data: JSON.parse(event[2]) };
      }
    }
  } finally {
    clearTimeout(timer);
  }
}

// Follows a run until it ends, and reconnects after failures.
//
// Calls `onEvent` with each event, and `onLost` with the wait before the next attempt in ms and a
// function that retries now. Returns after `end`; throws a Problem that is not retryable.
export async function follow(path, { onEvent, onLost, signal }) {
  let wait = FIRST_WAIT_MS;
  for (;;) {
    try {
      for await (const event of events(path, signal)) {
        wait = FIRST_WAIT_MS;
        onEvent(event);
        if (event.name === "end") return;
      }
    } catch (error) {
      signal.throwIfAborted();
      if (error instanceof Problem && error.code !== "rate_limited") throw error;
      if (!(error instanceof Problem || error instanceof Unreachable || isNetwork(error))) throw error;
      wait = Math.max(wait, (error.retryAfter ?? 0) * 1000);
    }
    signal.throwIfAborted();
    await pause(wait, signal, onLost);
    wait = Math.min(2 * wait, LONGEST_WAIT_MS);
  }
}

// The error of a connection that broke or timed out.
function isNetwork(error) {
  return error instanceof TypeError || error.name === "AbortError";
}

// Waits for some time, or until a retry is requested.
export function pause(ms, signal, lost) {
  return new Promise((resolve) => {
    const now = () => {
      clearTimeout(timer);
      signal.removeEventListener("abort", now);
      resolve();
    };
    const timer = setTimeout(now, ms);
    signal.addEventListener("abort", now);
    lost?.(ms, now);
  });
}
