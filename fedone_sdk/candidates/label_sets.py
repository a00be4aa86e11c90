"""Sets of label words: the candidates of the reserved slot ``labels``."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Annotated, Literal

from pydantic import Field

from fedone_sdk import assets
from fedone_sdk._values import Frozen
from fedone_sdk.errors import SpecError
from fedone_sdk.task import LabelValue

_MAX_WORD_CHARS = 200

LabelSet = dict[LabelValue, str] | tuple[str, ...]
"""One label word per class: words by label value, or words in the task's label order."""


class LabelsSource(Frozen):
    """Sets of label words, including the task's own; for the reserved slot ``labels``.

    Attributes:
        sets: Sets besides the task's own; if empty, sets that ship with the SDK are used.
    """

    kind: Literal["labels"] = "labels"
    sets: Annotated[tuple[LabelSet, ...], Field(max_length=1024)] = ()


def label_candidates(
    task_labels: Mapping[str, str], sets: Iterable[LabelSet] = ()
) -> tuple[str, ...]:
    """Return the candidates of the slot ``labels``.

    Args:
        task_labels: The task's own label words, by label value.
        sets: Other sets. In a task without a chat, their words are used as they are, so they must
            begin with a space. If `sets` is empty, `shipped_label_sets` is used.

    Returns:
        Unique JSON arrays of words in the task's label order; the first array has the task's words.

    Raises:
        SpecError: A set does not fit the task, or the task's words are the only set.
    """
    problems = []
    candidates = [_candidate(task_labels, task_labels)]
    for number, words in enumerate([*sets] or shipped_label_sets(task_labels), 1):
        try:
            candidates.append(_candidate(task_labels, words))
        except ValueError as exc:
            problems.append(f"sets: number {number}: {exc}")
    if problems:
        raise SpecError(problems)
    unique = tuple(dict.fromkeys(candidates))
    if len(unique) < 2:
        task_words = ", ".join(map(repr, task_labels.values()))
        raise SpecError(
            "sets: needs sets of label words, one word per label "
            f"({', '.join(task_labels)}), in addition to the task's {task_words}"
        )
    return unique


def shipped_label_sets(task_labels: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    """Return the sets of label words, shipped with the SDK, that can replace the task's words.

    The sets are grouped into families. The result is the family in which one set has the task's
    words, in any order; it is empty if there is none. The words of each set are in the task's label
    order, with capitals and leading spaces as in the task's words.
    """
    task_words = [word.strip().casefold() for word in task_labels.values()]
    space = " " if all(word[:1].isspace() for word in task_labels.values()) else ""
    capital = all(word.strip()[:1].isupper() for word in task_labels.values())
    for family in label_families():
        for words in family:
            if sorted(words) == sorted(task_words):
                order = [words.index(word) for word in task_words]
                spelled = str.capitalize if capital else str
                return tuple(tuple(space + spelled(each[i]) for i in order) for each in family)
    return ()


@cache
def label_families() -> tuple[list[list[str]], ...]:
    """Return the shipped sets; a family has the sets for one kind of task."""
    return tuple(tomllib.loads(assets.path("label_sets.toml").read_text("utf-8")).values())


def label_words(candidate: str, count: int | None = None) -> tuple[str, ...]:
    """Return the label words of a candidate of the slot ``labels``, and check their number."""
    try:
        words = json.loads(candidate)
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"not a JSON array of label words: {exc}") from exc
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"not a JSON array of label words: {candidate:.80}")
    _check(words, count)
    return tuple(words)


def _candidate(task_labels: Mapping[str, str], words: LabelSet | Mapping[str, str]) -> str:
    if isinstance(words, Mapping):
        if set(words) != set(task_labels):
            raise ValueError(
                f"has words for the labels {', '.join(words)}; "
                f"the task has the labels {', '.join(task_labels)}"
            )
        words = tuple(words[label] for label in task_labels)
    _check(words, len(task_labels))
    return json.dumps(words, ensure_ascii=False)


def _check(words: Sequence[str], count: int | None) -> None:
    if len(words) != (count or max(2, len(words))):
        raise ValueError(f"has {len(words)} label words, needs {count or 'at least 2'}")
    for word in words:
        if not word.strip():
            raise ValueError(f"label word {word!r} is blank")
        if len(word) > _MAX_WORD_CHARS:
            raise ValueError(f"label word {word:.20}... has more than {_MAX_WORD_CHARS} characters")
        if not word.isprintable():
            raise ValueError(f"label word {word!r} has an unprintable character")
    # In a chat the SDK adds leading spaces, so words must differ without them.
    if len({word.strip() for word in words}) < len(words):
        raise ValueError(f"two labels share one label word: {', '.join(map(repr, words))}")
