// The model for demo/device.ts: BACKEND=models/dist/node.js MODEL=FILE.gguf. As a program it
// reads a JSON list of queries from its input, and prints answers, seconds and its memory.
import { text } from "node:stream/consumers";
import { fileURLToPath } from "node:url";
import { Template } from "@huggingface/jinja";
import { getLlama, LlamaLogLevel } from "node-llama-cpp";
import { fingerprintOf, nodeLlama } from "../adapters/models/node-llama-cpp.js";
import type { ModelQuery } from "../src/backend.js";

const { MODEL: modelPath = "", THREADS = "1" } = process.env;
const options = { gpu: false, build: "never", logLevel: LlamaLogLevel.error } as const;
const llama = await getLlama({ ...options, maxThreads: Number(THREADS) });
const model = await llama.loadModel({ modelPath });
// Attention as in the SDK's `llama_cpp` backend: single precision if the weights are not quantised
// (float32, float16, bfloat16), otherwise flash attention.
const isExact = [0, 1, 32].includes(Number(model.fileInfo.metadata.general.file_type));
const exact = { experimentalKvCacheKeyType: "F32", experimentalKvCacheValueType: "F32" } as const;
const context = await model.createContext({
  contextSize: 1024,
  flashAttention: !isExact,
  ...(isExact && exact),
});
const fingerprint = await fingerprintOf(modelPath);

export const backend = nodeLlama({ model, sequence: context.getSequence(), fingerprint, Template });

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const answers = [];
  const start = performance.now();
  for (const query of JSON.parse(await text(process.stdin)) as ModelQuery[]) {
    answers.push(await backend(query, undefined));
  }
  const seconds = (performance.now() - start) / 1000;
  console.log(JSON.stringify({ answers, seconds, mib: process.memoryUsage().rss / 2 ** 20 }));
  process.exit();
}
