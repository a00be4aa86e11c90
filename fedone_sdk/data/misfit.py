"""Whether a task can be put to a row, and why not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fedone_sdk.task import Example, TaskSpec, label_index

_MAX_LABEL_CHARS = 40
_MAX_LABELS = 20
"""A field with more values than this holds something else than labels."""


@dataclass(frozen=True, slots=True)
class Misfit:
    """What keeps a task from being put to a row.

    Attributes:
        shown: What is wrong with it, for those whose row it is.
    """

    field: str
    problem: str
    shown: str
    label: object = None

    def __str__(self) -> str:
        return f"field {self.field!r} {self.shown}"


def misfit_of(task: TaskSpec, row: Example, *, most_chars: int | None = None) -> Misfit | None:
    """Return the first reason why a task cannot be put to a row; None where it can.

    Labels are compared by `label_index`. `most_chars` bounds texts.
    """
    for field in task.fields:
        if found := _text_misfit(row, field, most_chars):
            return found
    if task.loss == "score":  # A score function of the user's own takes what it likes.
        return None
    field = task.label_field
    if task.generates:
        found = _text_misfit(row, field, most_chars)
        if found or row[field]:
            return found
        return _same(field, "is empty; a reference text has at least one character")
    if field not in row:
        return _missing(row, field)
    label = row[field]
    if label_index(task, label) is not None:
        return None
    allowed = ", ".join(task.labels)
    return Misfit(
        field, f"is none of: {allowed}", f"is {label!r:.80}, not one of: {allowed}", label
    )


def _text_misfit(row: Example, field: str, most_chars: int | None) -> Misfit | None:
    if field not in row:
        return _missing(row, field)
    problem = text_problem(row[field], most_chars)
    return None if problem is None else _same(field, problem)


def text_problem(value: object, most_chars: int | None) -> str | None:
    """Return why a value is not a text that a message and a tokenizer take; None if it is one."""
    if not isinstance(value, str):
        return f"is {type(value).__name__}; it must be text"
    if most_chars is not None and len(value) > most_chars:
        return f"has more than {most_chars} characters"
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can spell it, no tokenizer can take it
        return "has half of a surrogate pair; it must be valid Unicode text"
    return None


def _same(field: str, problem: str) -> Misfit:
    return Misfit(field, problem, problem)


def _missing(row: Example, field: str) -> Misfit:
    has = ", ".join(map(str, row)) or "nothing"
    return Misfit(field, "is missing", f"is missing (the row has: {has})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """How many rows fit a task.

    Attributes:
        reason: Why most of the others do not fit, for the owner of the rows; None if all fit.
        public_reason: The same for the server: the only quotation is a label that occurs in
            several rows and looks like one.
    """

    total: int
    fit: int
    reason: str | None
    public_reason: str | None

    @classmethod
    def of(
        cls,
        task: TaskSpec,
        rows: Iterable[Example],
        *,
        most_chars: int | None = None,
        quotes: bool = True,
    ) -> Rows:
        """Compare rows with a task; without `quotes`, `public_reason` quotes no label."""
        total, problems, labels = 0, Counter[tuple[str, str]](), Counter[str]()
        first: dict[tuple[str, str], Misfit] = {}
        shown: dict[str, Misfit] = {}
        for row in rows:
            total += 1
            found = misfit_of(task, row, most_chars=most_chars)
            if found is None:
                continue
            kind = found.field, found.problem
            problems[kind] += 1
            first.setdefault(kind, found)
            if found.label is not None:
                text = str(found.label)
                labels[text] += 1
                shown.setdefault(text, found)
        if not problems:
            return cls(total=total, fit=total, reason=None, public_reason=None)
        ((kind, _),) = problems.most_common(1)
        misfit, public_reason = first[kind], f"field {kind[0]!r} {kind[1]}"
        if misfit.label is not None:
            ((text, count),) = labels.most_common(1)
            misfit = shown[text]
            looks_like_one = len(text) <= _MAX_LABEL_CHARS and len(labels) <= _MAX_LABELS
            if quotes and count > 1 and looks_like_one:
                public_reason = str(misfit)
        fit = total - problems.total()
        return cls(total=total, fit=fit, reason=str(misfit), public_reason=public_reason)
