// Only compiled: checks that the adapters fit the types of the engines.
import { Template } from "@huggingface/jinja";
import type { Wllama } from "@wllama/wllama";
import type { LlamaContext } from "llama.rn";
import type { LlamaContextSequence, LlamaModel } from "node-llama-cpp";
import { llamaRn } from "../adapters/models/llama-rn.js";
import { nodeLlama } from "../adapters/models/node-llama-cpp.js";
import { wllama } from "../adapters/models/wllama.js";

declare const model: LlamaModel;
declare const sequence: LlamaContextSequence;
declare const engine: Wllama;
declare const context: LlamaContext;

export const compiled = (): unknown[] => [
  nodeLlama({ model, sequence, fingerprint: "", Template }),
  wllama(engine, ""),
  llamaRn(context, ""),
];
