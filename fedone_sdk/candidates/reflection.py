"""Reflection: messages about wrongly answered examples, and filters of the model's answer.

A model reads wrong answers and rewrites one slot of the prompt, as in GEPA (Agrawal et al. 2025,
"GEPA: Reflective Prompt Evolution Can Outperform Reinforcement Learning").
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Self

from fedone_sdk.candidates.proposals import quoted, read_proposals, task_paragraphs
from fedone_sdk.task import Description, Role, TaskSpec
from fedone_sdk.vocabulary import MAX_PROPOSAL_CHARS

_SYSTEM = (
    "You improve one part of a prompt. A language model reads the prompt together with a text and "
    "answers. You see texts with the expected answer and the answer that was given."
)

_MERGES = (
    "You merge several texts for one part of a prompt into one. A language model reads the prompt "
    "together with a text and answers."
)

_FORM = (
    f"It has at most {MAX_PROPOSAL_CHARS} characters. Name a label only by its placeholder; use no "
    "other braces. Answer with a JSON array of one string, and nothing else."
)

_SHARED_WORDS = 5
"""A proposal must not share this many consecutive words with a row of data."""

_CASE_CHARS = 2000
"""The model is shown at most this many characters of each field, and of the feedback."""

_ALONE = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
"""Letters of scripts without spaces between words; each letter counts as a word."""

_WORD = re.compile(rf"[{_ALONE}]|[^\W{_ALONE}]+")
_ADDRESS = re.compile(r"[\w.+-]+@[\w.-]*\w|(?:[\w-]+\.)+\w{2,}(?:/[^\s\"')>]*)?")
_NUMBER = re.compile(r"\d+")
_IN_NUMBER = re.compile(r"(?<=\d)[ .,'/:-](?=\d)")


def reflection_messages(
    task: TaskSpec, slot: str, parent: str, cases: Iterable[tuple[Mapping[str, str], str]]
) -> list[tuple[Role, str]]:
    """Return messages that ask a model for a better text of a slot than `parent`.

    A case has the fields of an example and the feedback on the model's answer (`losses.feedback`).
    """
    paragraphs = _task(task, slot)
    paragraphs.append(f"The current text at {{{slot}}}: {quoted(parent) if parent else 'none'}")
    for fields, result in cases:
        lines = "\n".join(f"{name}: {text[:_CASE_CHARS]}" for name, text in fields.items())
        paragraphs.append(f"Example:\n{lines}\nResult: {result[:_CASE_CHARS]}")
    paragraphs.append(
        f"Write one better text for {{{slot}}}. First find out why the wrong answers were wrong, "
        "then state the rule that would have prevented it, in general words. Copy no name, number, "
        f"address or phrase from the examples. {_FORM}"
    )
    return [("system", _SYSTEM), ("user", "\n\n".join(paragraphs))]


def merge_messages(task: TaskSpec, slot: str, texts: Sequence[str]) -> list[tuple[Role, str]]:
    """Return messages that ask a model to merge texts, each of which is best for some clients.

    `texts` are sorted: the first is best for the most clients, the last for the fewest.
    """
    listed = "\n".join(f"- {quoted(text)}" for text in texts)
    paragraphs = [
        *_task(task, slot),
        f"Each of these texts at {{{slot}}} is best for some of the users, the first one for most "
        f"of them:\n{listed}",
        f"Write one text for {{{slot}}} that is good for all of them. Keep each rule that helps; "
        f"where two contradict each other, keep the one of the earlier text. {_FORM}",
    ]
    return [("system", _MERGES), ("user", "\n\n".join(paragraphs))]


def _task(task: TaskSpec, slot: str) -> list[str]:
    description = task.description or Description()
    return task_paragraphs(description, task.labels, task.messages, slot)


def read_reflection(answer: str, *, known: Sequence[str], labels: Iterable[str]) -> str | None:
    """Return the new candidate in a model's answer (`read_proposals`); None if there is none."""
    proposals = read_proposals(answer, known=known, count=1, labels=labels)
    return proposals[0] if proposals else None


def copied_part(text: str, rows: Iterable[str], public: Iterable[str]) -> str | None:
    """Return a description of what a text copies from private rows; None if it copies nothing.

    A copy is 5 consecutive words, a number, an address or a name that occurs in a row and in no
    public text. A name is a word that always has a capital letter in the rows. This filter does not
    give differential privacy: a model can describe a row in other words.

    Args:
        text: A proposed candidate.
        rows: The private texts.
        public: Texts that are not private, such as the other candidates.
    """
    known = _Parts.of("\n".join(public))
    proposed = _Parts.of(text)
    phrases = proposed.phrases - known.phrases
    capital, lower = set[str](), set[str]()
    for row in rows:
        private = _Parts.of(row)
        addresses = proposed.addresses - known.addresses
        for what, shared in (
            ("the words", phrases & private.phrases),
            ("the number", (proposed.numbers & private.numbers) - known.numbers),
            ("the address", {address for address in addresses if address in private.text}),
        ):
            if shared:
                return f"{what} {min(shared)!r}"
        capital |= proposed.capital & private.capital
        lower |= private.lower
    names = capital - lower - known.lower - known.capital
    return f"the name {min(names)!r}" if names else None


class _Parts(NamedTuple):
    """The parts of a text that are compared, in lower case."""

    text: str
    phrases: set[str]
    numbers: set[str]
    addresses: set[str]
    capital: set[str]
    lower: set[str]

    @classmethod
    def of(cls, text: str) -> Self:
        text = unicodedata.normalize("NFKC", text)
        words = _WORD.findall(text)
        folded = [word.casefold() for word in words]
        ends = range(_SHARED_WORDS, len(words) + 1)
        plain = text.casefold()
        return cls(
            text=plain,
            phrases={" ".join(folded[end - _SHARED_WORDS : end]) for end in ends},
            numbers={*_NUMBER.findall(text), *_NUMBER.findall(_IN_NUMBER.sub("", text))},
            addresses={*_ADDRESS.findall(plain)},
            capital={word.casefold() for word in words if word[0].isupper()},
            lower={word for word in words if not word[0].isupper()},
        )
