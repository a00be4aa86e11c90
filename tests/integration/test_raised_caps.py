"""Concurrent raises of caps, while devices work."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from fedone_sdk.aggregator.service import Service
from fedone_sdk.budget import Budget
from fedone_sdk.clock import SystemClock
from fedone_sdk.errors import ProblemError, SpecError
from fedone_sdk.stores import MemoryStore, SqlStore, Store
from tests.integration.test_http import server  # noqa: F401
from tests.integration.test_shared_store import ROUNDS, WORDS, Device, devices_of, spec_of
from tests.runs import serving

LOW = spec_of().model_copy(update={"budget": Budget(queries=4)})


@pytest.fixture(params=["memory", "sqlite", "postgres"])
async def services(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[list[Service]]:
    """The services of a run: two where a store is shared."""

    def store() -> Store:
        if request.param == "memory":
            return MemoryStore()
        if request.param == "sqlite":
            return SqlStore.sqlite(tmp_path / "store.db")
        cluster = request.getfixturevalue("postgres")
        return SqlStore.at(cluster.url(request.getfixturevalue("database")))

    async with AsyncExitStack() as stack:
        found = []
        for _ in range(2 if request.param == "postgres" else 1):
            start = serving(store=store(), clock=SystemClock())
            found.append(await stack.enter_async_context(start))
        await found[0].add_run(LOW, WORDS)
        yield found


async def work(devices: list[Device]) -> None:
    """Lets devices work until the run has ended."""

    async def until_the_end(device: Device) -> None:
        try:
            while True:
                found = await device.claim()
                if found is not None:
                    await device.send(found)
        except ProblemError as exc:
            if exc.code != "run_ended":
                raise

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        for device in devices:
            group.create_task(until_the_end(device))


async def test_the_highest_cap_counts_and_is_kept(services: list[Service]) -> None:
    devices = await devices_of(services)

    async def raise_caps(at: int, queries: int) -> bool:
        service = services[at % len(services)]
        try:
            await service.raise_caps(await service.registry.run("run"), Budget(queries=queries))
        except ProblemError:
            return False
        return True

    await work(devices)
    run = await services[0].registry.run("run")
    assert (run.state.status, run.result().spent.queries) == ("budget_exhausted", 4)
    caps = [8, 6, 12, 10, 6]
    raised = await asyncio.gather(*(raise_caps(at, cap) for at, cap in enumerate(caps)))
    assert raised[caps.index(12)]
    await asyncio.gather(work(devices), raise_caps(0, 14), raise_caps(1, 2 * ROUNDS - 2))
    await work(devices)
    run = await services[-1].registry.run("run")
    result = run.result()
    assert (result.status, result.rounds) == ("budget_exhausted", ROUNDS - 1)
    assert (result.cap.queries, result.spent.queries) == (2 * ROUNDS - 2, 2 * ROUNDS - 2)
    logged = await services[0].store.log("run", "budget")
    assert json.loads(logged[-1].body)["cap"] == {"queries": str(2 * ROUNDS - 2)}
    assert not await raise_caps(0, 2 * ROUNDS - 3)
    # A server that starts again with a file raises, too, and never lowers.
    await services[0].add_run(LOW, WORDS)
    assert run.state.account.cap == Budget(queries=2 * ROUNDS - 2)
    with pytest.raises(SpecError, match="budget: queries: the cap is 22, and a cap can only be"):
        await services[0].add_run(LOW.model_copy(update={"budget": Budget(queries=6)}), WORDS)
    await services[0].add_run(spec_of(), WORDS)
    await work(devices)
    assert (await services[-1].registry.run("run")).result().status == "completed"


async def test_what_cannot_be_continued_is_not_raised() -> None:
    async with serving(clock=SystemClock()) as service:
        run = await service.add_run(LOW, WORDS)
        await work(await devices_of([service]))
        run.history.clear()  # as after `retention.logs_days`
        with pytest.raises(ProblemError, match="its log was removed"):
            await service.raise_caps(run, Budget(queries=6))
        assert run.state.account.cap == LOW.budget
