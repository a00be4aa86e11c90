// A page whose device has a model of its own, in WebAssembly. It is served with wllama.wasm, rows.json
// and the model, whose name follows # in its address.
import { Wllama } from "@wllama/wllama";
import { inOneTab, IndexedDbStorage } from "../adapters/browser/index.js";
import { fingerprintOf, wllama } from "../adapters/models/wllama.js";
import type { Backend, ModelQuery } from "../src/backend.js";
import { EdgeClient } from "../src/index.js";

const SIZE = { n_ctx: 1024, n_parallel: 1, n_gpu_layers: 0 };
// Attention in single precision: devices with other engines then agree to 0.01 nats.
const EXACT = { flash_attn: false, cache_type_k: "f32", cache_type_v: "f32" } as const;

const value = (id: string): string => (document.getElementById(id) as HTMLInputElement).value;
const log = document.getElementById("log")!;
const say = (text: string): void => log.append(text, document.createElement("br"));

const loading = (async (): Promise<Backend> => {
  const name = location.hash.slice(1);
  const file = await (await fetch(name)).blob();
  const engine = new Wllama({ default: "wllama.wasm" }, { suppressNativeLog: true });
  await engine.loadModel([file], { ...SIZE, ...EXACT });
  say("loaded");
  return wllama(engine, await fingerprintOf(name, file));
})();

/** The answers to queries, and the seconds that they took. */
async function score(queries: readonly ModelQuery[]) {
  const backend = await loading;
  const start = performance.now();
  const answers = [];
  for (const query of queries) answers.push(await backend(query, undefined));
  return { answers, seconds: (performance.now() - start) / 1000 };
}

Object.assign(globalThis, { score });

document.getElementById("start")!.onclick = async () => {
  const client = new EdgeClient({
    server: value("server"),
    token: value("token"),
    data: await (await fetch("rows.json")).json(),
    storage: new IndexedDbStorage(),
    backend: await loading,
    onEvent: ({ kind }) => say(kind),
  });
  await inOneTab(() => client.run()).catch((error) => say(String(error)));
};
