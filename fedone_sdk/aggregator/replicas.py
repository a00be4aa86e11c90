"""The replicas of one aggregator: signals, leader election, deadlines, retention."""

from __future__ import annotations

import asyncio
import math
import traceback
from collections.abc import Awaitable, Callable, Iterable, Set
from dataclasses import dataclass, field, replace
from typing import Annotated

import structlog
from pydantic import Field, ValidationError

from fedone_sdk.aggregator import signals
from fedone_sdk.aggregator.access import Access
from fedone_sdk.aggregator.dispatch.client_pool import MEMBER_TTL_S
from fedone_sdk.aggregator.dispatch.dispatcher import Dispatcher
from fedone_sdk.aggregator.rounds.lifecycle import charge_lost_replicas
from fedone_sdk.aggregator.rounds.seats import expire
from fedone_sdk.aggregator.rounds.spending import has_lost_calls
from fedone_sdk.aggregator.runs.run_registry import RunRegistry, StoredRun
from fedone_sdk.aggregator.runs.served_run import ServedRun
from fedone_sdk.clock import Clock
from fedone_sdk.spec import Spec
from fedone_sdk.stores import Store

_log = structlog.get_logger(__name__)

_POLL_S = 1.0
"""Interval at which a replica checks the leader lock and the other replicas, seconds."""
_MAX_SIGNALS = 10_000
"""If more signals than this wait, they are dropped, and everything is reloaded instead."""
_DAY_S = 86_400.0
_CLIENTS_AT_ONCE = 500
_SWEEP_INTERVAL_S = 3600.0

Days = Annotated[float, Field(gt=0, le=36_500)]


class Retention(Spec):
    """Numbers of days until data is removed. Null, the default, keeps data for ever.

    Attributes:
        ended_runs_days: From a run's end to the removal of all its data; its name stays reserved.
        logs_days: From a run's end to the removal of its log, if the run cannot be resumed; its
            result and prompt stay.
        closed_work_days: From a run's end to the removal of the stored responses to its updates. An
            update that is sent again later gets 404.
        idle_clients_days: From a client's last request to its removal; its index and id stay.
    """

    ended_runs_days: Days | None = None
    logs_days: Days | None = None
    closed_work_days: Days | None = None
    idle_clients_days: Days | None = None


@dataclass(kw_only=True, eq=False)
class Replicas:
    """The tasks of one replica. The replicas of an aggregator share a store.

    Every replica follows the commits of the others. One replica, the leader, holds the store's
    leader lock. The leader applies deadlines, charges the pending model calls of replicas that have
    exited, and removes data whose retention period is over.

    Args:
        delete: Deletes a run, given its id and its version.
    """

    store: Store
    clock: Clock
    registry: RunRegistry
    dispatcher: Dispatcher
    access: Access
    retention: Retention
    delete: Callable[[str, int], Awaitable[None]]
    is_leader: bool = field(default=False, init=False)
    _down: bool = field(default=False, init=False)
    _signals: asyncio.Queue[str | None] = field(default_factory=asyncio.Queue, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    # When the deadlines are checked next, unless `_changed` is set.
    _wakes_at: float = field(default=0.0, init=False)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list, init=False)
    _alive: frozenset[str] = field(default=frozenset(), init=False)
    _polled_at: float = field(default=-_POLL_S, init=False)
    _published_load: tuple[int, float] = field(default=(0, 0.0), init=False)
    # By run id, the last trim: the run's version, and whether log and closed work were trimmed.
    _trimmed: dict[str, tuple[int, bool, bool]] = field(default_factory=dict, init=False)

    @property
    def num_alive(self) -> int:
        """Number of replicas that serve the store, as of the last check."""
        return max(len(self._alive), 1)

    async def start(self) -> None:
        """Start to listen for signals. The caller then loads the runs and calls `restore`."""
        self.store.listen(self._enqueue)
        self._alive = await self.store.alive()
        # On start, every replica tries to acquire the leader lock. If it succeeds, no other
        # replica is running, so the aggregator was down.
        self.is_leader = self._down = await self.store.lead()

    async def restore(self) -> None:
        """Restore the waiting clients, and charge model calls whose replica has exited.

        Call it after all runs are loaded, so that no run draws from only some of the clients.
        """
        down = self._down
        members = await self.store.members()
        # Time of the latest claim of any member. The aggregator was still running then.
        served_until = max((member.until for member in members), default=0.0) - MEMBER_TTL_S
        gone = [member.client_index for member in members if member.until <= served_until]
        for member in members:
            if member.until > served_until:
                until = self.clock.now() + MEMBER_TTL_S if down else member.until
                await self.dispatcher.add_member(replace(member, until=until))
        if down and gone:
            await self.store.leave(gone)
        for run in list(self.registry.served.values()):
            await run.apply(charge_lost_replicas, alive=self._alive, down=down)

    def watch(self) -> None:
        """Start the tasks that process signals and apply deadlines."""
        self._tasks = [
            asyncio.create_task(self._watch(), name="deadlines"),
            asyncio.create_task(self._process_signals(), name="signals"),
        ]

    def start_sweeps(self) -> None:
        """Start to remove data whose retention period is over, if a period is set."""
        if self.retention != Retention():
            sweeps = asyncio.create_task(self._sweep_hourly(), name="retention")
            self._tasks.append(sweeps)

    async def stop(self) -> None:
        """Stop the tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    def on_run_changed(self, run: ServedRun) -> None:
        """Check the deadlines again if a run has an earlier deadline now, or has ended."""
        is_earlier = run.due is not None and run.due < self._wakes_at
        if is_earlier or not run.state.running:  # The timer of an ended run is removed.
            self._changed.set()

    async def tick(self) -> None:
        """Apply deadlines, and charge model calls whose replica has exited."""
        if self.store.shared:
            await self._update_alive()
            await self._for_each(list(self.registry.served.values()), self._check_run)
        await self._apply_all_due()

    async def _apply_deadlines(self) -> None:
        if self.is_leader:
            await self._apply_all_due()

    async def _apply_all_due(self) -> None:
        now = self.clock.now()
        runs = list(self.registry.served.values())
        due = [run for run in runs if run.may_be_stale or (run.due is not None and run.due <= now)]
        await self._for_each(due, self._apply_deadline)

    async def _apply_deadline(self, run: ServedRun) -> None:
        await run.catch_up()
        now = self.clock.now()
        if run.state.running and run.due is not None and run.due <= now:
            await self.dispatcher.drop_missed(run)
            await run.apply(expire)

    async def _for_each(
        self, runs: Iterable[ServedRun], work: Callable[[ServedRun], Awaitable[object]]
    ) -> None:
        """Process runs concurrently, then raise all failures together."""
        results = await asyncio.gather(*map(work, runs), return_exceptions=True)
        failures = [result for result in results if isinstance(result, Exception)]
        if failures:
            raise ExceptionGroup("failures of runs", failures)

    async def _poll_store(self) -> None:
        """Check the leader lock and the other replicas; find commits whose signals were lost."""
        now = asyncio.get_running_loop().time()
        # At most one check per interval, because a check costs the store more than a commit.
        if not self.store.shared or now < self._polled_at + _POLL_S:
            return
        self._polled_at = now
        self.is_leader = await self.store.lead()
        await self._update_alive()
        await self.registry.refresh(lazily=True)
        await self._publish_load()
        await self._for_each(list(self.registry.served.values()), self._check_run)

    async def _update_alive(self) -> None:
        before, self._alive = self._alive, await self.store.alive()
        if before - self._alive:
            # A replica has exited, perhaps without a signal of its last commits.
            for run in self.registry.served.values():
                run.may_be_stale = True
            await self.access.reload_all()

    async def _check_run(self, run: ServedRun) -> None:
        # The signal of a commit may be lost, and a replica may exit before it sends the signal.
        if run.may_be_stale:
            await run.catch_up()
        if self.is_leader and has_lost_calls(run.state, self._alive):
            await run.apply(charge_lost_replicas, alive=self._alive, down=False)

    async def _publish_load(self) -> None:
        pool = self.dispatcher.pool
        load = pool.num_away, round(pool.rate(self.clock.now()), 3)
        before, self._published_load = self._published_load, load
        if (before, load) != ((0, 0.0), (0, 0.0)):
            signal = signals.PoolLoad(replica=self.store.replica, num_away=load[0], rate=load[1])
            await signals.publish(self.store, signal)

    async def _watch(self) -> None:
        while True:
            self._changed.clear()
            # If the first call fails, the second is made nevertheless.
            works = self._poll_store, self._apply_deadlines
            succeeded = [await self._try(work, "deadlines could not be applied") for work in works]
            if not all(succeeded):
                await asyncio.sleep(1)
                continue
            wait = self._until_due() if self.is_leader else None
            self._wakes_at = math.inf if wait is None else self.clock.now() + wait
            if self.store.shared:
                wait = _POLL_S if wait is None else min(wait, _POLL_S)
            try:
                async with asyncio.timeout(wait):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _try(self, work: Callable[[], Awaitable[None]], failure: str) -> bool:
        try:
            await work()
        except Exception:
            # The store may recover, so the loop continues.
            _log.error(failure, traceback=traceback.format_exc())
            return False
        return True

    def _until_due(self) -> float | None:
        due = [
            run.due
            for run in self.registry.served.values()
            if run.state.running and run.due is not None
        ]
        return max(min(due) - self.clock.now(), 0.001) if due else None

    def _enqueue(self, text: str | None) -> None:
        if self._signals.qsize() >= _MAX_SIGNALS:
            while not self._signals.empty():
                self._signals.get_nowait()
            text = None
        self._signals.put_nowait(text)

    async def _process_signals(self) -> None:
        while True:
            try:
                await self._process(await self._signals.get())
            except Exception:
                _log.error("a signal could not be processed", traceback=traceback.format_exc())

    async def _process(self, text: str | None) -> None:
        signal = None
        if text is not None:
            try:
                signal = signals.SIGNAL.validate_json(text)
            except ValidationError:
                _log.warning("a signal of a newer version was ignored")
        match signal:
            case None:
                await self._reload_all()
            case signals.RunChanged():
                await self._on_run_changed(signal)
            case signals.RunsChanged():
                await self.registry.refresh()
            case signals.MemberJoined():
                await self.dispatcher.add_member(signal.member)
            case signals.MembersLeft():
                self.dispatcher.on_members_left(signal.client_indices)
            case signals.PoolLoad():
                self.dispatcher.pool.record_replica(
                    signal.replica, signal.num_away, signal.rate, self.clock.now()
                )
            case signals.ClientChanged():
                await self.access.reload(signal.client_index)

    async def _on_run_changed(self, changed: signals.RunChanged) -> None:
        run = self.registry.served.get(changed.run_id)
        if run is None:
            await self.registry.refresh()
            return
        run.on_remote_commit(changed)
        self._changed.set()
        if changed.offered is None:
            self.dispatcher.wake()
        else:
            self.dispatcher.note_seats(run.run_id, changed.offered)
        # Changes that event streams show are loaded now, other changes on the next access.
        if changed.finished or changed.offered is None or changed.status != run.state.status:
            await run.catch_up()

    async def _reload_all(self) -> None:
        for run in self.registry.served.values():
            run.may_be_stale = True  # Set first: if the store fails now, a later check reloads.
        try:
            await self.access.reload_all()
            await self.registry.refresh()
            for member in await self.store.members():
                await self.dispatcher.add_member(member)
        finally:
            self.dispatcher.wake()
            self._changed.set()

    async def _sweep_hourly(self) -> None:
        while True:
            if self.is_leader:
                await self._try(self.sweep, "retention sweep failed")
            await asyncio.sleep(_SWEEP_INTERVAL_S)

    async def sweep(self) -> None:
        """Remove expired data; a failure for one run does not stop the others."""
        now, runs = self.clock.now(), await self.registry.all_heads()
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
            # Runs that can continue need the defence records and the epsilon of their clients.
            spared = {client for run in runs.values() if not run.final for client in run.clients}
            await self._sweep_clients(now - self.retention.idle_clients_days * _DAY_S, spared)

    async def _sweep_run(self, run_id: str, run: StoredRun, age_s: float) -> None:
        periods = self.retention
        if _is_older(age_s, periods.ended_runs_days):
            await self.delete(run_id, run.version)
            self._trimmed.pop(run_id, None)
            return
        log = run.final and _is_older(age_s, periods.logs_days)
        closed = _is_older(age_s, periods.closed_work_days)
        trimmed = run.version, log, closed
        if (log or closed) and self._trimmed.get(run_id) != trimmed:
            await self.store.trim(run_id, log=log, closed=closed)
            self._trimmed[run_id] = trimmed
            _log.info("run trimmed", run_id=run_id, log=log, closed=closed)

    async def _sweep_clients(self, before: float, spared: Set[int]) -> None:
        num_spared = 0
        while True:
            # The query also returns the spared clients, so the limit grows by their number.
            limit = num_spared + _CLIENTS_AT_ONCE
            idle = await self.store.idle_clients(before, limit)
            retired = [index for index in idle if index not in spared]
            for index in retired:
                await self.access.retire(index)
            num_spared = len(idle) - len(retired)
            if len(idle) < limit:
                return


def _is_older(age_s: float, days: float | None) -> bool:
    return days is not None and age_s > days * _DAY_S
