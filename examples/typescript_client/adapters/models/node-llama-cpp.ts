import { createHash } from "node:crypto";
import { createReadStream } from "node:fs";
import { basename } from "node:path";
import type { Backend } from "../../src/backend.js";
import { fingerprint, LabelWordError, llama, splitBeginning, TooLong } from "./llama.js";
import type { Asked, Engine } from "./llama.js";

/** The used part of a model of `node-llama-cpp`. */
export interface LlamaModel<Token extends number = number> {
  tokenize(text: string, specialTokens?: boolean): Token[];
  detokenize(tokens: readonly Token[]): string;
  readonly fileInfo: { readonly metadata: { readonly tokenizer: { chat_template?: string } } };
  readonly tokens: {
    readonly bos: Token | null;
    readonly bosString: string | null | undefined;
    readonly eosString: string | null | undefined;
    readonly shouldPrependBosToken: boolean;
  };
}

/** The used part of a sequence of its context. */
export interface LlamaSequence<Token extends number = number> {
  readonly contextSize: number;
  readonly nextTokenIndex: number;
  clearHistory(): Promise<void>;
  adaptStateToTokens(tokens: Token[], allowShift?: boolean): Promise<void>;
  evaluate(tokens: Token[], options: { temperature: number }): AsyncIterable<Token>;
  controlledEvaluate(
    input: (Token | [Token, { generateNext: Wanted<Token> }])[],
  ): Promise<(undefined | { next: { logits?: Map<Token, number>; totalLogitWeight?: number } })[]>;
}

interface Wanted<Token> {
  totalLogitWeight: true;
  logits: { filter: { tokens: Token[]; includeTop: number } };
}

/** `Template` of `@huggingface/jinja`, which `node-llama-cpp` depends on. */
export type TemplateClass = new (text: string) => {
  render(values: Record<string, unknown>): string;
};

/**
 * A model of `node-llama-cpp`, for Node and Electron's main process.
 *
 * @param options.sequence A sequence that only this backend uses.
 * @param options.fingerprint `fingerprintOf` of the model's file.
 * @param options.Template Needed for tasks that are chats.
 */
export function nodeLlama<Token extends number>(options: {
  model: LlamaModel<Token>;
  sequence: LlamaSequence<Token>;
  fingerprint: string;
  Template?: TemplateClass;
}): Backend {
  const { model, sequence, Template } = options;
  const source = model.fileInfo.metadata.tokenizer.chat_template;
  const template = Template && source !== undefined ? new Template(source) : undefined;

  const textOf = (asked: Asked): string => {
    if (typeof asked === "string") return asked;
    if (template === undefined) throw new Error("a chat needs a Template, and a model with one");
    const { messages, beginning } = splitBeginning(asked);
    const { bosString: bos_token, eosString: eos_token } = model.tokens;
    const rendered = template.render({
      ...{ messages, add_generation_prompt: true },
      ...{ bos_token, eos_token },
    });
    return rendered + beginning;
  };

  /** Keeps the tokens that the sequence has already evaluated; returns the others. */
  const prepared = async (asked: Asked, fresh: boolean, reserve: number): Promise<Token[]> => {
    const { bos, shouldPrependBosToken } = model.tokens;
    const tokens = model.tokenize(textOf(asked), true);
    if (bos !== null && shouldPrependBosToken && tokens[0] !== bos) tokens.unshift(bos);
    if (tokens.length + reserve > sequence.contextSize) throw new TooLong("the context is short");
    if (fresh) await sequence.clearHistory();
    await sequence.adaptStateToTokens(tokens.slice(0, -1), false);
    return tokens.slice(sequence.nextTokenIndex);
  };

  const engine: Engine = {
    fingerprint: options.fingerprint,
    async labels(asked, words, fresh) {
      const wanted = words.map((word) => {
        const [token, ...others] = model.tokenize(word);
        if (token !== undefined && others.length === 0) return token;
        throw new LabelWordError(`label word '${word}' is not one token of the model`);
      });
      const tokens = await prepared(asked, fresh, 1);
      const last = tokens.pop()!;
      const logits = { filter: { tokens: wanted, includeTop: 1 } };
      const generateNext = { totalLogitWeight: true as const, logits };
      const found = await sequence.controlledEvaluate([...tokens, [last, { generateNext }]]);
      const { logits: shown, totalLogitWeight } = found.at(-1)!.next;
      const total = Math.max(...shown!.values()) + Math.log(totalLogitWeight!);
      return wanted.map((token) => shown!.get(token)! - total);
    },
    async write(asked, maxTokens, signal) {
      const tokens = await prepared(asked, true, maxTokens);
      const written: Token[] = [];
      for await (const token of sequence.evaluate(tokens, { temperature: 0 })) {
        if (signal?.aborted) break;
        if (written.push(token) >= maxTokens) break;
      }
      return model.detokenize(written);
    },
  };
  return llama(engine);
}

/** The fingerprint of a model's file, as in the SDK's `llama_cpp` backend. */
export async function fingerprintOf(file: string): Promise<string> {
  const hash = createHash("sha256");
  for await (const chunk of createReadStream(file)) hash.update(chunk as Uint8Array);
  return fingerprint(basename(file), hash.digest());
}
