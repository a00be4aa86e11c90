"""Changes of runs, their listeners, and the rounds of a run as they finish."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from fedone_sdk.aggregator.rounds.state import Closed, FinishedRound
from fedone_sdk.aggregator.runs.run_view import RunView
from fedone_sdk.messages import RoundReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A committed change of a run.

    Attributes:
        offered: Clients with a new seat, or with an offer that can be paid for now.
        back_to: Number of rounds that remain after a rollback.
        reloaded: Whether another replica changed the run; what has changed is unknown.
    """

    offered: tuple[int, ...] = ()
    closed: tuple[Closed, ...] = ()
    finished: FinishedRound | None = None
    measured: bool = False
    back_to: int | None = None
    ended: bool = False
    reloaded: bool = False

    @property
    def of_rounds(self) -> bool:
        """Whether it may change the run's rounds or end the run."""
        return self.finished is not None or self.measured or self.ended or self.reloaded


Listener = Callable[[Any, Change], None]
"""Receives the changes of a run after they are committed."""


class Feed:
    """Rounds of a run that are new or changed since the last look."""

    def __init__(self, run: RunView, listeners: list[Listener]) -> None:
        self._run = run
        self._listeners = listeners
        self._changed = asyncio.Event()
        self._seen: list[RoundReport] = []

    def __enter__(self) -> Self:
        self._listeners.append(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        self._listeners.remove(self._listen)

    def take(self) -> list[RoundReport]:
        """Return new rounds and those whose metric is new, in order, and mark them as seen."""
        seen, history = self._seen, list(self._run.history)
        self._seen = history
        return [
            report for at, report in enumerate(history) if at >= len(seen) or report is not seen[at]
        ]

    @property
    def has_more(self) -> bool:
        """Whether `take` would return rounds, or a rollback has removed some."""
        return self._run.history != self._seen

    async def changed(self) -> bool:
        """Wait for a change of the rounds or the end of the run; safe to cancel."""
        await self._changed.wait()
        self._changed.clear()
        return True

    def _listen(self, run: RunView, change: Change) -> None:
        if run is self._run and change.of_rounds:
            self._changed.set()
