import assert from "node:assert/strict";
import { setImmediate } from "node:timers/promises";
import { test } from "node:test";
import { ProblemError, Stopped, TransportError } from "../src/errors.js";
import { keepLease } from "../src/lease.js";

/** Plays renewals that end in these ways; the waits before each, and the number that was asked. */
async function played(deadlineS: number, ...ends: (number | Error)[]) {
  const waits: number[] = [];
  const left = [...ends];
  let asked = 0;
  const clock = {
    now: () => 0,
    sleep: async (seconds: number, signal?: AbortSignal) => {
      if (signal?.aborted) throw new Stopped("stopped");
      waits.push(seconds);
    },
  };
  let isOver = false;
  const end = keepLease(
    deadlineS,
    async () => {
      asked++;
      const next = left.shift();
      if (left.length === 0) end();
      if (typeof next === "number") return { deadline_s: next };
      throw next;
    },
    clock,
    () => (isOver = true),
  );
  for (let turn = 0; turn < 20; turn++) await setImmediate();
  return { waits, asked, isOver };
}

test("a lease is renewed at half time, and by the deadline that the answer gives", async () => {
  const { waits, asked, isOver } = await played(60, 60, 20, 20);
  assert.deepEqual([waits, asked, isOver], [[30, 30, 10], 3, false]);
});

test("a renewal that fails is asked for again soon", async () => {
  const down = new TransportError("down");
  const busy = new ProblemError("rate_limited", 429, "", 9);
  const { waits } = await played(60, down, busy, 60);
  assert.deepEqual(waits, [30, 3, 9]);
  assert.deepEqual((await played(10, down, 10)).waits, [5, 1]);
});

test("a server cannot make a device renew without a pause", async () => {
  const { waits } = await played(1e300, 0, -5, 1e-9, 60);
  assert.deepEqual(waits, [86_400, 0.2, 0.2, 0.2]);
});

test("a lease that is not renewed any more is over shortly before its deadline", async () => {
  const refused = new ProblemError("renewal_refused", 409, "");
  const found = await played(60, refused, 60, 60);
  assert.deepEqual(found, { waits: [30, 58], asked: 1, isOver: true }); // this clock stands still
});
