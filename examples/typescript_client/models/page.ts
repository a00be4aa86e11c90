// A page that works as a device with a model in WebAssembly. Serve it with wllama.wasm, rows.json
// and the model; the name of the model's file follows # in the address.
import { Wllama } from "@wllama/wllama";
import { inOneTab, IndexedDbStorage } from "../adapters/browser/index.js";
import { fingerprintOf, wllama } from "../adapters/models/wllama.js";
import type { Backend, ModelQuery } from "../src/backend.js";
import { EdgeClient } from "../src/index.js";

const SIZE = { n_ctx: 1024, n_parallel: 1, n_gpu_layers: 0 };
// Attention in single precision, so that devices with other engines agree to 0.01 nats.
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

/** Returns the answers to queries, and the time in seconds. */
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
