"""The cap under chaos: dying devices, a network that cuts connections, servers that stop and crash.

The model itself counts what it is asked; whatever happens around it, that is never more than what
the run has set aside by then, and so never more than the cap.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import structlog

from fedone_sdk.aggregator import Aggregator, ServedRun
from fedone_sdk.backends import Query
from fedone_sdk.client.session import StopSignal
from fedone_sdk.errors import FedOneError
from fedone_sdk.messages import RunResult
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import Commit, SqlStore
from fedone_sdk.testing import ManualClock, ScriptedBackend
from tests.chaos.proxy import ChaosProxy
from tests.edge import edge_client
from tests.runs import TOKEN, WORDS, run_spec

NUM_CLIENTS = 12


def spec_of(exchange: str, *, cap: int, rounds: int) -> RunSpec:
    return run_spec(
        method={"batch_size": 3, "optimizer": "adamw", "local_steps": 2},
        participation={
            "exchange": exchange,
            "clients_per_round": 2,
            "deadline_s": 20,
        },
        budget={"queries": cap, "requests": cap},
        rounds=rounds,
    )


class Mortal(SqlStore):
    """A store whose process may die; afterwards nothing reaches the file."""

    dead = False

    async def commit(self, run_id: str, version: int, commit: Commit) -> None:
        if self.dead:
            raise FedOneError("this process is dead")
        await super().commit(run_id, version, commit)


class Chaos:
    """One run, and everything that can go wrong around it."""

    def __init__(self, seed: int, folder: Path, spec: RunSpec, *, restarts: int) -> None:
        self.rng = random.Random(seed)
        self.folder, self.spec = folder, spec
        self.restarts_left = restarts
        self.clock = ManualClock()
        assert spec.budget is not None
        assert spec.budget.queries is not None
        self.cap: int = spec.budget.queries
        self.backend = ScriptedBackend(gate=self.on_query)
        self.overshoot: list[str] = []
        self.events: dict[str, int] = {}
        self.server = AsyncExitStack()
        self.devices: list[asyncio.Task[None]] = []

    async def on_query(self, query: Query) -> None:
        asked, held = len(self.backend.asked), self.run.state.account.held
        # What a dead server had under way is asked again: a request more, but no new query.
        if not (asked <= held.requests <= self.cap and held.queries <= self.cap):
            self.overshoot.append(f"{asked} asked, {held} held, cap {self.cap}")
        for _ in range(self.rng.randrange(20)):
            await asyncio.sleep(0)

    async def start_server(self) -> None:
        self.store = Mortal.sqlite(self.folder / "fedone.db")
        aggregator = Aggregator(
            backend=self.backend, store=self.store, enrolment_tokens=[TOKEN], clock=self.clock
        )
        self.aggregator = await self.server.enter_async_context(aggregator)
        # In case of a crash, its gateway may still be at work: `run` is then the new process's.
        self.run: ServedRun = await aggregator.add_run(self.spec, WORDS)
        self.proxy.upstream = int((await aggregator.listen()).rpartition(":")[2])

    async def stop_server(self) -> None:
        # A connection that is made while a server closes would never be closed.
        self.proxy.upstream = 0
        await self.proxy.cut_all()
        for _ in range(10):
            await asyncio.sleep(0)
        await self.server.aclose()

    async def restart_server(self, *, crash: bool) -> None:
        self.store.dead = crash
        await self.stop_server()
        for _ in range(self.rng.randrange(50)):
            await asyncio.sleep(0)  # no server listens for a while
        await self.start_server()

    async def device(self, number: int) -> None:
        """One device, that sometimes has lost its identity."""
        keeps = self.rng.random() < 0.8
        data = [{"text": f"{number}: {row}", "label": row % 2} for row in range(4)]
        async with edge_client(
            self.proxy.url,
            token=TOKEN,
            data=data,
            state_dir=self.folder / f"device-{number}" if keeps else None,
            wait_s=self.rng.choice([0.0, 0.05, 5.0]),
        ) as client:
            await client.run_forever()

    def note(self, event: str) -> None:
        self.events[event] = self.events.get(event, 0) + 1

    async def torment(self) -> None:
        """Does one bad thing."""
        dice = self.rng.random()
        if dice < 0.45:
            number = self.rng.randrange(NUM_CLIENTS)
            self.devices[number].cancel()
            await asyncio.gather(self.devices[number], return_exceptions=True)
            self.devices[number] = asyncio.create_task(self.device(number))
            self.note("device killed")
        elif dice < 0.85:
            self.clock.advance(self.rng.uniform(0, 4))
            await self.aggregator.service.replicas.tick()
        elif dice < 0.9:
            await self.proxy.cut_all()
        elif dice < 0.96 and self.restarts_left:
            self.restarts_left -= 1
            crash = self.rng.random() < 0.5
            await self.restart_server(crash=crash)
            self.note("server crashed" if crash else "server stopped")

    async def play(self) -> RunResult:
        async with ChaosProxy(self.rng) as self.proxy:
            try:
                await self.start_server()
                self.devices = [
                    asyncio.create_task(self.device(number)) for number in range(NUM_CLIENTS)
                ]
                while self.run.state.running:
                    for _ in range(self.rng.randrange(60)):
                        await asyncio.sleep(0)
                    await self.torment()
                    for task in self.devices:
                        if task.done() and not task.cancelled():
                            task.result()  # a device never gives up, and never breaks
                return self.run.result()
            finally:
                for task in self.devices:
                    task.cancel()
                await asyncio.gather(*self.devices, return_exceptions=True)
                await self.stop_server()


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Requests that the server failed on; devices wait a fiftieth as long."""
    failed: list[str] = []

    def keep(_: Any, __: str, event: dict[str, Any]) -> str:
        if event["event"] == "request failed":
            failed.append(event["traceback"])
        raise structlog.DropEvent

    async def impatiently(self: StopSignal, seconds: float) -> None:
        await asyncio.sleep(seconds / 50)

    monkeypatch.setattr(StopSignal, "sleep", impatiently)
    structlog.configure(processors=[keep])
    yield failed
    structlog.reset_defaults()


async def check(chaos: Chaos, failures: list[str], limit_s: float) -> None:
    async with asyncio.timeout(limit_s):
        result = await chaos.play()
    spent, asked = result.spent.queries, len(chaos.backend.asked)
    assert chaos.overshoot == []
    assert asked <= result.spent.requests <= chaos.cap
    assert spent <= chaos.cap
    assert result.status in ("completed", "budget_exhausted")
    assert [report.round for report in result.history] == list(range(result.rounds))
    assert sum(report.queries for report in result.history) <= spent
    assert chaos.run.state.account.leases == {}
    assert chaos.proxy.cuts > 0
    # The chaos was one: some of what was paid for came to nothing.
    assert chaos.events["device killed"] > 3
    unexpected = [text for text in failures if "this process is dead" not in text]
    assert unexpected == []


@pytest.mark.parametrize("exchange", ["alpha", "losses"])
@pytest.mark.parametrize("seed", [1])
async def test_devices_and_network(
    seed: int, exchange: str, tmp_path: Path, failures: list[str]
) -> None:
    spec = spec_of(exchange, cap=100, rounds=1000)
    await check(Chaos(seed, tmp_path, spec, restarts=0), failures, 120)


@pytest.mark.parametrize("exchange", ["alpha", "losses"])
@pytest.mark.parametrize("seed", [2])
async def test_servers_too(seed: int, exchange: str, tmp_path: Path, failures: list[str]) -> None:
    chaos = Chaos(seed, tmp_path, spec_of(exchange, cap=100, rounds=1000), restarts=8)
    await check(chaos, failures, 120)
    assert chaos.restarts_left < 8


async def test_a_run_completes_all_the_same(tmp_path: Path, failures: list[str]) -> None:
    """With money enough, chaos costs rounds nothing but time."""
    chaos = Chaos(3, tmp_path, spec_of("losses", cap=10_000, rounds=6), restarts=3)
    await check(chaos, failures, 120)
    assert chaos.run.state.status == "completed"


@pytest.mark.heavy
@pytest.mark.parametrize("exchange", ["alpha", "losses"])
@pytest.mark.parametrize("seed", range(100, 120))
async def test_for_long(seed: int, exchange: str, tmp_path: Path, failures: list[str]) -> None:
    spec = spec_of(exchange, cap=1000, rounds=100_000)
    await check(Chaos(seed, tmp_path, spec, restarts=30), failures, 300)
