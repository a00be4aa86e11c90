"""Bugs in code that the aggregator calls but does not contain: backends, metrics, scores."""

from __future__ import annotations

import traceback
from collections import Counter

import structlog

from fedone_sdk.aggregator.rounds.events import PauseRequested
from fedone_sdk.aggregator.serving.run import ServedRun

_log = structlog.get_logger(__name__)

_MAX_BUGS = 3
"""Number of consecutive calls with a bug after which the run pauses."""


class BugCounter:
    """Counts consecutive calls that raise an unexpected exception, and pauses their run.

    A retry would raise again, and each attempt is charged in full.

    Args:
        what: The called code, for the reason of the pause.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._in_a_row: Counter[str] = Counter()  # Per run.

    def reset(self, run: ServedRun) -> None:
        """Record a call without an unexpected exception."""
        self._in_a_row.pop(run.run_id, None)

    async def add(self, run: ServedRun, bug: Exception) -> bool:
        """Record a call that raised; return whether the run is paused."""
        # Formatted here: some log renderers print local variables, which contain texts.
        lines = "".join(traceback.format_exception(bug))
        _log.error(f"{self._what} has a bug", run_id=run.run_id, traceback=lines)
        self._in_a_row[run.run_id] += 1
        times = self._in_a_row[run.run_id]
        if times < _MAX_BUGS:
            return False
        self.reset(run)
        reason = (
            f"{self._what} failed {times} times in a row with {type(bug).__name__}: see the "
            "server's log"
        )
        await run.apply(PauseRequested(reason=reason))
        return True
