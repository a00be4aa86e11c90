"""Checks whether a row has the texts and the label that a task needs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from fedone_sdk.errors import DataError
from fedone_sdk.scores import built_in_score
from fedone_sdk.task import Example, ScoreFunction, TaskSpec, label_index, label_key


@dataclass(frozen=True, slots=True)
class RowProblem:
    """Why a task cannot use a row.

    Attributes:
        reason: The problem of the field, without any value of the row.
        detail: The problem with the row's value, which only the row's owner may see; may be empty.
    """

    field: str
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        return f"field {self.field!r} {self.detail or self.reason}"

    @property
    def public(self) -> str:
        """The problem, without any value of the row."""
        return f"field {self.field!r} {self.reason}"


def check_examples(task: TaskSpec, examples: Iterable[Example], source: str | Path) -> None:
    """Check that every row has the fields of a task.

    A label is compared as text, so that a CSV's ``"1"`` is the label 1. A built-in score is called
    with each row, so that a wrong reference is found before a text is generated.

    Raises:
        DataError: A text field is missing or not text, or a label is unknown. The message names the
            source, the row (from 1), the field and the allowed values.
    """
    score = built_in_score(task)
    for number, example in enumerate(examples, 1):
        problem = row_problem(task, example)
        if problem is None and score is not None:
            problem = _reference_problem(task, example, score)
        if problem is not None:
            raise DataError(f"{source}: row {number}: {problem}")


def row_problem(task: TaskSpec, row: Example, max_chars: int | None = None) -> RowProblem | None:
    """Return the first reason why a task cannot use a row; None if it can."""
    for field in task.fields:
        if problem := field_problem(row, field, max_chars):
            return problem
    return label_problem(task, row, max_chars)


def _reference_problem(task: TaskSpec, row: Example, score: ScoreFunction) -> RowProblem | None:
    """Return why a built-in score cannot use a row's expected answer; None if it can."""
    try:
        score("", row)
    except ValueError as exc:
        if task.label_field not in row:
            return _missing(row, task.label_field)
        return RowProblem(task.label_field, f"cannot be used by task.score: {exc}")
    return None


def label_problem(task: TaskSpec, row: Example, max_chars: int | None = None) -> RowProblem | None:
    """Return why a task cannot use a row's label or reference text; None if it can."""
    if task.loss == "score":  # A user's score function defines which values it accepts.
        return None
    field = task.label_field
    if task.generates:
        problem = field_problem(row, field, max_chars)
        if problem or row[field]:
            return problem
        return RowProblem(field, "is empty; a reference text has at least one character")
    if field not in row:
        return _missing(row, field)
    label = row[field]
    if label_index(task, label) is not None:
        return None
    allowed = ", ".join(task.labels)
    return RowProblem(field, f"is none of: {allowed}", f"is {label!r:.80}, not one of: {allowed}")


def own_label_problem(
    row: Example, field: str, labels: Collection[str] | None
) -> RowProblem | None:
    """Return why a row's label is missing or not in `labels`; None if the label is valid."""
    if field not in row:
        return _missing(row, field)
    label = row[field]
    if label is None or not label_key(label):
        return RowProblem(field, "is empty")
    if labels is None or label_key(label) in labels:
        return None
    known = "one of the device's labels"
    return RowProblem(field, f"is not {known}", f"is {label!r:.80}, not {known}")


def field_problem(row: Example, field: str, max_chars: int | None = None) -> RowProblem | None:
    """Return why a field of a row is not a text that can be sent; None if the field is valid."""
    if field not in row:
        return _missing(row, field)
    problem = text_problem(row[field], max_chars)
    return None if problem is None else RowProblem(field, problem)


def text_problem(value: object, max_chars: int | None = None) -> str | None:
    """Return why messages or tokenizers do not accept a value as text; None if they do."""
    if not isinstance(value, str):
        return f"is {type(value).__name__}; it must be text"
    if max_chars is not None and len(value) > max_chars:
        return f"has more than {max_chars} characters"
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can contain half of a surrogate pair.
        return "has half of a surrogate pair; it must be valid Unicode text"
    return None


def _missing(row: Example, field: str) -> RowProblem:
    names = ", ".join(map(str, row)) or "nothing"
    return RowProblem(field, "is missing", f"is missing (the row has: {names})")
