import assert from "node:assert/strict";
import { test } from "node:test";
import { llamaRn } from "../adapters/models/llama-rn.js";
import { llama, TooLong, UnsupportedTask } from "../adapters/models/llama.js";
import type { Asked, Engine } from "../adapters/models/llama.js";
import { nativeWriter, promptApi, written } from "../adapters/models/written.js";
import type { LanguageModel, Writer } from "../adapters/models/written.js";
import type { Input, ModelQuery } from "../src/backend.js";
import { ManualClock } from "./server.js";

const LABELS = [" bad", " good"];

/** A query for label words about inputs, or for a text. */
function query(inputs: Input[], changes: Partial<ModelQuery> = {}): ModelQuery {
  return { want: "labels", inputs, labelWords: LABELS, references: [], maxTokens: 9, ...changes };
}

const plain = (text: string): Input => [
  ["prompt", "Judge: "],
  ["field", text],
];
const chat = (answer: string): Input => [
  ["role", "system"],
  ["role", "user"],
  ["field", "x"],
  ["role", "assistant"],
  ["text", answer],
];

/** An engine that takes so many characters, and what it was asked. */
function engine(most = 1e9) {
  const calls: [Asked, readonly string[], boolean][] = [];
  const made: Engine = {
    fingerprint: "m",
    labels: async (asked, words, fresh) => {
      if (JSON.stringify(asked).length > most) throw new TooLong("the context is short");
      calls.push([asked, words, fresh]);
      return words.map((_, at) => -1.1 - at);
    },
    write: async (asked) => `wrote ${asked}`,
  };
  return { calls, backend: llama(made) };
}

test("a model of llama.cpp is asked one input after the other, with words as a chat spells them", async () => {
  const { backend, calls } = engine();
  const inputs = [plain("a"), plain("b<|im_end|>"), plain("c")];
  const { logProbs, fingerprint } = await backend(query(inputs), undefined);
  assert.deepEqual([fingerprint, logProbs![1]], ["m", null]);
  assert.deepEqual(logProbs![0], [Math.fround(-1.1), Math.fround(-2.1)]);
  assert.deepEqual(calls, [
    ["Judge: a", LABELS, true],
    ["Judge: c", LABELS, false],
  ]);
  calls.length = 0;
  await backend(query([chat("")]), undefined);
  await backend(query([chat("It is:")]), undefined);
  await backend(query([chat("It is\n")]), undefined);
  const user = { role: "user", content: "x" };
  assert.deepEqual(calls[0]!.slice(0, 2), [[user], ["bad", "good"]]);
  assert.deepEqual(calls[1]![1], LABELS);
  assert.deepEqual(calls[2]![1], ["bad", "good"]);
  const { texts } = await backend(query([plain("a")], { want: "text" }), undefined);
  assert.deepEqual(texts, ["wrote Judge: a"]);
});

test("a task that does not fit is refused, and an input loses the end of its longest field", async () => {
  const { backend, calls } = engine(40);
  for (const changes of [{ want: "reference" }, { inputs: [[["mask", ""]]] }] as const) {
    await assert.rejects(backend(query([plain("a")], changes), undefined), UnsupportedTask);
  }
  await backend(query([[...plain("x".repeat(90)), ["field", "yy"]]]), undefined);
  assert.match(String(calls[0]![0]), /^Judge: x{27}yy$/);
  await assert.rejects(backend(query([[["prompt", "p".repeat(50)]]]), undefined), TooLong);
});

test("llama.rn: words that are not among the likeliest tokens are looked for among all", async () => {
  const asked: object[] = [];
  const rare = [{ tok_str: " good", prob: 0 }];
  const backend = llamaRn(
    {
      completion: async (params) => {
        asked.push(params);
        const probs = [{ tok_str: " bad", prob: 0.5 }, ...(params.n_probs! > 256 ? rare : [])];
        return { text: "", context_full: false, completion_probabilities: [{ probs }] };
      },
      getFormattedChat: async (messages) => ({ prompt: `<s>${messages[0].content}</s>` }),
      stopCompletion: async () => undefined,
    },
    "m",
  );
  const { logProbs } = await backend(query([chat("So:")]), undefined);
  assert.deepEqual(logProbs, [[Math.log(0.5), Math.log(1e-38)].map(Math.fround)]);
  const shared = { prompt: "<s>x</s>So:", n_predict: 1, temperature: 0 };
  assert.deepEqual(asked[0], { ...shared, n_probs: 256, post_sampling_probs: false });
});

/** A model that writes these texts in turn, or throws these errors. */
function writer(...answers: (string | object)[]): Writer {
  return nativeWriter(async () => {
    const next = answers.shift();
    if (typeof next === "string") return next;
    throw next;
  }, "nano");
}

test("a model that only writes: one answer for zero_one, several for log-probabilities", async () => {
  const one = async (...answers: (string | object)[]) =>
    (await written(writer(...answers))(query([plain("a")]), undefined)).logProbs![0];
  for (const text of ["good", " Good.", "**GOOD**", '"good"', "good\nIt says so.", "So:\ngood"]) {
    assert.deepEqual(await one(text), [-1000, 0], text);
  }
  for (const text of ["", "goodness", "good or bad", "bad\nor\ngood"]) {
    assert.deepEqual(await one(text), [-1000, -1000], text);
  }
  const several = async (...answers: string[]) => {
    const model = written(writer(...answers), { samples: 5 });
    return (await model(query([plain("a")]), undefined)).logProbs![0];
  };
  const agree = [0.5 / 4, 3.5 / 4].map((share) => Math.fround(Math.log(share)));
  assert.deepEqual(await several("good", "good", "good"), agree);
  const differ = [2 / 6, 4 / 6].map((share) => Math.fround(Math.log(share)));
  assert.deepEqual(await several("good", "bad", "good", "?", "good"), differ);
});

test("a model that is busy is asked again, and one that refuses an input fails on it alone", async () => {
  const clock = new ManualClock();
  const busy = ["BUSY", "BACKGROUND_USE_BLOCKED", "rateLimited", "concurrentRequests"];
  const model = written(
    writer(...busy.map((code) => ({ code })), "good", { name: "QuotaExceededError" }, "bad"),
    { clock },
  );
  const answer = await model(query(["a", "b", "c"].map(plain)), undefined);
  assert.deepEqual(answer.logProbs, [[-1000, 0], null, [0, -1000]]);
  assert.deepEqual([clock.slept, answer.usage], [[1, 2, 4, 8], { requests: 7 }]);
  const spent = written(writer({ code: "PER_APP_BATTERY_USE_QUOTA_EXCEEDED" }), { clock });
  await assert.rejects(spent(query([plain("a")]), undefined));
  const stop = new AbortController();
  const always = nativeWriter(async () => Promise.reject({ code: "BUSY" }), "nano");
  const waiting = written(always)(query([plain("a")]), stop.signal);
  setTimeout(() => stop.abort());
  await assert.rejects(waiting);
});

test("Chrome's model gets the system's message first, and the labels as a constraint", async () => {
  const calls: unknown[] = [];
  const api: LanguageModel = {
    create: async (options) => {
      calls.push(options);
      const prompt = async (...given: unknown[]) => (calls.push(...given), '"good"');
      return { prompt, destroy: () => void calls.push("destroyed") };
    },
  };
  const input: Input = [["role", "system"], ["prompt", "Judge."], ...chat("So:").slice(1)];
  const { logProbs } = await written(promptApi(api, "nano"))(query([input]), undefined);
  assert.deepEqual(logProbs, [[-1000, 0]]);
  assert.deepEqual(calls, [
    { initialPrompts: [{ role: "system", content: "Judge." }] },
    [{ role: "user", content: "x\nSo:" }],
    { responseConstraint: { type: "string", enum: ["bad", "good"] } },
    "destroyed",
  ]);
});
