import type { Backend } from "../../src/backend.js";
import { fromLikeliest, llama, TooLong } from "./llama.js";
import type { Asked, Engine } from "./llama.js";

export { fingerprintOf } from "./llama.js";

interface Options {
  readonly max_tokens: number;
  readonly n_probs?: number;
  readonly logprobs?: boolean;
  readonly top_logprobs?: number;
  readonly temperature: number;
  readonly cache_prompt: boolean;
  readonly logit_bias?: Record<string, number>;
  readonly abortSignal?: AbortSignal;
}

/** What is used of an instance of `@wllama/wllama` 3 that has loaded a model. */
export interface Wllama {
  getLoadedContextInfo(): { readonly n_vocab: number };
  createCompletion(
    options: Omit<Options, "logprobs" | "top_logprobs"> & { prompt: string; stream: false },
  ): Promise<{ choices: { text: string; logprobs: unknown }[] }>;
  createChatCompletion(
    options: Omit<Options, "n_probs"> & { messages: any[]; stream: false },
  ): Promise<{ choices: { message: { content?: string | null }; logprobs: unknown }[] }>;
}

/** The answer in the form of llama.cpp's server, which the types do not show for completions. */
interface Shown {
  readonly content?: { readonly top_logprobs: { token: string; logprob: number }[] }[];
}

/** Moves the sampled token, but not the log-probabilities, which are those before sampling. */
const SURELY = 1e6;

/**
 * A model in WebAssembly, for pages in any browser.
 *
 * @param wllama With `n_ctx` as long as the longest input, and `n_parallel: 1`.
 * @param fingerprint `fingerprintOf` the model's file.
 */
export function wllama(wllama: Wllama, fingerprint: string): Backend {
  const complete = async (asked: Asked, options: Options) => {
    try {
      if (typeof asked === "string") {
        const { logprobs: _, top_logprobs, ...rest } = options;
        const counted = top_logprobs === undefined ? {} : { n_probs: top_logprobs };
        const given = { ...rest, ...counted, prompt: asked, stream: false } as const;
        const [choice] = (await wllama.createCompletion(given)).choices;
        return { text: choice!.text, logprobs: choice!.logprobs as Shown | null };
      }
      const given = { ...options, messages: [...asked], stream: false as const };
      const [choice] = (await wllama.createChatCompletion(given)).choices;
      return { text: choice!.message.content ?? "", logprobs: choice!.logprobs as Shown | null };
    } catch (error) {
      if (/context size/i.test(String(error))) throw new TooLong("the context is short");
      throw error;
    }
  };
  const engine: Engine = {
    fingerprint,
    labels: (asked, words, fresh, signal) =>
      fromLikeliest(words, wllama.getLoadedContextInfo().n_vocab, async (count) => {
        const { logprobs } = await complete(asked, {
          ...{ max_tokens: 1, temperature: 0, cache_prompt: !fresh },
          ...{ logprobs: true, top_logprobs: count },
          // The engine shows nothing of a token that is a part of a character.
          logit_bias: { [words[0]!]: SURELY },
          ...(signal && { abortSignal: signal }),
        });
        const [shown] = logprobs?.content ?? [];
        return shown?.top_logprobs.map(({ token, logprob }) => [token, logprob] as const) ?? [];
      }),
    async write(asked, maxTokens, signal) {
      const { text } = await complete(asked, {
        ...{ max_tokens: maxTokens, temperature: 0, cache_prompt: false },
        ...(signal && { abortSignal: signal }),
      });
      const begun = typeof asked !== "string" && asked.at(-1)?.role === "assistant";
      const beginning = begun ? asked.at(-1)!.content : "";
      return text.startsWith(beginning) ? text.slice(beginning.length) : text;
    },
  };
  return llama(engine);
}
