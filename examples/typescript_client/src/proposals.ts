import { hasSpecialToken } from "./vocabulary.js";
import type { Description } from "./messages.js";
import type { Task } from "./task.js";

/** An example's text fields, with the expected and the actual answer. */
export interface Case {
  readonly example: Readonly<Record<string, string>>;
  readonly feedback: string;
}

/** Maximum length of a proposed text, characters. */
const MAX_PROPOSAL_CHARS = 400;

/** Maximum length of a text, or of its feedback, that the model reads, characters. */
const CASE_CHARS = 2000;

/** A proposal must not share this number of consecutive words with a row. */
const SHARED_WORDS = 5;

/** Maximum length of an answer, characters, and maximum number of arrays that are tried in it. */
const MAX_ANSWER_CHARS = 100_000;
const MAX_ARRAYS = 50;

const SYSTEM =
  "You improve one part of a prompt. A language model reads the prompt together with a text and " +
  "answers. You see texts with the expected answer and the answer that was given.";

/**
 * Messages that ask a model for a better text of a slot than `parent`, by role and text, as in
 * `fedone_sdk/candidates/reflection.py`.
 */
export function reflectionMessages(
  task: Task,
  slot: string,
  parent: string,
  cases: readonly Case[],
): [role: string, text: string][] {
  const description = task.spec.description ?? {};
  const paragraphs = [`Task: ${askedOf(description)} Each text is a ${kindOf(description)}.`];
  if (task.labels.length > 0) {
    const named = task.labels.map(
      (label, at) => `${placeholder(label)} = ${quoted(task.labelWords[at]!)}`,
    );
    paragraphs.push(`Labels, each with the placeholder for its word: ${named.join(", ")}.`);
  }
  const shape = task.messages
    .filter(({ template }) => template !== "")
    .map(({ role, template }) => (role === undefined ? template : `[${role}] ${template}`));
  if (shape.length > 0) {
    const whole = shape.join("\n");
    paragraphs.push(`The whole input; you write what stands at {${slot}}:\n---\n${whole}\n---`);
  }
  paragraphs.push(`The current text at {${slot}}: ${parent === "" ? "none" : quoted(parent)}`);
  for (const { example, feedback } of cases) {
    const fields = Object.entries(example).map(([name, text]) => `${name}: ${first(text)}`);
    paragraphs.push(`Example:\n${fields.join("\n")}\nResult: ${first(feedback)}`);
  }
  paragraphs.push(
    `Write one better text for {${slot}}. First find out why the wrong answers were wrong, then ` +
      "state the rule that would have prevented it, in general words. Copy no name, number, " +
      `address or phrase from the examples. It has at most ${MAX_PROPOSAL_CHARS} characters. ` +
      "Name a label only by its placeholder; use no other braces. Answer with a JSON array of " +
      "one string, and nothing else.",
  );
  return [
    ["system", SYSTEM],
    ["user", paragraphs.join("\n\n")],
  ];
}

/** The question that a task asks. */
export function askedOf(description: Description): string {
  const { question, aspect = "label" } = description;
  return question ?? `What is the ${aspect} of the ${kindOf(description)}?`;
}

/** The kind of example. */
export function kindOf({ text = "text" }: Description): string {
  return text;
}

/** The first characters of a text that the model reads, without half of a surrogate pair. */
function first(text: string): string {
  return text.length <= CASE_CHARS ? text : [...text].slice(0, CASE_CHARS).join("");
}

function quoted(text: string): string {
  return JSON.stringify(text.trim());
}

function placeholder(label: string): string {
  return `{label:${label}}`;
}

/**
 * Returns a usable new candidate in a model's answer, if there is one.
 *
 * @param known The slot's candidates.
 * @param labels The label values whose placeholders are allowed.
 */
export function readReflection(
  answer: string,
  known: readonly string[],
  labels: readonly string[],
): string | undefined {
  const [begin, end] = margins(known);
  const allowed = labels.map(placeholder);
  const seen = new Set(["", ...known.map(folded)]);
  for (const proposal of textsIn(answer.slice(0, MAX_ANSWER_CHARS))) {
    const core = proposal.replaceAll("\r\n", "\n").trim();
    const candidate = `${begin}${core}${end}`;
    const fits =
      [...candidate].length <= MAX_PROPOSAL_CHARS &&
      !seen.has(folded(core)) &&
      !/[^\P{C}\n\u200c\u200d]|[\p{Zl}\p{Zp}]/u.test(core) &&
      !/[{}]/.test(withoutAny(core, allowed)) &&
      // Any candidate may come before and after this one.
      [candidate, ...known].every((one) => !hasSpecialToken(`${one}${candidate}${one}`));
    if (fits) return candidate;
  }
  return undefined;
}

/** Removes parts from a text. */
function withoutAny(text: string, parts: readonly string[]): string {
  let kept = "";
  for (let at = 0; at < text.length;) {
    const part = parts.find((one) => text.startsWith(one, at));
    kept += part === undefined ? text[at] : "";
    at += part?.length ?? 1;
  }
  return kept;
}

/** The white space with which all candidates start and end. */
function margins(known: readonly string[]): [string, string] {
  const texts = known.filter((text) => text.trim() !== "");
  const common = (found: string[]) => (new Set(found).size === 1 ? found[0]! : "");
  return [
    common(texts.map((text) => text.slice(0, text.length - text.trimStart().length))),
    common(texts.map((text) => text.slice(text.trimEnd().length))),
  ];
}

function folded(text: string): string {
  return caseless(text.split(/\s+/).filter(Boolean).join(" "));
}

/** A text without case, like Python's `casefold`. */
function caseless(text: string): string {
  return text.toUpperCase().toLowerCase().replaceAll("ς", "σ");
}

/** The texts in a model's answer: the longest array of strings, or the marked lines. */
function textsIn(text: string): string[] {
  let longest: string[] = [];
  let at = -1;
  for (let count = 0; count < MAX_ARRAYS; count++) {
    at = text.indexOf("[", at + 1);
    if (at < 0) break;
    const end = arrayEnd(text, at);
    const whole = stringsOf(text.slice(at, end));
    const strings = whole ?? cutOff(text.slice(at + 1));
    if (strings.length >= longest.length) longest = strings;
    if (whole) at = end - 1;
  }
  return longest.length > 0 ? longest : markedLines(text);
}

/** Returns the end of the array that starts at `at`. */
function arrayEnd(text: string, at: number): number {
  let depth = 0;
  for (const { 0: token, index } of text.slice(at).matchAll(/"(?:[^"\\]|\\.)*"|[[\]{}]/gs)) {
    if (token === "[" || token === "{") depth++;
    else if (token === "]" || token === "}") depth--;
    if (depth === 0) return at + index + 1;
  }
  return text.length;
}

/** The strings of an array, and the first string of each of its objects; else undefined. */
function stringsOf(text: string): string[] | undefined {
  const value = parsed(text);
  if (!Array.isArray(value)) return undefined;
  return value.flatMap((item: unknown) => {
    if (typeof item === "string") return [item];
    const values = item !== null && typeof item === "object" ? Object.values(item) : [];
    return values.filter((one): one is string => typeof one === "string").slice(0, 1);
  });
}

/** Parses JSON whose strings may contain line feeds, as models write it; undefined if invalid. */
function parsed(text: string): unknown {
  const escaped = text.replace(/"(?:[^"\\]|\\.)*"/gs, (string) =>
    string.replace(/[\u0000-\u001f]/g, (one) => JSON.stringify(one).slice(1, -1)),
  );
  try {
    return JSON.parse(escaped);
  } catch {
    return undefined;
  }
}

/** The complete strings of an array without an end. */
function cutOff(text: string): string[] {
  const found: string[] = [];
  const item = /\s*("(?:[^"\\]|\\.)*")\s*(?:,|\]|$)/gsy;
  for (let match = item.exec(text); match; match = item.exec(text)) {
    const value = parsed(match[1]!);
    if (typeof value !== "string") break;
    found.push(value);
  }
  return found;
}

function markedLines(text: string): string[] {
  const found: string[] = [];
  for (const line of text.split(/\r\n|[\n\v\f\r\x1c-\x1e\x85\u2028\u2029]/)) {
    const match = /^[ \t]*(?:\p{Nd}{1,3}[.):]|[-*\u2022])[ \t]+(\S.*)$/u.exec(line);
    if (!match) continue;
    const item = match[1]!.trim().replace(/,$/, "");
    const isQuoted =
      /^(".*"|'.*'|`.*`|\u201c.*\u201d|\u2018.*\u2019)$/su.test(item) && item.length > 1;
    found.push(isQuoted ? item.slice(1, -1) : item);
  }
  return found;
}

/** Letters of scripts without spaces between words; each counts as a word. */
const ALONE = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff";
const WORD = new RegExp(`[${ALONE}]|(?:(?![${ALONE}])[\\p{L}\\p{N}_])+`, "gu");
const ADDRESS =
  /[\p{L}\p{N}_.+-]+@[\p{L}\p{N}_.-]*[\p{L}\p{N}_]|(?:[\p{L}\p{N}_-]+\.)+[\p{L}\p{N}_]{2,}(?:\/[^\s"')>]*)?/gu;
const NUMBER = /\p{Nd}+/gu;
const IN_NUMBER = /(?<=\p{Nd})[ .,'/:-](?=\p{Nd})/gu;

/** The parts that two texts can share, without case. */
interface Read {
  readonly text: string;
  readonly phrases: ReadonlySet<string>;
  readonly numbers: ReadonlySet<string>;
  readonly addresses: ReadonlySet<string>;
  readonly capital: ReadonlySet<string>;
  readonly lower: ReadonlySet<string>;
}

function read(given: string): Read {
  const text = given.normalize("NFKC");
  const words = text.match(WORD) ?? [];
  const plain = caseless(text);
  const folds = words.map(caseless);
  const ends = folds.slice(SHARED_WORDS - 1).map((_, start) => start);
  const isCapital = (word: string): boolean => /^\p{Uppercase}/u.test(word);
  return {
    text: plain,
    phrases: new Set(ends.map((start) => folds.slice(start, start + SHARED_WORDS).join(" "))),
    numbers: new Set([
      ...(text.match(NUMBER) ?? []),
      ...(text.replace(IN_NUMBER, "").match(NUMBER) ?? []),
    ]),
    addresses: new Set(plain.match(ADDRESS) ?? []),
    capital: new Set(words.filter(isCapital).map(caseless)),
    lower: new Set(words.filter((word) => !isCapital(word))),
  };
}

/**
 * Returns which kind of private part a text shares with rows; undefined if it shares none.
 *
 * Private parts are 5 consecutive words of a row, numbers, addresses, and names (words that the
 * rows write only with a capital). Parts of public texts are allowed. This is a filter, not
 * differential privacy: a model can express the same information in other words.
 */
export function quotes(
  text: string,
  rows: Iterable<string>,
  publicTexts: readonly string[],
): "words" | "number" | "address" | "name" | undefined {
  const known = read(publicTexts.join("\n"));
  const mine = read(text);
  const own = (what: "phrases" | "numbers" | "addresses") =>
    [...mine[what]].filter((one) => !known[what].has(one));
  const [phrases, numbers, addresses] = [own("phrases"), own("numbers"), own("addresses")];
  const seen = new Set<string>();
  const lower = new Set<string>();
  for (const each of rows) {
    const row = read(each);
    if (phrases.some((one) => row.phrases.has(one))) return "words";
    if (numbers.some((one) => row.numbers.has(one))) return "number";
    if (addresses.some((one) => row.text.includes(one))) return "address";
    for (const word of mine.capital) if (row.capital.has(word)) seen.add(word);
    for (const word of row.lower) lower.add(word);
  }
  const isPublic = (word: string): boolean =>
    lower.has(word) || known.lower.has(word) || known.capital.has(word);
  return [...seen].every(isPublic) ? undefined : "name";
}
