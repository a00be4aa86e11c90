"""Instructions that ship with the SDK, and explanations of label words that are codes."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import chain, zip_longest
from typing import Annotated, Literal

from pydantic import Field

from fedone_sdk import assets
from fedone_sdk._values import Frozen
from fedone_sdk.candidates.placeholders import label_placeholder
from fedone_sdk.task import Description

_NAME = re.compile(r"[^\W_]+")
_WORDS = re.compile(r"\{(\w+)\}")
_VOWEL = re.compile(r"(?!uni|use|usu|eu|one\b|once)[aeiou]|hour|honest|heir", re.IGNORECASE)
"""Matches the beginning of a word that needs the article "an"."""


class InstructionsSource(Frozen):
    """Texts that the SDK writes for a task.

    Attributes:
        kind: ``instructions`` ship with the SDK and are filled from the task's description.
            ``codes`` explain label words that are codes, such as `` A``, `` B``: they say which
            label value each code stands for.
        size: The largest number of candidates, including a blank; null uses all. The first
            candidates differ most from each other.
    """

    kind: Literal["instructions", "codes"] = "instructions"
    size: Annotated[int, Field(ge=2)] | None = None


def instruction_candidates(
    *, description: Description, labels: Iterable[str], size: int | None = None
) -> tuple[str, ...]:
    """Return the blank candidate and the shipped instructions, filled with a task's description.

    Instructions alternate between styles and end with a line feed. In place of label words they
    have placeholders (`fill`). If the task has no labels, instructions that list them are omitted.
    """
    placeholders = [label_placeholder(label) for label in labels]
    words = {
        "text": description.text,
        "a_text": f"{'an' if _VOWEL.match(description.text) else 'a'} {description.text}",
        "aspect": description.aspect,
        "question": description.asked,
    }
    words |= {name.capitalize(): word[0].upper() + word[1:] for name, word in words.items()}
    if placeholders:
        words["labels_or"] = _listed(placeholders, "or")
        words["labels_and"] = _listed(placeholders, "and")
    filled = (
        _WORDS.sub(lambda match: words[match[1]], phrasing)
        for phrasing in _phrasings()
        if placeholders or "{labels_" not in phrasing
    )
    return tuple(dict.fromkeys(["", *(f"{line}\n" for line in filled)]))[:size]


def code_candidates(names: Mapping[str, str]) -> tuple[str, ...]:
    """Return texts that explain label words that are codes; `names` maps label values to names."""
    plain = {label_placeholder(key): " ".join(_NAME.findall(name)) for key, name in names.items()}
    listed = _listed([f"{code} for {name}" for code, name in plain.items()], "or")
    lines = "".join(f"{code}: {name}\n" for code, name in plain.items())
    return (lines, f"Answer {listed}.\n", f"Answer with the code:\n{lines}")


@cache
def _phrasings() -> tuple[str, ...]:
    styles = tomllib.loads(assets.path("instructions.toml").read_text(encoding="utf-8"))
    in_turn = chain.from_iterable(zip_longest(*styles.values()))
    return tuple(phrasing for phrasing in in_turn if phrasing is not None)


def _listed(words: Sequence[str], conjunction: str) -> str:
    *others, last = words
    return f"{', '.join(others)} {conjunction} {last}" if others else last
