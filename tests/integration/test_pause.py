"""A run that cannot continue pauses: paid work is kept, and it resumes where it was."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from fedone_sdk.aggregator import ServedRun, Service
from fedone_sdk.aggregator.rounds.lifecycle import record_model
from fedone_sdk.backends import Answer, AnswerCache, ModelClient, Query
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.errors import BackendBlocked, BackendUnavailable, ProblemError, SpecError
from fedone_sdk.local import MemoryTransport
from fedone_sdk.messages import Claim, LossesAssignment, Renewal
from fedone_sdk.spec import RetrySpec, RunSpec
from fedone_sdk.stores import MemoryStore
from fedone_sdk.task import Rendered
from fedone_sdk.testing import LoopbackFederation, ManualClock, ScriptedBackend
from tests.by_hand import Device, device_of
from tests.runs import WORDS, memory_client, run_spec, serving, train, until

TRAIN = [{"text": f"train {number}", "label": number % 2} for number in range(6)]
DEV = [{"text": f"dev {number}", "label": number % 2} for number in range(10)]
REVOKED = BackendBlocked("the key was revoked", usage=NOTHING)


def spec_of(
    *, every: int = 0, participation: Mapping[str, Any] | None = None, **changes: Any
) -> RunSpec:
    evaluation = {"every": every, "examples": 4}
    wanted = {"model": None, **(participation or {})}
    return run_spec(evaluation=evaluation, participation=wanted, **changes)


def is_dev(query: Query) -> bool:
    return any("dev" in part.text for part in query.inputs[0])


@dataclass
class Model:
    """A model that a test can break (for queries that `hits`), hold and repair."""

    fails: Exception | None = None
    hits: Callable[[Query], bool] = lambda query: True
    held: asyncio.Event | None = None
    answered: list[Query] = field(default_factory=list)

    async def gate(self, query: Query) -> None:
        if self.fails is not None and self.hits(query):
            raise self.fails
        if self.held is not None:
            await self.held.wait()
        self.answered.append(query)

    def release(self) -> None:
        assert self.held is not None
        self.held.set()


class Checked(ScriptedBackend):
    """Fails its check, too, while its model fails; reports its capabilities afterwards."""

    def __init__(self, model: Model, **options: Any) -> None:
        super().__init__(gate=model.gate, **options)
        self.model = model
        self.looked = False

    async def check(self, label_words: tuple[str, ...], form: Rendered = ()) -> None:
        if self.model.fails is not None:
            raise self.model.fails
        self.looked = True

    def worst_case(self, batch_size: int, max_tokens: int = 0) -> Usage:
        assert self.looked
        return super().worst_case(batch_size)


async def working(service: Service) -> tuple[ServedRun, Device]:
    """A run with a device that has work."""
    run = await service.add_run(spec_of(), WORDS)
    device = await device_of(service)
    assert await device.claim() is not None
    return run, device


async def pause(run: ServedRun) -> None:
    """By an answer of another model."""
    for model in ("m-1", "m-2"):
        await run.apply(record_model, model=model)


async def under_way(device: Device) -> asyncio.Task[Any]:
    """A call whose queries are reserved."""
    run, call = device.service.runs["run"], asyncio.create_task(device.score())
    await until(lambda: run.state.seats[0].max_pending.requests == 4)
    return call


@asynccontextmanager
async def calling() -> AsyncIterator[tuple[Service, ServedRun, Device, Model, asyncio.Task[Any]]]:
    model = Model(held=asyncio.Event())
    async with serving(backend=ScriptedBackend(gate=model.gate)) as service:
        run, device = await working(service)
        yield service, run, device, model, await under_way(device)


class TestWork:
    async def test_it_is_kept_and_paid_answers_are_used(self) -> None:
        """One query of four fails: after the resume only the failed and waiting ones are sent."""
        model = Model()
        model.fails, model.hits = REVOKED, lambda query: len(model.answered) == 2
        backend = ModelClient(ScriptedBackend(gate=model.gate), cache=AnswerCache())
        async with serving(backend=backend) as service:
            run, device = await working(service)
            work = device.work
            assert (await device.refused()).code == "run_conflict"
            assert run.state.reason == "paused: the key was revoked"
            assert (len(model.answered), await device.claim()) == (2, None)
            model.fails = None
            await service.resume_run(run)
            assert (await device.claim()) == work
            await device.score()
            assert len(model.answered) == len({query.inputs for query in model.answered})
            await device.update()
            # Nothing was spent on what was refused.
            assert run.state.account.spent == Usage(
                queries=4, requests=len(model.answered), prompt_tokens=2 * len(model.answered)
            )
            assert run.state.account.leases == {}

    async def test_another_call_under_way_ends_well(self) -> None:
        async with calling() as (service, run, device, model, call):
            await pause(run)
            assert run.state.paused
            waiting = asyncio.create_task(service.wait(run))
            await asyncio.sleep(0)
            assert not waiting.done()  # the call is paid for
            model.release()
            await call
            await waiting
            await device.update()
            assert (run.state.round, run.state.paused) == (1, True)
            assert run.state.account.spent == Usage(queries=4, requests=4, prompt_tokens=8)
            assert run.state.account.leases == {}

    async def test_stopped_for_good_during_a_call(self) -> None:
        async with calling() as (service, run, _, model, call):
            await service.stop_run(run)
            model.release()
            await service.wait(run)
            assert call.done() or await call
            assert run.state.account.spent == Usage(queries=4, requests=4, prompt_tokens=8)

    async def test_a_stopping_service_ends_calls_without_a_caller(self) -> None:
        async with calling() as (service, run, *_, call):
            await service.stop_run(run)  # forgets the call
        with pytest.raises(asyncio.CancelledError):
            await call

    async def test_the_breaker_lets_a_resumed_run_try_at_once(self) -> None:
        model = Model(fails=BackendUnavailable("no answer"))
        retry = RetrySpec(attempts=3, breaker_failures=2, max_wait_s=0.01)
        backend = ModelClient(ScriptedBackend(gate=model.gate), retry=retry)
        async with serving(backend=backend) as service:
            run, device = await working(service)
            assert (await device.refused()).code == "run_conflict"
            assert "failed 2 times in a row" in str(run.state.reason)
            assert backend._retries is not None
            backend._retries._refuse_until = math.inf  # Only `reset` closes the breaker.
            model.fails = None
            await service.stop_run(run, keep=True)
            assert backend.trouble  # A stop does not let other runs try.
            await service.resume_run(run)
            await device.score()

    async def test_a_retry_that_a_pause_stops_gives_no_work_back(self) -> None:
        model = Model(fails=BackendUnavailable("slow"))
        retry = RetrySpec(attempts=9, max_wait_s=0.001)
        backend = ModelClient(ScriptedBackend(gate=model.gate), retry=retry)
        async with serving(backend=backend) as service:
            run, device = await working(service)
            call = asyncio.create_task(device.refused())
            await until(lambda: run.state.seats[0].max_pending.requests == 4)
            await pause(run)
            assert (await call).code == "run_conflict"
            assert run.state.seat_with(device.work.assignment_id) is not None

    @pytest.mark.parametrize(
        ("error", "code"), [(REVOKED, "run_conflict"), (ZeroDivisionError(), "backend_failed")]
    )
    async def test_a_model_that_cannot_even_be_quoted(self, error: Exception, code: str) -> None:
        class Unquotable(ScriptedBackend):
            broken = False

            async def quote(self, query: Query) -> Usage:
                if self.broken:
                    raise error
                return await super().quote(query)

        backend = Unquotable()
        async with serving(backend=backend) as service:
            run, device = await working(service)
            backend.broken = True
            assert (await device.refused()).code == code
            assert run.state.paused is (error is REVOKED)
            assert run.state.seats[0].used == run.state.seats[0].max_pending == NOTHING

    async def test_what_a_provider_counts_on_top_is_held_at_once(self) -> None:
        class Dear(ScriptedBackend):
            async def score(self, query: Query) -> Answer:
                answer = await super().score(query)
                return Answer(log_probs=answer.log_probs, usage=Usage(requests=3))

        async with serving(backend=Dear()) as service:
            run, device = await working(service)
            await device.score()
            assert run.state.account.held.requests == 12
            await device.update()
            assert run.state.account.spent.requests == 12

    async def test_a_model_whose_bills_are_too_high_to_be_counted(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend, worst = ScriptedBackend(), Usage(queries=1, prompt_tokens=2**53)
        async with serving(backend=backend) as service:
            run = await service.add_run(spec_of(), WORDS)
            device = await device_of(service)
            monkeypatch.setattr(backend, "worst_case", lambda *_: worst)
            assert await device.claim() is None
            with pytest.raises(ProblemError, match=r"more than 2\*\*53 tokens") as refused:
                await service.resume_run(run)
            detail = refused.value.detail
            assert (refused.value.code, run.state.reason) == (
                "backend_blocked",
                f"paused: {detail}",
            )


class TestEvaluation:
    async def test_a_paused_run_is_not_measured(self) -> None:
        model = Model(fails=REVOKED, hits=is_dev)
        backend = ScriptedBackend(gate=model.gate)
        async with serving(backend=backend) as service:
            run = await service.add_run(spec_of(every=1), WORDS, dev=DEV)
            await service.wait(run)
            assert run.state.paused
            assert sum(map(is_dev, backend.asked)) == 1  # no further one after the first
            assert run.state.evaluation.leases == run.state.account.leases == {}
            model.fails = None
            await service.resume_run(run)
            await train(service, run, TRAIN)
            result = run.result()
        assert None not in (result.metric.no_prompt, result.metric.before, result.metric.after)
        assert [report.metric is not None for report in result.history] == [True] * 3

    async def test_a_resume_does_not_throw_a_measurement_away(self) -> None:
        model = Model(held=asyncio.Event())
        backend = ScriptedBackend(gate=model.gate)
        async with serving(backend=backend) as service:
            run = await service.add_run(spec_of(), WORDS, dev=DEV)
            await until(lambda: len(backend.asked) == 5)  # all of the first measurement
            await pause(run)
            await service.resume_run(run)
            model.release()
            await train(service, run, TRAIN)
            assert run.state.metric.after is not None
            assert run.state.evaluation.spent.queries == 15
            assert run.state.account.spent.requests == 15 + 12 == len(backend.asked)

    async def test_the_end_is_measured_after_a_stop_and_again_after_a_resume(self) -> None:
        backend = ScriptedBackend()
        async with serving(backend=backend) as service:
            run = await service.add_run(spec_of(), WORDS, dev=DEV)
            await until(lambda: run.state.metric.before is not None)
            await pause(run)
            await service.stop_run(run, "interrupted")
            await service.wait(run)
            assert run.state.metric.after is not None
            await service.resume_run(run)
            assert run.state.metric.after is None
            await train(service, run, TRAIN)
            assert run.state.metric.after is not None
            assert run.state.evaluation.spent.queries == 4 * 5


class TestRestart:
    async def test_with_another_model_devices_wait_until_an_operator_accepts_it(self) -> None:
        store = MemoryStore()
        async with serving(backend=ScriptedBackend(), store=store) as service:
            _, device = await working(service)
            work = device.work
            await device.score()
        other = ScriptedBackend(fingerprint="other")
        async with serving(backend=other, store=store) as service:
            run = service.runs["run"]
            assert "the server's model is 'other', but " in run.state.reason
            device = Device(service, (await service.store.clients())[0])
            assert await device.claim() is None
            assert other.asked == []
            await service.resume_run(run)
            assert await device.claim() == work
            await device.score()
            await device.update(model="other")
            assert run.state.round == 1
            # The queries count once, the requests of both models are paid.
            assert run.state.account.spent == Usage(queries=4, requests=8, prompt_tokens=16)

    async def test_with_an_unavailable_model(self) -> None:
        store, model = MemoryStore(), Model()
        async with serving(backend=Checked(model), store=store) as service:
            work = (await working(service))[1].work
        model.fails = REVOKED
        async with serving(backend=Checked(model), store=store) as service:
            run = service.runs["run"]
            assert run.state.reason == "paused: the key was revoked"
            device = Device(service, (await service.store.clients())[0])
            assert await device.claim() is None
            with pytest.raises(ProblemError, match="the key was revoked") as excinfo:
                await service.resume_run(run)
            assert excinfo.value.code == "backend_blocked"
            assert run.state.paused
            assert run.ended.is_set()
            model.fails = None
            await service.resume_run(run)
            assert await device.claim() == work
            await device.score()
            assert run.state.account.held == Usage(queries=4, requests=4, prompt_tokens=8)

    async def test_with_a_model_that_cannot_keep_the_cap(self) -> None:
        store = MemoryStore()
        async with serving(backend=ScriptedBackend(), store=store) as service:
            await service.add_run(spec_of(budget={"usd": 1}), WORDS)

        class Unpriced(ScriptedBackend):
            bounds = ScriptedBackend.bounds - {"usd"}

        async with serving(backend=Unpriced(), store=store) as service:
            run = service.runs["run"]
            assert "set backend.prices" in str(run.state.reason)
            with pytest.raises(ProblemError, match=r"budget\.usd"):
                await service.resume_run(run)
            with pytest.raises(SpecError, match=r"budget\.usd: .* set backend\.prices"):
                await service.add_run(spec_of(name="new", budget={"usd": 1}), WORDS)


class TestDevices:
    async def test_they_wait_and_go_on_over_http(self) -> None:
        model = Model(fails=REVOKED, hits=lambda query: len(model.answered) >= 4)
        backend = ScriptedBackend(gate=model.gate)
        async with (
            asyncio.timeout(20),
            LoopbackFederation(spec_of(), WORDS, backend=backend) as federation,
            federation.client(TRAIN) as client,
        ):
            working = asyncio.create_task(client.run_forever())
            await federation.run.ended.wait()
            assert federation.run.state.reason == "paused: the key was revoked"
            # A claim meanwhile gets a wait, not the end of the run.
            headers = {"Authorization": f"Bearer {client._session.credential}"}
            async with aiohttp.ClientSession(federation.url) as session:
                claim = {"num_examples": 5, "wait_s": 0}
                url = "/v1/assignments/claim"
                async with session.post(url, json=claim, headers=headers) as response:
                    assert response.status == 204
                    assert "Retry-After" in response.headers
                assert not working.done()
                model.fails = None
                admin = {"Authorization": "Bearer admin"}
                async with session.post("/v1/runs/run/resume", headers=admin) as response:
                    assert (await response.json())["status"] == "running"
                async with session.post("/v1/runs/run/resume", headers=admin) as response:
                    assert (await response.json())["code"] == "run_conflict"
            await working
            result = federation.run.result()
            assert result.status == "completed"
            assert result.spent == Usage(queries=12, requests=12, prompt_tokens=24)

    async def test_a_call_may_take_longer_than_the_deadline(self) -> None:
        model = Model(held=asyncio.Event())
        clock = ManualClock()
        backend = ScriptedBackend(gate=model.gate)
        participation = {"exchange": "losses", "deadline_s": 1}
        spec = spec_of(rounds=1, participation=participation)
        async with asyncio.timeout(20), serving(spec, backend=backend, clock=clock) as service:
            run, transport = service.runs["run"], Hasty(service)
            async with memory_client(service, data=TRAIN, transport=transport) as client:
                working = asyncio.create_task(client.run_forever())
                await until(lambda: run.state.seats and run.state.seats[0].max_pending.requests)
                for _ in range(4):
                    clock.advance(0.9)
                    renewed = clock.now() + 1
                    while run.state.seats[0].due != renewed:
                        await asyncio.sleep(0.01)
                    await service.replicas.tick()
                model.release()
                await working
            assert run.state.status == "completed"
            assert run.state.account.spent == Usage(queries=4, requests=4, prompt_tokens=8)


class Hasty(MemoryTransport):
    """Tells the client of shorter deadlines, so that it renews soon."""

    async def claim(self, credential: str, message: Claim) -> Any:
        work = await super().claim(credential, message)
        if isinstance(work, LossesAssignment):
            return work.model_copy(update={"deadline_s": 0.04})
        return work

    async def renew(self, credential: str, assignment_id: str) -> Renewal:
        await super().renew(credential, assignment_id)
        return Renewal(deadline_s=0.04)
