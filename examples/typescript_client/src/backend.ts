/** A stretch of an input: its kind, and its text. */
export type Part = readonly [
  /**
   * `prompt` is what is tuned; only a `field` may be shortened to fit the model; a `mask`, of masked
   * models, has no text. In a chat a `role` opens each message and names it (`system`, `user`,
   * `assistant`); the last one is the `assistant`'s, which the model continues.
   */
  kind: "text" | "prompt" | "field" | "mask" | "role",
  text: string,
];

/** The input of a model for one example: its parts, in order. */
export type Input = readonly Part[];

/** One prompt on one mini-batch. */
export interface ModelQuery {
  /**
   * The kind of answer to each input: log-probabilities of the label words, the log-probability of a
   * reference text, or a text.
   */
  readonly want: "labels" | "reference" | "text";
  readonly inputs: readonly Input[];
  /** For `labels`, with their leading spaces. */
  readonly labelWords: readonly string[];
  /** For `reference`, one text per input. */
  readonly references: readonly string[];
  /** For `text`, the longest that is written, tokens. */
  readonly maxTokens: number;
}

/** What a model of the device's own answers. */
export interface ModelAnswer {
  /** Names the exact model; all devices of a run must have the same. */
  readonly fingerprint: string;
  /**
   * Per input one number per label word, or one for `reference`, nats; null where it failed. A label
   * that the model cannot have written is -1000.
   */
  readonly logProbs?: readonly (readonly number[] | null)[];
  /** Per input what the model wrote, for `text`; null where it failed. */
  readonly texts?: readonly (string | null)[];
  /** What it has cost. */
  readonly usage?: {
    readonly requests?: number;
    readonly promptTokens?: number;
    readonly completionTokens?: number;
    readonly usd?: number;
  };
}

/**
 * A model of the device's own: a query in, its answer out. It throws if the model is not available,
 * and the work is declined; an input that the model refuses is null in its answer.
 *
 * @param signal Aborted when the client stops.
 */
export type Backend = (query: ModelQuery, signal: AbortSignal | undefined) => Promise<ModelAnswer>;

/** An input of a template as one text. */
export function textOf(input: Input, mask = ""): string {
  return input.map(([kind, text]) => (kind === "mask" ? mask : text)).join("");
}

/**
 * An input of a chat as messages; a last one of the `assistant` is the beginning of the answer.
 * Without content, it and a `system` message are left out.
 */
export function messagesOf(input: Input): { role: string; content: string }[] {
  const messages: { role: string; content: string }[] = [];
  for (const [kind, text] of input) {
    if (kind === "role") messages.push({ role: text, content: "" });
    else messages[messages.length - 1]!.content += text;
  }
  const isInside = (at: number): boolean => at > 0 && at < messages.length - 1;
  return messages.filter(
    ({ role, content }, at) => content !== "" || role === "user" || isInside(at),
  );
}
