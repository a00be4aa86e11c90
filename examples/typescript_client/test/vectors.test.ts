import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { fileURLToPath } from "node:url";
import { test } from "node:test";
import { pack, unpack } from "../src/array.js";
import { epsilonOf } from "../src/accountant.js";
import type { Backend, Part } from "../src/backend.js";
import { Consent } from "../src/consent.js";
import type { Columns } from "../src/consent.js";
import { classMeans, exampleLoss, lossTerms, numGroups } from "../src/loss.js";
import type { Tensor, Slot } from "../src/messages.js";
import { drawMinibatch, splitMix64 } from "../src/minibatch.js";
import { privateLosses, privateTerms } from "../src/noise.js";
import { exactSum, mean } from "../src/numbers.js";
import { loadPrompt } from "../src/prompt.js";
import type { Random } from "../src/random.js";
import { readRun } from "../src/task.js";
import { runText } from "./server.js";
import type { Example } from "../src/task.js";
import { Vocabulary } from "../src/vocabulary.js";
import { vectors } from "./vectors.js";

interface Losses {
  losses: {
    name: string;
    run: string;
    examples: Example[];
    answers: (number[] | string)[];
    losses: number[];
    mean: number;
    bias?: number[];
    by_class?: Tensor;
    class_counts?: number[];
  }[];
  prompts: {
    name: string;
    run: string;
    vocabulary: { candidates?: string[]; slots?: Slot[] };
    indices: number[];
    example: Example;
    input: [string, string][];
    label_words: string[];
  }[];
  sums: { values: number[]; sum: number }[];
}

const losses = vectors<Losses>("losses");

function near(found: readonly number[], expected: readonly number[], relative: number): void {
  assert.equal(found.length, expected.length);
  found.forEach((value, at) => {
    const tolerance = relative * Math.max(1, Math.abs(expected[at]!));
    assert.ok(Math.abs(value - expected[at]!) <= tolerance, `${value} is not ${expected[at]}`);
  });
}

interface ConsentCase extends Columns {
  name: string;
  labels?: string[];
  gateway: boolean;
  task: object;
  rows: Example[];
  admitted: number[];
}

const consents = vectors<{ defaults: ConsentCase; cases: ConsentCase[] }>("consent");

for (const vector of consents.cases) {
  for (const isPrivate of vector.fields ? [false, true] : [false]) {
    test(`consent: ${vector.name}, ${isPrivate ? "private" : "not private"}`, () => {
      const { label, fields, labels, gateway, task, rows, admitted } = {
        ...consents.defaults,
        ...vector,
      };
      const columns = { ...(label && { label }), ...(fields && { fields }) };
      const run = readRun(runText({ task, method: { batch_size: 1 } }));
      const found = new Consent(columns, labels ?? undefined, isPrivate).admit(run, rows, gateway);
      assert.equal(found.refusal === undefined, admitted.length > 0);
      const expected = admitted.map((place) => rows[place]!);
      assert.deepEqual(found.refusal === undefined ? found.rows : [], expected);
    });
  }
}

test("the generated types follow the schema", () => {
  const script = fileURLToPath(new URL("../../scripts/generate-messages.mjs", import.meta.url));
  execFileSync(process.execPath, [script, "--check"], { stdio: "pipe" });
});

for (const vector of losses.losses) {
  test(`losses: ${vector.name}`, async () => {
    const { task } = readRun(vector.run);
    const score = (text: string, { keywords }: Example) =>
      Number((keywords as string[]).includes(text));
    const found = await Promise.all(
      vector.answers.map((answer, at) => exampleLoss(task, answer, vector.examples[at]!, score)),
    );
    near(found, vector.losses, task.loss === "cross_entropy" ? 1e-15 : 0);
    assert.equal(mean(vector.losses), vector.mean);
    if (vector.by_class) {
      const targets = vector.examples.map((example) => task.targetOf(example));
      const terms = (vector.answers as number[][]).map((row, at) =>
        lossTerms(task, row, targets[at]!, vector.bias!),
      );
      const cells = classMeans(terms, targets, numGroups(task.labels.length, false));
      // A float32 rounds the last bits of exp and log away.
      assert.deepEqual(pack(cells, vector.by_class.shape, "float32"), vector.by_class);
      const counts = task.labels.map((_, label) => targets.filter((one) => one === label).length);
      assert.deepEqual(counts, vector.class_counts);
    }
  });
}

for (const vector of losses.prompts) {
  test(`prompts: ${vector.name}`, () => {
    const { task } = readRun(vector.run);
    const vocabulary = Vocabulary.of({ candidates: [], ...vector.vocabulary });
    const prompt = vocabulary.prompt(task, vector.indices);
    assert.deepEqual(task.render(prompt, vector.example), vector.input);
    assert.deepEqual(prompt.labelWords ?? task.labelWords, vector.label_words);
  });
}

interface Artefact {
  name: string;
  artefact: string;
  row: Example;
  input: Part[];
  label_words: string[];
  answer: number[] | string;
  label: string | null;
  scores: Record<string, number> | null;
  text: string | null;
  rendered: string;
  messages: { role: string; content: string }[];
}

const { artefacts } = vectors<{ artefacts: Artefact[] }>("artefacts");

for (const { name, artefact, row, input, label_words, answer, ...expected } of artefacts) {
  test(`artefacts: ${name}`, async () => {
    const prompt = loadPrompt(artefact);
    const model: Backend = async ({ inputs, labelWords }) => {
      assert.deepEqual([inputs, labelWords], [[input], label_words]);
      const rows = typeof answer === "string" ? { texts: [answer] } : { logProbs: [answer] };
      return { fingerprint: "m", ...rows };
    };
    const found = await prompt.predict(row, model);
    const { label, scores, text, rendered, messages } = expected;
    assert.deepEqual({ ...found }, { label, scores, text });
    assert.equal(prompt.render(row), rendered);
    assert.deepEqual(prompt.messages(row), messages);
    const failing: Backend = async () => ({ fingerprint: "m", logProbs: [null], texts: [null] });
    assert.deepEqual(await prompt.predict(row, failing), { label: null, scores: null, text: null });
    const other: Backend = async (query) => ({
      ...(await model(query, undefined)),
      fingerprint: "n",
    });
    await assert.rejects(prompt.predict(row, other), /the prompt is for 'm', not 'n'/);
    assert.equal((await prompt.predict(row, other, { anyModel: true })).label, label);
    assert.throws(() => prompt.render({}), /^ArgumentError: row: column '\w+' must be text/);
  });
}

test("what is no prompt artefact is refused", () => {
  for (const text of ["", "{}", "null", "[1]", '{"format": "fedone-prompt", "version": 2}']) {
    assert.throws(() => loadPrompt(text), /^ArgumentError: artefact: /);
  }
});

test("sums", () => {
  for (const { values, sum } of losses.sums) assert.equal(exactSum(values), sum);
});

test("mini-batches", () => {
  interface Draws {
    splitmix64: { seed: number; outputs: string[] };
    draws: { seed: number; num_examples: number; batch_size: number; rows: number[] }[];
  }
  const { splitmix64, draws } = vectors<Draws>("minibatch");
  const numbers = splitMix64(splitmix64.seed);
  for (const output of splitmix64.outputs) assert.equal(String(numbers.next().value), output);
  for (const { num_examples, batch_size, seed, rows } of draws) {
    assert.deepEqual(drawMinibatch(num_examples, batch_size, seed), rows);
  }
});

test("noise and its epsilon", () => {
  interface Noise {
    releases: {
      seed: number;
      clip: number;
      noise_multiplier: number;
      losses: number[][];
      released: number[];
    }[];
    terms: {
      seed: number;
      clip: number;
      noise_multiplier: number;
      terms: number[][][];
      targets: number[];
      released: number[];
    }[];
    epsilons: { multipliers: number[]; delta: number; epsilon: number }[];
  }
  const { releases, terms, epsilons } = vectors<Noise>("noise");
  for (const { seed, losses: rows, released, ...privacy } of releases) {
    assert.deepEqual(privateLosses(rows, privacy, bytesOf(seed)), released);
  }
  for (const { seed, terms: rows, targets, released, ...privacy } of terms) {
    assert.deepEqual(privateTerms(rows, targets, privacy, bytesOf(seed)), released);
  }
  for (const { multipliers, delta, epsilon } of epsilons) {
    const precision = exactSum(multipliers.map((multiplier) => multiplier ** -2));
    near([epsilonOf(precision, delta)], [epsilon], 1e-8);
  }
});

/** The bytes of SplitMix64, big-endian. */
function bytesOf(seed: number): Random {
  const numbers = splitMix64(seed);
  const ahead: number[] = [];
  return (bytes) => {
    while (ahead.length < bytes.length) {
      const word = numbers.next().value;
      for (let shift = 56n; shift >= 0n; shift -= 8n) ahead.push(Number((word >> shift) & 255n));
    }
    bytes.set(ahead.splice(0, bytes.length));
    return bytes;
  };
}

test("arrays of messages", () => {
  interface Messages {
    messages: { name: string; body: string; arrays?: Record<string, number[]> }[];
  }
  let seen = 0;
  for (const { name, body } of vectors<Messages>("messages").messages) {
    for (const array of arraysIn(JSON.parse(body))) {
      seen++;
      assert.deepEqual(pack(unpack(array), array.shape, array.dtype), array, name);
    }
  }
  assert.ok(seen >= 5);
});

test("elements of arrays", () => {
  interface Messages {
    messages: { name: string; body: string; arrays: Record<string, number[]> }[];
  }
  for (const { name, body, arrays } of vectors<Messages>("messages").messages) {
    const message = JSON.parse(body) as Record<string, Tensor>;
    for (const [place, elements] of Object.entries(arrays ?? {})) {
      const array = place
        .split(".")
        .reduce<unknown>((found, key) => (found as Record<string, unknown>)[key], message);
      assert.deepEqual(unpack(array as Tensor), elements, name);
    }
  }
});

function* arraysIn(value: unknown): Generator<Tensor> {
  if (value === null || typeof value !== "object") return;
  if ("dtype" in value) yield value as Tensor;
  else for (const held of Object.values(value)) yield* arraysIn(held);
}
