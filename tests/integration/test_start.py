"""The cost of a start: it reads and checks only live runs."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
import pytest
from aiohttp import ClientConnectorError, ClientSession, web

from fedone_sdk.aggregator import Aggregator, ServedRun, Service
from fedone_sdk.aggregator.authority import Authority
from fedone_sdk.aggregator.dispatch.client_pool import RetryLater
from fedone_sdk.aggregator.http.application import listening
from fedone_sdk.backends import LLMBackend
from fedone_sdk.errors import BackendUnavailable, ProblemError
from fedone_sdk.messages import Claim, Enrol
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import MemoryStore, RunRecord, Store
from fedone_sdk.task import Rendered
from fedone_sdk.testing import ManualClock, ScriptedBackend
from tests import runs
from tests.integration.caller import ADMIN, TOKEN, Caller
from tests.processes import free_port
from tests.runs import WORDS, run_spec


def spec_of(name: str) -> RunSpec:
    return run_spec(name=name, budget={"queries": 100})


class Counting(MemoryStore):
    """Counts which runs are read, and keeps reading one of them back.

    Attributes:
        read: How often each run's record and log were read.
        gate: Awaited before a record is read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read = Counter[str]()
        self.gate = asyncio.Event()
        self.gate.set()

    async def run(self, run_id: str) -> RunRecord | None:
        await self.gate.wait()
        self.read[run_id] += 1
        return await super().run(run_id)

    async def log(self, run_id: str, *args: Any, **kwargs: Any) -> Any:
        self.read[run_id] += 1
        return await super().log(run_id, *args, **kwargs)


class Looked(ScriptedBackend):
    """Counts how often it is looked at, and raises `trouble_of` then."""

    def __init__(self, trouble_of: Exception | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.looks, self.trouble_of = 0, trouble_of
        self.gate_of_looks = asyncio.Event()
        self.gate_of_looks.set()

    async def check(self, label_words: tuple[str, ...], form: Rendered = ()) -> None:
        self.looks += 1
        await self.gate_of_looks.wait()
        if self.trouble_of is not None:
            raise self.trouble_of


def service_of(store: Store, backend: LLMBackend) -> Service:
    return Service(
        store=store,
        clock=ManualClock(),
        authority=Authority(enrolment_tokens=[runs.TOKEN]),
        backend=backend,
    )


def serving(
    store: Store, backend: LLMBackend | None = None, clock: ManualClock | None = None
) -> AbstractAsyncContextManager[Service]:
    return runs.serving(store=store, backend=backend or Looked(), clock=clock)


async def filled(store: Store, *, ended: int, live: int) -> None:
    """Adds runs: some that have ended, then some that run."""
    clock = ManualClock()
    async with serving(store, clock=clock) as service:
        for number in range(ended):
            clock.advance(1)
            run = await service.add_run(spec_of(f"ended-{number}"), WORDS)
            await service.stop_run(run)
        for number in range(live):
            clock.advance(1)
            await service.add_run(spec_of(f"live-{number}"), WORDS)


class TestWhatIsRead:
    async def test_only_live_runs_are_read_and_checked(self) -> None:
        store, backend = Counting(), Looked()
        await filled(store, ended=20, live=2)
        store.read.clear()
        async with serving(store, backend) as service:
            assert sorted(store.read) == ["live-0", "live-1"]
            assert backend.looks == 2
            assert (await service.registry.run("live-1")).state.running

    async def test_ended_runs_are_listed_and_read_on_demand(self) -> None:
        store, backend = Counting(), Looked()
        await filled(store, ended=3, live=1)
        async with serving(store, backend) as service:
            listed = {run.run_id: run for run in service.registry.summaries}
            assert list(listed) == ["ended-0", "ended-1", "ended-2", "live-0"]
            assert listed["live-0"].ended_at is None
            run = await service.registry.run("ended-1")
            assert listed["ended-1"] == run.summary
            assert run.summary.status == "stopped"
            assert service.registry.summaries == list(listed.values())
            assert backend.looks == 1
            with pytest.raises(ProblemError, match="there is no run"):
                await service.registry.run("ended-9")
            # A name is taken though its run is not read.
            assert (await service.add_run(spec_of("ended-0"), WORDS)).state.status == "stopped"

    async def test_two_that_ask_for_one_run_get_the_same(self) -> None:
        store = Counting()
        await filled(store, ended=1, live=0)
        async with serving(store) as service:
            store.gate.clear()
            asked = [asyncio.create_task(service.registry.run("ended-0")) for _ in range(2)]
            await asyncio.sleep(0)
            store.gate.set()
            one, other = await asyncio.gather(*asked)
            assert one is other


class TestWhoWaits:
    async def test_a_draw_at_a_start_includes_all_waiting_clients(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A vacant seat may be assigned once the pending work is restored."""
        store, claim = Counting(), Claim(num_examples=5, wait_s=0)
        async with serving(store) as service:
            run = await service.add_run(spec_of("live"), WORDS)
            for _ in range(3):
                credential = (await service.access.enrol(runs.TOKEN, Enrol())).credential
                await service.work.claim(await service.access.authenticate(credential), claim)
            before = dict(service.dispatcher.available(run))
        assert len(before) == 3
        seen = []
        applied = ServedRun.apply

        async def watched(self: ServedRun, *args: Any, **kwargs: Any) -> Any:
            seen.append(dict(service.dispatcher.available(self)))
            return await applied(self, *args, **kwargs)

        monkeypatch.setattr(ServedRun, "apply", watched)
        service = service_of(store, Looked())
        await runs.start(service)
        assert seen[0] == before
        await service.stop()


class TestTheModel:
    async def test_work_waits_for_the_check_of_the_model(self) -> None:
        store, backend = Counting(), Looked()
        await filled(store, ended=0, live=1)
        backend.gate_of_looks.clear()
        service = service_of(store, backend)
        await service.open()
        service.admit_devices()
        device = await service.access.authenticate(
            (await service.access.enrol(runs.TOKEN, Enrol())).credential
        )
        claim = asyncio.create_task(service.work.claim(device, Claim(num_examples=5, wait_s=30)))
        done, _ = await asyncio.wait({claim}, timeout=0.05)
        assert not done
        assert service.runs["live-0"].state.running
        backend.gate_of_looks.set()
        assert not isinstance(await asyncio.wait_for(claim, 10), RetryLater)
        await service.stop()

    @pytest.mark.parametrize("trouble", [BackendUnavailable("away"), RuntimeError("a bug")])
    async def test_a_run_with_an_unavailable_model_pauses(self, trouble: Exception) -> None:
        store = Counting()
        await filled(store, ended=0, live=2)
        async with serving(store, Looked(trouble)) as service:
            assert all(run.state.paused for run in service.runs.values())
        async with serving(store) as service:  # A paused run is live: it is read at a start.
            assert len(service.runs) == 2


class TestListening:
    async def test_a_stop_ends_the_reading(self) -> None:
        store = Counting()
        await filled(store, ended=0, live=1)
        store.gate.clear()
        service = service_of(store, Looked())
        await service.open()
        await asyncio.sleep(0.01)
        await service.stop()
        assert not [task for task in asyncio.all_tasks() if "loading" in task.get_name()]

    async def test_a_server_listens_before_its_runs_are_read(self) -> None:
        store = Counting()
        await filled(store, ended=1, live=1)
        store.gate.clear()
        aggregator = Aggregator(
            store=store, backend=Looked(), enrolment_tokens=[TOKEN], admin_token=ADMIN
        )
        await aggregator.open()
        url = await aggregator.listen()
        async with aiohttp.ClientSession() as session:
            server = _Server(url, session)
            status, health, _ = await server.call("GET", "/readyz", token=None)
            assert (status, health["checks"]["serving"]["ok"]) == (503, False)
            assert (await server.call("GET", "/healthz", token=None))[0] == 200
            _, runs, _ = await server.call("GET", "/v1/runs", token=ADMIN)
            assert [run["run_id"] for run in runs] == ["ended-0", "live-0"]
            _, enrolled, _ = await server.call("POST", "/v1/clients", {"name": "x"}, token=TOKEN)
            claim = asyncio.create_task(
                server.call(
                    "POST",
                    "/v1/assignments/claim",
                    {"num_examples": 5, "wait_s": 0, "run_id": "live-0"},
                    token=enrolled["credential"],
                )
            )
            done, _ = await asyncio.wait({claim}, timeout=0.1)
            assert not done
            store.gate.set()
            await aggregator.admit_devices()
            assert (await claim)[0] == 200
            assert (await server.call("GET", "/readyz", token=None))[0] == 200
        await aggregator.__aexit__(None, None, None)


class _Server(Caller):
    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self.session = url, session


@pytest.mark.parametrize("host", ["::1", "[::1]", "::", "[::]", "127.0.0.1", "0.0.0.0"])
async def test_address_families(host: str) -> None:
    """`[::]` takes IPv4 too."""
    port = free_port()
    async with listening(web.Application(), host=host, port=port), ClientSession() as session:
        for literal in ("[::1]", "127.0.0.1"):
            served = host.strip("[]") == "::" or (":" in host) == (":" in literal)
            try:
                async with session.get(f"http://{literal}:{port}/") as response:
                    assert (served, response.status) == (True, 404)
            except ClientConnectorError:
                assert not served
