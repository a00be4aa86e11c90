"""The aggregator without HTTP: claims, updates, restarts and whole runs, on a manual clock."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedone_sdk.aggregator import Aggregator, Service
from fedone_sdk.aggregator.rounds import RoundMachine
from fedone_sdk.backends import LLMBackend
from fedone_sdk.budget import Budget, Usage
from fedone_sdk.errors import FedOneError, LabelWordError, ProblemError, SpecError
from fedone_sdk.messages import Enrol, RunResult
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import ClientRecord, Commit, MemoryStore, SqlStore, Store
from fedone_sdk.task import Rendered
from fedone_sdk.testing import ManualClock, ScriptedBackend, pseudo_log_probs
from fedone_sdk.vocabulary import Vocabulary
from tests.by_hand import Work, claim, enrol, update_for
from tests.runs import TOKEN, WORDS, memory_client, run_spec, serving

EXAMPLES = [{"text": f"text {number}", "label": number % 2} for number in range(6)]


def spec_of(
    name: str = "run",
    *,
    rounds: int = 3,
    participation: Mapping[str, Any] | None = None,
    budget: Any = None,
    **method: Any,
) -> RunSpec:
    return run_spec(
        name=name,
        rounds=rounds,
        method={"learning_rate": 0.01, **method},
        participation={"exchange": "alpha", **(participation or {})},
        budget=budget,
    )


async def working(service: Service, clients: list[ClientRecord]) -> tuple[ClientRecord, Work]:
    """The client with the seat of a K* = 1 run, and its work."""
    for client in clients * 2:
        work = await claim(service, client)
        if work is not None:
            return client, work
    pytest.fail("no client got work")


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def code(excinfo: pytest.ExceptionInfo[ProblemError]) -> str:
    return excinfo.value.code


class TestClaims:
    async def test_a_waiting_client_is_woken_when_it_is_offered_a_seat(self) -> None:
        clock = ManualClock()
        async with serving(clock=clock) as service:
            await service.add_run(spec_of(participation={"min_clients": 2}), WORDS)
            clients = await enrol(service, 2)
            first = asyncio.create_task(claim(service, clients[0], wait_s=60))
            await turns()
            assert not first.done()
            second = asyncio.create_task(claim(service, clients[1], wait_s=60))
            done, (waiting,) = await asyncio.wait(
                {first, second}, return_when=asyncio.FIRST_COMPLETED
            )
            assert (await done.pop()) is not None
            # The other one waits on, until the seat is lost.
            await turns()
            assert not waiting.done()
            clock.advance(100)
            await service.replicas.tick()
            async with asyncio.timeout(5):
                work = await waiting
            assert work is not None
            assert work.round == 0

    async def test_nothing_to_do(self) -> None:
        async with serving() as service:
            (client,) = await enrol(service, 1)
            assert await claim(service, client) is None  # there may be a run soon
            await service.add_run(spec_of(participation={"min_clients": 2}), WORDS)
            assert await claim(service, client, wait_s=0.01) is None

    async def test_a_new_run_wakes_waiting_clients(self) -> None:
        async with serving() as service:
            (client,) = await enrol(service, 1)
            waiting = asyncio.create_task(claim(service, client, wait_s=60))
            await turns()
            await service.add_run(spec_of(), WORDS)
            async with asyncio.timeout(5):
                assert await waiting is not None

    async def test_a_patient_client_learns_of_the_end(self) -> None:
        async with serving() as service:
            run = await service.add_run(spec_of(participation={"min_clients": 2}), WORDS)
            (client,) = await enrol(service, 1)
            waiting = asyncio.create_task(claim(service, client, wait_s=60))
            await turns()
            await service.stop_run(run)
            async with asyncio.timeout(5):
                with pytest.raises(ProblemError) as excinfo:
                    await waiting
            assert code(excinfo) == "run_ended"
            with pytest.raises(ProblemError) as excinfo:
                await claim(service, client)
            assert code(excinfo) == "run_ended"

    async def test_a_client_that_works_for_one_run_is_not_drawn_by_another(self) -> None:
        async with serving() as service:
            one = await service.add_run(spec_of("one"), WORDS)
            (client,) = await enrol(service, 1)
            _, work = await working(service, [client])
            two = await service.add_run(spec_of("two"), WORDS)
            await two.seat()
            assert (one.state.seats != (), two.state.seats) == (True, ())
            await service.work.update(client, work.assignment_id, update_for(work), "a" * 64)
            await service.stop_run(one)
            work = await claim(service, client)  # type: ignore[assignment]
            assert work.run_id == "two"


class TestUpdates:
    async def test_twice_at_once(self) -> None:
        async with serving() as service:
            run = await service.add_run(spec_of(), WORDS)
            client, work = await working(service, await enrol(service, 1))
            receipts = await asyncio.gather(
                *(
                    service.work.update(client, work.assignment_id, update_for(work), "a" * 64)
                    for _ in range(5)
                )
            )
            assert len(set(receipts)) == 1
            assert run.state.round == 1

    async def test_adamw_of_the_losses_exchange_is_remembered_per_client(self) -> None:
        store = MemoryStore()
        spec = spec_of(rounds=4, optimizer="adamw", participation={"exchange": "losses"})
        async with serving(store=store) as service:
            await service.add_run(spec, WORDS)
            clients = await enrol(service, 1)
            for _ in range(2):
                client, work = await working(service, clients)
                await service.work.update(client, work.assignment_id, update_for(work), "a" * 64)
            first = await store.memory("run", client.index)
        async with serving(store=store) as service:  # also over a restart
            restored = [(await service.store.clients())[client.index]]
            for _ in range(2):
                client, work = await working(service, restored)
                await service.work.update(client, work.assignment_id, update_for(work), "a" * 64)
            assert await store.memory("run", client.index) not in (None, first)
            assert service.runs["run"].state.status == "completed"


class TestRuns:
    async def test_the_same_run_is_taken_up(self) -> None:
        async with serving() as service:
            run = await service.add_run(spec_of(), WORDS)
            same = await asyncio.gather(*(service.add_run(spec_of(), WORDS) for _ in range(3)))
            assert same == [run] * 3
            for other in (
                service.add_run(spec_of(rounds=4), WORDS),
                service.add_run(spec_of(), Vocabulary(candidates=("a", "b"))),
            ):
                with pytest.raises(SpecError, match="taken by a different run"):
                    await other

    @pytest.mark.parametrize("amount", [5, 5.0, "5.00", Decimal("5.0")])
    async def test_amounts_are_compared_as_numbers(self, amount: Any) -> None:
        store, backend = MemoryStore(), ScriptedBackend()
        async with serving(store=store, backend=backend) as service:
            run = await service.add_run(spec_of(budget={"usd": "5.0"}), WORDS)
            assert await service.add_run(spec_of(budget={"usd": amount}), WORDS) is run
        async with serving(store=store, backend=backend) as service:  # as it was stored
            spec = spec_of(budget={"usd": amount})
            run = await service.add_run(spec, WORDS)
            assert run.state.account.cap == Budget(usd=Decimal(5))
            assert list(run.spec.differences(spec)) == []
        assert await store.log("run", "budget") == []  # Nothing was raised.

    async def test_a_run_that_cannot_be_stored_does_not_exist(self) -> None:
        class Full(MemoryStore):
            async def add_run(self, record: Any) -> None:
                await asyncio.sleep(0)
                raise FedOneError("the disk is full")

        async with serving(store=Full()) as service:
            (client,) = await enrol(service, 1)
            waiting = asyncio.create_task(claim(service, client, wait_s=60))
            with pytest.raises(FedOneError, match="the disk is full"):
                await service.add_run(spec_of(), WORDS)
            await turns()
            assert service.runs == {}
            assert not waiting.done()
            waiting.cancel()
            with pytest.raises(ProblemError):
                await service.registry.run("run")

    @pytest.mark.parametrize(
        ("backend", "budget", "message"),
        [
            (None, {"usd": 5}, r"budget\.usd: cannot be capped, .*allowed: queries"),
            (None, {"requests": 5, "queries": 9}, r"budget\.requests"),
        ],
    )
    async def test_caps_that_cannot_be_enforced(
        self, backend: LLMBackend | None, budget: dict[str, Any], message: str
    ) -> None:
        async with serving(backend=backend) as service:
            with pytest.raises(SpecError, match=message):
                await service.add_run(spec_of(budget=budget), WORDS)
            assert service.runs == {}

    async def test_label_words_are_checked_before_anything_is_spent(self) -> None:
        class Picky(ScriptedBackend):
            async def check(self, label_words: tuple[str, ...], form: Rendered = ()) -> None:
                raise LabelWordError(label_words[0], ["n", "o"])

        async with serving(backend=Picky()) as service:
            with pytest.raises(LabelWordError):
                await service.add_run(spec_of(), WORDS)
            assert service.runs == {}

    async def test_waiters_hear_of_a_stop_and_wait_again_after_a_resume(self) -> None:
        clock = ManualClock()
        async with serving(clock=clock) as service:
            run = await service.add_run(spec_of(rounds=2), WORDS)
            await working(service, await enrol(service, 1))
            clock.advance(7)
            await service.stop_run(run, "enough")
            async with asyncio.timeout(5):
                await service.wait(run)
            result = run.result()
            assert (result.status, result.reason, result.wall_s) == ("stopped", "enough", 7)
            with pytest.raises(ProblemError, match="run_conflict"):
                await service.stop_run(run)
            assert run.ended.is_set()
            await service.resume_run(run)
            assert not run.ended.is_set()
            with pytest.raises(ProblemError, match="cannot be resumed"):
                await service.resume_run(run)
            assert not run.ended.is_set()

    async def test_deadlines_are_applied_without_requests(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(RoundMachine, "MAX_LOST", 1)

        class Impatient(ManualClock):
            def now(self) -> float:
                self.advance(60)
                return super().now()

        async with serving(clock=Impatient()) as service:
            run = await service.add_run(spec_of(), WORDS)
            (client,) = await enrol(service, 1)
            async with asyncio.timeout(5):
                while run.state.running:
                    with contextlib.suppress(ProblemError):  # it may end while we ask
                        await claim(service, client)
                    await asyncio.sleep(0)
            assert run.state.status == "failed"


class TestRestart:
    @pytest.fixture(params=["memory", "sql"])
    def store(self, request: pytest.FixtureRequest, tmp_path: Path) -> Store:
        return MemoryStore() if request.param == "memory" else SqlStore.sqlite(tmp_path / "a.db")

    async def test_pending_work_continues(self, store: Store) -> None:
        async with serving(store=store) as service:
            await service.add_run(spec_of(), WORDS)
            identity = await service.access.enrol(TOKEN, Enrol())
            client, work = await working(
                service, [await service.access.authenticate(identity.credential)]
            )
        async with serving(store=store) as service:
            run = service.runs["run"]
            client = await service.access.authenticate(identity.credential)
            assert run.state.account.leased == Usage(queries=4)
            assert await claim(service, client) == work
            await service.work.update(client, work.assignment_id, update_for(work), "a" * 64)
        async with serving(store=store) as service:
            run = service.runs["run"]
            assert [report.client_id for report in run.history] == [identity.client_id]
            client = await service.access.authenticate(identity.credential)
            again = await service.work.update(
                client, work.assignment_id, update_for(work), "a" * 64
            )
            assert again.round == 0
            with pytest.raises(ProblemError) as excinfo:
                await service.work.update(client, work.assignment_id, update_for(work), "b" * 64)
            assert code(excinfo) == "update_conflict"
            assert await service.add_run(spec_of(), WORDS) is run


class TestSeveralInOneLoop:
    async def test_a_stop_waits_for_its_own_work_only(self) -> None:
        """Another aggregator's store may hang for long."""
        held = asyncio.Event()

        class Hanging(MemoryStore):
            async def commit(self, run_id: str, version: int, commit: Commit) -> None:
                await held.wait()
                await super().commit(run_id, version, commit)

        async with serving(store=Hanging()) as other:
            run = await other.add_run(spec_of(), WORDS)
            stopping = asyncio.create_task(other.stop_run(run))
            await asyncio.sleep(0)
            try:
                async with asyncio.timeout(2), serving() as service:
                    await service.add_run(spec_of(), WORDS)
                assert not stopping.done()
            finally:
                held.set()
            await stopping
            assert run.state.status == "stopped"


class TestFailedStart:
    @pytest.mark.parametrize("fails", ["access", "heads", "replicas"])
    async def test_the_store_can_be_opened_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
    ) -> None:
        path = tmp_path / "runs.db"
        async with serving(store=SqlStore.sqlite(path)) as service:
            await service.add_run(spec_of(), WORDS)

        def broken(*_: object, **__: object) -> None:
            raise ZeroDivisionError("a flaw")

        where = {
            "access": "fedone_sdk.aggregator.service.Access.open",
            "heads": "fedone_sdk.aggregator.runs.run_registry.RunRegistry.read_heads",
            "replicas": "fedone_sdk.aggregator.service.Replicas.start",
        }[fails]
        with monkeypatch.context() as patch:
            patch.setattr(where, broken)
            with pytest.raises(ZeroDivisionError):
                async with serving(store=SqlStore.sqlite(path)):
                    pytest.fail("it has started")
            with pytest.raises(ZeroDivisionError):
                async with Aggregator(store=SqlStore.sqlite(path), enrolment_tokens=[TOKEN]):
                    pytest.fail("it has started")
        async with serving(store=SqlStore.sqlite(path)) as service:
            assert list(service.runs) == ["run"]


class TestStoreFailures:
    async def test_an_event_that_is_not_stored_has_not_happened(self) -> None:
        class Flaky(MemoryStore):
            broken = False

            async def commit(self, run_id: str, version: int, commit: Commit) -> None:
                if self.broken:
                    raise FedOneError("the disk is full")
                await super().commit(run_id, version, commit)

        store = Flaky()
        async with serving(store=store) as service:
            run = await service.add_run(spec_of(), WORDS)
            client, work = await working(service, await enrol(service, 1))
            seen: list[Any] = []
            service.listeners.append(lambda run, effect: seen.append(effect))
            before = run.state
            store.broken = True
            with pytest.raises(FedOneError, match="disk"):
                await service.work.update(client, work.assignment_id, update_for(work), "a" * 64)
            assert run.state is before
            assert seen == []
            store.broken = False
            await service.work.update(client, work.assignment_id, update_for(work), "a" * 64)
            assert run.state.round == 1


def float32_log_probs(inputs: Rendered, label_words: Sequence[str]) -> tuple[float, ...]:
    """Scores that the wire carries exactly, as those of a real model are."""
    return tuple(map(float, np.float32(pseudo_log_probs(inputs, label_words))))


async def federate(spec: RunSpec, *, on_device: bool = False) -> RunResult:
    """A whole run in memory: edge clients, a gateway (or models of their own), a scripted model."""
    backend = ScriptedBackend(float32_log_probs)
    async with (
        serving(backend=None if on_device else backend) as service,
        AsyncExitStack() as stack,
    ):
        run = await service.add_run(spec, WORDS)
        clients = [
            await stack.enter_async_context(
                memory_client(
                    service,
                    data=[{**example, "text": f"{number}: {example['text']}"}
                          for example in EXAMPLES[: 3 + number]],
                    backend=backend if on_device else None,
                )
            )
            for number in range(4)
        ]  # fmt: skip
        for client in clients:
            await client.enrol()
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client.run_forever())
        return run.result()


class TestWholeRuns:
    @pytest.mark.parametrize("clients_per_round", [1, 3])
    async def test_both_exchanges_and_both_places_of_the_model_agree(
        self, clients_per_round: int
    ) -> None:
        participation = {"clients_per_round": clients_per_round, "min_clients": 4}
        results = []
        for exchange in ("alpha", "losses"):
            for on_device in (False, True):
                spec = spec_of(rounds=6, participation={**participation, "exchange": exchange})
                result = await federate(spec, on_device=on_device)
                assert result.status == "completed"
                assert result.spent.queries == 6 * 4 * clients_per_round
                results.append(result)
        assert len({result.alpha_sha256 for result in results}) == 1
        losses = [[report.mean_loss for report in result.history] for result in results]
        np.testing.assert_allclose(losses, [losses[0]] * 4, rtol=1e-6)
