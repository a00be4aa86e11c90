import assert from "node:assert/strict";
import { test } from "node:test";
import { pack } from "../src/array.js";
import { EdgeClient, MemoryStorage } from "../src/index.js";
import type { Backend, EdgeClientOptions, Example } from "../src/index.js";
import type { TaskSpec } from "../src/messages.js";
import { quotes, readReflection, reflectionMessages } from "../src/proposals.js";
import { feedback, reflection } from "../src/reflect.js";
import { Task } from "../src/task.js";
import { assignment, json, ManualClock, problem, RUN } from "./server.js";
import { ScriptedServer, taskOf } from "./server.js";
import type { Reaction } from "./server.js";
import { vectors } from "./vectors.js";

type Written = Omit<TaskSpec, "labels"> & { labels?: Record<string, string> };

interface Vectors {
  quotes: { rows: string[]; public: string[]; texts: [string, boolean][] };
  reads: { known: string[]; labels: string[]; answers: [string, string | null][] };
  messages: {
    task: Written;
    slot: string;
    parent: string;
    cases: { fields: Record<string, string>; feedback: string }[];
    expected: [string, string][];
  };
  feedback: {
    task: Written;
    example: Example;
    answer: number[] | string;
    score?: { value: number; feedback: string };
    expected: string;
  }[];
}

const given = vectors<Vectors>("reflection");

/** A task as it is sent: with a list of labels. */
function sent(task: Written): Task {
  const words = Object.entries(task.labels ?? {});
  return new Task({ ...task, labels: words.map(([value, word]) => ({ value, word })) });
}

test("reflection vectors", async () => {
  const { rows, public: known, texts } = given.quotes;
  for (const [text, isPrivate] of texts) {
    assert.equal(quotes(text, rows, known) !== undefined, isPrivate, text);
  }
  for (const [answer, candidate] of given.reads.answers) {
    const found = readReflection(answer, given.reads.known, given.reads.labels);
    assert.equal(found ?? null, candidate, answer);
  }
  const { task, slot, parent, cases, expected } = given.messages;
  const read = cases.map(({ fields, feedback: said }) => ({ example: fields, feedback: said }));
  assert.deepEqual(reflectionMessages(sent(task), slot, parent, read), expected);
  for (const one of given.feedback) {
    const { bias } = one.task;
    const score = () => one.score!;
    const found = await feedback(sent(one.task), one.answer, one.example, bias ?? [0, 0], score);
    assert.equal(found, one.expected);
  }
});

const TEXT = "Look twice at late mails.";
const DATA = Array.from({ length: 5 }, (_, n) => ({
  text: `Miriam wrote again, no ${n}`,
  label: n % 2,
}));

const twice = (reaction: Reaction): Reaction[] => [reaction, reaction];
const answered: Reaction = () => json({ text: JSON.stringify([TEXT]) });

/** A run with a proposed slot; a candidate has this share of the right label. */
function serverOf(share = 0.9, reflects = answered, ids = ["a1", "a2", "a3"]): ScriptedServer {
  const task = { ...RUN.task, template: "{instruction}\n{text}{mask}", slots: ["instruction"] };
  const run = { ...RUN, task, prompt_len: 1, vocab_size: 3, layout: [[1, 3, null]] };
  const slots = [{ name: "instruction", candidates: ["", "Judge.", "Read."] }];
  const prompts = pack([0, 1], [2, 1], "uint8");
  const work = (assignment_id: string) => () =>
    json(assignment({ assignment_id, prompts, leased_queries: 3, reflect: true }));
  const scores: Reaction = ({ body }) => {
    const { examples, proposal } = JSON.parse(body);
    const shares = proposal ? [share] : [0.4, 0.5];
    const rows = shares.flatMap((one) =>
      examples.map(({ text }: { text: string }) => row(text, one)),
    );
    const log_probs = pack(rows.flat(), [shares.length, examples.length, 2], "float32");
    return json({ log_probs, model: "m" });
  };
  return new ScriptedServer()
    .next("claim", ...ids.map(work))
    .next(
      "task",
      ...twice(() => taskOf({ ...run, reflection: { slot: "instruction", gateway: true } })),
    )
    .next("vocabulary", ...twice(() => json({ slots })))
    .next("reflect", reflects)
    .next("score", ...Array(4).fill(scores));
}

/** The log-probabilities of a text's labels, with this share of the right one. */
function row(text: string, share: number): number[] {
  const isOne = Number(text.at(-1)) % 2 === 1;
  return [isOne ? 1 - share : share, isOne ? share : 1 - share].map(Math.log);
}

function clientOf(server: ScriptedServer, options: Partial<EdgeClientOptions>) {
  const storage = new MemoryStorage();
  return new EdgeClient({
    ...{ server: "https://fedone.example", token: "t", data: DATA, storage, fetch: server.fetch },
    ...{ clock: new ManualClock(), ...options },
  });
}

const updates = (server: ScriptedServer) => server.bodies("update").map((body) => JSON.parse(body));

/** A model that writes this text, and what it was asked. */
function writer(text: string): { model: Backend; asked: string[] } {
  const asked: string[] = [];
  const model: Backend = async ({ want, inputs }) => {
    assert.equal(want, "text");
    asked.push(inputs[0]!.map(([, part]) => part).join("\n"));
    return { fingerprint: "own", texts: [text] };
  };
  return { model, asked };
}

test("through the gateway, the run's model reads the failed rows and writes a candidate", async () => {
  const server = serverOf();
  const policy = { reflect: reflection("gateway") };
  assert.equal(await clientOf(server, { policy }).runOnce(), "worked");
  const [asked] = server.bodies("reflect").map((body) => JSON.parse(body));
  assert.deepEqual([asked.assignment_id, asked.parent, asked.cases.length], ["a1", 1, 3]);
  assert.match(asked.cases[0].feedback, /^(expected 'yes', )?answered 'no' with probability 0.50$/);
  const trial = JSON.parse(server.bodies("score")[1]!);
  assert.deepEqual([trial.prompts, trial.proposal], [null, { parent: 1, text: TEXT }]);
  const [update] = updates(server);
  assert.deepEqual(update.proposal, { parent: 1, text: TEXT });
  assert.equal(update.usage.queries, 0);
});

test("a model on the device reads the rows, only its text leaves, and at most two do", async () => {
  const server = serverOf();
  const { model, asked } = writer(JSON.stringify([TEXT]));
  const backend: Backend = async ({ inputs }) => ({
    fingerprint: "own",
    usage: { requests: 1 },
    logProbs: inputs.map((input) =>
      row(input.at(-2)![1], input.some(([, text]) => text === TEXT) ? 0.9 : 0.5),
    ),
  });
  const client = clientOf(server, { backend, policy: { reflect: reflection(model) } });
  for (let turn = 0; turn < 3; turn++) assert.equal(await client.runOnce(), "worked");
  assert.match(asked[0]!, /Miriam wrote again/);
  assert.equal(asked.length, 2);
  const [first, , third] = updates(server);
  assert.deepEqual(first.proposal, { parent: 0, text: TEXT });
  assert.deepEqual([first.usage.queries, first.usage.requests, third.usage.queries], [3, 3, 2]);
  assert.equal(third.proposal, undefined);
  assert.ok(!server.received.some(({ body }) => body.includes("Miriam")));
});

for (const [name, text, trials, options] of [
  ["no better than its parent", TEXT, 1, {}],
  ["like a row", "Miriam is late.", 0, {}],
  ["held back by the app", TEXT, 0, { beforePropose: () => null }],
  ["a template", "see {text}", 0, {}],
  ["beyond the device's budget", TEXT, 0, { queries: 2 }],
] as const) {
  test(`a candidate that is ${name} stays on the device`, async () => {
    const server = serverOf(name.startsWith("no better") ? 0.5 : 0.9);
    const { model, asked } = writer(JSON.stringify([text]));
    const more = "queries" in options ? { budget: options } : {};
    const policy = { reflect: reflection(model, "queries" in options ? {} : options), ...more };
    assert.equal(await clientOf(server, { policy }).runOnce(), "worked");
    assert.equal(asked.length, 1);
    assert.equal(server.bodies("score").length, 1 + trials);
    assert.equal(updates(server)[0].proposal, undefined);
  });
}

test("a reflection that fails costs its candidate, and not the work", async () => {
  const server = serverOf();
  const model: Backend = async () => {
    throw new Error("private");
  };
  assert.equal(
    await clientOf(server, { policy: { reflect: reflection(model) } }).runOnce(),
    "worked",
  );
  const refusing = serverOf(0.9, () => problem("backend_failed", 502));
  const policy = { reflect: reflection("gateway") };
  assert.equal(await clientOf(refusing, { policy }).runOnce(), "worked");
  for (const one of [server, refusing]) assert.equal(updates(one)[0].losses.length, 2);
});

test("after a kill no reflection and no trial is paid for twice", async () => {
  const storage = new MemoryStorage();
  const dying = { ...methodsOf(storage), set: (key: string, value: string) => die(key, value) };
  const die = (key: string, value: string): void => {
    if (value.includes("unsent")) throw new Error("killed");
    storage.set(key, value);
  };
  const server = serverOf(0.9, answered, ["a1", "a1"]);
  const { model, asked } = writer(JSON.stringify([TEXT]));
  const policy = { reflect: reflection(model) };
  await assert.rejects(clientOf(server, { storage: dying, policy }).runOnce(), /killed/);
  assert.equal(await clientOf(server, { storage, policy }).runOnce(), "worked");
  assert.equal(asked.length, 1);
  assert.equal(server.bodies("score").length, 2);
  assert.deepEqual(updates(server)[0].proposal, { parent: 1, text: TEXT });
});

function methodsOf(storage: MemoryStorage) {
  return { get: (key: string) => storage.get(key), remove: (key: string) => storage.remove(key) };
}
