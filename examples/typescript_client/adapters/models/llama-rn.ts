import type { Backend } from "../../src/backend.js";
import { FIRST, isComplete, llama, splitBeginning, TooLong, valuesOf } from "./llama.js";
import type { Asked, Engine, Shown } from "./llama.js";

/** The used part of a context of `llama.rn`. */
export interface LlamaContext {
  completion(params: {
    prompt: string;
    n_predict: number;
    temperature: number;
    n_probs?: number;
    post_sampling_probs?: boolean;
  }): Promise<{
    text: string;
    context_full: boolean;
    completion_probabilities?: { probs: { tok_str: string; prob: number }[] }[];
  }>;
  getFormattedChat(
    messages: any[],
    template: null,
    params: { jinja: boolean; add_generation_prompt: boolean },
  ): Promise<{ prompt: string }>;
  stopCompletion(): Promise<void>;
}

/** A number larger than any vocabulary. */
const ALL = 1_000_000;

/** Minimum probability in single precision; smaller ones are shown as 0. */
const LEAST = 1e-38;

/**
 * A model of `llama.rn`, for React Native.
 *
 * @param context A context that only this backend uses; load it with `ctx_shift: false`.
 * @param fingerprint Identifies the model's file: `fingerprint` in `llama.ts`.
 */
export function llamaRn(context: LlamaContext, fingerprint: string): Backend {
  const complete = async (
    asked: Asked,
    n_predict: number,
    n_probs: number,
    signal?: AbortSignal,
  ) => {
    const stop = (): void => void context.stopCompletion();
    signal?.addEventListener("abort", stop);
    try {
      const prompt = await textOf(asked);
      const probs = n_probs > 0 ? { n_probs, post_sampling_probs: false } : {};
      const found = await context.completion({ prompt, n_predict, temperature: 0, ...probs });
      if (found.context_full) throw new TooLong("the context is short");
      return found;
    } finally {
      signal?.removeEventListener("abort", stop);
    }
  };

  const textOf = async (asked: Asked): Promise<string> => {
    if (typeof asked === "string") return asked;
    const { messages, beginning } = splitBeginning(asked);
    const params = { jinja: true, add_generation_prompt: true };
    return (await context.getFormattedChat(messages, null, params)).prompt + beginning;
  };

  const engine: Engine = {
    fingerprint,
    async labels(asked, words, _, signal) {
      const likeliest = async (count: number): Promise<Shown> => {
        const { completion_probabilities } = await complete(asked, 1, count, signal);
        const probs = completion_probabilities?.[0]?.probs ?? [];
        return probs.map(({ tok_str, prob }) => [tok_str, Math.log(Math.max(prob, LEAST))]);
      };
      const shown = await likeliest(FIRST);
      return valuesOf(words, isComplete(words, shown) ? shown : await likeliest(ALL));
    },
    write: async (asked, maxTokens, signal) => (await complete(asked, maxTokens, 0, signal)).text,
  };
  return llama(engine);
}
