"""Whether a task can be put to a row, and why not."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fedone_sdk.task import Example, TaskSpec, label_index, label_key


@dataclass(frozen=True, slots=True)
class Misfit:
    """What keeps a task from being put to a row.

    Attributes:
        problem: What is wrong, without a value of the row.
        shown: What is wrong, for those whose row it is; empty for the same.
    """

    field: str
    problem: str
    shown: str = ""

    def __str__(self) -> str:
        return f"field {self.field!r} {self.shown or self.problem}"

    @property
    def kind(self) -> str:
        """The misfit without a value of the row."""
        return f"field {self.field!r} {self.problem}"


def misfit_of(task: TaskSpec, row: Example, *, most_chars: int | None = None) -> Misfit | None:
    """Return the first reason why a task cannot be put to a row; None where it can.

    Labels are compared by `label_index`. `most_chars` bounds texts.
    """
    for field in task.fields:
        if misfit := text_misfit(row, field, most_chars):
            return misfit
    return label_misfit(task, row, most_chars)


def label_misfit(task: TaskSpec, row: Example, most_chars: int | None = None) -> Misfit | None:
    """Return why a task cannot use a row's label, or its reference text; None if it can."""
    if task.loss == "score":  # A score function of the user's own takes what it likes.
        return None
    field = task.label_field
    if task.generates:
        misfit = text_misfit(row, field, most_chars)
        if misfit or row[field]:
            return misfit
        return Misfit(field, "is empty; a reference text has at least one character")
    if field not in row:
        return _missing(row, field)
    label = row[field]
    if label_index(task, label) is not None:
        return None
    allowed = ", ".join(task.labels)
    return Misfit(field, f"is none of: {allowed}", f"is {label!r:.80}, not one of: {allowed}")


def unlabelled(row: Example, field: str, labels: Collection[str] | None) -> Misfit | None:
    """Return why a row has no label, or none of these keys; None if it has one."""
    if field not in row:
        return _missing(row, field)
    label = row[field]
    if label is None or not label_key(label):
        return Misfit(field, "is empty")
    if labels is None or label_key(label) in labels:
        return None
    return Misfit(field, "is another one", f"is {label!r:.80}, not one of the device's labels")


def text_misfit(row: Example, field: str, most_chars: int | None) -> Misfit | None:
    """Return why a row's field is not a text that can be sent; None if it is one."""
    if field not in row:
        return _missing(row, field)
    problem = text_problem(row[field], most_chars)
    return None if problem is None else Misfit(field, problem)


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


def _missing(row: Example, field: str) -> Misfit:
    has = ", ".join(map(str, row)) or "nothing"
    return Misfit(field, "is missing", f"is missing (the row has: {has})")
