import { pack, unpack } from "./array.js";
import type { Backend, ModelAnswer, ModelQuery } from "./backend.js";
import { Declining, kindOf, Stopped } from "./errors.js";
import type { ModelOutput } from "./loss.js";
import type { Score, Scores, Usage } from "./messages.js";
import type { Step } from "./step.js";
import type { Filling, Task } from "./task.js";
import type { Vocabulary } from "./vocabulary.js";
import { raced } from "./waits.js";

/** Scores a step's prompts with these indices, and stores their losses one after another. */
export type Oracle = (step: Step, missing: readonly number[]) => Promise<void>;

/** Maximum number of (prompt, example) pairs in a request to the gateway. */
const PAIRS = 512;

/** Maximum number of concurrent queries to the model on the device. */
const CONCURRENCY = 4;

const WANTS = {
  cross_entropy: "labels",
  brier: "labels",
  hinge: "labels",
  zero_one: "labels",
  nll: "reference",
  score: "text",
} as const;

/**
 * Scores prompts through the aggregator's gateway. After a restart the same request is sent again,
 * and the server charges it once.
 *
 * @param assignmentId The assignment whose lease pays.
 * @param ask Sends a request.
 * @param ready Awaited before each request.
 */
export function gatewayOracle(
  assignmentId: string,
  ask: (message: Score) => Promise<Scores>,
  ready: () => Promise<void>,
): Oracle {
  return async (step, missing) => {
    const { batch, prompts } = step;
    const parts = cuts(prompts.length, batch.texts.length);
    for (const [start, stop] of parts) {
      if (!missing.some((place) => start <= place && place < stop)) continue;
      await ready();
      const asked = prompts.slice(start, stop);
      const shape = [asked.length, asked[0]?.length ?? 0];
      const scores = await ask({
        assignment_id: assignmentId,
        // The server drew the prompts, so they need not be sent.
        prompts: parts.length === 1 ? null : pack(asked.flat(), shape, step.dtype),
        examples: [...batch.texts],
        references: [...batch.references],
        ...step.trial,
      });
      const rows = answersOf(scores, asked.length, batch.texts.length, step.run.task);
      for (const [at, row] of rows.entries()) {
        if (missing.includes(start + at)) await step.keep([start + at], row, scores.model);
      }
    }
  };
}

/** Divides the prompts of a step into equal parts [start, stop), one per request to the gateway. */
export function cuts(numPrompts: number, numExamples: number): [number, number][] {
  const wanted = Math.ceil((numPrompts * numExamples) / PAIRS);
  const parts = Math.min(Math.max(wanted, 1), numPrompts);
  const bound = (part: number): number => Math.floor((numPrompts * part) / parts);
  return Array.from({ length: parts }, (_, part) => [bound(part), bound(part + 1)]);
}

/** The model's answer for each prompt and example; null if the model failed. */
function answersOf(
  scores: Scores,
  numPrompts: number,
  numExamples: number,
  task: Task,
): (ModelOutput | null)[][] {
  const rows: (ModelOutput | null)[][] = [];
  const width = Math.max(task.labels.length, 1);
  const shape = scores.log_probs?.shape ?? [];
  if (scores.log_probs == null) {
    for (const texts of scores.texts ?? []) rows.push([...texts]);
  } else if (shape.join() === [numPrompts, numExamples, width].join()) {
    const flat = unpack(scores.log_probs);
    for (let at = 0; at < flat.length; at += numExamples * width) {
      const starts = Array.from({ length: numExamples }, (_, example) => at + example * width);
      rows.push(starts.map((start) => flat.slice(start, start + width)));
    }
  }
  if (rows.length !== numPrompts || rows.some((row) => row.length !== numExamples)) {
    throw new Declining("the answer has the wrong shape");
  }
  for (const [prompt, example] of scores.failed ?? []) {
    if (rows[prompt]?.[example] !== undefined) rows[prompt]![example] = null;
  }
  return rows;
}

/**
 * Scores prompts with the model on the device. If a prompt occurs twice, the model is called once,
 * but two queries are counted.
 *
 * @param backend The app's function.
 * @param vocabulary The run's candidates.
 * @param ready Awaited before each query.
 */
export function ownOracle(
  backend: Backend,
  vocabulary: Vocabulary,
  ready: () => Promise<void>,
  signal: AbortSignal | undefined,
): Oracle {
  return async (step, missing) => {
    const { task } = step.run;
    const places = new Map<string, number[]>();
    for (const place of missing) {
      const key = step.prompts[place]!.join();
      places.set(key, [...(places.get(key) ?? []), place]);
    }
    const ahead = [...places.values()];
    const work = async (): Promise<void> => {
      for (let own = ahead.shift(); own !== undefined; own = ahead.shift()) {
        try {
          await ready();
          const prompt = (step.vocabulary ?? vocabulary).prompt(task, step.prompts[own[0]!]!);
          const answer = await asked(backend, queryFor(step, prompt), signal);
          await step.keep(own, checked(step, answer), answer.fingerprint, usageOf(answer));
        } catch (error) {
          ahead.length = 0; // After a failure no other query starts.
          throw error;
        }
      }
    };
    // Pending queries complete, because they are paid.
    const done = await Promise.allSettled(Array.from({ length: CONCURRENCY }, work));
    for (const one of done) if (one.status === "rejected") throw one.reason;
  };
}

/** The model's answer for each example; null if the answer does not fit the query. */
function checked({ run, batch }: Step, answer: ModelAnswer): (ModelOutput | null)[] {
  const { task } = run;
  const rows = task.loss === "score" ? answer.texts : answer.logProbs;
  const width = task.loss === "nll" ? 1 : task.labels.length;
  const fits = (row: unknown): boolean =>
    row === null ||
    (task.loss === "score" ? typeof row === "string" : Array.isArray(row) && row.length === width);
  const count = batch.texts.length;
  if (rows?.length !== Math.max(count, 1) || !rows.every(fits) || !answer.fingerprint) {
    throw new Declining("the client's model gave an answer that does not fit its query");
  }
  return rows.slice(0, count);
}

function usageOf({ usage = {} }: ModelAnswer): Usage {
  const { requests = 0, promptTokens = 0, completionTokens = 0, usd = 0 } = usage;
  return { requests, prompt_tokens: promptTokens, completion_tokens: completionTokens, usd };
}

function queryFor(step: Step, prompt: Filling): ModelQuery {
  const { task } = step.run;
  const want = WANTS[task.loss];
  // If all examples are withheld, a query with empty texts is sent, to hide this from the server.
  const none = Object.fromEntries(task.fields.map((name) => [name, ""]));
  const texts = step.batch.texts.length > 0 ? step.batch.texts : [none];
  return {
    want,
    inputs: texts.map((text) => task.render(prompt, text)),
    labelWords: want === "labels" ? [...(prompt.labelWords ?? task.labelWords)] : [],
    references: want === "reference" ? texts.map((_, at) => step.batch.references[at] ?? " ") : [],
    maxTokens: want === "text" ? (task.spec.max_tokens ?? 64) : 0,
  };
}

/**
 * Calls the model on the device.
 *
 * @throws Declining The model failed.
 * @throws Stopped The signal was aborted; the model may continue anyway.
 */
export async function asked(
  backend: Backend,
  query: ModelQuery,
  signal: AbortSignal | undefined,
): Promise<ModelAnswer> {
  try {
    return await raced("the client's model", () => backend(query, signal), { signal });
  } catch (error) {
    if (error instanceof Stopped) throw error;
    throw new Declining(`the client's model failed with ${kindOf(error)}`);
  }
}
