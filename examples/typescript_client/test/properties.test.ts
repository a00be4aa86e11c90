import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { pack, unpack } from "../src/array.js";
import { parseTemplate } from "../src/template.js";
import { drawMinibatch } from "../src/minibatch.js";
import { privateLosses } from "../src/noise.js";
import { exactSum } from "../src/numbers.js";
import { cuts } from "../src/oracle.js";
import { platformRandom } from "../src/random.js";
import { readRun } from "../src/task.js";
import { runText } from "./server.js";

const finite = fc.double({ noNaN: true, noDefaultInfinity: true, min: -1e300, max: 1e300 });

test("an array comes back as it was packed", () => {
  const kinds = [
    ["uint8", fc.nat(255)],
    ["uint16", fc.nat(65535)],
    ["float32", finite.map(Math.fround).filter(Number.isFinite)],
  ] as const;
  for (const [dtype, element] of kinds) {
    fc.assert(
      fc.property(fc.array(element as fc.Arbitrary<number>), (values) => {
        assert.deepEqual(unpack(pack(values, [values.length], dtype)), values);
      }),
    );
  }
});

test("bytes that do not fit their shape are refused", () => {
  fc.assert(
    fc.property(fc.array(fc.nat(255)), fc.nat(8), (values, extra) => {
      const array = pack(values, [values.length + extra + 1], "uint8");
      assert.throws(() => unpack(array), /does not fit its shape/);
    }),
  );
});

/** The sum as a fraction of integers, rounded by the division of big decimals. */
function reference(values: readonly number[]): number {
  const scaled = values.map((value) => BigInt(value * 2 ** 60));
  const sum = scaled.reduce((one, other) => one + other, 0n);
  return Number(sum) / 2 ** 60;
}

test("a sum is exact and does not depend on the order", () => {
  const terms = fc.integer({ min: -(2 ** 50), max: 2 ** 50 });
  const small = fc.tuple(terms, fc.integer({ min: 0, max: 60 })).map(([n, bits]) => n / 2 ** bits);
  fc.assert(
    fc.property(fc.array(small), (values) => {
      assert.equal(exactSum(values), reference(values));
      assert.equal(exactSum([...values].reverse()), exactSum(values));
    }),
  );
});

test("a mini-batch has distinct rows", () => {
  fc.assert(
    fc.property(
      fc.integer({ min: 1, max: 200 }),
      fc.integer({ min: 1, max: 250 }),
      fc.nat(),
      (m, b, seed) => {
        const rows = drawMinibatch(m, b, seed);
        assert.equal(new Set(rows).size, Math.min(m, b));
        assert.ok(rows.every((row) => row >= 0 && row < m));
      },
    ),
  );
});

test("parts of a step cover it once", () => {
  fc.assert(
    fc.property(
      fc.integer({ min: 1, max: 300 }),
      fc.integer({ min: 1, max: 300 }),
      (prompts, examples) => {
        const covered = cuts(prompts, examples).flatMap(([start, stop]) =>
          Array.from({ length: stop - start }, (_, at) => start + at),
        );
        assert.deepEqual(
          covered,
          Array.from({ length: prompts }, (_, at) => at),
        );
      },
    ),
  );
});

test("a template is its pieces", () => {
  const text = fc.string().map((piece) => piece.replace(/[{}]/g, ""));
  const name = fc.constantFrom("prompt", "sentence", "mask", "_x9", "Übung");
  fc.assert(
    fc.property(fc.array(fc.tuple(text, name)), text, (pieces, end) => {
      const template = pieces.map(([before, field]) => `${before}{${field}}`).join("") + end;
      const found = parseTemplate(template.replaceAll("\u0000", ""));
      const written = found.map(({ text, field }) => text + (field ? `{${field}}` : "")).join("");
      assert.equal(written, template.replaceAll("\u0000", ""));
    }),
  );
  for (const bad of ["{", "}", "{a b}", "{}", "{a!r}", "{a:>3}"]) {
    assert.throws(() => parseTemplate(bad), /malformed/);
  }
});

test("labels keep the order of the wire, whatever they are called", () => {
  const label = fc.oneof(fc.nat(500).map(String), fc.string({ minLength: 1 }));
  fc.assert(
    fc.property(fc.uniqueArray(label, { minLength: 2, maxLength: 8 }), (labels) => {
      const entries = labels.map((value) => ({ value, word: `" ${value}":` }));
      const spec = { template: "{prompt}{text}", labels: entries };
      const { task_crc32, ...run } = JSON.parse(runText({ task: spec, method: { batch_size: 1 } }));
      const { task } = readRun(JSON.stringify({ task_crc32, ...run }));
      spec.labels = [...entries].reverse();
      const swapped = JSON.stringify({ ...run, task: spec, task_crc32 });
      assert.throws(() => readRun(swapped), /malformed: a task: task_crc32/);
      assert.deepEqual(task.labels, labels);
      assert.deepEqual(
        task.labelWords,
        labels.map((key) => `" ${key}":`),
      );
    }),
  );
});

test("noise is centred and has the standard deviation that the run asks for", () => {
  const rows = Array.from({ length: 4 }, () => [0.25, 3]);
  const privacy = { clip: 2, noise_multiplier: 0.5 };
  const std = (0.5 * Math.sqrt(4) * 2) / 2;
  const count = 4000;
  const found = Array.from({ length: count }, () =>
    privateLosses(rows, privacy, platformRandom()),
  ).flat();
  const mean = found.reduce((one, other) => one + other) / found.length;
  const variance = found.reduce((sum, one) => sum + (one - mean) ** 2, 0) / found.length;
  // Five standard errors of 16,000 draws.
  assert.ok(Math.abs(mean - (0.25 + 2) / 2) < (5 * std) / Math.sqrt(found.length));
  assert.ok(Math.abs(variance / std ** 2 - 1) < 5 * Math.sqrt(2 / found.length));
});
