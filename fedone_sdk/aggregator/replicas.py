"""The replicas of one aggregator: what they hear of each other, and what only one of them does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import structlog
from pydantic import ValidationError

from fedone_sdk.aggregator.access import Access
from fedone_sdk.aggregator.dispatcher import Dispatcher
from fedone_sdk.aggregator.events import TimePassed
from fedone_sdk.aggregator.run import ServedRun
from fedone_sdk.aggregator.signals import (
    SIGNAL,
    ClientChanged,
    Joined,
    Left,
    RunAdded,
    RunMoved,
    Signal,
)
from fedone_sdk.clock import Clock
from fedone_sdk.stores import Member, Store

__all__ = ["Replicas"]

_log = structlog.get_logger(__name__)

_LOOK_S = 1.0
"""How often replicas look whether the leader or others are gone, seconds."""


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
    ) -> None:
        self._store = store
        self._clock = clock
        self._runs = runs
        self._dispatcher = dispatcher
        self._access = access
        self._refresh = refresh
        self._signals: asyncio.Queue[str | None] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._alive: frozenset[str] = frozenset()
        self._leads = False

    @property
    def num_alive(self) -> int:
        """How many replicas serve the store, as far as this one has seen."""
        return max(len(self._alive), 1)

    @property
    def leads(self) -> bool:
        """Whether this one does what only one of them should do."""
        return self._leads

    async def start(self) -> None:
        """Takes up what was under way, and begins to listen and to watch."""
        self._store.listen(self._signals.put_nowait)
        self._alive = await self._store.alive()
        down = self._alive <= {self._store.replica}
        for member in await self._store.members():
            await self._take_in(self._dispatcher.presume(member) if down else member)
        for run in list(self._runs.values()):
            await run.restarted(self._alive, down=down)
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
        if self._store.shared:
            await self._store.publish(RunAdded(run_id=run.run_id).model_dump_json())

    # What only the leader does

    async def tick(self) -> None:
        """Takes seats from late clients, and charges what lost replicas had under way."""
        if self._store.shared:
            await self._look_for_lost()
        now = self._clock.now()
        for run in list(self._runs.values()):
            if run.due is not None and run.due <= now:
                await run.catch_up()
                if run.state.running:
                    await self._dispatcher.miss(run)
                    await run.apply(TimePassed())

    async def _look_for_lost(self) -> None:
        self._alive = await self._store.alive()
        for run in list(self._runs.values()):
            if run.machine.has_lost(run.state, self._alive):
                await run.restarted(self._alive, down=False)

    async def _look_for_unheard(self) -> None:
        """Reads runs of whose commits nobody told: a replica may die between both."""
        for run_id, version in (await self._store.versions()).items():
            run = self._runs.get(run_id)
            if run is None:
                await self._refresh()
            elif run.hear_version(version):
                await run.catch_up()

    async def _watch(self) -> None:
        while True:
            self._changed.clear()
            try:
                self._leads = await self._store.lead()
                wait = None
                if self._leads:
                    await self.tick()
                    wait = self._until_due()
                elif self._store.shared:
                    self._alive = await self._store.alive()
                if self._store.shared:
                    await self._look_for_unheard()
            except Exception:
                # A store that fails now may work again; deadlines must not stop being watched.
                _log.exception("deadlines could not be applied")
                await asyncio.sleep(1)
                continue
            if self._store.shared:
                wait = _LOOK_S if wait is None else min(wait, _LOOK_S)
            try:
                async with asyncio.timeout(wait):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _until_due(self) -> float | None:
        due = [run.due for run in self._runs.values() if run.state.running and run.due is not None]
        return max(min(due) - self._clock.now(), 0.001) if due else None

    # What others say

    async def _hear(self) -> None:
        while True:
            text = await self._signals.get()
            try:
                if text is None:
                    await self._doubt_all()
                else:
                    await self._understand(SIGNAL.validate_json(text))
            except ValidationError:
                _log.warning("a signal of a newer version is passed over")
                await self._doubt_all()
            except Exception:
                _log.exception("a signal could not be followed")

    async def _understand(self, signal: Signal) -> None:
        match signal:
            case RunMoved():
                await self._moved(signal)
            case RunAdded():
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
                self._dispatcher.pool.leave(signal.client_indices)
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
        if client is not None:
            self._dispatcher.take_in(member, client)

    async def _doubt_all(self) -> None:
        """Signals were lost: reads everything that they may have told of."""
        await self._access.reload()
        for run in self._runs.values():
            run.doubt()
        await self._refresh()
        for member in await self._store.members():
            await self._take_in(member)
        self._dispatcher.wake()
        self._changed.set()
