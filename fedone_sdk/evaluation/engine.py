"""Progress of trials."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of trials.

    Attributes:
        total: Known trials.
        kept: Trials whose results existed before.
        done: Trials with a result, kept or new.
        failed: Trials that failed.
        last: The trial that has just ended; None at the beginning of a stage.
        failure: Why it failed, one line; None if it did not.
        note: Its note for the user.
        left_s: About how many seconds the other trials take; None if that is not known.
    """

    total: int
    kept: int
    done: int
    failed: int
    last: str | None = None
    failure: str | None = None
    note: str | None = None
    left_s: float | None = None

    @property
    def text(self) -> str:
        """The progress on one line."""
        kept = f" ({self.kept} were there already)" if self.kept else ""
        failed = f", {self.failed} failed" if self.failed else ""
        left = ""
        if self.left_s is not None:
            minutes = self.left_s / 60
            left = (
                f", {self.left_s:.0f} s left" if self.left_s < 100 else f", {minutes:.0f} min left"
            )
        last = f", last {self.last}" if self.last else ""
        why = f": {self.failure}" if self.failure else ""
        return f"{self.done + self.failed} of {self.total} trials{kept}{failed}{left}{last}{why}"
