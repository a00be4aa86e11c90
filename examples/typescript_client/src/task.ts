import { MessageError } from "./errors.js";
import type { Input, Part } from "./backend.js";
import type { RunTask, TaskSpec } from "./messages.js";
import { crc32 } from "./numbers.js";
import { parseTemplate } from "./template.js";
import type { Piece } from "./template.js";

/** One labelled row: the text fields that the template names, and the label. */
export type Example = Readonly<Record<string, unknown>>;

/** A prompt for a task: a text, or texts of slots with the label words of the prompt. */
export interface Filling {
  readonly texts: readonly string[];
  readonly labelWords?: readonly string[];
}

const MAX_TEXT_CHARS = 20_000;

/** Whether a value is valid as a label's bias, nats. */
export function isBias(value: unknown): boolean {
  return typeof value === "number" && Math.abs(value) <= 100;
}

/** The task: it makes model inputs from examples. */
export class Task {
  /** The labels, in the order of the model's answers. */
  readonly labels: readonly string[];
  /** The label words, in the same order. */
  readonly labelWords: readonly string[];
  /** The text columns that the task uses. */
  readonly fields: readonly string[];
  readonly #messages: readonly { role?: string; pieces: Piece[] }[];

  constructor(readonly spec: TaskSpec) {
    const labels = spec.labels ?? [];
    this.labels = labels.map(({ value }) => value);
    this.labelWords = labels.map(({ word }) => word);
    this.#messages = this.messages.map(({ template, ...who }) => ({
      ...who,
      pieces: parseTemplate(template),
    }));
    const others = new Set(["prompt", "mask", ...this.slots]);
    const names = this.#messages.flatMap(({ pieces }) => pieces.map(({ field }) => field));
    this.fields = [
      ...new Set(names.filter((name) => name !== undefined && !others.has(name))),
    ] as string[];
  }

  /** The templates of an input; in a chat each has a role. */
  get messages(): readonly { readonly role?: string; readonly template: string }[] {
    const { chat, template } = this.spec;
    if (!chat) return [{ template: template ?? "" }];
    return [
      ...(chat.system == null ? [] : [{ role: "system", template: chat.system }]),
      { role: "user", template: chat.user },
      { role: "assistant", template: chat.assistant ?? "" },
    ];
  }

  /** The slots in the templates; empty if the templates have `{prompt}`. */
  get slots(): readonly string[] {
    return this.spec.slots ?? [];
  }

  get loss(): NonNullable<TaskSpec["loss"]> {
    return this.spec.loss ?? "cross_entropy";
  }

  /** Checksum of the task, which the client compares with the server's. */
  get crc32(): number {
    const { chat, template } = this.spec;
    const words = this.labelWords;
    const texts = [
      ...[this.loss, this.labelField],
      ...(chat ? [chat.system, chat.user, chat.assistant] : [template]),
      ...this.slots,
      ...this.labels.flatMap((label, at) => [label, words[at]]),
    ];
    const text = new TextEncoder().encode(texts.map((each) => `${each ?? ""}\0`).join(""));
    const bias = [...(this.spec.bias ?? [])];
    const packed = new DataView(new ArrayBuffer(8 * bias.length));
    bias.forEach((value, at) => packed.setFloat64(8 * at, value, true));
    return crc32(Uint8Array.from([...text, ...new Uint8Array(packed.buffer)]));
  }

  get labelField(): string {
    return this.spec.label_field ?? "label";
  }

  /** The columns that the model sees; with `nll` also the reference text. */
  get shown(): readonly string[] {
    return this.loss === "nll" ? [...this.fields, this.labelField] : this.fields;
  }

  /** Whether an example has valid text fields, and what its loss needs. */
  usable(example: Example): boolean {
    if (!this.fields.every((name) => isSendable(example[name]))) return false;
    const label = example[this.labelField];
    if (this.loss === "score") return true;
    if (this.loss === "nll") return isSendable(label) && label !== "";
    return this.targetOf(example) >= 0;
  }

  /** Returns the index of an example's label; -1 if the task does not have the label. */
  targetOf(example: Example): number {
    return this.indexOf(example[this.labelField]);
  }

  /** Returns the index of the label that a value names; -1 if the task does not have the label. */
  indexOf(label: unknown): number {
    const found = this.labels.indexOf(spelled(label));
    if (found >= 0) return found;
    const key = labelKey(label);
    const alike = this.labels.flatMap((each, at) => (labelKey(each) === key ? [at] : []));
    return alike.length === 1 ? alike[0]! : -1;
  }

  /** Returns the model's input for a prompt and an example. */
  render(prompt: Filling, example: Example): Input {
    const texts = new Map<string, string>(
      this.slots.length > 0
        ? this.slots.map((slot, at) => [slot, prompt.texts[at] ?? ""])
        : [["prompt", prompt.texts.join("")]],
    );
    const parts: Part[] = [];
    for (const { role, pieces } of this.#messages) {
      if (role !== undefined) parts.push(["role", role]);
      for (const { text, field, most } of pieces) {
        if (text) parts.push(["text", text]);
        const given = field === undefined ? undefined : texts.get(field);
        if (given !== undefined) parts.push(["prompt", given]);
        else if (field === "mask") parts.push(["mask", ""]);
        else if (field !== undefined) parts.push(["field", cut(String(example[field]), most)]);
      }
      const last = parts[parts.length - 1];
      // A final line feed separates a candidate from more text; here no text follows.
      if ((role === "system" || role === "user") && last?.[0] === "prompt") {
        parts[parts.length - 1] = ["prompt", last[1].replace(/\n+$/, "")];
      }
    }
    return parts;
  }
}

/** The first characters of a text, without half of a surrogate pair. */
function cut(text: string, most?: number): string {
  return most === undefined || text.length <= most ? text : [...text].slice(0, most).join("");
}

/** A label in NFC and lower case, without outer spaces; `1.0` becomes `1`. */
export function labelKey(label: unknown): string {
  return spelled(label)
    .normalize("NFC")
    .trim()
    .toLowerCase()
    .replace(/^(-?\d+)\.0$/, "$1");
}

/** A run with its task. */
export interface Run extends Omit<RunTask, "task"> {
  readonly task: Task;
}

/**
 * Reads the response of `GET /v1/runs/{id}/task`.
 *
 * @throws MessageError It is malformed, or the task has another checksum than the server's task.
 */
export function readRun(text: string): Run {
  let run: RunTask;
  try {
    run = JSON.parse(text) as RunTask;
  } catch {
    throw new MessageError("the aggregator's answer is malformed: a task: no JSON");
  }
  const { task, method, privacy } = run ?? {};
  const size = method?.batch_size;
  if (typeof task !== "object" || !Number.isInteger(size) || size! < 1) {
    throw new MessageError("the aggregator's answer is malformed: a task: it lacks a key");
  }
  // Invalid numbers would make losses fail, and failures could reveal labels to the server.
  if (typeof (privacy ?? {}) !== "object") {
    throw new MessageError("the aggregator's answer is malformed: a task: privacy");
  }
  const { bias, labels = [] } = task;
  const isLabel = (one: unknown) =>
    ["value", "word"].every((key) => typeof (one as any)?.[key] === "string");
  if (!(Array.isArray(labels) && labels.every(isLabel))) {
    throw new MessageError("the aggregator's answer is malformed: a task: labels");
  }
  if (bias != null && !(bias.length === labels.length && Array.from(bias).every(isBias))) {
    throw new MessageError("the aggregator's answer is malformed: a task: bias");
  }
  const read = new Task(task);
  if (run.task_crc32 !== read.crc32) {
    throw new MessageError("the aggregator's answer is malformed: a task: task_crc32");
  }
  return { ...run, task: read };
}

/** A label in Python's spelling, because labels may be `true` and `false`. */
function spelled(label: unknown): string {
  return typeof label === "boolean" ? (label ? "True" : "False") : String(label);
}

/** Whether a message can contain a text: it is not too long, and valid Unicode. */
export function isSendable(text: unknown): text is string {
  if (typeof text !== "string") return false;
  if (text.length > MAX_TEXT_CHARS && [...text].length > MAX_TEXT_CHARS) return false;
  try {
    encodeURIComponent(text);
    return true;
  } catch {
    return false; // half of a surrogate pair
  }
}
