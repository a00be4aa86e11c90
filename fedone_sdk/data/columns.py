"""Finds a table's columns of texts and labels, and splits its labelled rows (`fedone init`)."""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedone_sdk.data.row_checks import text_problem
from fedone_sdk.errors import DataError
from fedone_sdk.task import label_key

_Rows = Sequence[Mapping[str, Any]]

_TEXT_NAMES = (
    *("text", "sentence", "message", "body", "content", "review", "question", "comment", "tweet"),
    *("utterance", "description", "title", "v2"),
)
_LABEL_NAMES = (
    *("label", "class", "category", "target", "intent", "sentiment", "topic", "priority"),
    *("emotion", "tag", "type", "rating", "stars", "y", "v1"),
)
NAMES = {*_TEXT_NAMES, *_LABEL_NAMES}
"""The usual names of columns with texts or labels."""

MAX_LABELS = 64
MAX_LABEL_CHARS = 60
_MIN_ROWS = 3
"""Number of rows that a label needs: one each for the training, dev and public split."""

_MIN_LABELLED = 0.5
_DEV_SHARE, _MIN_DEV, _MAX_DEV, _MOST_DEV = 0.2, 150, 400, 0.4
_PUBLIC_SHARE, _MAX_PUBLIC = 0.1, 64


def columns_of(rows: _Rows) -> list[str]:
    """Return the columns of all rows."""
    return [*dict.fromkeys(name for row in rows for name in row)]


def label_columns(rows: _Rows) -> list[str]:
    """Return the columns that may hold labels, the likeliest first.

    Labels are short texts or numbers. A column has 2 to 64 different labels, with at least two rows
    per label on average. Up to half of the rows may lack a label. Words come before codes.
    """
    values = {name: [label_text(row.get(name)) for row in rows] for name in columns_of(rows)}
    keys = {
        name: {label_key(label) for label in column if label} for name, column in values.items()
    }
    most = min(MAX_LABELS, max(len(rows) // 2, 2))
    columns = [
        name
        for name, column in values.items()
        if 2 <= len(keys[name]) <= most
        and all(len(key) <= MAX_LABEL_CHARS for key in keys[name])
        and sum(map(bool, column)) >= _MIN_LABELLED * len(rows)
    ]
    if not columns:
        counts = ", ".join(f"{name!r} has {len(labels)}" for name, labels in keys.items())
        raise DataError(
            f"no column can be the label: a column with 2 to {most} different values of at most "
            f"{MAX_LABEL_CHARS} characters in at least half of the rows is needed ({counts})"
        )

    def order(name: str) -> tuple[int, bool, int]:
        has_codes = not all(re.search(r"[^\W\d_]{2}", key) for key in keys[name])
        return _rank(name, _LABEL_NAMES), has_codes, len(keys[name])

    columns.sort(key=order)
    # If another column has the same classes as words instead of codes, it comes first.
    same = [name for name in columns[1:] if _same_classes(values[columns[0]], values[name])]
    best = min((columns[0], *same), key=lambda name: order(name)[1])
    return [best, *(name for name in columns if name != best)]


def _same_classes(first: Sequence[str], second: Sequence[str]) -> bool:
    return len({*zip(first, second, strict=True)}) == len({*first}) == len({*second})


def text_columns(rows: _Rows, label: str) -> list[str]:
    """Return the columns that may hold the texts, the likeliest first."""
    sizes = {
        name: sum(map(len, texts))
        for name in columns_of(rows)
        if name != label
        and (texts := [text for row in rows if isinstance(text := row.get(name), str)])
    }
    columns = [name for name, size in sizes.items() if size]
    if not columns:
        raise DataError(f"no column except the label column {label!r} has texts")
    # The name decides only between columns with texts of a similar length.
    bar = max(sizes.values()) / 4
    return sorted(
        columns,
        key=lambda name: (_rank(name, _TEXT_NAMES) if sizes[name] >= bar else 99, -sizes[name]),
    )


class Labelled(NamedTuple):
    """The usable rows of a table.

    Attributes:
        rows: The text and the label of each row, with one spelling per label.
        notes: Sentences about rows that were left out, and about labels that were changed.
    """

    rows: list[dict[str, str]]
    notes: list[str]


def labelled(rows: _Rows, text: str, label: str) -> Labelled:
    """Return the rows that have a text and a label.

    Raises:
        DataError: Fewer than 2 labels have enough rows, or more than 64 do.
    """
    notes: list[str] = []
    usable = []
    for row in rows:
        words, value = row.get(text, ""), label_text(row.get(label))
        if text_problem(words) is None and words.strip() and value:
            usable.append({"text": words, "label": value})
    if lacking := len(rows) - len(usable):
        notes.append(f"{lacking} of {len(rows)} rows lack a text or a label and are left out")
    # The same row in the training and the dev split would make a prompt look better than it is.
    distinct = {(row["text"], label_key(row["label"])): row for row in usable}
    if repeated := len(usable) - len(distinct):
        notes.append(f"{repeated} of {len(rows)} rows repeat another row and are left out")
    usable = [*distinct.values()]
    spellings = defaultdict[str, Counter[str]](Counter)
    for row in usable:
        spellings[label_key(row["label"])][row["label"]] += 1
    spelled = {key: counts.most_common(1)[0][0] for key, counts in spellings.items()}
    for key, counts in spellings.items():
        if len(counts) > 1:
            notes.append(f"labels {', '.join(map(repr, sorted(counts)))} become {spelled[key]!r}")
    rare = [key for key, counts in spellings.items() if counts.total() < _MIN_ROWS]
    if rare:
        names = ", ".join(repr(spelled[key]) for key in rare[:5])
        names += f", and {len(rare) - 5} more" if len(rare) > 5 else ""
        notes.append(f"labels with fewer than {_MIN_ROWS} rows are left out: {names}")
    kept = [
        {**row, "label": spelled[key]}
        for row in usable
        if (key := label_key(row["label"])) not in rare
    ]
    count = len(spellings) - len(rare)
    if not 2 <= count <= MAX_LABELS:
        raise DataError(
            f"column {label!r} has {count} labels with {_MIN_ROWS} rows or more; "
            f"2 to {MAX_LABELS} are needed{''.join(f'; {note}' for note in notes)}"
        )
    return Labelled(kept, notes)


class Splits(NamedTuple):
    """Rows for training, rows for evaluation only, and rows that become public."""

    train: list[dict[str, str]]
    dev: list[dict[str, str]]
    public: list[dict[str, str]]


def split(rows: Sequence[dict[str, str]]) -> Splits:
    """Split rows into three parts; each part has all labels, in about the same shares.

    The dev split has a fifth of the rows: at least 150, at most 400, and never more than two fifths
    of the rows. The public part has a tenth of the rows, at most 64.
    """
    by_label = defaultdict[str, list[int]](list)
    for number, row in enumerate(rows):
        by_label[row["label"]].append(number)
    total = len(rows)
    dev = min(max(_DEV_SHARE * total, _MIN_DEV), _MAX_DEV, _MOST_DEV * total)
    public = min(_PUBLIC_SHARE * total, _MAX_PUBLIC)
    draw = random.Random(0)
    part = dict[int, int]()
    for numbers in by_label.values():
        order = draw.sample(numbers, len(numbers))
        share = len(numbers) / total
        num_dev = min(max(1, round(dev * share)), len(numbers) - 2)
        num_public = min(max(2, round(public * share)), max(1, (len(numbers) - num_dev) // 2))
        part |= dict.fromkeys(order[:num_dev], 1)
        part |= dict.fromkeys(order[num_dev : num_dev + num_public], 2)
    parts = Splits([], [], [])
    for number, row in enumerate(rows):
        parts[part.get(number, 0)].append(row)
    return parts


def label_text(value: Any) -> str:
    """Return a cell as the text of a label; empty for a cell without a label."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None or isinstance(value, dict | list) or value != value:
        return ""
    return str(value).strip()


def _rank(name: str, known: Sequence[str]) -> int:
    words = re.split(r"[\W_]+", name.casefold())
    ranks = [known.index(word) for word in (*words, name.casefold().rstrip("s")) if word in known]
    return min(ranks, default=len(known)) * 2 + (len(words) > 1)
