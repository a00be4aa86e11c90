"""The clients of a federation in one process: all wait, and those exist that have work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Self

from fedone_sdk.aggregator.events import Effect, SeatOffered
from fedone_sdk.aggregator.pool import STAY_S
from fedone_sdk.aggregator.run import CaughtUp, ServedRun
from fedone_sdk.aggregator.service import Service
from fedone_sdk.client import EdgeClient
from fedone_sdk.errors import ProblemError
from fedone_sdk.messages import Enrol, Enrolled
from fedone_sdk.simulation.devices import Devices
from fedone_sdk.simulation.memory_transport import MemoryTransport

__all__ = ["Population"]


_BATCH = 128
"""Clients that enrol at the same time."""


@dataclass(slots=True)
class _Place:
    """One client.

    Attributes:
        number: Its position among the shards.
        index: Its enrolment index; None while it is not known.
        enrolled: The answer to its enrolment, until its `EdgeClient` asks for it.
        client: The client itself, once it has had work.
        awake: Whether it is at work.
    """

    number: int
    index: int | None = None
    enrolled: Enrolled | None = None
    client: EdgeClient | None = None
    awake: bool = False


class _Line(MemoryTransport):
    """A client's line to the service, which sees who the client is."""

    def __init__(self, population: Population, place: _Place) -> None:
        super().__init__(population.service)
        self._population = population
        self._place = place

    async def enrol(self, token: str, message: Enrol) -> Enrolled:
        """Makes an identity, or hands out the one that was made with all the others'."""
        answer, self._place.enrolled = self._place.enrolled, None
        if answer is None:
            answer = await super().enrol(token, message)
            await self._population.know(self._place, answer.credential)
        return answer


class Population:
    """The clients of a federation, as many as there are shards.

    All are enrolled and wait in the aggregator's pool, and none of them holds a request open.
    When the machine offers one of them a seat, its `EdgeClient` is made and does what it would do
    on a device: it asks for the work, scores, returns the update. It is kept for its next seat,
    with what it knows of the run and what its method remembers.

    Args:
        service: The aggregator's, in this process.
        devices: What the clients are made of.

    Attributes:
        service: As given.
    """

    def __init__(self, service: Service, devices: Devices) -> None:
        self.service = service
        self._devices = devices
        self._places = [_Place(number) for number in range(len(devices))]
        self._nonces = devices.nonces()
        self._by_index: dict[int, _Place] = {}
        self._made = AsyncExitStack()
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._made.aclose()

    async def enrol(self) -> None:
        """Enrols all, in the order of their shards.

        A client's enrolment index, which draws go by, is its shard's.

        Raises:
            ProblemError: The token is not valid.
        """
        devices = self._devices
        if devices.between is not None:
            for place in self._places:
                await self._enrol_client(place)
            return
        plain = MemoryTransport(self.service)
        for places in _batches(self._places):
            # Who keeps an identity may have one; the others share a write of the store, whose
            # queue keeps their order.
            kept = [place for place in places if devices.credential(place.number) is not None]
            new = [place for place in places if place not in kept]
            answers = await asyncio.gather(
                *(
                    plain.enrol(devices.token, Enrol(nonce=self._nonces[place.number]))
                    for place in new
                )
            )
            for place, answer in zip(new, answers, strict=True):
                place.enrolled = answer
                await self.know(place, answer.credential)
            for place in kept:
                await self._enrol_client(place)

    async def _enrol_client(self, place: _Place) -> None:
        await (await self._client(place)).enrol()
        if place.index is None:
            await self.know(place, self._devices.credential(place.number))

    async def know(self, place: _Place, credential: str | None) -> None:
        """Takes note of who a client is; nothing where the aggregator does not know it."""
        try:
            record = await self.service.client(credential)
        except ProblemError:
            return  # It is told so when it asks for work, and enrols again.
        place.index = record.index
        self._by_index[record.index] = place

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Lets the clients work within the ``async with``.

        Raises:
            ExceptionGroup: What a client could not go on with.
        """
        async with asyncio.TaskGroup() as self._group:
            self.service.listeners.append(self._notice)
            keeping = self._group.create_task(self._keep_waiting(), name="population")
            try:
                await self._gather(self._by_index)
                for run in self.service.runs.values():
                    self._look_at(run)  # Seats of before this start.
                for place in self._places:
                    if place.index is None:
                        self._wake(place)
                yield
            finally:
                self.service.listeners.remove(self._notice)
                for task in (keeping, *self._tasks):
                    task.cancel()

    # Who has work

    def _notice(self, run: ServedRun, effect: Effect | CaughtUp | None) -> None:
        if isinstance(effect, SeatOffered):
            self._offer(effect.client)
        elif isinstance(effect, CaughtUp):
            self._look_at(run)

    def _look_at(self, run: ServedRun) -> None:
        for seat in run.state.seats:
            if seat.phase != "done":
                self._offer(seat.client)

    def _offer(self, index: int) -> None:
        place = self._by_index.get(index)
        if place is not None:  # else a client of somebody else's
            self._wake(place)

    def _wake(self, place: _Place) -> None:
        if not place.awake and self._group is not None:
            place.awake = True
            task = self._group.create_task(self._work(place), name=f"client {place.number}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _has_seat(self, place: _Place) -> bool:
        return any(
            seat.client == place.index and seat.phase != "done"
            for run in self.service.runs.values()
            for seat in run.state.seats
        )

    async def _work(self, place: _Place) -> None:
        """Works until a client has no seat; who is offline goes on: its update may wait."""
        client = await self._client(place)
        while True:
            outcome = await client.run_once()
            served = outcome != "offline" and place.index is not None
            if outcome == "ended" or (served and not self._has_seat(place)):
                # No await from the look to here: an offer from now on wakes it again.
                place.awake = False
                return
            await asyncio.sleep(client.next_turn_s)

    async def _client(self, place: _Place) -> EdgeClient:
        if place.client is None:
            line = _Line(self, place)
            client = self._devices.client(place.number, line, self._nonces[place.number])
            place.client = await self._made.enter_async_context(client)
        return place.client

    # Who waits

    async def _gather(self, indices: Iterable[int]) -> None:
        shards = self._devices.shards
        await self.service.gather(
            {index: len(shards[self._by_index[index].number]) for index in indices}
        )

    async def _keep_waiting(self) -> None:
        """Says again that they wait: who is not heard of for long leaves the pool."""
        while True:
            await asyncio.sleep(STAY_S / 3)
            pool = self.service.dispatcher.pool
            # Not who left it, such as one who missed a seat: its next request lets it in again.
            await self._gather([index for index in self._by_index if index in pool])


def _batches(places: Iterable[_Place]) -> Iterator[list[_Place]]:
    ahead = iter(places)
    while batch := [*islice(ahead, _BATCH)]:
        yield batch
