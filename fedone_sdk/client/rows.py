"""The rows of a device: which take part in a run, and which of their texts may leave the device.

A row takes part if it has the columns that the app names. If a run's task cannot use one of these
rows, the device declines the run. Otherwise a server could count the rows with some property, by a
task that only such rows fit.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import structlog

from fedone_sdk import errors
from fedone_sdk.clock import answer_of
from fedone_sdk.data import row_checks
from fedone_sdk.errors import ArgumentError, DataError, FedOneError
from fedone_sdk.messages import MAX_TEXT_CHARS, MIN_SCORED_SHARE, RunTask, Scored
from fedone_sdk.task import Example, TaskSpec, label_index, label_key, references_of

_log = structlog.get_logger(__name__)

Data = Iterable[Example] | Callable[[], "Iterable[Example] | Awaitable[Iterable[Example]]"]

_MAX_ROWS = 100_000


class Source:
    """The current examples of a device.

    Raises:
        DataError: The iterable has no examples, or its items are not examples.
    """

    def __init__(self, data: Data) -> None:
        self._is_cut = False
        self._data = data if callable(data) else self._taken(data)
        if self._data == []:
            raise DataError("data: this client has no examples; it needs at least one")

    async def rows(self) -> Sequence[Example]:
        """Return the current examples; raises exceptions of the app's function."""
        if not callable(self._data):
            return self._data
        return self._taken(await answer_of(self._data()))

    def _taken(self, data: Any) -> list[Example]:
        if isinstance(data, (str, bytes, Mapping)) or not isinstance(data, Iterable):
            hint = "; load_examples reads a file" if isinstance(data, str) else ""
            raise DataError(f"data: is {type(data).__name__}; it must be an iterable of rows{hint}")
        rows = [*itertools.islice(data, _MAX_ROWS + 1)]
        for number, row in enumerate(rows, 1):
            if not isinstance(row, Mapping):
                raise DataError(
                    f"data: row {number} is {type(row).__name__}; it must map fields to values, "
                    "such as {'text': ..., 'label': ...}"
                )
        if len(rows) > _MAX_ROWS and not self._is_cut:
            self._is_cut = True
            _log.warning(f"data: only the first {_MAX_ROWS} rows are used; the others are left out")
        return rows[:_MAX_ROWS]


class Declining(FedOneError):
    """Raised to decline work.

    Attributes:
        reason: The reason that the server gets; the exception's text is for the device's owner.
    """

    def __init__(self, reason: str, *, shown: str | None = None) -> None:
        self.reason = reason
        super().__init__(reason if shown is None else shown)


class Unfit(Declining):
    """The device cannot do any work of the run, whatever the mini-batch."""


_KINDS: dict[type[Exception], str] = {
    errors.LabelWordError: "a label word is not one token of the client's model",
    errors.BackendBlocked: "the client's model cannot be queried until its configuration changes",
    errors.BackendUnavailable: "the client's model is not available now",
    errors.BackendError: "the client's model failed",
    errors.BudgetError: "the client's budget has nothing left for this",
}
"""Reasons that the server gets, by error type; the first matching type applies."""


def reason_of(failure: Exception) -> str:
    """Return why work is declined, for the server and the app, without a model's error text.

    A model's error text may quote private data; it is only logged on the device.
    """
    if isinstance(failure, Declining):
        return failure.reason
    reason = str(failure)
    if not isinstance(failure, FedOneError):
        reason = f"the client failed with {type(failure).__name__}"
    return next((words for kind, words in _KINDS.items() if isinstance(failure, kind)), reason)


WITHHELD = "the run does not fit this device"
"""The reason that a device sends if the run has `privacy` and the cause may be in its rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The rows of a device that take part in a run.

    Attributes:
        reason: Why some rows do not take part, for the device's owner; None if all rows do.
        refusal: Why no row takes part, for the server, without values of rows; None if some do.
    """

    rows: tuple[Example, ...]
    reason: str | None = None
    refusal: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Consent:
    """The columns that an app lets a run use.

    Attributes:
        fields: Columns that may be put into prompts; None is every column but the label. If
            `fields` includes the label column, loss ``nll`` may send the labels to the gateway.
        labels: The run's labels must include all of these; rows with other labels are left out.
            None is all labels in the rows.
        private: Whether the device requires privacy.
    """

    label: str
    fields: frozenset[str] | None
    labels: frozenset[str] | None
    private: bool

    @classmethod
    def of(
        cls,
        label: str | None,
        fields: Collection[str] | None,
        labels: Collection[object] | None,
        *,
        private: bool,
    ) -> Self:
        """Return the consent that the arguments of `EdgeClient` express."""
        if private and (label is None or fields is None):
            raise ArgumentError(
                "label, fields: policy.privacy needs both: the label column, and the columns "
                "that may be rendered"
            )
        for name, names in (("fields", fields), ("labels", labels)):
            if names is not None and (isinstance(names, str) or not names):
                raise ArgumentError(f"{name}: is {names!r}; it must be a collection of names")
        return cls(
            label="label" if label is None else label,
            fields=None if fields is None else frozenset(fields),
            labels=None if labels is None else frozenset(map(label_key, labels)),
            private=private,
        )

    def admit(self, run: RunTask, all_rows: Sequence[Example], *, gateway: bool) -> Admitted:
        """Return the rows that take part in a run; `gateway` says whether the gateway scores."""
        task = run.task
        if refusal := self._refused(task, gateway=gateway):
            return Admitted(rows=(), reason=refusal, refusal=refusal)
        named = task.fields if self.fields is None else sorted(self.fields - {self.label})
        problems = [self._incomplete(task, row, named) for row in all_rows]
        rows = tuple(
            row for row, problem in zip(all_rows, problems, strict=True) if problem is None
        )
        first = next(filter(None, problems), None)
        reason = None if first is None else str(first)
        if not rows:
            refusal = "no row is complete" + ("" if first is None else f": {first.public}")
            return Admitted(rows=(), reason=reason, refusal=refusal)
        for row in rows:
            if problem := row_checks.label_problem(task, row, MAX_TEXT_CHARS):
                return Admitted(rows=(), reason=str(problem), refusal=problem.public)
        return Admitted(rows=rows, reason=reason)

    def _refused(self, task: TaskSpec, *, gateway: bool) -> str | None:
        """Return why a task has no consent, independent of the rows; None if it has consent."""
        if task.loss != "score" and task.label_field != self.label:
            return (
                f"the run's label column is {task.label_field!r}, and the device has another one: "
                "set label (fedone client --label), or rename the column in the data"
            )
        for name in task.fields:
            if name == self.label or (self.fields is not None and name not in self.fields):
                return f"the run renders column {name!r}, which the device does not share"
        if task.loss == "nll" and gateway and self.label not in (self.fields or ()):
            return "loss nll sends the label column, which the device does not share"
        labels = self.labels if task.labels else None
        if labels and any(label_index(task, label) is None for label in labels):
            return "the run's labels do not include all labels of the device"
        return None

    def _incomplete(
        self, task: TaskSpec, row: Example, named: Sequence[str]
    ) -> row_checks.RowProblem | None:
        """Return why a row is left out; None if it has the columns `named` and can take part."""
        for name in named:
            if problem := row_checks.field_problem(row, name, MAX_TEXT_CHARS):
                return problem
        if task.generates and not self.private:
            return row_checks.label_problem(task, row, MAX_TEXT_CHARS)
        return row_checks.own_label_problem(row, self.label, self.labels)


BeforeSend = Callable[[str], "str | Awaitable[str | None] | None"]
"""Gets every text before it is scored. Returns the text, a redacted form of the text, or None to
hold the example back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """The examples of one step that may leave the device.

    Attributes:
        texts: Text fields of each example, filtered by the hook `before_send`.
        references: Reference texts, also filtered, for loss ``nll``; otherwise empty.
        examples: The same examples with all fields.
        vetoed: Number of examples that the hook held back, or whose filtered texts cannot be used.
        private: Whether the update hides which examples were scored.
    """

    texts: tuple[dict[str, str], ...]
    references: tuple[str, ...]
    examples: tuple[Example, ...]
    vetoed: int
    private: bool

    @classmethod
    async def of(
        cls,
        task: TaskSpec,
        examples: Sequence[Example],
        before_send: BeforeSend | None,
        *,
        private: bool = False,
    ) -> Minibatch:
        """Apply the hook to the examples of a step."""
        names = (*task.fields, task.label_field) if task.loss == "nll" else task.fields
        texts, kept_examples = [], []
        for example in examples:
            kept = dict(example)
            if before_send is not None:
                kept |= {name: await passed(before_send, example[name]) for name in names}
            if row_checks.row_problem(task, kept, MAX_TEXT_CHARS) is None:
                texts.append({name: kept[name] for name in task.fields})
                kept_examples.append(kept)
        batch = cls(
            texts=tuple(texts),
            references=references_of(task, kept_examples),
            examples=tuple(kept_examples),
            vetoed=len(examples) - len(texts),
            private=private,
        )
        batch.check(frozenset())
        return batch

    @property
    def sha256(self) -> str:
        """Digest of texts and labels, part of the keys of stored losses (`Journal`)."""
        content = [self.texts, self.examples]
        try:
            text = json.dumps(content, sort_keys=True, default=repr, ensure_ascii=False)
        except (TypeError, ValueError):  # A key is None (csv.DictReader), or a row is recursive.
            text = repr(content)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def check(self, failed: frozenset[int]) -> Scored:
        """Count scored, failed and vetoed examples; if `private`, all examples count as scored.

        Raises:
            Declining: Too few examples were scored.
        """
        total = len(self.texts) + self.vetoed
        scored = len(self.texts) - len(failed)
        if self.private:
            return Scored(scored=total)
        if not scored or scored < MIN_SCORED_SHARE * total:
            raise Declining(
                f"only {scored} of {total} examples could be scored "
                f"({len(failed)} failed, {self.vetoed} vetoed)"
            )
        return Scored(scored=scored, failed=len(failed), vetoed=self.vetoed)


async def passed(hook: BeforeSend, text: Any, name: str = "before_send") -> str | None:
    """Return the result of the app's hook for a text; None holds the text back."""
    try:
        passing: str | None = await answer_of(hook(text))
    except Exception as exc:
        # The text of an app's exception may quote private data.
        _log.warning(f"{name} failed", error=type(exc).__name__)
        return None
    if passing is None or row_checks.text_problem(passing, MAX_TEXT_CHARS) is None:
        return passing
    _log.warning(f"{name} returned no text that can be sent", kind=type(passing).__name__)
    return None
