"""Whether a device fits a run, and why not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedone_sdk.backends.base import LLMBackend
from fedone_sdk.client.batch import Unfit
from fedone_sdk.client.options import Hooks
from fedone_sdk.client.privacy import PrivacyAccount
from fedone_sdk.data.misfit import Rows
from fedone_sdk.messages import MAX_TEXT_CHARS, RunTask
from fedone_sdk.task import Example


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFit:
    """How a device fits a run.

    Attributes:
        run_id: The run.
        rows: Rows of the device.
        fit: Rows that fit the run's task; 0 if the device itself does not fit.
        reason: Why not all of them fit, for the device's own people; None if all do.
    """

    run_id: str
    rows: int
    fit: int
    reason: str | None = None

    def __str__(self) -> str:
        because = "" if self.reason is None else f" because {self.reason}"
        return f"{self.run_id} {self.fit} of {self.rows}{because}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a device can do, apart from its rows, and what it requires of runs (`privacy`)."""

    backend: LLMBackend | None
    hooks: Hooks
    privacy: PrivacyAccount | None

    def check(self, run: RunTask) -> None:
        """Check that the device can work for a run.

        Raises:
            Unfit: It cannot.
        """
        if self.privacy is not None:
            self.privacy.check_run(run)
        if self.backend is None and not run.gateway:
            raise Unfit("no backend: this server has no gateway, and the client has no backend")
        if run.task.loss == "score" and self.hooks.score is None:
            raise Unfit("loss score needs a score function, and this client has none")

    def fit(self, run_id: str, run: RunTask, rows: Sequence[Example]) -> RunFit:
        """Return how the device with these rows fits a run."""
        try:
            self.check(run)
        except Unfit as exc:
            return RunFit(run_id=run_id, rows=len(rows), fit=0, reason=exc.reason)
        found = self.compare(run, rows)
        return RunFit(run_id=run_id, rows=found.total, fit=found.fit, reason=found.reason)

    def compare(self, run: RunTask, rows: Sequence[Example]) -> Rows:
        """Count the rows that fit a run's task."""
        quotes = self.privacy is None
        return Rows.of(run.task, rows, most_chars=MAX_TEXT_CHARS, quotes=quotes)
