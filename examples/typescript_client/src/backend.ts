/** A part of an input: its kind, and its text. */
export type Part = readonly [
  /**
   * `prompt` is the tuned text. Only a `field` may be shortened to fit the model. A `mask` (of a
   * masked model) has no text. In a chat, a `role` begins each message and names a role (`system`,
   * `user`, `assistant`). The last message is the `assistant`'s, which the model continues.
   */
  kind: "text" | "prompt" | "field" | "mask" | "role",
  text: string,
];

/** The input of a model for one example: its parts, in order. */
export type Input = readonly Part[];

/** One prompt on one mini-batch. */
export interface ModelQuery {
  /**
   * The requested answer to each input: log-probabilities of the label words (`labels`), the
   * log-probability of a reference text, or a text.
   */
  readonly want: "labels" | "reference" | "text";
  readonly inputs: readonly Input[];
  /** For `labels`: the label words with their leading spaces. */
  readonly labelWords: readonly string[];
  /** For `reference`: one text per input. */
  readonly references: readonly string[];
  /** For `text`: the maximum length, tokens. */
  readonly maxTokens: number;
}

/** The answer of a model on the device. */
export interface ModelAnswer {
  /** Identifies the exact model, which must be the same on all devices of a run. */
  readonly fingerprint: string;
  /**
   * For each input: one number per label word, or one number for `reference`, nats. Null if the
   * input failed. A label that the model cannot have written has -1000.
   */
  readonly logProbs?: readonly (readonly number[] | null)[];
  /** For `text`: the generated text for each input; null if the input failed. */
  readonly texts?: readonly (string | null)[];
  /** The cost. */
  readonly usage?: {
    readonly requests?: number;
    readonly promptTokens?: number;
    readonly completionTokens?: number;
    readonly usd?: number;
  };
}

/**
 * A model on the device, which answers a query. If it throws, the client declines the work. An
 * input that the model refuses is null in the answer.
 *
 * @param signal Aborted when the client stops.
 */
export type Backend = (query: ModelQuery, signal: AbortSignal | undefined) => Promise<ModelAnswer>;

/** An input of a template as one text. */
export function textOf(input: Input, mask = ""): string {
  return input.map(([kind, text]) => (kind === "mask" ? mask : text)).join("");
}

/**
 * An input of a chat as messages. An `assistant` message at the end is the beginning of the answer.
 * It is omitted if it is empty, and so is an empty `system` message.
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
