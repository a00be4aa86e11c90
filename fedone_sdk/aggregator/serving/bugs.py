"""Bugs in code that the aggregator calls and did not write: backends, metrics, score functions."""

from __future__ import annotations

import traceback
from collections import Counter

import structlog

from fedone_sdk.aggregator.rounds.events import PauseAsked
from fedone_sdk.aggregator.serving.run import ServedRun

__all__ = ["Bugs"]

_log = structlog.get_logger(__name__)

_MOST_BUGS = 3
"""Calls in a row that may meet a bug before their run pauses."""


class Bugs:
    """Counts calls in a row that met a bug, and pauses their run after a few.

    Asked again, a model's backend would meet the same bug, and each attempt is charged in full.

    Args:
        what: What is called, for the reason of the pause.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._in_a_row: Counter[str] = Counter()  # By run.

    def none(self, run: ServedRun) -> None:
        """Notes a call that met none."""
        self._in_a_row.pop(run.run_id, None)

    async def met(self, run: ServedRun, bug: Exception) -> bool:
        """Notes a call that met one; returns whether the run pauses for it."""
        # Formatted here, since some log renderers print local variables: texts are among them.
        lines = "".join(traceback.format_exception(bug))
        _log.error(f"{self._what} has a bug", run_id=run.run_id, traceback=lines)
        self._in_a_row[run.run_id] += 1
        times = self._in_a_row[run.run_id]
        if times < _MOST_BUGS:
            return False
        self.none(run)
        reason = (
            f"{self._what} failed {times} times in a row with {type(bug).__name__}: see the "
            "server's log"
        )
        await run.apply(PauseAsked(reason=reason))
        return True
