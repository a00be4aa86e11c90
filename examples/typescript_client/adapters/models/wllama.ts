import type { Backend } from "../../src/backend.js";
import { FIRST, isComplete, llama, splitBeginning, TooLong, valuesOf } from "./llama.js";
import type { Asked, Engine, Shown } from "./llama.js";

export { fingerprintOf } from "./llama.js";

/** The used part of an instance of `@wllama/wllama` 3 that has loaded a model. */
export interface Wllama {
  createCompletion(options: Options & { prompt: string }): Promise<{ choices: Choice[] }>;
  createChatCompletion(options: Options & { messages: any[] }): Promise<{ choices: Choice[] }>;
}

/** Options of llama.cpp's server; some of them are missing in wllama's types. */
interface Options {
  readonly stream: false;
  readonly max_tokens: number;
  readonly cache_prompt: boolean;
  readonly logprobs?: any;
  readonly [key: string]: any;
}

interface Choice {
  readonly text?: string;
  readonly message?: { readonly content?: string | null };
  readonly logprobs: unknown;
}

interface Token {
  readonly token: string;
  readonly logprob?: number;
  readonly prob?: number;
}

/** Logit bias that determines the sampled token; the shown log-probabilities do not change. */
const SURELY = 1e6;

/** Added to the logits of unlikely words, so that a word with probability 1e-13 is shown. */
const RAISED = 30;

/** Number of other tokens that are shown too. */
const BESIDES = 8;

/**
 * A model in WebAssembly, for pages in any browser.
 *
 * @param wllama Loaded with `n_ctx` as long as the longest input, and `n_parallel: 1`.
 * @param fingerprint `fingerprintOf` of the model's file.
 */
export function wllama(wllama: Wllama, fingerprint: string): Backend {
  const complete = async (
    asked: Asked,
    fresh: boolean,
    more: Record<string, unknown>,
    signal: AbortSignal | undefined,
  ): Promise<Choice> => {
    const options = {
      ...{ stream: false as const, cache_prompt: !fresh, max_tokens: 1, ...more },
      ...(signal && { abortSignal: signal }),
    };
    try {
      const { choices } =
        typeof asked === "string"
          ? await wllama.createCompletion({ ...options, prompt: asked })
          : await wllama.createChatCompletion({ ...options, messages: [...asked] });
      return choices[0]!;
    } catch (error) {
      if (/context size/i.test(String(error))) throw new TooLong("the context is short");
      throw error;
    }
  };

  const shownBy = async (
    asked: Asked,
    fresh: boolean,
    count: number,
    more: Record<string, unknown>,
    signal: AbortSignal | undefined,
  ): Promise<Shown> => {
    const counted =
      typeof asked === "string" ? { n_probs: count } : { logprobs: true, top_logprobs: count };
    const { logprobs } = await complete(
      asked,
      fresh,
      { ...counted, samplers: [], ...more },
      signal,
    );
    const [first] = (logprobs as { content?: Record<string, Token[]>[] } | null)?.content ?? [];
    const tokens = first?.["top_logprobs"] ?? first?.["top_probs"] ?? [];
    return tokens.map(({ token, logprob, prob }) => [token, logprob ?? Math.log(prob!)]);
  };

  const engine: Engine = {
    fingerprint,
    async labels(asked, words, fresh, signal) {
      // The engine shows no tokens if the sampled token is a part of a character.
      const sampled = { logit_bias: { [words[0]!]: SURELY } };
      const shown = await shownBy(asked, fresh, FIRST, sampled, signal);
      if (isComplete(words, shown)) return valuesOf(words, shown);
      // A bias makes the engine show unlikely words. A token that both answers show gives the
      // difference between their normalisations.
      const more = {
        logit_bias: Object.fromEntries(words.map((word) => [word, RAISED])),
        post_sampling_probs: true,
      };
      const raised = await shownBy(asked, false, words.length + BESIDES, more, signal);
      const known = raised.map(([token]) => token).filter((token) => !words.includes(token));
      const reference = known.find((token) => isComplete([token], shown)) ?? "";
      const [before, after] = [valuesOf([reference], shown)[0]!, valuesOf([reference], raised)[0]!];
      return valuesOf(words, raised).map((value) => value - RAISED - after + before);
    },
    async write(asked, maxTokens, signal) {
      const options = { max_tokens: maxTokens, temperature: 0 };
      const { text, message } = await complete(asked, true, options, signal);
      const written = text ?? message?.content ?? "";
      const beginning = typeof asked === "string" ? "" : splitBeginning(asked).beginning;
      return written.startsWith(beginning) ? written.slice(beginning.length) : written;
    },
  };
  return llama(engine);
}
