import assert from "node:assert/strict";
import { test } from "node:test";
import { setImmediate } from "node:timers/promises";
import { pack } from "../src/array.js";
import {
  ArgumentError,
  EdgeClient,
  MemoryStorage,
  ProblemError,
  systemClock,
  UnsupportedError,
} from "../src/index.js";
import type {
  Backend,
  ClientEvent,
  EdgeClientOptions,
  EdgeStorage,
  Example,
  WorkPolicy,
} from "../src/index.js";
import { messagesOf, textOf } from "../src/backend.js";
import { burst } from "../src/burst.js";
import { CurrentWork } from "../src/state.js";
import {
  assignment,
  json,
  lost,
  ManualClock,
  problem,
  RUN,
  ScriptedServer,
  taskOf,
} from "./server.js";

const SERVER = "https://fedone.example";
const DATA = Array.from({ length: 5 }, (_, n) => ({ text: "x".repeat(n + 1), label: n % 2 }));

/** A client of a scripted server, and the events that it emitted. */
function clientOf(server: ScriptedServer, options: Partial<EdgeClientOptions> = {}) {
  const events: ClientEvent[] = [];
  const clock = new ManualClock();
  const storage = options.storage ?? new MemoryStorage();
  const client = new EdgeClient({
    ...{ server: SERVER, token: "enrolment-token", data: DATA, storage, clock },
    fetch: server.fetch,
    onEvent: (event) => events.push(event),
    ...options,
  });
  return { client, clock, events, storage };
}

/** A model of the device's own that counts what it is asked. */
function countingBackend(): { backend: Backend; asked: string[] } {
  const asked: string[] = [];
  const backend: Backend = async ({ inputs }) => {
    asked.push(inputs[0]!.find(([kind]) => kind === "prompt")![1]);
    return { fingerprint: "own", logProbs: inputs.map(() => [-1, -2]), usage: { requests: 1 } };
  };
  return { backend, asked };
}

test("it enrols, scores through the gateway and returns one loss for each prompt", async () => {
  const server = new ScriptedServer();
  const { client, events } = clientOf(server);
  await client.run();
  const [update] = server.bodies("update").map((body) => JSON.parse(body));
  assert.deepEqual(update.scored, { scored: 3, failed: 0, vetoed: 0 });
  assert.equal(update.num_examples, 5);
  assert.equal(update.model, "m");
  assert.equal(update.losses.length, 4);
  assert.equal(update.losses[0], update.losses[2]);
  const [score] = server.bodies("score").map((body) => JSON.parse(body));
  assert.equal(score.prompts, null); // the server drew them itself
  assert.ok(!JSON.stringify(score).includes("label"));
  assert.deepEqual(
    events.map(({ kind }) => kind).filter((kind) => kind !== "scored"),
    ["enrolled", "waiting", "assigned", "updated", "waiting", "ended"],
  );
  assert.deepEqual(client.status(), {
    ...{ clientId: "client-1", online: true, unsent: false, nextTurnS: 0, outcome: "ended" },
  });
});

test("it returns the losses of an assignment that asks for a proposal, without one", async () => {
  const asking = assignment({ reflect: true, leased_queries: 5 });
  const server = new ScriptedServer().next("claim", () => json(asking));
  const { client } = clientOf(server);
  await client.run();
  const [update] = server.bodies("update").map((body) => JSON.parse(body));
  assert.equal(update.losses.length, 4);
  assert.ok(!update.proposal);
  assert.equal(server.bodies("reflect").length, 0);
});

test("an enrolment whose answer is lost, or that a restart interrupts, is one client", async () => {
  const server = new ScriptedServer().next("clients", ...Array(5).fill(lost));
  const { client, storage } = clientOf(server);
  assert.equal(await client.runOnce(), "offline");
  await clientOf(server, { storage }).client.run();
  const bodies = server.bodies("clients");
  assert.equal(bodies.length, 6);
  assert.equal(new Set(bodies).size, 1);
  assert.match(JSON.parse(bodies[0]!).nonce, /^[A-Za-z0-9_-]{43}$/);
});

test("it enrols once, and later needs no token", async () => {
  const server = new ScriptedServer();
  const { client, storage } = clientOf(server);
  await client.run();
  const { token: _, ...options } = { token: undefined, storage };
  const again = clientOf(server, options);
  await again.client.run();
  assert.equal(server.bodies("clients").length, 1);
});

test("a retry of an update has the same bytes", async () => {
  const unavailable = () => problem("store_unavailable", 503, { "Retry-After": "2" });
  const server = new ScriptedServer().next("update", lost, unavailable);
  const { client, clock } = clientOf(server);
  await client.run();
  const bodies = server.bodies("update");
  assert.equal(bodies.length, 3);
  assert.equal(new Set(bodies).size, 1);
  assert.ok(clock.slept.some((seconds) => seconds >= 2));
});

test("a longer wait ends the turn, and the update is kept across a restart", async () => {
  const server = new ScriptedServer().next("update", () =>
    problem("rate_limited", 429, { "Retry-After": "40" }),
  );
  const { client, storage } = clientOf(server);
  assert.equal(await client.runOnce(), "offline");
  assert.equal(client.status().unsent, true);
  assert.ok(client.status().nextTurnS >= 40);
  const again = clientOf(server, { storage });
  await again.client.run();
  const bodies = server.bodies("update");
  assert.equal(bodies.length, 2);
  assert.equal(bodies[0], bodies[1]);
  assert.equal(again.client.status().unsent, false);
});

test("work that the server gave up is dropped", async () => {
  const server = new ScriptedServer().next("update", () => problem("assignment_expired", 409));
  const { client, events } = clientOf(server);
  assert.equal(await client.runOnce(), "refused");
  assert.equal(client.status().unsent, false);
  assert.ok(events.some((event) => event.kind === "refused"));
});

test("losses of a paused run outlast other work", async () => {
  const storage = new MemoryStorage();
  const work = new CurrentWork(storage, SERVER);
  await work.begin("paused");
  work.open("digest");
  const usage = { queries: 0, requests: 7 };
  await work.keep([0], { row: [0.5], answers: null, model: "m", usage });
  await work.begin("other");
  await work.put({ runId: "two", assignmentId: "other", round: 0, body: '{"usage": {}}' });
  await work.drop("other");
  for (const kept of [work, new CurrentWork(storage, SERVER)]) {
    await kept.begin("paused");
    assert.deepEqual(kept.row(0), [0.5]);
    assert.equal(kept.usageOf("paused").requests, 7);
    assert.deepEqual(kept.usageOf("other"), { ...kept.usageOf("paused"), requests: 0 });
  }
});

test("an update that is refused while its assignment is open is declined", async () => {
  const server = new ScriptedServer().next("update", () => problem("invalid_message", 422));
  const { client } = clientOf(server);
  assert.equal(await client.runOnce(), "declined");
  assert.equal(client.status().unsent, false);
  assert.equal(server.bodies("decline").length, 1);
});

test("no work: it comes back when the server says", async () => {
  const idle = () => new Response(null, { status: 204, headers: { "Retry-After": "17" } });
  const server = new ScriptedServer().next("claim", idle);
  const { client } = clientOf(server);
  assert.equal(await client.runOnce({ waitS: 2 }), "idle");
  assert.equal(client.status().nextTurnS, 17);
  assert.equal(JSON.parse(server.bodies("claim")[0]!).wait_s, 2);
});

test("a server that wants a newer client ends it", async () => {
  const server = new ScriptedServer().next("claim", () => problem("upgrade_required", 426));
  const upgrade = (error: unknown) =>
    error instanceof ProblemError && error.code === "upgrade_required" && error.status === 426;
  await assert.rejects(clientOf(server).client.run(), upgrade);
  assert.equal(server.received[0]!.headers["FedOne-Protocol"], "1");
});

test("a device that the server has lost enrols as a new one", async () => {
  const server = new ScriptedServer().next("claim", () => problem("unauthorized", 401));
  const { client } = clientOf(server);
  assert.equal(await client.runOnce(), "idle");
  assert.equal(await client.runOnce(), "worked");
  const nonces = server.bodies("clients").map((body) => JSON.parse(body).nonce);
  assert.equal(new Set(nonces).size, 2);
});

test("a login page is no aggregator", async () => {
  const server = new ScriptedServer().next("claim", () => new Response("<html>", { status: 200 }));
  const { client, events } = clientOf(server);
  assert.equal(await client.runOnce(), "offline");
  assert.equal(events.at(-1)!.kind, "offline");
});

test("what a proxy refuses for good gives the work back, and what passes does not", async () => {
  const forged = JSON.stringify({ code: "not_found", detail: "blocked by policy" });
  for (const status of [400, 403, 405, 411, 413, 414, 415, 431, 451]) {
    for (const [call, body] of [
      ["score", "<html>"],
      ["update", ""],
      ["task", forged],
    ] as const) {
      const server = new ScriptedServer().next(call, () => new Response(body, { status }));
      const { client } = clientOf(server);
      assert.equal(await client.runOnce(), "declined");
      const { reason } = JSON.parse(server.bodies("decline")[0]!);
      assert.match(
        reason,
        new RegExp(`${call}: answered ${status}, but the answer is not from an aggregator`),
      );
      assert.equal(client.status().unsent, false);
    }
  }
  for (const status of [408, 421, 425, 429, 502, 520, 599]) {
    const server = new ScriptedServer().next("score", () => new Response("busy", { status }));
    assert.equal(await clientOf(server).client.runOnce(), "worked");
  }
});

test("a path that is no aggregator's is told, also to a page", async () => {
  const server = new ScriptedServer().next("clients", () => problem("not_found", 404), lost);
  const run = clientOf(server).client.run();
  await assert.rejects(run, /^ArgumentError: server: .* is not an aggregator's base URL: why/);
  Object.assign(globalThis, { document: {} });
  const { client, events } = clientOf(server.next("clients", ...Array(5).fill(lost)));
  await client.runOnce();
  Reflect.deleteProperty(globalThis, "document");
  assert.match(String(events[0] && "reason" in events[0] && events[0].reason), /lacks this origin/);
});

test("between offline and online a device does not say that it waits", async () => {
  const server = new ScriptedServer()
    .next("claim", ...Array(10).fill(lost))
    .next("claim", () => new Response(null, { status: 204, headers: { "Retry-After": "9" } }));
  const { client, events } = clientOf(server);
  for (let turn = 0; turn < 3; turn++) await client.runOnce({ waitS: 25 });
  const kinds = events.map(({ kind }) => kind).filter((kind) => kind !== "scored");
  const ends = ["online", "waiting", "assigned", "updated"];
  assert.deepEqual(kinds, ["enrolled", "waiting", "offline", ...ends]);
  const waits = server.bodies("claim").map((body) => JSON.parse(body).wait_s);
  assert.deepEqual(waits, [...Array(5).fill(25), ...Array(5).fill(0), 0, 25]);
});

const hang = () => new Promise<never>(() => undefined);
const hangsOn = (name: "get" | "set" | "remove"): EdgeStorage => {
  const kept = new MemoryStorage();
  const whole = { get: kept.get.bind(kept), set: kept.set.bind(kept), remove: () => undefined };
  return { ...whole, [name]: hang };
};
const SCORED = { ...RUN.task, loss: "score", labels: [] };
const written: Backend = async ({ inputs }) => ({ fingerprint: "m", texts: inputs.map(() => "") });
const HANGING: Record<string, Partial<EdgeClientOptions>> = {
  data: { data: hang },
  onlyWhen: { onlyWhen: hang },
  beforeSend: { beforeSend: hang },
  backend: { backend: hang },
  score: { backend: written, score: hang },
  "storage.get": { storage: hangsOn("get") },
  "storage.set": { storage: hangsOn("set") },
  fetch: { fetch: hang },
  "the body of an answer": { fetch: async () => new Response(new ReadableStream()) },
  "clock.sleep": { fetch: lost as never, clock: { now: () => 0, sleep: hang } },
};

for (const [name, options] of Object.entries(HANGING)) {
  test(`a burst ends in its time, whatever hangs: ${name}`, { timeout: 5_000 }, async () => {
    const server = new ScriptedServer().next("claim", ...Array(2).fill(() => json(assignment())));
    if (name === "score") server.next("task", () => taskOf({ ...RUN, task: SCORED }));
    const { client } = clientOf(server, { clock: systemClock, ...options });
    for (let turn = 0; turn < 2; turn++) {
      assert.equal(await burst(client, { seconds: 0.03 }), "stopped");
    }
  });
}

test("a burst ends in its time, whatever hangs: a turn of the same client", async () => {
  const stop = new AbortController();
  const { client } = clientOf(new ScriptedServer(), { backend: hang, clock: systemClock });
  const running = client.run({ signal: stop.signal });
  assert.equal(await burst(client, { seconds: 0.03 }), "stopped");
  stop.abort();
  await running;
  assert.equal(client.status().outcome, "stopped");
});

test("an app's function has a time limit of its own, and a model that of its seat", async () => {
  for (const what of ["data", "storage.set", "onlyWhen"] as const) {
    const { client } = clientOf(new ScriptedServer(), { ...HANGING[what], timeoutS: 0.03 });
    if (what === "onlyWhen") assert.equal(await client.runOnce(), "paused");
    else
      await assert.rejects(client.runOnce(), /^FedOneError: (data|storage): no answer in 0.03 s/);
  }
  for (const what of ["backend", "beforeSend", "score"] as const) {
    const server = new ScriptedServer()
      .next("claim", () => json(assignment({ deadline_s: 0.1 })))
      .next("renew", () => problem("renewal_refused", 409));
    if (what === "score") server.next("task", () => taskOf({ ...RUN, task: SCORED }));
    const { client } = clientOf(server, { clock: systemClock, ...HANGING[what] });
    assert.equal(await client.runOnce(), "declined");
    assert.match(JSON.parse(server.bodies("decline")[0]!).reason, /^no time is left for /);
  }
});

test("the alpha exchange is refused before anything is asked", async () => {
  const alpha = () => json({ ...assignment({ exchange: "alpha" }), prompts: undefined });
  const server = new ScriptedServer().next("claim", alpha, alpha);
  const { client } = clientOf(server);
  assert.equal(await client.runOnce(), "declined");
  const pinned = clientOf(server, { runId: "demo" });
  await assert.rejects(pinned.client.run(), UnsupportedError);
  assert.match(server.bodies("decline")[1]!, /alpha exchange/);
  assert.deepEqual(server.bodies("score"), []);
});

test("a model of the device's own is asked once for a prompt that stands twice", async () => {
  const server = new ScriptedServer();
  const { backend, asked } = countingBackend();
  await clientOf(server, { backend }).client.run();
  assert.deepEqual(asked.sort(), [" a b", " b a", " c c"]);
  const update = JSON.parse(server.bodies("update")[0]!);
  assert.deepEqual(
    { ...update.usage },
    { queries: 4, requests: 3, prompt_tokens: 0, completion_tokens: 0, usd: 0 },
  );
  const [claim, later] = server.bodies("claim").map((body) => JSON.parse(body));
  assert.deepEqual([claim.own_model, claim.changed], [true, true]);
  assert.deepEqual([later.own_model, later.changed], [true, undefined]);
});

test("a device with another model than the run's declines", async () => {
  const server = new ScriptedServer();
  server.next("task", () => taskOf({ ...RUN, model: "another" }));
  server.next("claim", ...Array(2).fill(() => json(assignment())));
  const { backend } = countingBackend();
  const { client } = clientOf(server, { backend });
  assert.equal(await client.runOnce(), "declined");
  assert.equal(await client.runOnce(), "declined");
  const [first, second] = server.bodies("decline").map((body) => JSON.parse(body));
  const reason = "the run scores with 'another', the device with 'own'";
  assert.deepEqual([first.reason, first.unfit], [reason, undefined]); // its model was asked
  assert.deepEqual([second.reason, second.unfit], [reason, true]);
});

test("what was scored before a stop is not asked again", async () => {
  const server = new ScriptedServer().next("claim", ...Array(2).fill(() => json(assignment())));
  const { backend, asked } = countingBackend();
  const stop = new AbortController();
  const stopping: Backend = async (query, signal) => {
    if (asked.length < 2) return backend(query, signal);
    await setImmediate(); // the others are kept
    stop.abort();
    return new Promise(() => undefined); // it takes no notice
  };
  const { client, storage } = clientOf(server, { backend: stopping });
  assert.equal(await client.runOnce({ signal: stop.signal }), "stopped");
  // The same rows, with their keys in another order.
  const data = DATA.map(({ text, label }) => ({ label, text }));
  assert.equal(await clientOf(server, { backend, storage, data }).client.runOnce(), "worked");
  assert.equal(asked.length, 3);
  assert.equal(JSON.parse(server.bodies("update")[0]!).usage.requests, 3);
});

test("losses on other examples do not mix", async () => {
  const server = new ScriptedServer().next("claim", ...Array(2).fill(() => json(assignment())));
  const { backend, asked } = countingBackend();
  const stop = new AbortController();
  const stopping: Backend = async (query, signal) => {
    if (asked.length < 2) return backend(query, signal);
    await setImmediate();
    stop.abort();
    throw new Error("cut off");
  };
  const { client, storage } = clientOf(server, { backend: stopping });
  await client.runOnce({ signal: stop.signal });
  const data = DATA.map(({ text, label }) => ({ text: `${text}!`, label }));
  assert.equal(await clientOf(server, { backend, storage, data }).client.runOnce(), "worked");
  assert.equal(asked.length, 5);
  // What the others cost was spent all the same.
  assert.equal(JSON.parse(server.bodies("update")[0]!).usage.requests, 5);
});

test("a model that fails gives the work back, without its words", async () => {
  const server = new ScriptedServer();
  const backend: Backend = async ({ inputs }) => {
    throw new RangeError(`cannot read ${JSON.stringify(inputs)}`);
  };
  const { client } = clientOf(server, { backend });
  assert.equal(await client.runOnce(), "declined");
  const { reason } = JSON.parse(server.bodies("decline")[0]!);
  assert.equal(reason, "the client's model failed with RangeError");
});

test("the hook redacts, vetoes, and holds back where it throws", async () => {
  const server = new ScriptedServer().next("claim", ...Array(2).fill(() => json(assignment())));
  const beforeSend = (text: string) => text.replace(/x/g, "y");
  await clientOf(server, { beforeSend }).client.runOnce();
  const { examples } = JSON.parse(server.bodies("score")[0]!);
  assert.ok(examples.every(({ text }: { text: string }) => /^y+$/.test(text)));
  const broken = clientOf(server, {
    beforeSend: () => {
      throw new Error("private");
    },
  });
  assert.equal(await broken.client.runOnce(), "declined");
  assert.match(
    server.bodies("decline")[0]!,
    /0 of 3 examples could be scored \(0 failed, 3 vetoed\)/,
  );
});

test("nothing is claimed while the app's condition does not hold", async () => {
  const server = new ScriptedServer();
  let charging = false;
  const { client, events } = clientOf(server, { onlyWhen: () => charging });
  assert.equal(await client.runOnce(), "paused");
  assert.equal(client.status().nextTurnS, 10);
  assert.deepEqual(server.received, []);
  charging = true;
  assert.equal(await client.runOnce(), "worked");
  assert.deepEqual(
    events.slice(0, 2).map(({ kind }) => kind),
    ["paused", "resumed"],
  );
});

test("candidates that were added are fetched, and nothing else", async () => {
  const candidates = ["", "Judge.", "New."];
  const slots = [{ name: "instruction", candidates, repeat: 1 }];
  const task = { ...RUN.task, template: "{instruction}{text}{mask}", slots: ["instruction"] };
  const run = (version: number) => () =>
    taskOf({ ...RUN, task, vocabulary_version: version, layout: [[1, 2 + version, 0]] });
  const work = (version: number) => () => {
    const prompts = pack([0, 1 + version], [2, 1], "uint8");
    const name = `a${version}`;
    return json(assignment({ assignment_id: name, prompts, vocabulary_version: version }));
  };
  const server = new ScriptedServer()
    .next("claim", work(1), work(1), work(2))
    .next("task", run(1), run(2))
    .next("vocabulary", () => json({ candidates: [], slots, version: 1 }))
    .next("vocabulary", () => json({ appended: [["instruction", "Newer."]], version: 2 }));
  const { backend, asked } = countingBackend();
  const { client } = clientOf(server, { backend });
  for (let turn = 0; turn < 3; turn++) assert.equal(await client.runOnce(), "worked");
  assert.deepEqual(asked, ["", "New.", "", "New.", "", "Newer."]);
  const paths = server.received.map(({ path }) => path);
  assert.deepEqual(
    paths.filter((path) => path.startsWith("/v1/runs/")),
    ["task", "vocabulary", "task", "vocabulary?after=1"].map((name) => `/v1/runs/demo/${name}`),
  );
});

test("a candidate with a special token of a model is declined", async () => {
  const hostile = ["x<|im_end|>", "</s>", "[INST] x", "\uff1c\uff5cend\uff5c\uff1e", "<|"];
  for (const text of hostile) {
    const server = new ScriptedServer().next("vocabulary", () =>
      json({ candidates: ["", " a", text] }),
    );
    const { backend, asked } = countingBackend();
    const { client } = clientOf(server, { backend });
    assert.equal(await client.runOnce(), "declined");
    assert.deepEqual(asked, []);
  }
});

test("an answer without an end is not read to its end", async () => {
  let sent = 0;
  const endless = () =>
    new Response(
      new ReadableStream({
        pull: (controller) => {
          if (++sent > 200) controller.close();
          else controller.enqueue(new Uint8Array(2 ** 20).fill(32));
        },
      }),
    );
  const { client } = clientOf(new ScriptedServer().next("claim", endless));
  assert.equal(await client.runOnce(), "offline");
  assert.ok(sent < 40, `${sent} MiB`);
});

test("noise is drawn once, and the same after a restart", async () => {
  const privacy = { target: "losses", clip: 2, noise_multiplier: 1, delta: 1e-5 };
  const noised = () => taskOf({ ...RUN, privacy });
  const server = new ScriptedServer()
    .next("claim", ...Array(2).fill(() => json(assignment())))
    .next("task", noised, noised);
  let fails = true;
  const storage = new MemoryStorage();
  const failing = {
    get: (key: string) => storage.get(key),
    set: (key: string, value: string) => {
      // The power fails before the update is kept.
      if (fails && value.includes("unsent")) throw new DOMException("full", "QuotaExceededError");
      storage.set(key, value);
    },
    remove: (key: string) => storage.remove(key),
  };
  await assert.rejects(clientOf(server, { storage: failing }).client.runOnce(), /full/);
  const { journals } = JSON.parse(String(storage.get("fedone.https___fedone.example.work")));
  const [journal] = journals;
  fails = false;
  assert.equal(await clientOf(server, { storage: failing }).client.runOnce(), "worked");
  const { losses } = JSON.parse(server.bodies("update")[0]!);
  assert.deepEqual(losses, journal.noised);
  assert.notDeepEqual(
    losses,
    journal.rows.map((row: number[]) => row[0]),
  );
});

const COLUMNS = { label: "label", fields: ["text"] };
const PRIVACY = { target: "losses", clip: 2, noise_multiplier: 4, delta: 1e-5 };

test("epsilon is counted over restarts, and work beyond it is declined", async () => {
  const storage = new MemoryStorage();
  const policy = { privacy: { maxEpsilon: 1.2, unit: "label" } } as const;
  const outcomes: unknown[] = [];
  for (const [at, id] of ["a1", "a2"].entries()) {
    const server = new ScriptedServer()
      .next("claim", () => json(assignment({ assignment_id: id })))
      .next("task", () => taskOf({ ...RUN, privacy: PRIVACY }));
    const { client } = clientOf(server, { storage, policy, ...COLUMNS });
    outcomes.push(await client.runOnce());
    assert.ok(Math.abs(client.status().epsilon! - 0.93) < 0.01);
    const reasons = server.bodies("decline").map((body) => JSON.parse(body));
    assert.equal(reasons.length, at);
    if (at) assert.match(reasons[0].reason, /exceed the client's maximal epsilon/);
    if (at) assert.equal(reasons[0].unfit, true);
  }
  assert.deepEqual(outcomes, ["worked", "declined"]);
  await storage.set("fedone.device.spent", '{"precision": "much", "queries": 0}');
  const { client } = clientOf(new ScriptedServer(), { storage, policy, ...COLUMNS });
  await assert.rejects(client.runOnce(), /fedone.device.spent is damaged/);
});

test("work that the device does not accept is declined before anything is asked", async () => {
  const label = { maxEpsilon: 8, unit: "label" } as const;
  const run = (changes: object) => ({ ...RUN, privacy: { ...PRIVACY, ...changes } });
  const cases: [WorkPolicy, object, object, RegExp][] = [
    [{}, { leased_queries: 3 }, RUN, /has 4 prompts, but reserves 3 queries/],
    [{}, { leased_queries: undefined }, RUN, /has 4 prompts, but reserves undefined/],
    [{ budget: { queries: 3 } }, {}, RUN, /budget has nothing left/],
    [{ privacy: label }, {}, RUN, /the run asks for none/],
    [{ privacy: { ...label, minNoiseMultiplier: 5 } }, {}, run({}), /at least 5, and .* is 4/],
    [{}, {}, run({ clip: 5e-324, noise_multiplier: 1e6 }), /a clip outside of 0.001 to 1000/],
    [{}, {}, run({ noise_multiplier: 0.01 }), /noise multiplier outside of 0.1/],
  ];
  for (const [policy, work, task, reason] of cases) {
    const server = new ScriptedServer()
      .next("claim", () => json(assignment(work)))
      .next("task", () => taskOf(task as typeof RUN));
    assert.equal(await clientOf(server, { policy, ...COLUMNS }).client.runOnce(), "declined");
    assert.match(JSON.parse(server.bodies("decline")[0]!).reason, reason);
    assert.deepEqual([server.bodies("score"), server.bodies("update")], [[], []]);
  }
});

test("a private device says neither which rows it has nor what became of them", async () => {
  const beforeSend = (text: string) => (text.includes("1") ? null : text);
  const policy = { privacy: { maxEpsilon: 8, unit: "label" } } as const;
  const sent = async (data: Example[], task: object) => {
    const run = { ...RUN, privacy: PRIVACY, task: { ...RUN.task, ...task } };
    const server = new ScriptedServer().next("task", () => taskOf(run));
    const { client } = clientOf(server, { data, policy, beforeSend, ...COLUMNS });
    await client.runOnce();
    const { losses, ...update } = JSON.parse(server.bodies("update")[0] ?? "{}");
    return [...server.bodies("claim"), ...server.bodies("decline"), update];
  };
  const rows = (texts: string[]) => texts.map((text) => ({ text, label: 1 }));
  const found = await sent(rows(["a", "b", "c"]), {});
  assert.deepEqual([found[1].num_examples, found[1].scored], [1, { scored: 3 }]);
  assert.deepEqual(await sent(rows(["a", "1", "c"]), {}), found);
  const [, declined] = await sent(rows(["a", "b"]), {
    labels: [
      { value: "0", word: " no" },
      { value: "2", word: " maybe" },
    ],
  });
  assert.equal(JSON.parse(declined).reason, "the run does not fit this device");
});

test("a private device sends noise, whatever fails for its row", async () => {
  const logProbs = pack(Array(4).fill([0, -3e38]).flat(), [4, 1, 2], "float32");
  const own: Backend = async ({ inputs }) => ({
    fingerprint: "m",
    logProbs: inputs.map((parts) => (String(parts).includes("failing") ? null : [-1, -2])),
  });
  const broken = { loss: "score", labels: [] } as const;
  const written: Backend = async ({ inputs }) => ({
    fingerprint: "m",
    texts: inputs.map(() => ""),
  });
  const cases: [object, Example, Partial<EdgeClientOptions>][] = [
    [{}, { text: "a", label: 1 }, {}],
    [{}, { text: "secret", label: 0 }, { backend: own, beforeSend: () => null }],
    [{}, { text: "failing", label: 0 }, { backend: own }],
    [broken, { text: "a", label: 0 }, { backend: written, score: () => NaN }],
  ];
  for (const [task, row, options] of cases) {
    const unit = options.backend ? "example" : "label";
    const policy = { privacy: { maxEpsilon: 8, unit } } as const;
    const run = { ...RUN, privacy: PRIVACY, task: { ...RUN.task, ...task } };
    const server = new ScriptedServer()
      .next("task", () => taskOf(run))
      .next("score", () => json({ log_probs: logProbs, model: "m" }));
    const { client } = clientOf(server, { data: [row], policy, ...COLUMNS, ...options });
    assert.equal(await client.runOnce(), "worked");
    const update = JSON.parse(server.bodies("update")[0]!);
    assert.deepEqual([update.scored, update.losses.length], [{ scored: 1 }, 4]);
  }
});

test("a task whose numbers could make a loss or its noise fail is not understood", async () => {
  const policy = { privacy: { maxEpsilon: 8, unit: "label" } } as const;
  const changes = [
    ...[{ privacy: false }, { privacy: 0 }, { method: { batch_size: -1 } }],
    ...[[0, 1e9], [0], "01"].map((bias) => ({ task: { ...RUN.task, bias } })),
  ];
  for (const change of changes) {
    const server = new ScriptedServer().next("task", () =>
      taskOf({ ...RUN, privacy: PRIVACY, ...change }),
    );
    assert.equal(await clientOf(server, { policy, ...COLUMNS }).client.runOnce(), "declined");
    assert.match(JSON.parse(server.bodies("decline")[0]!).reason, /malformed/);
  }
});

test("an async onEvent may fail, and data must be rows", async () => {
  const server = new ScriptedServer();
  const options = { server: SERVER, token: "t", storage: new MemoryStorage(), fetch: server.fetch };
  const onEvent = async () => Promise.reject(new Error("the app's"));
  const client = new EdgeClient({ ...options, data: DATA, onEvent });
  assert.equal(await client.runOnce(), "worked"); // an unhandled rejection would end the test
  for (const data of [undefined as never, () => undefined as never]) {
    const run = new EdgeClient({ ...options, data }).runOnce();
    await assert.rejects(run, /^ArgumentError: data: is not an array/);
  }
});

test("arguments that cannot be used are refused with their name", () => {
  const storage = new MemoryStorage();
  const cases: [Partial<EdgeClientOptions>, RegExp][] = [
    [{ server: "ftp://fedone.example" }, /^server: "ftp:/],
    [{ server: "https://user:password@fedone.example" }, /^server: /],
    [{ server: undefined as never }, /^server: "undefined"/],
    [{ data: [] }, /^data: /],
    [{ token: "two words" }, /^token: /],
    [{ runId: "../etc" }, /^runId: /],
    [{ name: "" }, /^name: /],
    [{ policy: { privacy: { maxEpsilon: 8 } } }, /^policy.privacy: unit 'example' needs a backend/],
    [{ policy: { privacy: { maxEpsilon: 0, unit: "label" } } }, /^policy.privacy: maxEpsilon/],
    [{ policy: { budget: { queries: -1 } } }, /^policy.budget.queries: /],
    [{ policy: { privacy: { maxEpsilon: 8, unit: "label" } } }, /^label, fields: policy.privacy/],
  ];
  for (const [options, message] of cases) {
    const make = () => new EdgeClient({ server: SERVER, data: DATA, storage, ...options });
    assert.throws(make, (error) => error instanceof ArgumentError && message.test(error.message));
  }
});

test("work that is given back costs what it has cost, and nothing of other work", async () => {
  const second = () => json(assignment({ assignment_id: "a2", exchange: "alpha" }));
  const server = new ScriptedServer().next("claim", () => json(assignment()), second);
  const { backend, asked } = countingBackend();
  const failing: Backend = async (query, signal) => {
    if (asked.length === 2) throw new Error("out of memory");
    return backend(query, signal);
  };
  const { client } = clientOf(server, { backend: failing });
  assert.equal(await client.runOnce(), "declined");
  assert.equal(await client.runOnce(), "declined");
  const [first, other] = server.bodies("decline").map((body) => JSON.parse(body).usage.requests);
  assert.deepEqual([first, other], [2, 0]);
});

test("an input is a text, or the messages of a chat", () => {
  const input = [
    ["prompt", "Say:"],
    ["text", " "],
    ["field", "x"],
    ["mask", ""],
  ] as const;
  assert.equal(textOf(input), "Say: x");
  assert.equal(textOf(input, "<mask>"), "Say: x<mask>");
  const chat = [
    ["role", "user"],
    ["prompt", "Say:"],
    ["field", "x"],
    ["role", "assistant"],
  ] as const;
  assert.deepEqual(messagesOf([...chat, ["text", "It was"]]), [
    { role: "user", content: "Say:x" },
    { role: "assistant", content: "It was" },
  ]);
});
