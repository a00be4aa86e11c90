import { messagesOf, textOf } from "../../src/backend.js";
import type { Backend, Input, ModelAnswer, ModelQuery } from "../../src/backend.js";
import { systemClock } from "../../src/clock.js";
import type { Clock } from "../../src/clock.js";
import { UnsupportedTask } from "./llama.js";
import type { Message } from "./llama.js";

/** A model of the system, which returns no probabilities; it gets one request at a time. */
export interface Writer {
  /** Identifies the exact model, which must be the same on all devices of a run. */
  readonly fingerprint: string;
  /**
   * Writes an answer to messages; the last message is the user's.
   *
   * @param options.choices The allowed answers, for models that support this restriction.
   * @throws Busy The model is out of quota, in the background, or busy with another request.
   * @throws Refused The model refuses this input.
   */
  write(messages: readonly Message[], options: WriteOptions): Promise<string>;
}

/** Options of a call. */
export interface WriteOptions {
  readonly maxTokens: number;
  readonly choices?: readonly string[];
  readonly signal?: AbortSignal | undefined;
}

/** The model may answer later. */
export class Busy extends Error {
  override name = "Busy";
}

/** The model refuses an input, because it is too long or violates a policy. */
export class Refused extends Error {
  override name = "Refused";
}

/** Number of first answers to an input; more are sampled only if these differ. */
const FIRST = 3;

/** Added to each label's count (Krichevsky and Trofimov 1981), as the SDK's backends do. */
const SMOOTHING = 0.5;

const LOG_ZERO = -1000;
const LABEL_TOKENS = 16;
const MAX_WAIT_S = 60;

/**
 * A backend for a model that returns only texts.
 *
 * @param options.samples Answers per input from which log-probabilities are estimated. With 1, the
 *   written label has 0 and all others have -1000, which suits runs with `loss: zero_one`.
 */
export function written(
  writer: Writer,
  { samples = 1, clock = systemClock }: { samples?: number; clock?: Clock } = {},
): Backend {
  let last: Promise<unknown> = Promise.resolve();
  return (query, signal) => {
    const answer = last.then(() => answered(writer, samples, clock, query, signal));
    last = answer.catch(() => undefined);
    return answer;
  };
}

async function answered(
  writer: Writer,
  samples: number,
  clock: Clock,
  { want, inputs, labelWords, maxTokens }: ModelQuery,
  signal: AbortSignal | undefined,
): Promise<ModelAnswer> {
  if (want === "reference") throw new UnsupportedTask("this model scores no reference texts");
  let requests = 0;
  const write = async (input: Input, options: WriteOptions): Promise<string | null> => {
    for (let waitS = 1; ; waitS = Math.min(2 * waitS, MAX_WAIT_S)) {
      if (signal?.aborted) throw new Error("stopped");
      requests++;
      try {
        return await writer.write(messagesFor(input), options);
      } catch (error) {
        if (error instanceof Refused) return null;
        if (!(error instanceof Busy)) throw error;
      }
      await clock.sleep(waitS, signal);
    }
  };
  const choices = labelWords.map((word) => word.trim());
  const label = async (input: Input): Promise<number[] | null> => {
    const counts = labelWords.map(() => 0);
    for (let total = 1; total <= samples; total++) {
      const text = await write(input, { maxTokens: LABEL_TOKENS, choices, signal });
      if (text === null) return null;
      const place = labelOf(text, choices);
      if (place >= 0) counts[place]!++;
      if (samples > 1 && total === FIRST && Math.max(...counts) === FIRST)
        return estimated(counts, total);
    }
    return samples > 1
      ? estimated(counts, samples)
      : counts.map((count) => (count > 0 ? 0 : LOG_ZERO));
  };
  const texts: (string | null)[] = [];
  const logProbs: (number[] | null)[] = [];
  for (const input of inputs) {
    if (want === "text") texts.push(await write(input, { maxTokens, signal }));
    else logProbs.push(await label(input));
  }
  return { fingerprint: writer.fingerprint, texts, logProbs, usage: { requests } };
}

/** An input as messages. The beginning of the answer is appended to the last user's message. */
function messagesFor(input: Input): Message[] {
  if (input[0]?.[0] !== "role") return [{ role: "user", content: textOf(input) }];
  const messages = messagesOf(input);
  if (messages.at(-1)?.role !== "assistant") return messages;
  const beginning = messages.pop()!;
  const { role, content } = messages.pop()!;
  return [...messages, { role, content: `${content}\n${beginning.content}` }];
}

const EDGES = /^[\s\p{P}\p{S}]+|[\s\p{P}\p{S}]+$/gu;

/** Index of the label word that a text, or its first or last line, equals; -1 if none. */
function labelOf(text: string, words: readonly string[]): number {
  const plain = (each: string): string => each.normalize("NFKC").replace(EDGES, "").toLowerCase();
  const lines = text.split("\n").filter((line) => plain(line) !== "");
  const places = [text, lines[0] ?? "", lines.at(-1) ?? ""].map((line) =>
    words.findIndex((word) => plain(word) === plain(line)),
  );
  const found = [...new Set(places.filter((place) => place >= 0))];
  return found.length === 1 ? found[0]! : -1;
}

/** An answer without a label counts for all labels in equal parts. */
function estimated(counts: readonly number[], total: number): number[] | null {
  const labelled = counts.reduce((sum, count) => sum + count, 0);
  if (labelled === 0) return counts.map(() => LOG_ZERO);
  const each = (total - labelled) / counts.length + SMOOTHING;
  const every = total + SMOOTHING * counts.length;
  return counts.map((count) => Math.fround(Math.log((count + each) / every)));
}

/** Names of errors after which a model may answer later (ML Kit, Foundation Models, Prompt API). */
const BUSY = [
  ...["BUSY", "BACKGROUND_USE_BLOCKED"],
  ...["rateLimited", "concurrentRequests", "assetsUnavailable"],
  ...["OperationError", "UnknownError"],
];

/** Names of errors for a refused input. */
const REFUSED = [
  ...["REQUEST_TOO_LARGE", "REQUEST_TOO_SMALL", "REQUEST_PROCESSING_ERROR"],
  ...["RESPONSE_PROCESSING_ERROR", "RESPONSE_GENERATION_ERROR"],
  ...["exceededContextWindowSize", "guardrailViolation", "refusal", "decodingFailure"],
  ...["unsupportedLanguageOrLocale", "QuotaExceededError", "NotReadableError", "NotSupportedError"],
];

/** Converts an error by its `code` or `name`. */
function sorted(error: unknown): unknown {
  const { code, name } = (error ?? {}) as { code?: unknown; name?: unknown };
  const is = (names: readonly string[]): boolean =>
    names.some((each) => each === code || each === name);
  if (is(BUSY)) return new Busy(String(error));
  return is(REFUSED) ? new Refused(String(error)) : error;
}

/**
 * A model behind a native module of the app: Gemini Nano (ML Kit), Apple's Foundation Models.
 *
 * @param write Must reject with an error whose `code` is the system's name of the error.
 */
export function nativeWriter(write: Writer["write"], fingerprint: string): Writer {
  return {
    fingerprint,
    write: (messages, options) =>
      write(messages, options).catch((error) => {
        throw sorted(error);
      }),
  };
}

/** The used part of `LanguageModel`, Chrome's Prompt API. */
export interface LanguageModel {
  create(options: { initialPrompts: Message[]; signal?: AbortSignal }): Promise<{
    prompt(
      messages: Message[],
      options: { responseConstraint?: object; signal?: AbortSignal },
    ): Promise<string>;
    destroy(): void;
  }>;
}

/** The model of Chrome's Prompt API; each answer has its own session. */
export function promptApi(api: LanguageModel, fingerprint: string): Writer {
  const write: Writer["write"] = async (messages, { choices, signal }) => {
    const stop = { ...(signal && { signal }) };
    const isSystem = ({ role }: Message): boolean => role === "system";
    const initialPrompts = messages.filter(isSystem);
    const session = await api.create({ initialPrompts, ...stop });
    try {
      const constraint = choices && { responseConstraint: { type: "string", enum: choices } };
      const rest = messages.filter((message) => !isSystem(message));
      return await session.prompt(rest, { ...constraint, ...stop });
    } finally {
      session.destroy();
    }
  };
  return nativeWriter(write, fingerprint);
}
