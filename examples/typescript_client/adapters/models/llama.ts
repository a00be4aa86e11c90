import { messagesOf, textOf } from "../../src/backend.js";
import type { Backend, Input, ModelAnswer, ModelQuery } from "../../src/backend.js";
import { hasSpecialToken } from "../../src/vocabulary.js";

/** A message of a chat. */
export interface Message {
  readonly role: string;
  readonly content: string;
}

/**
 * A model's input: a text to continue, or a chat. If the last message of a chat is the
 * `assistant`'s, it is the beginning of the answer. Special tokens in a text are read as such.
 */
export type Asked = string | readonly Message[];

/** Separates the beginning of the answer ("" if a chat has none) from the messages before it. */
export function splitBeginning(chat: readonly Message[]): {
  messages: Message[];
  beginning: string;
} {
  const last = chat.at(-1);
  const beginning = last?.role === "assistant" ? last.content : "";
  return { messages: beginning ? chat.slice(0, -1) : [...chat], beginning };
}

/** An engine of llama.cpp. This folder has three; an app can write another one. */
export interface Engine {
  /** Identifies the model: `fingerprintOf` of its file. */
  readonly fingerprint: string;
  /**
   * Log-probabilities of words as the next token, nats, over the whole vocabulary.
   *
   * @param fresh Whether to reuse nothing of earlier calls, so that an answer depends only on its
   *   query.
   * @throws TooLong The context is too short.
   * @throws LabelWordError A word is not one token.
   */
  labels(
    asked: Asked,
    words: readonly string[],
    fresh: boolean,
    signal?: AbortSignal,
  ): Promise<readonly number[]>;
  /** The most likely text of at most `maxTokens` tokens. */
  write(asked: Asked, maxTokens: number, signal?: AbortSignal): Promise<string>;
}

/** A label word is not one token of the model. */
export class LabelWordError extends Error {
  override name = "LabelWordError";
}

/** A task that the model does not support: reference texts, or a template with `{mask}`. */
export class UnsupportedTask extends Error {
  override name = "UnsupportedTask";
}

/** An input is longer than the model's context. */
export class TooLong extends Error {
  override name = "TooLong";
}

/**
 * A backend for an engine. It answers one input after another, and an input reuses the beginning
 * that it shares with the input before. Long fields are shortened at their ends. An input with
 * special tokens of models fails.
 */
export function llama(engine: Engine): Backend {
  let last: Promise<unknown> = Promise.resolve();
  return (query, signal) => {
    const answer = last.then(() => answered(engine, query, signal));
    last = answer.catch(() => undefined);
    return answer;
  };
}

async function answered(
  engine: Engine,
  query: ModelQuery,
  signal: AbortSignal | undefined,
): Promise<ModelAnswer> {
  const { want, inputs, labelWords, maxTokens } = query;
  const isMasked = inputs.some((input) => input.some(([kind]) => kind === "mask"));
  if (want === "reference" || isMasked) {
    throw new UnsupportedTask(
      "this model continues a text: it has no reference text, and no {mask}",
    );
  }
  const rows: (number[] | null)[] = [];
  const texts: (string | null)[] = [];
  for (const input of inputs) {
    if (signal?.aborted) throw new Error("stopped");
    const fails = input.some(([, text]) => hasSpecialToken(text));
    if (want === "text") {
      const write = (asked: Asked) => engine.write(asked, maxTokens, signal);
      texts.push(fails ? null : await fitted(input, write));
      continue;
    }
    const words = spelled(labelWords, input);
    const fresh = rows.every((row) => row === null);
    const ask = (asked: Asked) => engine.labels(asked, words, fresh, signal);
    rows.push(fails ? null : (await fitted(input, ask)).map(Math.fround));
  }
  const { fingerprint } = engine;
  return { fingerprint, logProbs: rows, texts, usage: { requests: 1 } };
}

const isChat = (input: Input): boolean => input[0]?.[0] === "role";

async function fitted<T>(input: Input, ask: (asked: Asked) => Promise<T>): Promise<T> {
  try {
    return await ask(isChat(input) ? messagesOf(input) : textOf(input));
  } catch (error) {
    const shorter = error instanceof TooLong ? shortened(input) : undefined;
    if (shorter === undefined) throw error;
    return fitted(shorter, ask);
  }
}

/** Removes the last quarter of the longest field; undefined if all fields are empty. */
function shortened(input: Input): Input | undefined {
  const lengths = input.map(([kind, text]) => (kind === "field" ? text.length : 0));
  const longest = Math.max(...lengths);
  if (longest === 0) return undefined;
  const place = lengths.indexOf(longest);
  const cut = (text: string): string =>
    text.slice(0, Math.floor(0.75 * longest)).replace(/[\ud800-\udbff]$/, ""); // half a character
  return input.map(([kind, text], at) => [kind, at === place ? cut(text) : text]);
}

/**
 * The label words as a chat model writes them after an input: with a leading space after text, and
 * without it at the beginning of the answer and after white space.
 */
function spelled(words: readonly string[], input: Input): readonly string[] {
  if (!isChat(input)) return words;
  const last = input.filter(([kind, text]) => kind === "role" || text !== "").at(-1)!;
  // "." stands for a field: fields differ, but all rows must have the same label words.
  const before = { role: "", field: "." }[last[0] as string] ?? last[1];
  const space = before === "" || /\s$/.test(before) ? "" : " ";
  return words.map((word) => space + word.trimStart());
}

/** Number of likely tokens that are requested first; they nearly always include the label words. */
export const FIRST = 256;

/** Tokens as text, each with a number; the likeliest first. */
export type Shown = readonly (readonly [token: string, value: number])[];

/**
 * The values of words in a list of tokens.
 *
 * @throws LabelWordError A word is not in the list.
 */
export function valuesOf(words: readonly string[], shown: Shown): number[] {
  const values = new Map([...shown].reverse()); // of several tokens with one text the likeliest
  return words.map((word) => {
    const value = values.get(word);
    if (value !== undefined) return value;
    throw new LabelWordError(`label word '${word}' is not one token of the model`);
  });
}

/** Whether all words are in a list of tokens. */
export function isComplete(words: readonly string[], shown: Shown): boolean {
  const tokens = new Set(shown.map(([token]) => token));
  return words.every((word) => tokens.has(word));
}

/** The fingerprint of a model's file, as in the SDK's `llama_cpp` backend. */
export async function fingerprintOf(name: string, file: Blob): Promise<string> {
  return fingerprint(name, await crypto.subtle.digest("SHA-256", await file.arrayBuffer()));
}

/** @param digest The file's SHA-256. */
export function fingerprint(name: string, digest: ArrayBuffer | Uint8Array): string {
  const bytes = [...new Uint8Array(digest).subarray(0, 8)];
  const hex = bytes.map((byte) => byte.toString(16).padStart(2, "0")).join("");
  return `llama_cpp:${name}:${hex}`;
}
