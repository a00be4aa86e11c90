"""Listeners of a run, and its rounds as they finish."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from fedone_sdk.aggregator.rounds.events import Effect, MetricMeasured, RoundFinished, RunEnded
from fedone_sdk.messages import RoundReport

if TYPE_CHECKING:
    from fedone_sdk.aggregator.serving.run import ServedRun


@dataclass(frozen=True, slots=True)
class RunReloaded:
    """The run was reloaded after a commit of another replica."""


Listener = Callable[["ServedRun", Effect | RunReloaded], None]
"""Receives the effects of a run after they are committed."""

_CHANGES = (RunReloaded, MetricMeasured, RoundFinished, RunEnded)
"""Effects that change the rounds or end the run."""


class Feed:
    """Rounds of a run that are new or changed since the last look."""

    def __init__(self, run: ServedRun, listeners: list[Listener]) -> None:
        self._run = run
        self._listeners = listeners
        self._changes: asyncio.Queue[Effect | RunReloaded] = asyncio.Queue()
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

    async def changed(self) -> Effect | RunReloaded:
        """Wait for a change of the rounds or the end of the run; safe to cancel."""
        return await self._changes.get()

    def _listen(self, run: ServedRun, effect: Effect | RunReloaded) -> None:
        if run is self._run and isinstance(effect, _CHANGES):
            self._changes.put_nowait(effect)
