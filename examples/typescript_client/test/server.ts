import { pack } from "../src/array.js";
import type { Clock } from "../src/clock.js";
import { Stopped } from "../src/errors.js";
import type { Fetch } from "../src/index.js";
import type { TaskSpec } from "../src/messages.js";
import { Task } from "../src/task.js";

/** A request as it came. */
export interface Received {
  readonly path: string;
  readonly body: string;
  readonly headers: Record<string, string>;
}

export type Reaction = (received: Received) => Response | Promise<Response>;

/** An answer of JSON. */
export function json(value: unknown, status = 200, headers: Record<string, string> = {}): Response {
  return new Response(JSON.stringify(value), { status, headers });
}

/** A refusal. */
export function problem(code: string, status: number, headers = {}): Response {
  return json({ type: "", title: "", status, code, detail: "why" }, status, headers);
}

/** An answer that never comes. */
export const never: Reaction = () => new Promise(() => undefined);

/** A connection that breaks. */
export const lost: Reaction = () => {
  throw new TypeError("fetch failed");
};

/** The text of a run for devices, with the check sum of its task. */
export function runText(run: { task: unknown; [key: string]: unknown }): string {
  return JSON.stringify({ ...run, task_crc32: new Task(run.task as TaskSpec).crc32 });
}

/** The answer of `GET /v1/runs/{id}/task`. */
export function taskOf(run: { task: unknown; [key: string]: unknown }): Response {
  return new Response(runText(run), { headers: { "Content-Type": "application/json" } });
}

export const RUN = {
  task: {
    template: "{prompt} {text} {mask}",
    labels: [
      { value: "0", word: " no" },
      { value: "1", word: " yes" },
    ],
    loss: "cross_entropy",
    label_field: "label",
  },
  method: { name: "gs-bdpl", batch_size: 3 },
  prompt_len: 2,
  vocab_size: 3,
  vocabulary_sha256: "",
  gateway: true,
};

export const PROMPTS = [
  [0, 1],
  [2, 2],
  [0, 1],
  [1, 0],
];

/** An assignment of the `losses` exchange. */
export function assignment(changes: object = {}): object {
  return {
    ...{ assignment_id: "a1", run_id: "demo", round: 0, deadline_s: 60, leased_queries: 4 },
    ...{ exchange: "losses", minibatch_seed: 7 },
    prompts: pack(PROMPTS.flat(), [4, 2], "uint8"),
    ...changes,
  };
}

/**
 * A scripted aggregator: the last part of a path names what answers. One piece of work, then none.
 */
export class ScriptedServer {
  readonly received: Received[] = [];
  readonly #once = new Map<string, Reaction[]>();
  #given = false;

  /** Answers the next calls of a name in these ways. */
  next(name: string, ...reactions: Reaction[]): this {
    this.#once.set(name, [...(this.#once.get(name) ?? []), ...reactions]);
    return this;
  }

  /** The bodies that came for a name. */
  bodies(name: string): string[] {
    return this.received.filter(({ path }) => nameOf(path) === name).map(({ body }) => body);
  }

  readonly fetch: Fetch = async (url, init) => {
    const path = url.replace("https://fedone.example", "");
    const headers = init.headers as Record<string, string>;
    const received = { path, headers, body: String(init.body ?? "") };
    this.received.push(received);
    const name = nameOf(path);
    const reaction = this.#once.get(name)?.shift();
    const answered = reaction ? reaction(received) : this.#answer(name, received);
    const aborted = new Promise<never>((_, reject) =>
      init.signal?.addEventListener("abort", () => reject(new Error("aborted"))),
    );
    return Promise.race([answered, aborted]);
  };

  #answer(name: string, { body }: Received): Response {
    if (name === "clients") {
      return json({ client_id: "client-1", credential: "fedone_secret" }, 201);
    }
    if (name === "claim") {
      if (this.#given) return problem("run_ended", 410);
      this.#given = true;
      return json(assignment());
    }
    if (name === "task") return taskOf(RUN);
    if (name === "vocabulary") return json({ candidates: [" a", " b", " c"] });
    if (name === "score") return json({ log_probs: logProbs(body), model: "m" });
    if (name === "update") {
      return json({ assignment_id: "a1", round: 0, body_sha256: "0" });
    }
    return name === "renew" ? json({ deadline_s: 60 }) : new Response(null, { status: 204 });
  }
}

function nameOf(path: string): string {
  return path.split("?")[0]!.split("/").at(-1)!;
}

function logProbs(body: string) {
  const { examples } = JSON.parse(body) as { examples: { text: string }[] };
  const values = PROMPTS.flatMap(([first = 0]) =>
    examples.flatMap(({ text }) => [-1 - first, -text.length / 8]),
  );
  return pack(values, [PROMPTS.length, examples.length, 2], "float32");
}

/** A clock whose sleeps last no time: it stands where the last one ended. */
export class ManualClock implements Clock {
  readonly slept: number[] = [];
  #now = 0;

  now(): number {
    return this.#now;
  }

  async sleep(seconds: number, signal?: AbortSignal): Promise<void> {
    // The renewals of a lease wait until something else has taken the time.
    if (seconds === 30) {
      return new Promise((_, reject) =>
        signal?.addEventListener("abort", () => reject(new Stopped("stopped"))),
      );
    }
    if (signal?.aborted) throw new Stopped("stopped");
    this.slept.push(seconds);
    this.#now += seconds;
  }
}
