import { rowsOf } from "./array.js";
import type { Backend } from "./backend.js";
import type { BeforeSend } from "./batch.js";
import { Declining, MessageError, ProblemError, Stopped } from "./errors.js";
import { biased, lossTerms, predicted } from "./loss.js";
import type { ModelOutput, ScoreFunction } from "./loss.js";
import type { LossesUpdate, Proposal, Reflected } from "./messages.js";
import { exactSum } from "./numbers.js";
import { asked } from "./oracle.js";
import type { Oracle } from "./oracle.js";
import { askedOf, kindOf, quotes, readReflection, reflectionMessages } from "./proposals.js";
import type { Case } from "./proposals.js";
import { Step } from "./step.js";
import type { Example, Task } from "./task.js";
import { Vocabulary } from "./vocabulary.js";
import { raced } from "./waits.js";
import type { Reflect, Work } from "./work.js";

/** Maximum number of candidates that one device may propose in a run. */
const MAX_PROPOSALS = 2;

/** Numbers of examples for a reflection: with the highest losses, and with the lowest losses. */
const FAILED = 4;
const GONE_WELL = 2;

const MAX_TOKENS = 512;
const MAX_TEXT_CHARS = 20_000;

/**
 * Lets a model write a candidate from rows that the best prompt of an assignment answered wrongly.
 * The device scores the candidate on the same rows, and proposes it if its loss is lower
 * (docs/explanation/reflection.md).
 *
 * @param model A model on the device that generates texts; or `"gateway"`, the server's model. The
 *   gateway then sees these rows and their labels.
 * @param options.beforePropose Receives each text before it leaves the device. The text is proposed
 *   only if it is returned unchanged.
 * @returns `policy.reflect` of an `EdgeClient`.
 */
export function reflection(
  model: Backend | "gateway",
  { beforePropose }: { readonly beforePropose?: BeforeSend } = {},
): Reflect {
  const counts = new Map<string, number>();
  return async (work, step, update, oracle) => {
    const { assignment, journal, run, account } = work;
    const { run_id: runId } = assignment;
    const count = counts.get(runId) ?? 0; // The server may allow more.
    if (!assignment.reflect || run.reflection == null || run.privacy != null) return undefined;
    if (count >= MAX_PROPOSALS || (model === "gateway" && !run.reflection.gateway))
      return undefined;
    const { slot } = run.reflection;
    let proposal: Proposal | undefined;
    try {
      const written = new Reflection(work, step, update, slot, model, beforePropose);
      proposal = await written.propose(oracle);
    } catch (error) {
      // After a failure nothing is proposed, but the work continues.
      const known = [Declining, MessageError, ProblemError].some((kind) => error instanceof kind);
      if (!known) throw error;
    }
    if (proposal) counts.set(runId, count + 1);
    const tried = work.ownModel && journal.row(step.prompts.length) ? 1 : 0;
    const queries = update.usage.queries! + tried;
    return { ...(proposal && { proposal }), usage: account.shown({ ...journal.usage, queries }) };
  };
}

/** The reflection on a scored step. */
class Reflection {
  readonly #parent: number;

  constructor(
    readonly work: Work,
    readonly step: Step,
    { losses }: LossesUpdate,
    readonly slot: string,
    readonly model: Backend | "gateway",
    readonly beforePropose: BeforeSend | undefined,
  ) {
    this.#parent = losses.indexOf(Math.min(...losses));
  }

  /**
   * Returns a candidate with a lower loss than its parent; undefined if there is none.
   *
   * @throws Declining The model failed.
   */
  async propose(oracle: Oracle): Promise<Proposal | undefined> {
    const { account, assignment, journal, known, run, signal } = this.work;
    const version = assignment.vocabulary_version ?? 0;
    const vocabulary = await known.vocabulary(assignment.run_id, version, signal);
    const [place, candidates] = this.#slotOf(vocabulary);
    const current = candidates[this.step.prompts[this.#parent]![place]!] ?? "";
    let text = journal.written;
    if (text === undefined) {
      const cases = await this.#cases();
      if (cases.length === 0) return undefined;
      text = await this.#write(current, cases);
      await journal.keep([], { row: [], answers: null, model: journal.model!, written: text });
    }
    const candidate = readReflection(text, candidates, run.task.labels);
    if (candidate === undefined || !(await this.#mayLeave(candidate, vocabulary))) return undefined;
    const proposal = { parent: this.#parent, text: candidate };
    const trial = new Trial(this.step, proposal, vocabulary, this.slot, place, candidates.length);
    if (journal.row(trial.place) === null) {
      await account.pay(1);
      await oracle(trial, [0]);
    }
    const before = this.#losses(this.#parent);
    const after = this.#losses(trial.place);
    const gains = before.map((loss, at) => (loss === null ? 0 : loss - (after[at] ?? loss)));
    return exactSum(gains) > 0 ? proposal : undefined;
  }

  /** Returns the position of the slot in a prompt, and its candidates. */
  #slotOf({ slots }: Vocabulary): [number, readonly string[]] {
    const at = slots.findIndex(({ name }) => name === this.slot);
    if (at < 0) throw new Declining("the vocabulary does not fit its run");
    const place = slots.slice(0, at).reduce((sum, { repeat = 1 }) => sum + repeat, 0);
    return [place, slots[at]!.candidates];
  }

  /** A prompt's loss on each example with the parent's label bias; null if the model failed. */
  #losses(place: number): readonly (number | null)[] {
    const { batch, run, journal, byClass } = this.step;
    const row = journal.row(place) ?? [];
    if (!byClass) return row;
    const bias = this.#bias!;
    return row.map((loss, at) => {
      const answer = journal.answers(place)[at];
      if (loss === null || answer == null) return null;
      return lossTerms(run.task, answer, run.task.targetOf(batch.examples[at]!), bias)[0]!;
    });
  }

  get #bias(): readonly number[] | undefined {
    const { biases } = this.work.assignment;
    return biases == null
      ? (this.step.run.task.spec.bias ?? undefined)
      : rowsOf(biases)[this.#parent];
  }

  /** The parent's worst and best examples; none if all its answers are right. */
  async #cases(): Promise<Case[]> {
    const { batch, run } = this.step;
    const losses = this.#losses(this.#parent);
    const answers = this.step.answered[this.#parent] ?? []; // None after a restart.
    const found = losses.flatMap((loss, at) => {
      const answer = answers[at];
      return loss === null || answer == null ? [] : [{ loss, answer, at }];
    });
    const isWrong = found.some(({ loss, answer, at }) =>
      run.task.loss === "score"
        ? loss > 0
        : run.task.loss === "nll" || !isRight(run.task, answer, batch.examples[at]!, this.#bias),
    );
    if (!isWrong) return [];
    found.sort((one, other) => other.loss - one.loss);
    const chosen = [...found.slice(0, FAILED), ...found.slice(FAILED).slice(-GONE_WELL)];
    return Promise.all(
      chosen.map(async ({ answer, at }) => ({
        example: batch.texts[at]!,
        feedback: (
          await feedback(run.task, answer, batch.examples[at]!, this.#bias, this.work.score)
        ).slice(0, MAX_TEXT_CHARS),
      })),
    );
  }

  async #write(current: string, cases: readonly Case[]): Promise<string> {
    const { assignment, link, run, signal } = this.work;
    if (this.model === "gateway") {
      const message = { assignment_id: assignment.assignment_id, parent: this.#parent, cases };
      return (await link.gateway<Reflected>("reflect", message, { text: "string" }, signal)).text;
    }
    const messages = reflectionMessages(run.task, this.slot, current, cases);
    const parts = messages.flatMap(
      ([role, text]) =>
        [
          ["role", role],
          ["text", text],
        ] as const,
    );
    const query = {
      ...{ want: "text" as const, inputs: [[...parts, ["role", "assistant"] as const]] },
      ...{ labelWords: [], references: [], maxTokens: MAX_TOKENS },
    };
    const [text] = (await asked(this.model, query, signal)).texts ?? [];
    if (typeof text !== "string") throw new Declining("the client's model wrote no text");
    return text;
  }

  async #mayLeave(text: string, { slots }: Vocabulary): Promise<boolean> {
    const { held, run } = this.work;
    const rows = held.flatMap((row) => Object.values(row).filter((one) => typeof one === "string"));
    const { description } = run.task.spec;
    const publicTexts = [
      ...slots.flatMap(({ candidates }) => candidates),
      ...run.task.messages.map(({ template }) => template),
      ...(description ? [askedOf(description), kindOf(description)] : []),
    ];
    if (quotes(text, rows, publicTexts) !== undefined) return false;
    const { beforePropose } = this;
    if (beforePropose === undefined) return true;
    const { signal } = this.work;
    try {
      return (await raced("beforePropose", () => beforePropose(text), { signal })) === text;
    } catch (error) {
      if (error instanceof Stopped) throw error;
      return false;
    }
  }
}

/** The test of a candidate: the parent prompt with the candidate in the slot, same mini-batch. */
class Trial extends Step {
  /** The index of its losses in the journal. */
  readonly place: number;
  override readonly trial: NonNullable<Step["trial"]>;
  override readonly vocabulary: Vocabulary;

  constructor(
    step: Step,
    proposal: Proposal,
    { version, candidates, slots }: Vocabulary,
    slot: string,
    position: number,
    index: number,
  ) {
    const prompt = [...step.prompts[proposal.parent]!];
    prompt[position] = index;
    const { run, batch, dtype, journal, score } = step;
    super(run, batch, [prompt], dtype, journal, score, () => undefined);
    this.place = step.prompts.length;
    this.trial = { prompts: null, proposal };
    const more = slots.map((one) =>
      one.name === slot ? { ...one, candidates: [...one.candidates, proposal.text] } : one,
    );
    this.vocabulary = new Vocabulary(version, candidates, more);
  }

  override keep(_: readonly number[], ...found: Tail<Parameters<Step["keep"]>>): Promise<void> {
    return super.keep([this.place], ...found);
  }
}

type Tail<T> = T extends [unknown, ...infer Rest] ? Rest : never;

function isRight(
  task: Task,
  answer: ModelOutput,
  example: Example,
  bias: readonly number[] | undefined,
): boolean {
  if (typeof answer === "string") return false;
  return predicted(answer, biased(answer, bias)) === task.targetOf(example);
}

/** Returns the expected and the actual answer to an example, as a sentence. */
export async function feedback(
  task: Task,
  answer: ModelOutput,
  example: Example,
  bias?: readonly number[],
  score?: ScoreFunction,
): Promise<string> {
  const label = example[task.labelField];
  if (typeof answer === "string") {
    const given = await score!(answer, example);
    const { value, feedback: said } =
      typeof given === "number" ? { value: given, feedback: "" } : given;
    const expected = label == null ? "" : `expected ${repr(label)}, `;
    const more = said === "" ? "" : `: ${said}`;
    return `${expected}answered ${repr(answer)}, score ${value.toFixed(2)} of 1${more}`;
  }
  if (task.loss === "nll") {
    return `expected ${repr(label)}, probability ${Math.exp(answer[0]!).toFixed(3)}`;
  }
  const target = task.targetOf(example);
  const values = biased(answer, bias);
  const best = values.indexOf(Math.max(...values));
  const share = 1 / exactSum(values.map((value) => Math.exp(value - values[best]!)));
  const words = task.labelWords.map((word) => repr(word.trim()));
  const answered = `answered ${words[best]} with probability ${share.toFixed(2)}`;
  return best === target ? answered : `expected ${words[target]}, ${answered}`;
}

/** Formats a value as Python's `repr` does. */
function repr(value: unknown): string {
  if (typeof value !== "string") return JSON.stringify(value);
  const quote = value.includes("'") && !value.includes('"') ? '"' : "'";
  const named: Record<string, string> = { "\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\" };
  const escaped = value.replace(/[\\\p{C}\p{Zl}\p{Zp}]|(?! )\p{Zs}/gu, (one) => {
    const code = one.codePointAt(0)!;
    const [mark, width] = code < 256 ? ["x", 2] : code < 65_536 ? ["u", 4] : ["U", 8];
    return named[one] ?? `\\${mark}${code.toString(16).padStart(Number(width), "0")}`;
  });
  return `${quote}${escaped.replaceAll(quote, `\\${quote}`)}${quote}`;
}
