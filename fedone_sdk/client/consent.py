"""What a device lets a run use of its rows; every other module of the client asks here.

Which rows take part follows from the columns that the app names, not from a task: a task can
neither select rows nor count them. A run that cannot use all of these rows does not fit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Self

from fedone_sdk.data.misfit import Misfit, label_misfit, text_misfit, unlabelled
from fedone_sdk.errors import ArgumentError
from fedone_sdk.messages import MAX_TEXT_CHARS, RunTask
from fedone_sdk.task import Example, TaskSpec, label_index, label_key

WITHHELD = "the run does not fit this device"
"""All that a server learns of why rows are not used, where they are private."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The rows of a device that take part in a run.

    Attributes:
        reason: Why not all do, for the owner of the rows; None if all do.
        refusal: Why none does, without a value of a row, for the server; None if some do.
    """

    rows: tuple[Example, ...]
    reason: str | None = None
    refusal: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Consent:
    """The columns that an app lets a run use.

    Attributes:
        label: The label column. It is compared with the model's answers on the device.
        fields: Columns that may be rendered; None is every column but the label. With the label
            among them, the gateway gets it as the reference text of loss ``nll``.
        labels: Values of the label column, which a run has to cover; rows with another one are
            left out. None is those of the rows.
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
        """Return the consent of an app's arguments.

        Raises:
            SpecError: One is missing or cannot be used.
        """
        if private and (label is None or fields is None):
            raise ArgumentError(
                "label, fields: policy.privacy needs both: the label column, and the columns "
                "that may be rendered"
            )
        for name, given in (("fields", fields), ("labels", labels)):
            if given is not None and (isinstance(given, str) or not given):
                raise ArgumentError(f"{name}: is {given!r}; it must be a collection of names")
        return cls(
            label="label" if label is None else label,
            fields=None if fields is None else frozenset(fields),
            labels=None if labels is None else frozenset(map(label_key, labels)),
            private=private,
        )

    def admit(self, run: RunTask, held: Sequence[Example], *, gateway: bool) -> Admitted:
        """Return the rows that take part in a run, scored by the `gateway` or on the device."""
        task = run.task
        if refusal := self._refused(task, gateway=gateway):
            return Admitted(rows=(), reason=refusal, refusal=refusal)
        rows, first = list[Example](), None
        named = task.fields if self.fields is None else sorted(self.fields - {self.label})
        for row in held:
            misfit = self._incomplete(task, row, named)
            if misfit is None:
                rows.append(row)
            first = first or misfit
        reason = None if first is None else str(first)
        if not rows:
            refusal = "no row is complete" if first is None else f"no row is complete: {first.kind}"
            return Admitted(rows=(), reason=reason, refusal=refusal)
        for row in rows:
            if misfit := label_misfit(task, row, MAX_TEXT_CHARS):
                return Admitted(rows=(), reason=str(misfit), refusal=misfit.kind)
        return Admitted(rows=tuple(rows), reason=reason)

    def _refused(self, task: TaskSpec, *, gateway: bool) -> str | None:
        """Return which column a task asks for without consent; None if it asks for none."""
        if task.loss != "score" and task.label_field != self.label:
            return f"the run's label column is {task.label_field!r}, which is not the device's"
        for name in task.fields:
            if name == self.label or (self.fields is not None and name not in self.fields):
                return f"the run renders column {name!r}, and the device does not let it out"
        if task.loss == "nll" and gateway and self.label not in (self.fields or ()):
            return "loss nll sends the label column, and the device does not let it out"
        labels = self.labels if task.labels else None
        if labels and any(label_index(task, label) is None for label in labels):
            return "the run's labels do not cover the device's"
        return None

    def _incomplete(self, task: TaskSpec, row: Example, named: Sequence[str]) -> Misfit | None:
        """Return why a row takes part in no run of these columns; None if it does."""
        for name in named:
            if misfit := text_misfit(row, name, MAX_TEXT_CHARS):
                return misfit
        if task.generates and not self.private:
            return label_misfit(task, row, MAX_TEXT_CHARS)
        return unlabelled(row, self.label, self.labels)
