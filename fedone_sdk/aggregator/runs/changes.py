"""Committed changes of runs, as the log, other replicas and listeners receive them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Self

import structlog

from fedone_sdk.aggregator.rounds.run_state import Closed, FinishedRound, Result, RunState, offers
from fedone_sdk.aggregator.runs.run_view import RunView
from fedone_sdk.aggregator.signals import MAX_NAMED, RunChanged
from fedone_sdk.messages import RoundReport

_log = structlog.get_logger(__name__)

_LOGGED = {
    "aside": "client gets no work for a while",
    "budget": "caps raised",
    "proposal": "candidate proposed",
    "rollback": "run rolled back",
}

_phase = attrgetter("status", "paused", "ended_at")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A committed change of a run.

    Attributes:
        offered: Clients that can claim work now, because of a draw or of budget that became free.
        measured: Whether a round has a new metric.
        back_to: Number of rounds that remain after a rollback; None without a rollback.
        resumed: Whether the run runs again.
        reloaded: Whether another replica changed the run; the other fields but `ended` and
            `resumed` are then unknown.
        log: Lines of the run's log, each with its kind and body.
    """

    offered: tuple[int, ...] = ()
    closed: tuple[Closed, ...] = ()
    finished: FinishedRound | None = None
    measured: bool = False
    back_to: int | None = None
    ended: bool = False
    resumed: bool = False
    reloaded: bool = False
    log: tuple[tuple[str, Mapping[str, Any]], ...] = ()

    @classmethod
    def of(cls, before: RunState, result: Result[Any]) -> Self:
        """Return the change from the state `before` to the state in a handler's result."""
        after = result.state
        lines = dict(result.log)
        return replace(
            cls._between(before, after),
            offered=offers(before, after),
            closed=result.closed,
            finished=result.finished,
            measured="metric" in lines,
            back_to=lines["rollback"]["round"] if "rollback" in lines else None,
            log=result.log,
        )

    @classmethod
    def reload(cls, before: RunState, after: RunState) -> Self:
        """Return the change from the state `before` to the stored state `after`."""
        return replace(cls._between(before, after), reloaded=True)

    @classmethod
    def _between(cls, before: RunState, after: RunState) -> Self:
        """Return the fields that depend only on the two states."""
        ended = not after.running and _phase(before) != _phase(after)
        return cls(ended=ended, resumed=after.running and not before.running)

    @property
    def affects_rounds(self) -> bool:
        """Whether the change may have added, changed or removed rounds, or ended the run."""
        has_other_rounds = self.finished is not None or self.back_to is not None
        return has_other_rounds or self.measured or self.ended or self.reloaded

    def signal(self, run_id: str, version: int, state: RunState) -> str:
        """Return the signal that tells other replicas about the change."""
        changed = RunChanged(
            run_id=run_id,
            version=version,
            due=state.next_deadline,
            offered=self.offered if len(self.offered) <= MAX_NAMED else None,
            finished=self.finished is not None,
            status=state.status,
        )
        return changed.model_dump_json()

    def write_log(self, run_id: str, state: RunState) -> None:
        """Write the change to the server's log."""
        for closed in self.closed:
            if closed.receipt is None:
                facts = {"assignment_id": closed.assignment_id, "client": closed.client}
                _log.info("assignment closed", run_id=run_id, reason=closed.reason, **facts)
        for kind, record in self.log:
            if kind in _LOGGED:
                _log.info(_LOGGED[kind], run_id=run_id, **record)
        if self.finished is not None:
            number = self.finished.report.round
            for banned in self.finished.record.get("quarantined", ()):
                _log.warning("client quarantined", run_id=run_id, round=number, **banned)
        if self.ended:
            # The reason may contain a provider's error text, which may quote a device's text.
            reason = state.summary or state.reason
            facts = {"status": state.status} | ({} if reason is None else {"reason": reason})
            write = _log.warning if state.paused or state.status == "failed" else _log.info
            write("run paused" if state.paused else "run ended", run_id=run_id, **facts)


Listener = Callable[[Any, Change], None]
"""Receives the changes of a run after they are committed."""


class Feed:
    """Collects the round reports of a run that are new or changed since the last `take`."""

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
        """Return, in order, the reports that are new or have a new metric; mark them as seen."""
        seen, history = self._seen, list(self._run.history)
        self._seen = history
        return [
            report for at, report in enumerate(history) if at >= len(seen) or report is not seen[at]
        ]

    @property
    def has_more(self) -> bool:
        """Whether rounds were added, changed or removed since the last `take`."""
        return self._run.history != self._seen

    async def wait(self) -> None:
        """Wait for a change of the rounds or the end of the run; safe to cancel."""
        await self._changed.wait()
        self._changed.clear()

    def _listen(self, run: RunView, change: Change) -> None:
        if run is self._run and change.affects_rounds:
            self._changed.set()
