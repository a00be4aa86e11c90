"""New candidates from a language model: the messages to the model, and the parser of its answer.

The messages have candidates and their mean losses, never an example of a device. Candidates are
listed from the worst to the best, as in OPRO (Yang et al. 2024, "Large Language Models as
Optimizers"). The answer is untrusted text and is used only as candidates.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fedone_sdk.candidates.placeholders import label_placeholder
from fedone_sdk.scores import answer_in
from fedone_sdk.task import Description, Role, TaskSpec
from fedone_sdk.vocabulary import MAX_PROPOSAL_CHARS, special_token


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredCandidate:
    """A candidate with its mean loss over all queries whose prompt contains it, nats.

    Attributes:
        class_losses: The mean loss on the examples of each class, by label value.
    """

    text: str
    mean_loss: float
    class_losses: Mapping[str, float] = field(default_factory=dict)


_SHOWN = 5
"""Number of best and of worst candidates in the messages."""

_SYSTEM = (
    "You write candidates for one part of a prompt. A language model reads the prompt together "
    "with a text and gives the text a label. A candidate is judged by the model's mean loss over "
    "many labelled texts: lower is better."
)


def proposal_messages(
    task: TaskSpec, slot: str, scored: Iterable[ScoredCandidate], *, count: int
) -> list[tuple[Role, str]]:
    """Return messages that ask a model for `count` new candidates of a slot.

    The messages have at most the 5 best and the 5 worst of the scored candidates.
    """
    description, labels = task.description or Description(), task.labels
    paragraphs = task_paragraphs(description, labels, task.messages, slot)
    ranked = sorted(
        (candidate for candidate in scored if math.isfinite(candidate.mean_loss)),
        key=lambda candidate: (-candidate.mean_loss, candidate.text),
    )
    if len(ranked) > 2 * _SHOWN:
        ranked = [*ranked[:_SHOWN], *ranked[-_SHOWN:]]
    aim, advice = "", ""
    if ranked:
        aim = " that should have lower losses than these"
        advice = (
            "Find out what the good ones have in common and where the bad ones fail; where one "
            "class has a high loss, help that class. "
        )
        lines = "\n".join(_line(candidate, labels) for candidate in ranked)
        paragraphs.append(f"Candidates so far with their losses, the worst first:\n{lines}")
    rules = [
        f"Write {count} new candidates for {{{slot}}}{aim}.",
        f"{advice}Make the candidates differ from each other.",
        f"Each has at most {MAX_PROPOSAL_CHARS} characters.",
        "Name a label only by its placeholder; use no other braces."
        if labels
        else "Use no braces.",
        f"Answer with a JSON array of {count} strings, and nothing else.",
    ]
    return [("system", _SYSTEM), ("user", "\n\n".join([*paragraphs, " ".join(rules)]))]


def task_paragraphs(
    description: Description,
    labels: Mapping[str, str],
    messages: Iterable[tuple[Role | None, str]],
    slot: str,
) -> list[str]:
    """Return the paragraphs about a task: its question, its labels and its input."""
    paragraphs = [f"Task: {description.asked} Each text is a {description.text}."]
    if labels:
        named = (f"{label_placeholder(label)} = {quoted(word)}" for label, word in labels.items())
        paragraphs.append(f"Labels, each with the placeholder for its word: {', '.join(named)}.")
    if shape := "\n".join(f"[{role}] {text}" if role else text for role, text in messages if text):
        whole = f"The whole input; you write what stands at {{{slot}}}:\n---\n{shape}\n---"
        paragraphs.append(whole)
    return paragraphs


def _line(candidate: ScoredCandidate, labels: Mapping[str, str]) -> str:
    by_class = ", ".join(
        f"{labels[label].strip()} {loss:.3f}"
        for label, loss in candidate.class_losses.items()
        if label in labels and math.isfinite(loss)
    )
    losses = f"{candidate.mean_loss:.3f}" + (f" ({by_class})" if by_class else "")
    return f"- loss {losses}: {quoted(candidate.text)}"


def quoted(text: str) -> str:
    """Return a text in double quotes."""
    return json.dumps(text.strip(), ensure_ascii=False)


_MAX_ANSWER_CHARS = 100_000
_MAX_ARRAYS = 50

_DECODER = json.JSONDecoder(strict=False)  # Models often write line feeds within a string.
_ITEM = re.compile(r'\s*("(?:[^"\\]|\\.)*")\s*(?:,|\]|$)', re.DOTALL)
_MARKED = re.compile(r"[ \t]*(?:\d{1,3}[.):]|[-*\u2022])[ \t]+(\S.*)")
_QUOTES = ('""', "''", "``", "\u201c\u201d", "\u2018\u2019")
_JOINERS = "\u200c\u200d"  # Persian words and emoji contain these invisible characters.


def read_proposals(
    text: str, *, known: Collection[str], count: int, labels: Iterable[str] = ()
) -> tuple[str, ...]:
    """Return the new candidates in a model's answer.

    Args:
        text: The answer: a JSON array of strings, possibly truncated or within other text; or a
            numbered or bulleted list. Any other text gives no candidates.
        known: The slot's candidates. A text that differs from a known candidate only in case and
            white space is dropped. If all known candidates start or end with the same white space,
            new candidates get it too.
        count: The largest number to return.
        labels: The label values whose placeholders are allowed; a candidate with other braces is
            dropped.

    Returns:
        Unique candidates in the answer's order. A text is dropped if it is blank, has more than
        `MAX_PROPOSAL_CHARS` characters, has an invisible character, or contains a special token of
        a model (or would form one together with a candidate before or after it).
    """
    begin, end = _margins(known)
    placeholders = re.compile("|".join(re.escape(label_placeholder(key)) for key in labels) or "$^")
    seen = {_folded(candidate) for candidate in known}
    new: list[str] = []
    for proposal in texts_in(text):
        if len(new) == count:
            break
        core = proposal.replace("\r\n", "\n").strip()
        candidate = f"{begin}{core}{end}"
        if (
            len(candidate) > MAX_PROPOSAL_CHARS
            or _folded(core) in {"", *seen}
            or not _is_plain(core)
            or set("{}") & set(placeholders.sub("", core))
            # In a prompt, any candidate may be directly before or after this one.
            or any(special_token(f"{text}{candidate}{text}") for text in (candidate, *known, *new))
        ):
            continue
        seen.add(_folded(core))
        new.append(candidate)
    return tuple(new)


def _margins(known: Collection[str]) -> tuple[str, str]:
    texts = [candidate for candidate in known if candidate.strip()]
    begins = {text[: len(text) - len(text.lstrip())] for text in texts}
    ends = {text[len(text.rstrip()) :] for text in texts}
    return (begins.pop() if len(begins) == 1 else "", ends.pop() if len(ends) == 1 else "")


def _folded(text: str) -> str:
    return " ".join(text.split()).casefold()


def _is_plain(text: str) -> bool:
    return not any(
        unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
        for character in text
        if character != "\n" and character not in _JOINERS
    )


def texts_in(text: str) -> Sequence[str]:
    """Return all texts that a model's answer lists."""
    text = answer_in(text)[:_MAX_ANSWER_CHARS]
    longest: Sequence[str] = []
    for strings in _arrays(text):
        if len(strings) >= len(longest):
            longest = strings
    return longest or list(_marked_lines(text))


def _arrays(text: str) -> Iterator[list[str]]:
    at = -1
    for _ in range(_MAX_ARRAYS):
        at = text.find("[", at + 1)
        if at < 0:
            return
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            yield _cut_off(text, at + 1)
            continue
        yield [string for item in value for string in _strings(item)]
        at = end - 1


def _strings(item: object) -> Iterator[str]:
    if isinstance(item, str):
        yield item
    elif isinstance(item, dict):
        yield from [value for value in item.values() if isinstance(value, str)][:1]


def _cut_off(text: str, at: int) -> list[str]:
    items = []
    while match := _ITEM.match(text, at):
        try:
            items.append(_DECODER.decode(match[1]))
        except ValueError:
            break
        at = match.end()
    return items


def _marked_lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if match := _MARKED.fullmatch(line):
            item = match[1].strip().removesuffix(",")
            quoted = len(item) > 1 and item[0] + item[-1] in _QUOTES
            yield item[1:-1] if quoted else item
