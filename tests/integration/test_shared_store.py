"""Several services on one PostgreSQL: each of them serves the same run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from fedone_sdk.aggregator.authority import Authority
from fedone_sdk.aggregator.dispatch.client_pool import RetryLater
from fedone_sdk.aggregator.service import Service
from fedone_sdk.algorithms import alpha_sha256, dump_memory, load_memory
from fedone_sdk.budget import Usage
from fedone_sdk.clock import SystemClock
from fedone_sdk.errors import ProblemError
from fedone_sdk.messages import Claim, Enrol, LossesAssignment, LossesUpdate, Scored
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import MemoryStore, SqlStore, Store
from fedone_sdk.vocabulary import Vocabulary
from tests.postgres import Cluster
from tests.runs import TOKEN, run_spec, serving, start

WORDS = Vocabulary(candidates=("x", "y"))
ROUNDS = 12


def spec_of(**participation: Any) -> RunSpec:
    return run_spec(
        method={"num_samples": 2},
        participation={"min_clients": 4, **participation},
        budget={"queries": 2 * ROUNDS},
        rounds=ROUNDS,
    )


@asynccontextmanager
async def replicas(
    number: int, store: Callable[[], Store], **participation: Any
) -> AsyncIterator[list[Service]]:
    async with AsyncExitStack() as stack:
        services = []
        for _ in range(number):
            start = serving(store=store(), clock=SystemClock())
            services.append(await stack.enter_async_context(start))
        await services[0].add_run(spec_of(**participation), WORDS)
        yield services


class Device:
    """Asks another replica each time."""

    def __init__(self, services: list[Service], number: int) -> None:
        self.services, self.at = services, number
        self.credential = ""

    @property
    def service(self) -> Service:
        self.at += 1
        return self.services[self.at % len(self.services)]

    async def enrol(self) -> None:
        self.credential = (await self.service.access.enrol(TOKEN, Enrol())).credential

    async def claim(self, wait_s: float = 5.0) -> LossesAssignment | None:
        service = self.service
        claim = Claim(num_examples=5, wait_s=wait_s)
        found = await service.work.claim(await service.access.authenticate(self.credential), claim)
        assert not isinstance(found, RetryLater) or found.retry_after_s == 0
        return found if isinstance(found, LossesAssignment) else None

    async def send(self, work: LossesAssignment, body: str = "ab") -> None:
        prompts = work.prompts.data
        losses = tuple(0.1 + 0.1 * prompts[at] + work.round / 100 for at in range(2))
        update = LossesUpdate(
            num_examples=5, scored=Scored(scored=2), usage=Usage(), model="scripted", losses=losses
        )
        service = self.service
        client = await service.access.authenticate(self.credential)
        receipt = await service.work.update(client, work.assignment_id, update, body * 32)
        assert receipt.round == work.round


async def devices_of(services: list[Service], count: int = 4) -> list[Device]:
    devices = [Device(services, number) for number in range(count)]
    for device in devices:
        await device.enrol()
    return devices


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(10):
        while not await condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def shared(postgres: Cluster, database: str) -> Callable[[], Store]:
    return lambda: SqlStore.at(postgres.url(database))


class TestThreeReplicas:
    async def test_the_same_update_sent_to_two_is_one(self, shared: Callable[[], Store]) -> None:
        async with replicas(2, shared, min_clients=1) as services:
            (device,) = await devices_of(services, 1)
            work = await device.claim()
            assert work is not None
            await asyncio.gather(device.send(work), device.send(work))
            run = await services[0].registry.run("run")
            assert (run.state.round, run.result().spent.queries) == (1, 2)
            with pytest.raises(ProblemError, match="another update"):
                await device.send(work, body="cd")


class _Shared(MemoryStore):
    """A store in memory, as one of several processes sees it."""

    shared = True

    def __init__(self, other: MemoryStore | None = None) -> None:
        super().__init__()
        if other is not None:
            self.__dict__ = other.__dict__


async def test_after_a_rollback_to_the_start_a_client_remembers_nothing() -> None:
    store = MemoryStore()
    spec = spec_of(min_clients=1)
    method = spec.method.model_copy(update={"optimizer": "adamw"})
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(serving(store=store, clock=SystemClock()))
        run = await service.add_run(spec.model_copy(update={"method": method}), WORDS)
        start = run.state
        (device,) = await devices_of([service], 1)
        work = await device.claim()
        assert work is not None
        await device.send(work)
        assert load_memory(await store.memory("run", 0) or b"")
        await service.roll_back(run, 0, "a lying client")
        assert await store.memory("run", 0) is None
        assert alpha_sha256(run.state.method.alpha) == alpha_sha256(start.method.alpha)


async def test_a_client_remembers_what_it_did_last_and_not_what_was_read_before() -> None:
    class Slow(_Shared):
        async def memory(
            self, run_id: str, client_index: int, at_round: int | None = None
        ) -> bytes | None:
            found = await super().memory(run_id, client_index, at_round)
            while meanwhile:
                await meanwhile.pop()()
            return found

    meanwhile: list[Callable[[], Awaitable[None]]] = []
    store = _Shared()
    here, there = (
        Service(store=s, clock=SystemClock(), authority=Authority(enrolment_tokens=[TOKEN]))
        for s in (store, Slow(store))
    )
    spec = spec_of(min_clients=1)
    method = spec.method.model_copy(update={"optimizer": "adamw"})
    async with AsyncExitStack() as stack:
        for service in (here, there):
            await start(service)
            stack.push_async_callback(service.stop)
        await here.add_run(spec.model_copy(update={"method": method}), WORDS)
        (device,) = await devices_of([here], 1)

        async def work_here() -> None:
            work = await device.claim()
            assert work is not None
            await device.send(work)

        await work_here()
        await there.registry.refresh()
        meanwhile.append(work_here)
        client = await there.access.authenticate(device.credential)
        work = await there.work.claim(client, Claim(num_examples=5, wait_s=0))
        assert isinstance(work, LossesAssignment)
        assert work.round == 2
        (seat,) = there.runs["run"].state.seats
        saved = await store.memory("run", client.index)
        assert saved is not None
        assert seat.local is not None
        assert dump_memory(seat.local.memory) == saved
