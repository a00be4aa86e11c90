"""Whether a device fits a run, and why not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedone_sdk.client.batch import Unfit
from fedone_sdk.client.privacy import PrivacyAccount
from fedone_sdk.data.misfit import Rows
from fedone_sdk.messages import MAX_TEXT_CHARS, RunTask
from fedone_sdk.spec import TrainedSpec
from fedone_sdk.task import Example

__all__ = ["Means", "RunFit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFit:
    """How a device fits a run.

    Attributes:
        run_id: The run.
        rows: Rows that the device holds.
        fit: Rows that the run's task can be put to; 0 where the device itself does not fit.
        reason: Why not all of them fit, for the device's own people; None where they do.
    """

    run_id: str
    rows: int
    fit: int
    reason: str | None = None

    def __str__(self) -> str:
        because = "" if self.reason is None else f" because {self.reason}"
        return f"{self.run_id} {self.fit} of {self.rows}{because}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What a device has to work with, beside its rows.

    Attributes:
        backend: Whether it has a model of its own.
        score: Whether it has a score function.
        trainer: Whether it trains.
        privacy: What it requires of runs.
    """

    backend: bool
    score: bool
    trainer: bool
    privacy: PrivacyAccount | None = None

    def check(self, run: RunTask) -> None:
        """Looks whether they are enough for a run.

        Raises:
            Unfit: They are not.
        """
        if self.privacy is not None:
            self.privacy.check_run(run)
        if isinstance(run.method, TrainedSpec):
            if not self.trainer:
                raise Unfit(f"{run.method.name} trains a model, and this client has no trainer")
        elif not (self.backend or run.gateway):
            raise Unfit("no backend: this server has no gateway, and the client has no backend")
        if run.task.loss == "score" and not self.score:
            raise Unfit("loss score needs a score function, and this client has none")

    def fit(self, run_id: str, run: RunTask, rows: Sequence[Example]) -> RunFit:
        """How a device with these rows fits a run."""
        try:
            self.check(run)
        except Unfit as exc:
            return RunFit(run_id=run_id, rows=len(rows), fit=0, reason=exc.reason)
        found = self.compare(run, rows)
        return RunFit(run_id=run_id, rows=found.total, fit=found.fit, reason=found.reason)

    def compare(self, run: RunTask, rows: Sequence[Example]) -> Rows:
        """How many rows fit a run's task."""
        quotes = self.privacy is None
        return Rows.of(run.task, rows, most_chars=MAX_TEXT_CHARS, quotes=quotes)
