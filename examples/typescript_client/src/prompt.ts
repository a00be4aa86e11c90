import { messagesOf, textOf } from "./backend.js";
import type { Backend } from "./backend.js";
import { ArgumentError, FedOneError } from "./errors.js";
import { biased, predicted } from "./loss.js";
import type { Label, TaskSpec } from "./messages.js";
import { Task } from "./task.js";
import type { Example, Filling } from "./task.js";

export type { Backend } from "./backend.js";
export type { Example } from "./task.js";

/** A model's answer to a row. */
export interface Prediction {
  /** The likeliest label; null without labels, or if the model wrote no label or failed. */
  readonly label: string | null;
  /** Log-probability of each label with the prompt's bias, nats; null without labels or answer. */
  readonly scores: Readonly<Record<string, number>> | null;
  /** The generated text, if the task has no labels. */
  readonly text: string | null;
}

interface Artefact {
  readonly format: string;
  readonly version: number;
  readonly model: string | null;
  readonly task: TaskSpec;
  readonly prompt: {
    readonly text: string;
    readonly bias?: number[] | null;
    readonly slots?: readonly { readonly text: string }[];
    readonly labels?: Label[];
  };
}

/** A tuned prompt, from `loadPrompt`. */
export class TunedPrompt {
  readonly #task: Task;
  readonly #prompt: Filling;
  readonly #model: string | null;

  constructor({ task, prompt, model }: Artefact) {
    const { bias = task.bias ?? null, labels = task.labels ?? [] } = prompt;
    this.#task = new Task({ ...task, bias, labels });
    this.#prompt = { texts: prompt.slots?.map(({ text }) => text) ?? [prompt.text] };
    this.#model = model;
  }

  /** Returns a model's input for a row as text, without a mask; messages of a chat are joined. */
  render(row: Example): string {
    return textOf(this.#input(row).filter(([kind]) => kind !== "role"));
  }

  /** Returns a model's input for a row as chat messages; a template becomes the user's message. */
  messages(row: Example): { role: string; content: string }[] {
    const input = this.#input(row);
    const isChat = input[0]?.[0] === "role";
    return messagesOf(isChat ? input : [["role", "user"], ...input]);
  }

  /**
   * Returns a model's answer to a row.
   *
   * @param options.anyModel Whether to accept another model than the prompt's.
   * @throws ArgumentError The row lacks a column, or the task only scores given texts.
   * @throws FedOneError The model is another one, or its answer does not fit.
   */
  async predict(
    row: Example,
    model: Backend,
    { anyModel = false }: { anyModel?: boolean } = {},
  ): Promise<Prediction> {
    const { labels, labelWords, loss, spec } = this.#task;
    if (loss === "nll") throw new ArgumentError("task.loss: nll scores a text that is given");
    const answer = await model(
      {
        want: labels.length > 0 ? "labels" : "text",
        inputs: [this.#input(row)],
        labelWords,
        references: [],
        maxTokens: labels.length > 0 ? 0 : (spec.max_tokens ?? 64),
      },
      undefined,
    );
    if (!anyModel && this.#model !== null && answer.fingerprint !== this.#model) {
      throw new FedOneError(`the prompt is for '${this.#model}', not '${answer.fingerprint}'`);
    }
    const [text] = answer.texts ?? [];
    if (labels.length === 0) return { label: null, scores: null, text: text ?? null };
    const [found] = answer.logProbs ?? [];
    if (found === null) return { label: null, scores: null, text: null };
    if (found?.length !== labels.length) throw new FedOneError("the model's answer does not fit");
    const values = biased(found, spec.bias);
    const scores = Object.fromEntries(labels.map((label, at) => [label, values[at]!]));
    return { label: labels[predicted(found, values)] ?? null, scores, text: null };
  }

  #input(row: Example) {
    const missing = this.#task.fields.find((name) => typeof row[name] !== "string");
    if (missing !== undefined) throw new ArgumentError(`row: column '${missing}' must be text`);
    return this.#task.render(this.#prompt, row);
  }
}

/**
 * Reads a tuned prompt from a prompt artefact, which `fedone runs export --as prompt` writes.
 *
 * @param artefact The artefact's JSON, as text or parsed.
 * @throws ArgumentError It is not a prompt artefact.
 */
export function loadPrompt(artefact: string | object): TunedPrompt {
  let found: Partial<Artefact> | null;
  try {
    found = typeof artefact === "string" ? JSON.parse(artefact) : artefact;
  } catch {
    found = null;
  }
  if (found?.format !== "fedone-prompt") throw new ArgumentError("artefact: not a prompt artefact");
  if (found.version !== 1) {
    throw new ArgumentError(`artefact: has version ${found.version}, this client reads 1`);
  }
  return new TunedPrompt(found as Artefact);
}
