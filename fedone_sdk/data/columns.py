"""A table of which nothing is known: which columns hold texts and labels, and a dev set of it."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from fedone_sdk.errors import DataError

_TEXT_NAMES = ("text", "sentence", "message", "body", "content", "review", "question", "comment")
_LABEL_NAMES = ("label", "class", "category", "target", "intent", "sentiment", "topic", "priority")
_MAX_LABELS = 50
_MAX_LABEL_CHARS = 60


def label_columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the columns that may hold labels, the likeliest first.

    A label is a short text or a number, of 2 to 50 kinds, each in two rows on average.
    """
    kinds = {name: {_as_text(row.get(name)) for row in rows} for name in rows[0]}
    most = min(_MAX_LABELS, max(len(rows) // 2, 2))
    found = [
        name
        for name, values in kinds.items()
        if 2 <= len(values) <= most and all(v and len(v) <= _MAX_LABEL_CHARS for v in values)
    ]
    if not found:
        raise DataError(
            f"no column can be the label ({', '.join(rows[0])}): one with 2 to {most} different "
            "short values is needed"
        )
    return sorted(found, key=lambda name: (_rank(name, _LABEL_NAMES), len(kinds[name])))


def text_columns(rows: Sequence[Mapping[str, Any]], label: str) -> list[str]:
    """Return the columns that may hold the texts, the likeliest first."""
    sizes = {
        name: sum(len(row[name]) for row in rows)
        for name in rows[0]
        if name != label and all(isinstance(row.get(name), str) for row in rows)
    }
    found = [name for name, size in sizes.items() if size]
    if not found:
        raise DataError(f"no column but the label {label!r} holds a text in every row")
    return sorted(found, key=lambda name: (_rank(name, _TEXT_NAMES), -sizes[name]))


def split_dev(
    rows: Sequence[Mapping[str, Any]], label: str, *, share: float, seed: int = 0
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Split a share of each label off, at least one row of each, in the order of the rows."""
    by_label = defaultdict[str, list[int]](list)
    for number, row in enumerate(rows):
        by_label[_as_text(row[label])].append(number)
    draw, held_out = random.Random(seed), set[int]()
    for value, numbers in by_label.items():
        if len(numbers) < 2:
            raise DataError(f"label {value!r} of column {label!r} has one row; two are needed")
        count = min(max(1, round(share * len(numbers))), len(numbers) - 1)
        held_out.update(draw.sample(numbers, count))
    train = [row for number, row in enumerate(rows) if number not in held_out]
    return train, [row for number, row in enumerate(rows) if number in held_out]


def _as_text(value: Any) -> str:
    return "" if value is None or isinstance(value, float | dict | list) else str(value)


def _rank(name: str, known: Sequence[str]) -> int:
    lowered = name.casefold().rstrip("s")
    return known.index(lowered) if lowered in known else len(known)
