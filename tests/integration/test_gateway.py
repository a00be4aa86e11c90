"""The gateway: queries are leased before, charged once, and never lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from fedone_sdk.aggregator import ServedRun
from fedone_sdk.aggregator.model.gateway import ModelGateway
from fedone_sdk.backends import Answer, AnswerCache, LLMBackend, ModelClient, Query
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.errors import (
    BackendError,
    BackendUnavailable,
    BudgetExhausted,
    SpecError,
    StoreUnavailable,
    is_retryable,
)
from fedone_sdk.messages import Scores, Tensor
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import Commit, MemoryStore
from fedone_sdk.task import TaskSpec
from fedone_sdk.testing import ManualClock, ScriptedBackend
from tests.by_hand import Device, enrol
from tests.runs import WORDS, run_spec, serving


def spec_of(
    exchange: str = "losses",
    *,
    budget: dict[str, Any] | None = None,
    participation: dict[str, Any] | None = None,
    **method: Any,
) -> RunSpec:
    participation = {"exchange": exchange, **(participation or {})}
    return run_spec(method=method, participation=participation, budget=budget)


class Outage:
    """A gate that fails for the first so many queries."""

    def __init__(self, failures: int, error: Exception) -> None:
        self.failures, self.error = failures, error

    def __call__(self, query: Query) -> None:
        if self.failures:
            self.failures -= 1
            raise self.error


BUG = ZeroDivisionError("a private text")


class Bench:
    """A service with a gateway, one run and a device."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.store, self.clock = MemoryStore(), ManualClock()
        self._stack = stack

    async def start(self, backend: LLMBackend | None, spec: RunSpec | None = None) -> Device:
        start = serving(store=self.store, clock=self.clock, backend=backend)
        self._service = await self._stack.enter_async_context(start)
        if spec is not None:
            await self._service.add_run(spec, WORDS)
            await enrol(self._service)
        (client,) = await self._service.store.clients()
        device = Device(self._service, client)
        assert await device.claim() is not None
        return device

    @property
    def run(self) -> ServedRun:
        return self._service.runs["run"]

    @property
    def gateway(self) -> ModelGateway:
        assert self._service._gateway is not None
        return self._service._gateway

    @property
    def spent(self) -> Usage:
        return self.run.state.account.spent

    @property
    def held(self) -> Usage:
        return self.run.state.account.held


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        yield Bench(stack)


def prompts(rows: Sequence[Sequence[int]], dtype: Any = "uint8") -> Tensor:
    flat = [index for row in rows for index in row]
    return Tensor.pack(flat, (len(rows), len(rows[0]) if rows else 0), dtype)


async def turns(count: int = 30) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def hang_up(device: Device, held: asyncio.Event) -> None:
    """A call is pending when its device disconnects, and completes without it."""
    gone = asyncio.create_task(device.score())
    await turns()
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    held.set()
    await turns()


async def test_nothing_is_kept_for_an_assignment_that_closes_during_its_call(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = await bench.start(ScriptedBackend(), spec_of())

    async def closing(seat: object) -> None:
        await device.update()

    monkeypatch.setattr(bench.run, "prefetch_prompts", closing)
    assert (await device.refused()).code == "assignment_expired"
    assert not bench.gateway._open


class TestCharges:
    async def test_a_call_and_its_retries_are_charged_once(self, bench: Bench) -> None:
        """Also if no caller waits for the first answer."""
        held = asyncio.Event()
        backend = ScriptedBackend(gate=lambda _: held.wait())
        device = await bench.start(backend, spec_of())
        await hang_up(device, held)
        scores = await device.score()
        assert scores.log_probs is not None
        assert scores.log_probs.shape == (4, 2, 2)
        assert scores.model == "scripted"
        for _ in range(3):
            assert await device.score() == scores
        assert len(backend.asked) == 4
        await device.update()
        assert bench.spent == Usage(queries=4, requests=4, prompt_tokens=8)

    async def test_the_same_call_twice_at_once_is_one(self, bench: Bench) -> None:
        held = asyncio.Event()
        backend = ScriptedBackend(gate=lambda _: held.wait())
        device = await bench.start(backend, spec_of())
        calls = [asyncio.create_task(device.score()) for _ in range(5)]
        await turns()
        assert len(backend.asked) == 4
        calls[0].cancel()  # this one's device went away; the others still wait
        held.set()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(answers[0], asyncio.CancelledError)
        assert len({answer for answer in answers[1:] if isinstance(answer, Scores)}) == 1
        assert bench.run.state.seats[0].used == Usage(queries=4, requests=4, prompt_tokens=8)

    async def test_local_steps_of_the_alpha_exchange_share_a_lease(self, bench: Bench) -> None:
        device = await bench.start(ScriptedBackend(), spec_of("alpha", local_steps=2))
        assert device.work.leased_queries == 8
        await device.score(prompts=prompts([[0, 0]] * 4))
        await device.score(prompts=prompts([[1, 0]] * 4))
        problem = await device.refused(prompts=prompts([[1, 1]]))
        assert problem.code == "lease_exhausted"
        await device.update()
        assert bench.spent.queries == 8

    async def test_cache_hits_count_as_queries_and_cost_nothing(self, bench: Bench) -> None:
        device = await bench.start(
            ModelClient(ScriptedBackend(), cache=AnswerCache()), spec_of("alpha")
        )
        await device.score(prompts=prompts([[0, 0]] * 4))
        assert bench.run.state.seats[0].used == Usage(queries=4, requests=1, prompt_tokens=2)
        assert bench.run.result().cache.hits == 6  # 3 repetitions of 2 inputs
        # The figures of a report include what open work has sent.
        result = bench.run.result()
        assert result.spent == Usage(queries=4, requests=1, prompt_tokens=2)
        assert (result.spent + result.leased) == bench.run.state.account.leased


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "detail"),
        [
            ({"examples": ({"text": "a"},) * 3}, "at most 2"),
            ({"examples": ({"txt": "a"},)}, "has the fields ['txt'], the task's are ['text']"),
            ({"examples": ({"text": "a"}, {"text": "b", "label": "1"})}, "examples.1: has the f"),
            ({"examples": ({},)}, "has the fields []"),
            ({"prompts": prompts([[0, 3]])}, "an index has no candidate"),
            ({"prompts": prompts([[0, 1, 2]])}, "must be integers [P, 2]"),
            ({"prompts": Tensor.pack([0, 1], (2,), "uint8")}, "must be integers [P, 2]"),
            ({"prompts": Tensor.pack([0, 1], (1, 2), "float32")}, "must be integers [P, 2]"),
            ({"prompts": Tensor.pack([], (0, 2), "uint8")}, "prompts: are empty"),
            ({"prompts": None}, "are required in the alpha exchange"),
        ],
        ids=str,
    )
    async def test_requests_that_do_not_fit(
        self, bench: Bench, changes: dict[str, Any], detail: str
    ) -> None:
        backend = ScriptedBackend()
        device = await bench.start(backend, spec_of("alpha"))
        before = bench.run.state
        problem = await device.refused(**{"prompts": prompts([[0, 0]]), **changes})
        assert (problem.code, detail in problem.detail) == ("invalid_message", True)
        assert backend.asked == []
        assert bench.run.state is before

    @pytest.mark.parametrize("count", [5, 2**20])
    async def test_more_prompts_than_leased(self, bench: Bench, count: int) -> None:
        """Refused before a text is rendered: it costs the server nothing."""
        backend = ScriptedBackend()
        device = await bench.start(backend, spec_of("alpha"))
        many = Tensor.from_bytes(bytes(2 * count), (count, 2), "uint8")
        assert (await device.refused(prompts=many)).code == "lease_exhausted"
        assert backend.asked == []

    async def test_refused_calls_are_not_kept(self, bench: Bench) -> None:
        """Each would keep all its texts as long as the work is out, and costs a device nothing."""
        backend = ScriptedBackend()
        device = await bench.start(backend, spec_of())
        scores = await device.score()
        for number in range(5):
            problem = await device.refused(examples=({"text": f"text {number}"},))
            assert problem.code == "lease_exhausted"
        (work,) = bench.gateway._open.values()
        assert len(work.calls) == 1
        # The one that was answered is answered from memory as before.
        assert await device.score() == scores
        assert len(backend.asked) == 4

    @pytest.mark.parametrize(
        ("failure", "again"),
        [(BackendError("too long"), False), (BackendUnavailable("down"), True)],
    )
    async def test_only_a_final_refusal_is_kept(
        self, bench: Bench, failure: BackendError, again: bool
    ) -> None:
        """Also without a waiting caller."""
        held, calls = asyncio.Event(), []

        async def gate(query: Query) -> None:
            calls.append(query)
            await held.wait()
            raise failure

        device = await bench.start(ScriptedBackend(gate=gate), spec_of())
        await hang_up(device, held)
        first = len(calls)
        assert (await device.refused()).status >= 500
        assert (len(calls) > first) is again

    async def test_late(self, bench: Bench) -> None:
        held = asyncio.Event()
        backend = ScriptedBackend(gate=lambda _: held.wait())
        device = await bench.start(backend, spec_of())
        waiting = asyncio.create_task(device.score())
        await turns()
        bench.clock.advance(100)
        await device.service.replicas.tick()
        # Its call was under way: all of it may have been sent.
        assert bench.spent == Usage(queries=4, requests=4, prompt_tokens=8)
        assert (await device.refused()).code == "assignment_expired"
        held.set()
        await waiting
        assert bench.spent == Usage(queries=4, requests=4, prompt_tokens=8)
        assert bench.gateway._open == {}

    async def test_no_gateway(self, bench: Bench) -> None:
        device = await bench.start(None, spec_of())
        assert (await device.refused()).code == "not_found"


class TestOutages:
    async def test_calls_that_fail_again_and_again(self, bench: Bench) -> None:
        """A device whose text the model never answers does not drain the run."""
        asked: list[Query] = []

        async def gate(query: Query) -> None:
            asked.append(query)
            raise BackendUnavailable("overloaded")

        device = await bench.start(ScriptedBackend(gate=gate), spec_of())
        codes = [(await device.refused()).code for _ in range(20)]
        assert codes == ["backend_unavailable"] * 7 + ["backend_failed"] * 13
        assert len(asked) <= 8 * 4

    async def test_a_model_that_comes_back(self, bench: Bench) -> None:
        """The queries are charged once, the requests as often as they may have been sent."""
        outage = Outage(1, BackendUnavailable("overloaded", retry_after_s=7.0))
        backend = ScriptedBackend(gate=outage)
        device = await bench.start(backend, spec_of())
        problem = await device.refused()
        assert (problem.code, problem.status) == ("backend_unavailable", 503)
        assert problem.retry_after_s == 7.0
        await device.score()
        await device.update()
        # The first query failed, and no other was sent.
        assert bench.spent == Usage(queries=4, requests=5, prompt_tokens=10)
        assert bench.run.state.account.leases == {}

    async def test_retries_stop_at_the_cap(self, bench: Bench) -> None:
        outage = Outage(100, BackendUnavailable("overloaded"))
        backend = ScriptedBackend(gate=outage)
        device = await bench.start(backend, spec_of(budget={"requests": 10}))
        codes = [(await device.refused()).code for _ in range(9)]
        # Each call is admitted whole: 7 failures and 4 requests are more than 10.
        assert codes == ["backend_unavailable"] * 7 + ["lease_exhausted"] * 2
        assert bench.held.requests == 10
        assert len(backend.asked) == 7

    async def test_a_bug_in_a_backend_is_charged_too(self, bench: Bench) -> None:
        device = await bench.start(ScriptedBackend(gate=Outage(1, BUG)), spec_of())
        problem = await device.refused()
        assert (problem.code, is_retryable(problem)) == ("backend_failed", False)
        assert "a private text" not in problem.detail
        assert bench.run.state.seats[0].used == Usage(queries=4, requests=1, prompt_tokens=2)
        assert bench.run.state.seats[0].max_pending == NOTHING

    async def test_bugs_in_a_row_pause_the_run(self, bench: Bench) -> None:
        bug = Outage(2, BUG)
        backend = ScriptedBackend(gate=bug)
        device = await bench.start(backend, spec_of("alpha", num_samples=16))
        ask = partial(device.refused, prompts=prompts([[0, 0]] * 2))
        assert [(await ask()).code for _ in range(2)] == ["backend_failed"] * 2
        await device.score(prompts=prompts([[0, 0]] * 2))
        bug.failures = 4  # An answer in between: the count begins again.
        ask = partial(device.refused, prompts=prompts([[1, 1]] * 2))
        assert [(await ask()).code for _ in range(2)] == ["backend_failed"] * 2
        assert bench.run.state.running
        problem = await ask()
        assert (problem.code, problem.detail) == ("run_conflict", "the run is paused")
        assert bench.run.state.paused
        assert "failed 3 times in a row with ZeroDivisionError" in str(bench.run.state.reason)
        await device.service.resume_run(bench.run)
        assert (await ask()).code == "backend_failed"

    @pytest.mark.parametrize("want", ["labels", "text"])
    async def test_an_answer_of_another_size_is_a_bug_too(self, bench: Bench, want: str) -> None:
        class Short(ScriptedBackend):
            async def score(self, query: Query) -> Answer:
                answer = await super().score(query)
                rows = {"log_probs": answer.log_probs[1:], "texts": answer.texts[1:]}
                return replace(answer, **rows)

        spec = spec_of()
        if want == "text":
            task = TaskSpec(template="{prompt} {text}", loss="score", metric="loss")
            spec = spec.model_copy(update={"task": task})
        backend = Short()
        device = await bench.start(backend, spec)
        codes = [(await device.refused()).code for _ in range(3)]
        assert codes == ["backend_failed", "backend_failed", "run_conflict"]
        assert len(backend.asked) == 3  # Nothing is sent after the first.

    @pytest.mark.parametrize(
        ("kind", "reason"),
        [
            (SpecError, "task.labels: two are the same but for case"),
            (BudgetExhausted, "the gateway's budget is spent"),
        ],
    )
    async def test_what_an_operator_must_change_pauses_the_run(
        self, bench: Bench, kind: type[Exception], reason: str
    ) -> None:
        def refuse(query: Query) -> None:
            raise kind(reason)

        device = await bench.start(ScriptedBackend(gate=refuse), spec_of())
        assert (await device.refused()).code == "run_conflict"
        assert bench.run.state.reason == f"paused: {reason}"

    async def test_a_store_that_is_away_is_no_bug_of_the_backend(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing is sent then, and a paid answer waits until its cost is stored."""
        backend, stored, failures = ScriptedBackend(), bench.store.commit, 5

        async def commit(run_id: str, version: int, changes: Commit) -> None:
            nonlocal failures
            if failures > 1 or (failures and backend.asked):
                failures -= 1
                raise StoreUnavailable("the disk is full")
            await stored(run_id, version, changes)

        device = await bench.start(backend, spec_of())
        monkeypatch.setattr("fedone_sdk.aggregator.runs.served_run._RETRY_S", 0)
        monkeypatch.setattr(bench.store, "commit", commit)
        for _ in range(4):
            with pytest.raises(StoreUnavailable):
                await device.score()
        await device.score()
        assert (failures, len(backend.asked)) == (0, 4)


class TestRestart:
    @pytest.mark.parametrize("graceful", [True, False])
    async def test_a_call_under_way_is_billed_again_but_counts_once(
        self, bench: Bench, graceful: bool
    ) -> None:
        held = asyncio.Event()
        backend = ScriptedBackend(gate=lambda _: held.wait())
        device = await bench.start(backend, spec_of(budget={"queries": 9}))
        waiting = asyncio.create_task(device.score())
        await turns()
        if graceful:
            await device.service.stop()
            held.set()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        held.set()
        device = await bench.start(backend)
        assert device.work.leased_queries == 4
        # What was under way may have been sent, and is spent; asked again, it is sent again.
        await device.score()
        assert bench.run.state.seats[0].used == Usage(queries=4, requests=8, prompt_tokens=16)
        assert len(backend.asked) == 8
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    async def test_a_stopped_service_no_longer_writes(self, bench: Bench) -> None:
        held = asyncio.Event()
        device = await bench.start(ScriptedBackend(gate=lambda _: held.wait()), spec_of())
        waiting = asyncio.create_task(device.score())
        await turns()
        await device.service.stop()
        version = await bench.store.versions()
        held.set()
        await asyncio.gather(waiting, return_exceptions=True)
        await turns()
        assert await bench.store.versions() == version
