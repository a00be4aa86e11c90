"""The edge client in an app: events, conditions, threads, shutdown."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import tracemalloc
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from fedone_sdk import EdgeClient
from fedone_sdk.aggregator import Service
from fedone_sdk.aggregator.rounds import RoundMachine
from fedone_sdk.backends import LLMBackend
from fedone_sdk.budget import Budget, SqliteLedger
from fedone_sdk.client import ClientEvent, Idle
from fedone_sdk.client.session import MAX_WAIT_S, Backoff
from fedone_sdk.errors import TransportError
from fedone_sdk.local import MemoryTransport
from fedone_sdk.messages import (
    Claim,
    Decline,
    Enrol,
    Enrolled,
    LossesAssignment,
    Receipt,
    RunTask,
    Score,
    Scores,
    Tensor,
    VocabularyList,
)
from fedone_sdk.spec import RunSpec
from fedone_sdk.testing import LoopbackFederation, ManualClock, ScriptedBackend
from fedone_sdk.vocabulary import Vocabulary
from tests import runs
from tests.edge import edge_client, stored
from tests.runs import TOKEN, WORDS, memory_client, run_spec, until
from tests.virtual_time import now, on_virtual_time

DATA: list[dict[str, Any]] = [{"text": f"text {n}", "label": n % 2} for n in range(6)]


def spec_of(rounds: int = 2, num_samples: int = 4, **participation: Any) -> RunSpec:
    method = {"num_samples": num_samples, "batch_size": 5}
    return run_spec(rounds=rounds, method=method, participation=participation)


def serving(
    spec: RunSpec, backend: LLMBackend | None = None, clock: ManualClock | None = None
) -> AbstractAsyncContextManager[Service]:
    return runs.serving(spec, backend=backend or ScriptedBackend(), clock=clock)


def client_of(service: Service, **more: Any) -> EdgeClient:
    return memory_client(service, data=DATA, **more)


class TestEvents:
    async def test_the_events_of_a_run(self) -> None:
        events: list[ClientEvent] = []
        async with (
            serving(spec_of()) as service,
            client_of(service, on_event=events.append) as client,
        ):
            await client.run_forever()
        kinds = [event.kind for event in events]
        work = ["waiting", "assigned", "scored", "updated"]
        assert kinds == ["enrolled", *work, *work, "waiting", "ended"]
        (scored, _) = (event for event in events if event.kind == "scored")
        assert (scored.run_id, scored.round, scored.done, scored.total) == ("run", 0, 4, 4)
        assert len({event.assignment_id for event in events if event.round == 1}) == 1

    async def test_a_failing_app_breaks_nothing(self) -> None:
        def broken(event: ClientEvent) -> None:
            raise RuntimeError(f"no display for {event.kind}")

        async with serving(spec_of()) as service, client_of(service, on_event=broken) as client:
            await client.run_forever()
            assert service.runs["run"].state.status == "completed"

    async def test_a_failing_condition_is_logged_once(self) -> None:
        answers: list[bool] = []

        async def condition() -> bool:
            if not answers:
                raise RuntimeError("no sensor")
            return answers[0]

        async with serving(spec_of()) as service, client_of(service, only_when=condition) as client:
            with capture_logs() as logs:
                assert [(await client.run_once()).outcome for _ in range(3)] == ["paused"] * 3
            (line,) = [line for line in logs if line["event"].startswith("only_when failed")]
            assert line["error"] == "RuntimeError"
            answers.append(True)
            assert (await client.run_once()).outcome == "worked"


class Flaky(MemoryTransport):
    """Unreachable while `away` is set."""

    away: Callable[[], bool]

    async def claim(self, credential: str, message: Claim) -> Any:
        if self.away():
            raise TransportError("no route to host")
        return await super().claim(credential, message)


class TestOffline:
    @on_virtual_time
    async def test_it_waits_for_the_network(self) -> None:
        """Two hours without one: few attempts, then the work continues."""
        events: list[ClientEvent] = []
        tried: list[float] = []

        def away() -> bool:
            tried.append(now())
            return now() < 7200

        async with serving(spec_of()) as service:
            transport = Flaky(service)
            transport.away = away
            async with client_of(service, transport=transport, on_event=events.append) as client:
                await client.run_forever()
            assert service.runs["run"].state.status == "completed"
        kinds = [event.kind for event in events]
        assert kinds.count("offline") == kinds.count("online") == 1
        assert kinds.index("offline") < kinds.index("online") < kinds.index("assigned")
        # Five at once, then every five minutes or sooner: not a request a second.
        assert 30 < sum(at < 7200 for at in tried) < 600
        assert 7200 <= now() < 7200 + 310

    @on_virtual_time
    async def test_the_server_sends_a_retry_after(self) -> None:
        """Pace steering: an idle device of a large fleet returns after many minutes."""
        asked: list[float] = []

        class Pacing(MemoryTransport):
            async def claim(self, credential: str, message: Claim) -> Any:
                asked.append(now())
                return Idle(retry_after_s=2700.0)

        async with (
            serving(spec_of()) as service,
            client_of(service, transport=Pacing(service)) as client,
        ):
            working = asyncio.create_task(client.run_forever())
            await asyncio.sleep(3 * 2700 + 1)
            client.stop()  # ends the wait at once
            await working
        assert asked == pytest.approx([0, 2700, 5400, 8100], abs=1)
        assert now() == pytest.approx(3 * 2700 + 1, abs=1)

    def test_the_backoff_grows_with_full_jitter(self) -> None:
        backoff = Backoff(first_s=1.0, max_s=300.0)
        waits = [[backoff.next_s() for _ in range(12)] for _ in range(200) if not backoff.reset()]
        for place, of_place in enumerate(zip(*waits, strict=True)):
            bound = min(300.0, 2.0**place)
            assert max(of_place) <= bound
            # Uniform over the whole span: 200 draws miss neither end by a fifth.
            assert min(of_place) < bound / 5
            assert max(of_place) > bound * 4 / 5
        assert backoff.next_s(asked_s=1e9) <= MAX_WAIT_S + 300.0


class TestOnlyWhen:
    @on_virtual_time
    async def test_nothing_is_claimed_while_it_does_not_hold(self) -> None:
        events: list[ClientEvent] = []
        claims: list[float] = []

        class Watched(MemoryTransport):
            async def claim(self, credential: str, message: Claim) -> Any:
                claims.append(now())
                return await super().claim(credential, message)

        async with serving(spec_of()) as service:
            client = client_of(
                service,
                transport=Watched(service),
                only_when=lambda: now() >= 1000,
                on_event=events.append,
            )
            async with client:
                assert (await client.run_once()).outcome == "paused"
                await client.run_forever()
            assert service.runs["run"].state.status == "completed"
        assert 1000 <= min(claims) <= 1010
        kinds = [event.kind for event in events]
        assert kinds[:3] == ["paused", "resumed", "enrolled"]
        assert kinds.count("paused") == 1

    @on_virtual_time
    async def test_pending_work_waits_for_it(self) -> None:
        """It is lost during the work and returns after the deadline: the lease is kept."""
        backend = ScriptedBackend()
        events: list[ClientEvent] = []
        clock = ManualClock()

        def plugged_in() -> bool:
            return len(backend.asked) == 0 or now() > 250

        async with serving(spec_of(1, 200), backend, clock) as service:
            client = client_of(service, only_when=plugged_in, on_event=events.append)
            async with client:
                working = asyncio.create_task(client.run_forever())
                while not working.done():
                    await asyncio.sleep(10)
                    clock.advance(10)
                    await service.replicas.tick()
                await working
            assert service.runs["run"].state.status == "completed"
        kinds = [event.kind for event in events]
        assert kinds.count("assigned") == kinds.count("updated") == 1
        assert kinds.index("scored") < kinds.index("paused") < kinds.index("resumed")
        assert len(backend.asked) == 200
        assert 250 < now() < 300

    @on_virtual_time
    async def test_work_is_given_back_when_its_time_is_over(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(RoundMachine, "MAX_RENEWALS", 2)
        backend = ScriptedBackend()
        events: list[ClientEvent] = []
        spec = spec_of(1, 200)
        async with serving(spec, backend) as service:
            client = client_of(service, only_when=lambda: not backend.asked, on_event=events.append)
            async with client:
                assert (await client.run_once()).outcome == "declined"
            assert events[-1].reason == "the work took longer than its deadline"
            # Two renewals at half time, and the whole of the last deadline but a moment.
            assert now() == pytest.approx(50 + 50 + 100 - 2, abs=1)
            assert service.runs["run"].state.account.spent.queries == len(backend.asked) == 100

    @pytest.mark.parametrize("own", [False, True], ids=["gateway", "own model"])
    async def test_stopping_while_it_does_not_hold_keeps_the_work(
        self, tmp_path: Path, own: bool
    ) -> None:
        backend = ScriptedBackend()
        events: list[ClientEvent] = []
        allowed = iter([True] * (3 if own else 2))  # for the claim, then for requests
        more: dict[str, Any] = {"backend": backend} if own else {}
        more |= {"state_dir": tmp_path, "budget": Budget(queries=1000), "on_event": events.append}
        spec = spec_of(1, 200, own_models="trusted")
        async with serving(spec, backend) as service:
            async with client_of(service, only_when=lambda: next(allowed, False), **more) as client:
                working = asyncio.create_task(client.run_forever())
                await until(lambda: "paused" in [event.kind for event in events])
                client.stop()
                await working
                (seat,) = service.runs["run"].state.seats
                assert seat.assignment_id is not None
            assert 0 < len(backend.asked) <= 100
            async with client_of(service, **more) as client:
                await client.run_forever()
            assert service.runs["run"].state.account.spent.queries == 200
        # Nothing was sent twice, and the device's budget has no query twice.
        account = SqliteLedger(tmp_path / "budget.sqlite3").account(None)
        assert (account.spent.queries, account.leases) == (200, {})


class TestEnds:
    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("turns", range(0, 40, 3))
    async def test_a_cancellation_anywhere_is_clean(self, tmp_path: Path, turns: int) -> None:
        """No task is left, nothing is lost: the next client ends the run with the same alpha."""

        async def alpha(folder: Path, break_off: int | None) -> tuple[str, int]:
            backend = ScriptedBackend(gate=lambda query: asyncio.sleep(0))
            async with serving(spec_of(3), backend) as service:
                if break_off is not None:
                    async with client_of(service, state_dir=folder) as client:
                        working = asyncio.create_task(client.run_forever())
                        for _ in range(break_off):
                            await asyncio.sleep(0)
                        working.cancel()
                        await asyncio.gather(working, return_exceptions=True)
                    left = [task.get_name() for task in asyncio.all_tasks()]
                    assert [name for name in left if name.startswith("edge client")] == []
                async with client_of(service, state_dir=folder) as client:
                    await client.run_forever()
                return service.runs["run"].result().alpha_sha256, len(backend.asked)

        assert await alpha(tmp_path / "a", turns) == await alpha(tmp_path / "b", None)
        gc.collect()  # "Task was destroyed" and "exception was never retrieved" come with it

    async def test_two_turns_at_once_are_one_after_the_other(self) -> None:
        async with serving(spec_of(rounds=4)) as service, client_of(service) as client:
            turns = await asyncio.gather(*(client.run_once() for _ in range(4)))
            assert [turn.outcome for turn in turns] == ["worked"] * 4
            assert service.runs["run"].state.status == "completed"


class TestThread:
    """A plain synchronous app, with the client in a thread that has its own loop."""

    @pytest.mark.parametrize("how", ["outside", "inside"])
    async def test_stop(self, how: str) -> None:
        def app(url: str, token: str) -> None:
            began = threading.Event()

            def note(event: ClientEvent) -> None:
                began.set()
                if how == "inside" and event.kind == "assigned":
                    client.stop()

            client = edge_client(url, token=token, data=DATA, on_event=note, wait_s=30)
            for _ in range(3):  # each in a new thread, with a new loop
                began.clear()
                thread = in_thread(client)
                assert began.wait(30)
                if how == "outside":
                    client.stop()
                thread.join(10)  # the long poll has 30 seconds
                assert not thread.is_alive()

        seats = 2 if how == "outside" else 1
        spec = spec_of(10, min_clients=seats)
        async with LoopbackFederation(spec, WORDS, backend=ScriptedBackend()) as served:
            await asyncio.to_thread(app, served.url, served.token)
            # Work in progress is finished.
            assert served.run.state.round == (0 if how == "outside" else 3)


def in_thread(client: EdgeClient) -> threading.Thread:
    async def work() -> None:
        async with client:
            await client.run_forever()

    thread = threading.Thread(target=lambda: asyncio.run(work()), daemon=True)
    thread.start()
    return thread


LONG_WORDS = Vocabulary(candidates=(" good " * 100, " bad", " fine"))


class Endless:
    """A server that has work for ever, for more and more runs."""

    def __init__(self, spec: RunSpec) -> None:
        self.rounds = 0
        self._spec = spec

    async def enrol(self, token: str, message: Enrol) -> Enrolled:
        return Enrolled(client_id="client", credential="secret")

    async def claim(self, credential: str, message: Claim) -> LossesAssignment:
        self.rounds += 1
        return LossesAssignment(
            assignment_id=f"a{self.rounds}",
            run_id=f"run-{self.rounds // 7}",
            round=self.rounds,
            deadline_s=100,
            leased_queries=4,
            prompts=Tensor.of_indices([0, 1, 2, 0, 1, 2, 0, 0], (4, 2), 3),
            minibatch_seed=self.rounds,
        )

    async def task(self, credential: str, run_id: str) -> RunTask:
        return RunTask(
            task=self._spec.task,
            task_crc32=self._spec.task.crc32,
            method=self._spec.method,
            prompt_len=2,
            vocab_size=3,
            vocabulary_sha256=LONG_WORDS.sha256,
            gateway=True,
        )

    async def vocabulary(self, credential: str, run_id: str, after: int = 0) -> VocabularyList:
        return VocabularyList(candidates=LONG_WORDS.candidates)

    async def score(self, credential: str, message: Score) -> Scores:
        shape = (4, len(message.examples), 2)
        return Scores(
            log_probs=Tensor.pack([-0.5] * (8 * len(message.examples)), shape, "float32"), model="m"
        )

    async def update(self, credential: str, assignment_id: str, message: Any) -> Receipt:
        return Receipt(assignment_id=assignment_id, round=0, body_sha256="0" * 64)

    async def renew(self, credential: str, assignment_id: str) -> None: ...

    async def decline(self, credential: str, assignment_id: str, message: Decline) -> None: ...

    async def aclose(self) -> None: ...


@pytest.mark.parametrize(("own", "keeps"), [(False, False), (False, True), (True, False)])
async def test_hundreds_of_rounds_keep_memory_flat(tmp_path: Path, own: bool, keeps: bool) -> None:
    backend = ScriptedBackend() if own else None
    transport: Any = Endless(spec_of())
    client = edge_client(
        "memory:", token=TOKEN, data=DATA, transport=transport, backend=backend,
        state_dir=tmp_path if keeps else None,
    )  # fmt: skip

    async def rounds(count: int) -> int:
        for _ in range(count):
            assert (await client.run_once()).outcome == "worked"
            if backend is not None:
                backend.asked.clear()  # the double's own notes
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    async with client:
        tracemalloc.start()
        try:
            before = await rounds(50)
            after = await rounds(150)
        finally:
            tracemalloc.stop()
    assert after - before < 48 * 1024
    if keeps:
        assert os.listdir(tmp_path) == ["state.sqlite3"]
        assert stored(tmp_path, "SELECT kind FROM entries") == [("identity",)]
