"""Retention of ended runs, logs, receipts and idle clients."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Set
from dataclasses import dataclass, field
from typing import Annotated

import structlog
from pydantic import Field

from fedone_sdk.aggregator.runs.run_registry import StoredRun
from fedone_sdk.clock import Clock
from fedone_sdk.spec import Spec
from fedone_sdk.stores import Store

_log = structlog.get_logger(__name__)

_DAY_S = 86_400.0
_CLIENTS_AT_ONCE = 500
_INTERVAL_S = 3600.0

Days = Annotated[float, Field(gt=0, le=36_500)]


class Retention(Spec):
    """Retention periods in days. Null, the default, keeps data for ever.

    Attributes:
        ended_runs_days: Runs, counted from their end. A run is deleted with all its data; its name
            stays reserved.
        logs_days: Logs of runs that have ended for good. The result and the prompt stay.
        closed_work_days: Receipts of ended runs. Afterwards a repeated update gets 404.
        idle_clients_days: Clients without a request. Their index and public id stay.
    """

    ended_runs_days: Days | None = None
    logs_days: Days | None = None
    closed_work_days: Days | None = None
    idle_clients_days: Days | None = None

    @property
    def active(self) -> bool:
        """Whether any period is set."""
        return any(days is not None for days in self.model_dump().values())


@dataclass(kw_only=True, eq=False)
class Sweeper:
    """Removes data whose retention period is over."""

    retention: Retention
    store: Store
    clock: Clock
    runs: Callable[[], Awaitable[dict[str, StoredRun]]]
    delete: Callable[[str, int], Awaitable[None]]
    retire: Callable[[int], Awaitable[None]]
    # Run id -> version, log and closed work that were trimmed.
    _trimmed: dict[str, tuple[int, bool, bool]] = field(default_factory=dict, init=False)

    async def run(self, is_leader: Callable[[], bool]) -> None:
        """Sweep now and then, on the replica that is the leader."""
        while True:
            if is_leader():
                try:
                    await self.sweep()
                except Exception:
                    # The store may recover.
                    _log.error("retention sweep failed", traceback=traceback.format_exc())
            await asyncio.sleep(_INTERVAL_S)

    async def sweep(self) -> None:
        """Remove expired data; a failure for one run does not stop the others."""
        now, runs = self.clock.now(), await self.runs()
        for run_id, run in runs.items():
            ended_at = run.summary.ended_at
            if run.live or ended_at is None:
                continue
            try:
                await self._sweep_run(run_id, run, now - ended_at)
            except Exception:
                _log.error(
                    "a run cannot be removed", run_id=run_id, traceback=traceback.format_exc()
                )
        if self.retention.idle_clients_days is not None:
            # Not clients of live runs: re-enrolled they would have a new ledger and epsilon.
            known = {client for run in runs.values() if not run.final for client in run.clients}
            await self._sweep_clients(now - self.retention.idle_clients_days * _DAY_S, known)

    async def _sweep_run(self, run_id: str, run: StoredRun, age_s: float) -> None:
        kept = self.retention
        if _is_older(age_s, kept.ended_runs_days):
            await self.delete(run_id, run.version)
            self._trimmed.pop(run_id, None)
            return
        log = run.final and _is_older(age_s, kept.logs_days)
        closed = _is_older(age_s, kept.closed_work_days)
        trimmed = run.version, log, closed
        if (log or closed) and self._trimmed.get(run_id) != trimmed:
            await self.store.trim(run_id, log=log, closed=closed)
            self._trimmed[run_id] = trimmed
            _log.info("run trimmed", run_id=run_id, log=log, closed=closed)

    async def _sweep_clients(self, before: float, known: Set[int]) -> None:
        num_spared = 0
        while True:
            # The query returns spared clients again, so the limit grows by their number.
            limit = num_spared + _CLIENTS_AT_ONCE
            idle = await self.store.idle_clients(before, limit)
            found = [index for index in idle if index not in known]
            for index in found:
                await self.retire(index)
            num_spared = len(idle) - len(found)
            if len(idle) < limit:
                return


def _is_older(age_s: float, days: float | None) -> bool:
    return days is not None and age_s > days * _DAY_S
