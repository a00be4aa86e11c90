import { Declining } from "./errors.js";
import type { Slot, VocabularyList } from "./messages.js";
import type { Filling, Run, Task } from "./task.js";

/** The reserved slot whose candidates are sets of label words. */
const LABELS = "labels";

const NAMES = "bos|eos|pad|unk|mask|cls|sep|/?s|/?think|/?tool_call|(start|end)_of_(turn|image)";
const MISTRAL =
  "/?(inst|system_prompt|available_tools|tool_results|tool_content)|tool_calls|args|img";

/** Special tokens of tokenisers and chat templates, as in `fedone_sdk/vocabulary.py`. */
const SPECIAL = new RegExp(
  String.raw`<\||\|>|<</?sys>>|<(${NAMES}|(unused|extra_id_)\d+)>` +
    String.raw`|\[(${MISTRAL}|g?mask|cls|sep|pad|unk|bos|eos|unused\d+)\]`,
  "i",
);

/** Whether a text has a special token; the text is normalised first, as tokenisers do. */
export function hasSpecialToken(text: string): boolean {
  return SPECIAL.test(text.normalize("NFKC"));
}

/** The candidates of a prompt's positions: common to all, or per slot. They are never removed. */
export class Vocabulary {
  constructor(
    readonly version: number,
    readonly candidates: readonly string[],
    readonly slots: readonly Slot[],
  ) {}

  /**
   * Reads the server's candidates.
   *
   * @param listed All candidates, or those that were added after `known`.
   * @throws Declining A candidate contains a special token of a model.
   */
  static of(listed: VocabularyList, known?: Vocabulary): Vocabulary {
    const version = listed.version ?? 0;
    const sent = [
      ...(listed.candidates ?? []),
      ...(listed.slots ?? []).flatMap((slot) => slot.candidates),
      ...(listed.appended ?? []).map(([, text]) => text),
    ];
    if (sent.some(hasSpecialToken)) {
      throw new Declining("the vocabulary is malformed");
    }
    if (known === undefined) {
      return new Vocabulary(version, listed.candidates ?? [], listed.slots ?? []);
    }
    const slots = known.slots.map((slot) => {
      const more = (listed.appended ?? []).filter(([name]) => name === slot.name);
      return { ...slot, candidates: [...slot.candidates, ...more.map(([, text]) => text)] };
    });
    return new Vocabulary(version, known.candidates, slots);
  }

  /**
   * Returns the prompt of these candidates.
   *
   * @param task The prompt's task.
   * @param indices One candidate index for each position.
   * @throws Declining An index is invalid, or a set of label words does not fit the task.
   */
  prompt(task: Task, indices: readonly number[]): Filling {
    if (this.slots.length === 0) {
      return { texts: indices.map((index) => candidate(this.candidates, index)) };
    }
    const left = [...indices];
    const texts = new Map<string, string>();
    for (const { name, candidates, repeat = 1 } of this.slots) {
      const chosen = left.splice(0, repeat).map((index) => candidate(candidates, index));
      texts.set(name, chosen.join(""));
    }
    const chosen = texts.get(LABELS);
    texts.delete(LABELS);
    const words = chosen === undefined ? undefined : labelWords(chosen, task.labels.length);
    // With a leading space, as a chat model writes a word after text.
    const spelled = (words ?? task.labelWords).map((word) =>
      task.spec.chat ? ` ${word.trimStart()}` : word,
    );
    const filled = fill(texts, new Map(task.labels.map((label, at) => [label, spelled[at]!])));
    return { texts: filled, ...(words && { labelWords: words }) };
  }
}

/** The number of candidates of each position. */
export function sizesOf(run: Run): number[] {
  const layout = run.layout?.length
    ? run.layout
    : ([[run.prompt_len, run.vocab_size, null]] as const);
  return layout.flatMap(([repeat, size]) => Array<number>(repeat ?? 0).fill(size ?? 0));
}

function candidate(candidates: readonly string[], index: number): string {
  const text = candidates[index];
  if (text === undefined) throw new Declining("the vocabulary does not fit its run");
  return text;
}

function labelWords(candidate: string, count: number): string[] {
  let words: unknown;
  try {
    words = JSON.parse(candidate);
  } catch {
    words = undefined;
  }
  if (!Array.isArray(words) || words.length !== count) {
    throw new Declining("the vocabulary is malformed");
  }
  return words.map(String);
}

/**
 * Replaces `{label:KEY}` by a label word, and `{NAME}` by another slot's text.
 *
 * In that text, label words are replaced too, but names of slots are not.
 */
function fill(texts: Map<string, string>, words: Map<string, string>): string[] {
  const worded = new Map(
    [...texts].map(([name, text]) => [name, replaced(text, words, new Map())]),
  );
  return [...texts].map(([name, text]) => {
    const others = new Map([...worded].filter(([other]) => other !== name));
    return replaced(text, words, others);
  });
}

function replaced(text: string, words: Map<string, string>, slots: Map<string, string>): string {
  const keys = [
    ...[...words].map(([label, word]) => ({ key: `{label:${label}}`, word })),
    ...[...slots].map(([name, slot]) => ({ key: `{${name}}`, slot })),
  ].sort((one, other) => other.key.length - one.key.length);
  let found = "";
  let at = 0;
  while (at < text.length) {
    const match: { key: string; word?: string; slot?: string } | undefined =
      text[at] === "{" ? keys.find(({ key }) => text.startsWith(key, at)) : undefined;
    if (match === undefined) found += text[at++];
    else {
      found += match.slot ?? behind(match.word!, found);
      at += match.key.length;
    }
  }
  return found;
}

/** A label word after a text; no leading space at the beginning and after an opening mark. */
function behind(word: string, before: string): string {
  const text = /["'`]$/.test(before) ? before.slice(0, -1) : before;
  return text === "" || /[\s([{<\u2018\u201c\u00ab]$/.test(text) ? word.trimStart() : word;
}
