"""The replicas of one aggregator: what they hear of each other, and what only one of them does."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping

import structlog
from pydantic import ValidationError

from fedone_sdk.aggregator.access.clients import Access
from fedone_sdk.aggregator.cluster.signals import (
    SIGNAL,
    ClientChanged,
    Crowd,
    Joined,
    Left,
    RunAdded,
    RunMoved,
    RunRemoved,
    Signal,
    tell,
)
from fedone_sdk.aggregator.rounds.events import TimePassed
from fedone_sdk.aggregator.serving.dispatcher import Dispatcher
from fedone_sdk.aggregator.serving.pool import STAY_S
from fedone_sdk.aggregator.serving.run import ServedRun
from fedone_sdk.clock import Clock
from fedone_sdk.stores import Member, Store

__all__ = ["Replicas"]

_log = structlog.get_logger(__name__)

_LOOK_S = 1.0
"""How often replicas look whether the leader or others are gone, seconds."""
_MOST_SIGNALS = 10_000
"""So many may wait to be followed; beyond that it is cheaper to read everything anew."""


class Replicas:
    """One replica among those that serve a store.

    All hear of the others' commits. The leader applies deadlines, and charges what a replica that
    is gone had under way.

    Args:
        store: What they share.
        clock: Tells the time.
        runs: The runs that are served, by id.
        dispatcher: Who waits for work here.
        access: The clients.
        refresh: Reads what others may have changed in any run.
        has_news: Whether these versions of all stored runs say that others were added or removed.
    """

    def __init__(
        self,
        *,
        store: Store,
        clock: Clock,
        runs: Mapping[str, ServedRun],
        dispatcher: Dispatcher,
        access: Access,
        refresh: Callable[[], Awaitable[None]],
        has_news: Callable[[Mapping[str, int]], bool],
    ) -> None:
        self._store = store
        self._clock = clock
        self._runs = runs
        self._dispatcher = dispatcher
        self._access = access
        self._refresh = refresh
        self._has_news = has_news
        self._signals: asyncio.Queue[str | None] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._alive: frozenset[str] = frozenset()
        self._leads = self._down = False
        self._looked = -_LOOK_S
        self._told = (0, 0.0)

    @property
    def num_alive(self) -> int:
        """How many replicas serve the store, as far as this one has seen."""
        return max(len(self._alive), 1)

    @property
    def leads(self) -> bool:
        """Whether this one does what only one of them should do."""
        return self._leads

    async def start(self) -> None:
        """Begins to listen; then the runs are to be read, and `take_up` to be called."""
        self._store.listen(self._listen)
        self._alive = await self._store.alive()
        # Whoever serves leads or sees at once that nobody does; who starts beside this one has
        # served nobody yet.
        self._leads = self._down = await self._store.lead()

    async def take_up(self) -> None:
        """Takes up what was under way: who waited, and what runs had given out.

        After all runs were read: a draw must not know of some who wait only.
        """
        down = self._down
        members = await self._store.members()
        # The last one that was heard of tells until when somebody served, at least.
        served = max((member.until for member in members), default=0.0) - STAY_S
        gone = [member.client_index for member in members if member.until <= served]
        for member in members:
            if member.until > served:
                await self._take_in(self._dispatcher.presume(member) if down else member)
        if down and gone:
            await self._store.leave(gone)
        for run in list(self._runs.values()):
            await run.restarted(self._alive, down=down)

    def watch(self) -> None:
        """Begins to follow the others and to watch deadlines; the runs are taken up."""
        self._tasks = [
            asyncio.create_task(self._watch(), name="deadlines"),
            asyncio.create_task(self._hear(), name="signals"),
        ]

    async def stop(self) -> None:
        """Ends listening and watching."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    def notice(self) -> None:
        """Something happened to a run: its next deadline may be another."""
        self._changed.set()

    async def tell_added(self, run: ServedRun) -> None:
        """Tells the others of a new run."""
        await tell(self._store, RunAdded(run_id=run.run_id))

    # What only the leader does

    async def tick(self) -> None:
        """Takes seats from late clients, and charges what lost replicas had under way."""
        if self._store.shared:
            await self._look_who_lives()
            await self._for_each(list(self._runs.values()), self._look_at)
        await self._pass_all()

    async def _pass_deadlines(self) -> None:
        if not self._store.shared:
            self._leads = await self._store.lead()
        if self._leads:
            await self._pass_all()

    async def _pass_all(self) -> None:
        now = self._clock.now()
        runs = list(self._runs.values())
        due = [run for run in runs if run.doubtful or (run.due is not None and run.due <= now)]
        await self._for_each(due, self._pass_deadline)

    async def _pass_deadline(self, run: ServedRun) -> None:
        await run.catch_up()
        now = self._clock.now()
        if run.state.running and run.due is not None and run.due <= now:
            await self._dispatcher.miss(run)
            await run.apply(TimePassed())

    async def _for_each(
        self, runs: Iterable[ServedRun], work: Callable[[ServedRun], Awaitable[object]]
    ) -> None:
        """Does something with runs, all at once: none waits for one that is slow or broken.

        Raises:
            ExceptionGroup: Of what failed, once all the others are done.
        """
        done = await asyncio.gather(*map(work, runs), return_exceptions=True)
        failed = [result for result in done if isinstance(result, Exception)]
        if failed:
            raise ExceptionGroup("runs that could not be worked on", failed)

    async def _look(self) -> None:
        """Looks who leads, who is gone, and for commits that nobody told of."""
        now = asyncio.get_running_loop().time()
        # Not at every event: it costs the store more than the event does.
        if not self._store.shared or now < self._looked + _LOOK_S:
            return
        self._looked = now
        self._leads = await self._store.lead()
        await self._look_who_lives()
        versions = await self._store.versions()
        if self._has_news(versions):
            await self._refresh()
        for run_id, version in versions.items():
            if run_id in self._runs:
                self._runs[run_id].hear_version(version)
        await self._tell_crowd()
        await self._for_each(list(self._runs.values()), self._look_at)

    async def _look_who_lives(self) -> None:
        before, self._alive = self._alive, await self._store.alive()
        if before - self._alive:
            # What they had under way may be newer than the copies here, and of what they did last
            # they may have told nobody.
            for run in self._runs.values():
                run.doubt()
            await self._access.reload()

    async def _look_at(self, run: ServedRun) -> None:
        # A replica may die between a commit and its signal, and a signal may be lost.
        if run.doubtful:
            await run.catch_up()
        if self._leads and run.machine.has_lost_calls(run.state, self._alive):
            await run.restarted(self._alive, down=False)

    async def _tell_crowd(self) -> None:
        now, pool = self._clock.now(), self._dispatcher.pool
        before, self._told = self._told, (pool.away, round(pool.rate(now), 3))
        if (before, self._told) != ((0, 0.0), (0, 0.0)):
            away, rate = self._told
            crowd = Crowd(replica=self._store.replica, away=away, rate=rate)
            await tell(self._store, crowd)

    async def _watch(self) -> None:
        while True:
            self._changed.clear()
            # What one cannot do must not keep the other from being done.
            tried = [await self._tried(self._look), await self._tried(self._pass_deadlines)]
            if not all(tried):
                await asyncio.sleep(1)
                continue
            wait = self._until_due() if self._leads else None
            if self._store.shared:
                wait = _LOOK_S if wait is None else min(wait, _LOOK_S)
            try:
                async with asyncio.timeout(wait):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _tried(self, work: Callable[[], Awaitable[None]]) -> bool:
        try:
            await work()
        except Exception:
            # A store that fails now may work again; deadlines must not stop being watched.
            _log.error("deadlines could not be applied", traceback=traceback.format_exc())
            return False
        return True

    def _until_due(self) -> float | None:
        due = [run.due for run in self._runs.values() if run.state.running and run.due is not None]
        return max(min(due) - self._clock.now(), 0.001) if due else None

    # What others say

    def _listen(self, text: str | None) -> None:
        if self._signals.qsize() >= _MOST_SIGNALS:
            while not self._signals.empty():
                self._signals.get_nowait()
            text = None
        self._signals.put_nowait(text)

    async def _hear(self) -> None:
        while True:
            try:
                await self._follow(await self._signals.get())
            except Exception:
                _log.error("a signal could not be followed", traceback=traceback.format_exc())

    async def _follow(self, text: str | None) -> None:
        signal = None
        if text is not None:
            try:
                signal = SIGNAL.validate_json(text)
            except ValidationError:
                _log.warning("a signal of a newer version is passed over")
        if signal is None:
            await self._doubt_all()
        else:
            await self._understand(signal)

    async def _understand(self, signal: Signal) -> None:
        match signal:
            case RunMoved():
                await self._moved(signal)
            case RunAdded():
                await self._refresh()
                await self._access.recount()  # It may have brought its clients along.
            case RunRemoved():
                await self._refresh()
            case Joined():
                await self._take_in(
                    Member(
                        client_index=signal.client_index,
                        num_examples=signal.num_examples,
                        run_id=signal.run_id,
                        until=signal.until,
                    )
                )
            case Left():
                self._dispatcher.left(signal.client_indices)
            case Crowd():
                self._dispatcher.pool.hear(
                    signal.replica, signal.away, signal.rate, self._clock.now()
                )
            case ClientChanged():
                await self._access.reload(signal.client_index)

    async def _moved(self, moved: RunMoved) -> None:
        run = self._runs.get(moved.run_id)
        if run is None:
            await self._refresh()
            return
        run.hear(moved)
        self._changed.set()
        if moved.offered is None:
            self._dispatcher.wake()
        else:
            self._dispatcher.offer(run.run_id, moved.offered)
        # Whoever follows the run here wants to know; all else can wait until it is asked for.
        if moved.finished or moved.offered is None or moved.status != run.state.status:
            await run.catch_up()

    async def _take_in(self, member: Member) -> None:
        client = await self._access.record(member.client_index)
        if client is not None and client.revoked_at is None:
            self._dispatcher.take_in(member, client)

    async def _doubt_all(self) -> None:
        """Signals were lost: reads everything that they may have told of."""
        for run in self._runs.values():
            run.doubt()  # First: should the store be away, the next look reads them.
        try:
            await self._access.reload()
            await self._refresh()
            for member in await self._store.members():
                await self._take_in(member)
        finally:
            self._dispatcher.wake()
            self._changed.set()
