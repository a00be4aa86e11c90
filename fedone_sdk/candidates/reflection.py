"""The text of a reflection: the messages about failed examples, and the filters of its answer.

A model reads why a prompt failed and rewrites one slot of it, as in GEPA (Agrawal et al. 2025,
"GEPA: Reflective Prompt Evolution Can Outperform Reinforcement Learning").
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence

from fedone_sdk.candidates.prompt import label_placeholder
from fedone_sdk.candidates.proposer import quoted, read_proposals, shape_of
from fedone_sdk.description import Description
from fedone_sdk.task import Role, TaskSpec
from fedone_sdk.vocabulary import MAX_PROPOSAL_CHARS

_SYSTEM = (
    "You improve one part of a prompt. A language model reads the prompt together with a text and "
    "answers. You see texts with the expected answer and the answer that was given."
)

_SHARED_WORDS = 5
"""Words in a row that a proposal must not share with a row."""

_CASE_CHARS = 2000
"""Characters of a text in a reflection: what decides is usually near its beginning."""

_WORD = re.compile(r"\w+(?:['\u2019]\w+)*")
_TOKEN = re.compile(r"\S+")
_PRIVATE = re.compile(r"\d|@|://|www\.")


def reflection_messages(
    task: TaskSpec, slot: str, parent: str, cases: Iterable[tuple[Mapping[str, str], str]]
) -> list[tuple[Role, str]]:
    """Return the messages that ask a model for a better text of a slot than `parent`.

    A case has the fields of an example, and what was expected and answered (`task.feedback`).
    """
    description = task.description or Description()
    paragraphs = [f"Task: {description.asked} Each text is a {description.text}."]
    if task.labels:
        named = (
            f"{label_placeholder(label)} = {quoted(word)}" for label, word in task.labels.items()
        )
        paragraphs.append(f"Labels, each with the placeholder for its word: {', '.join(named)}.")
    paragraphs += shape_of(task.messages, slot)
    paragraphs.append(f"The current text at {{{slot}}}: {quoted(parent) if parent else 'none'}")
    paragraphs += [f"Example:\n{_fields(fields)}\nResult: {result}" for fields, result in cases]
    paragraphs.append(
        f"Write one better text for {{{slot}}}. First find out why the wrong answers were wrong, "
        "then state the rule that would have prevented it, in general words. Copy no name, number, "
        f"address or phrase from the examples. It has at most {MAX_PROPOSAL_CHARS} characters. "
        "Name a label only by its placeholder; use no other braces. Answer with a JSON array of "
        "one string, and nothing else."
    )
    return [("system", _SYSTEM), ("user", "\n\n".join(paragraphs))]


def _fields(example: Mapping[str, str]) -> str:
    return "\n".join(f"{name}: {text[:_CASE_CHARS]}" for name, text in example.items())


def read_reflection(answer: str, *, known: Sequence[str], labels: Iterable[str]) -> str | None:
    """Return the new candidate in a model's answer, if there is one.

    `known` are the slot's candidates, `labels` the label values whose placeholders are allowed.
    """
    found = read_proposals(
        answer, known=known, count=1, max_chars=MAX_PROPOSAL_CHARS, labels=labels
    )
    return found[0] if found else None


def quotes(text: str, rows: Iterable[str], public: Iterable[str]) -> str | None:
    """Return what a text shares with private rows that no public text has; None for nothing.

    It must not share a run of 5 words with a row, nor a token with a digit, an address, or a name:
    a word that the rows write with a capital only. This hides no information that a model encodes
    in other words: it is a filter, not differential privacy.

    `public` are texts that everybody has, such as the other candidates.
    """
    words = _words(text)
    phrases = {
        _phrase(words[at : at + _SHARED_WORDS]) for at in range(len(words) - _SHARED_WORDS + 1)
    }
    known = _joined(public)
    phrases = {phrase for phrase in phrases if phrase not in known}
    tokens = {_bare(token) for token in _TOKEN.findall(_normal(text))}
    marked = {token for token in tokens if _PRIVATE.search(token)}
    capital = {word for word in _WORD.findall(_normal(text)) if word[:1].isupper()}
    lower, seen = set[str](), set[str]()
    for row in rows:
        normal = _normal(row)
        here = f" {' '.join(_words(row))} "
        if shared := next((phrase for phrase in phrases if phrase in here), None):
            return f"the words {shared.strip()!r}"
        of_row = {_bare(token) for token in _TOKEN.findall(normal)}
        if shared := next(
            (t for t in marked if t in of_row and f" {t.casefold()} " not in known), ""
        ):
            return f"{shared!r}"
        if capital:
            written = set(_WORD.findall(normal))
            seen |= capital & written
            lower |= {word for word in capital if word.lower() in written}
    names = sorted(word for word in seen - lower if f" {word.casefold()} " not in known)
    return f"the name {names[0]!r}" if names else None


def _normal(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


def _words(text: str) -> list[str]:
    return [word.casefold() for word in _WORD.findall(_normal(text))]


def _phrase(words: Sequence[str]) -> str:
    return f" {' '.join(words)} "


def _bare(token: str) -> str:
    return token.strip(".,;:!?()[]{}<>\"'\u2018\u2019\u201c\u201d")


def _joined(texts: Iterable[str]) -> str:
    """Return the words and the tokens of texts, to look phrases up."""
    parts = []
    for text in texts:
        parts.append(" ".join(_words(text)))
        parts.append(" ".join(_bare(token).casefold() for token in _TOKEN.findall(_normal(text))))
    return f" {' | '.join(parts)} "
