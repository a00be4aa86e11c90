from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import structlog

from fedone_sdk.backends.base import Answer, LLMBackend, Query
from fedone_sdk.backends.model_client import ModelClient
from fedone_sdk.budget import Budget, BudgetGuard, Usage
from fedone_sdk.errors import (
    BackendBlocked,
    BackendError,
    BackendUnavailable,
    BudgetExhausted,
    FormChanged,
)
from fedone_sdk.spec import LimitsSpec, RetrySpec
from fedone_sdk.task import Part
from tests.virtual_time import now, on_virtual_time

ONE = Usage(requests=1)


class Model(LLMBackend):
    """End each request as `ending` defines, after `takes_s`."""

    def __init__(self, ending: Callable[[int], BaseException | None] = lambda number: None) -> None:
        self.ending = ending
        self.takes_s = 0.0
        self.sent: list[float] = []

    @property
    def fingerprint(self) -> str:
        return "model:1"

    async def score(self, query: Query) -> Answer:
        self.sent.append(now())
        number = len(self.sent)
        await asyncio.sleep(self.takes_s)
        if (error := self.ending(number)) is not None:
            raise error
        return Answer(log_probs=((-1.0,),), usage=ONE)


def down(number: int) -> Exception:
    return BackendUnavailable("503 from the model", usage=ONE)


def revoked(number: int) -> Exception:
    return BackendBlocked("the key was revoked: set OPENAI_API_KEY", usage=ONE)


def down_until(last: int) -> Callable[[int], Exception | None]:
    return lambda number: down(number) if number <= last else None


def ask(payer: BudgetGuard | None = None) -> Query:
    return Query(inputs=((Part("field", "a"),),), label_words=(" b",), payer=payer)


def retrying(model: LLMBackend, **settings: Any) -> ModelClient:
    return ModelClient(model, retry=RetrySpec(**settings))


def many(backend: LLMBackend, count: int) -> list[asyncio.Task[Answer]]:
    return [asyncio.create_task(backend.score(ask())) for _ in range(count)]


async def opened(ending: Callable[[int], Exception] = revoked) -> tuple[Model, ModelClient]:
    """A client whose first request has opened the breaker."""
    model = Model(ending)
    backend = retrying(model, attempts=9, breaker_failures=3, max_wait_s=30)
    with pytest.raises(BackendBlocked):
        await backend.score(ask())
    return model, backend


async def outcomes(tasks: list[asyncio.Task[Answer]]) -> list[Answer | BaseException]:
    return await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(
    "error",
    [
        BackendError("400: too long", usage=ONE), BackendBlocked("401: set OPENAI_API_KEY"),
        BudgetExhausted("no money"), RuntimeError("a bug"),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
@on_virtual_time
async def test_nothing_else_is_queried_again(error: Exception) -> None:
    model = Model(lambda number: error)
    with pytest.raises(type(error)) as excinfo:
        await retrying(model).score(ask())
    assert str(excinfo.value) == str(error)
    assert len(model.sent) == 1


@on_virtual_time
async def test_a_failure_reports_the_usage_of_all_attempts() -> None:
    error = BackendUnavailable("503 from the model", usage=ONE)  # a backend may raise it again
    for _ in range(2):
        payer = BudgetGuard(None)
        with pytest.raises(BackendUnavailable) as caught:
            await retrying(Model(lambda number: error), attempts=3).score(ask(payer))
        assert caught.value.usage == (await payer.account()).spent == ONE * 3


@on_virtual_time
async def test_waits_are_random_and_their_bound_doubles_up_to_the_cap() -> None:
    waits: list[list[float]] = [[] for _ in range(6)]
    for _ in range(150):
        model = Model(down)
        with pytest.raises(BackendUnavailable):
            await retrying(model, attempts=7, max_wait_s=4, breaker_failures=99).score(ask())
        for number, at in enumerate(model.sent[1:]):
            waits[number].append(at - model.sent[number])
    for bound, found in zip([0.5, 1, 2, 4, 4, 4], waits, strict=True):
        assert 0 <= min(found) < 0.2 * bound  # full jitter: also hardly at all
        assert 0.8 * bound < max(found) <= bound + 1e-6


@on_virtual_time
async def test_the_provider_is_waited_for_as_it_asks() -> None:
    model = Model(
        lambda number: BackendUnavailable("429", retry_after_s=20) if number == 1 else None
    )
    await retrying(model, max_wait_s=60).score(ask())
    assert 20 <= model.sent[1] <= 20.5


@on_virtual_time
async def test_every_attempt_is_paid_for() -> None:
    payer = BudgetGuard(Budget(requests=3))
    model = Model(down)
    backend = retrying(model, attempts=9)
    with pytest.raises(BudgetExhausted):
        await backend.score(ask(payer))
    assert len(model.sent) == 3
    assert (await payer.account()).spent == Usage(requests=3)


@on_virtual_time
async def test_failures_in_a_row_open_the_breaker_for_all() -> None:
    model = Model(down)
    backend = retrying(model, attempts=50, breaker_failures=10, max_wait_s=8)
    with structlog.testing.capture_logs() as logs:
        found = await outcomes(many(backend, 7))
    assert len(model.sent) == 10  # those who waited for their next attempt sent nothing more
    assert all(isinstance(error, BackendBlocked) for error in found)
    assert {str(error) for error in found} == {
        "the model failed 10 times in a row; last error: 503 from the model"
    }
    assert sum(error.usage.requests for error in found) == 10  # type: ignore[union-attr]
    assert [entry["log_level"] for entry in logs].count("warning") == 1
    with pytest.raises(BackendBlocked, match="10 times"):
        await backend.score(ask())
    assert len(model.sent) == 10


@on_virtual_time
async def test_a_success_resets_the_count() -> None:
    model = Model(lambda number: down(number) if number % 5 else None)
    backend = retrying(model, attempts=5, breaker_failures=5)
    for _ in range(6):
        await backend.score(ask())
    assert len(model.sent) == 30


@on_virtual_time
async def test_a_revoked_key_stops_calls_that_wait_for_a_retry() -> None:
    model = Model(lambda number: down(number) if number <= 4 else revoked(number))
    backend = retrying(model, attempts=50)
    found = await outcomes(many(backend, 5))
    assert all("revoked" in str(error) for error in found)
    assert all(isinstance(error, BackendBlocked) for error in found)
    assert len(model.sent) == 5
    assert now() == 0  # no call waited for the end of its pause


@pytest.mark.parametrize("ending", [revoked, down])
@on_virtual_time
async def test_two_hundred_callers_send_no_more_than_the_pending_ones(
    ending: Callable[[int], Exception],
) -> None:
    model = Model(lambda number: ending(number) if number > 1 else None)
    model.takes_s = 0.1
    payer = BudgetGuard(None)
    limits, retry = LimitsSpec(concurrency=8), RetrySpec(breaker_failures=8)
    backend = ModelClient(model, guard=payer, limits=limits, retry=retry)
    await backend.score(ask())
    found = await outcomes(many(backend, 200))
    assert all(isinstance(error, BackendBlocked) for error in found)
    assert len({str(error) for error in found}) == 1
    assert len(model.sent) == 9
    assert (await payer.account()).held == Usage(requests=9)


@on_virtual_time
async def test_the_first_request_goes_alone_before_its_turn_and_its_price() -> None:
    """A wrong key costs one request, and nothing is reserved for waiting calls."""
    model = Model(revoked)
    model.takes_s = 0.1
    payer = BudgetGuard(None)
    limits = LimitsSpec(concurrency=8)
    backend = ModelClient(model, guard=payer, limits=limits, retry=RetrySpec())
    asked = many(backend, 200)
    await asyncio.sleep(0.05)
    assert (await payer.account()).leased == Usage(requests=1)
    found = await outcomes(asked)
    assert all(isinstance(error, BackendBlocked) for error in found)
    assert len(model.sent) == 1
    assert (await payer.account()).held == Usage(requests=1)


@on_virtual_time
async def test_after_a_first_temporary_failure_no_call_waits() -> None:
    model = Model(down_until(1))
    model.takes_s = 60
    await outcomes(many(retrying(model, attempts=1), 20))
    assert now() == 120
    assert len(model.sent) == 20


@on_virtual_time
async def test_while_it_learns_how_to_ask_they_go_one_by_one() -> None:
    """A refusal that changes the next request is no answer yet, and no failed attempt."""

    def again(number: int) -> FormChanged | None:
        return FormChanged("ask otherwise", usage=ONE) if number <= 2 else None

    model = Model(again)
    model.takes_s = 1
    await outcomes(many(retrying(model, attempts=1), 20))
    assert len(model.sent) == 22
    assert len({sent for sent in model.sent}) == 4  # three alone, then all others


@on_virtual_time
async def test_after_a_pause_one_tries_and_the_others_wait_for_it() -> None:
    model, backend = await opened(down)
    start = now()
    await asyncio.sleep(29)
    with pytest.raises(BackendBlocked, match="3 times"):
        await backend.score(ask())
    await asyncio.sleep(1)
    model.takes_s = 2
    found = await outcomes(many(backend, 20))  # still down: one request more
    assert {str(error) for error in found} == {
        "the model failed 4 times in a row; last error: 503 from the model"
    }
    assert model.sent[3:] == [pytest.approx(start + 30)]
    await asyncio.sleep(30)
    model.ending = lambda number: None
    tasks = many(backend, 20)
    await asyncio.sleep(1)
    assert len(model.sent) == 5  # one is under way
    found = await outcomes(tasks)
    assert all(isinstance(answer, Answer) for answer in found)
    assert len(model.sent) == 24


@on_virtual_time
async def test_reset_spares_the_pause() -> None:
    model, backend = await opened()
    backend.reset()
    found = await outcomes(many(backend, 10))  # nothing was changed: one request finds that out
    assert all(isinstance(error, BackendBlocked) for error in found)
    assert len(model.sent) == 2
    model.ending = lambda number: None
    backend.reset()
    assert all(isinstance(answer, Answer) for answer in await outcomes(many(backend, 10)))
    assert len(model.sent) == 12


@on_virtual_time
async def test_a_cancelled_waiter_does_not_end_the_try() -> None:
    model, backend = await opened()
    backend.reset()
    model.ending = lambda number: None
    model.takes_s = 1
    first, second, third = many(backend, 3)
    await asyncio.sleep(0.5)
    second.cancel()
    assert (await first).usage == ONE
    assert (await third).usage == ONE
    assert second.cancelled()
    assert len(model.sent) == 3


@pytest.mark.parametrize(
    "ending",
    [BackendError("400: too long"), BudgetExhausted("no money"), asyncio.CancelledError()],
    ids=lambda error: type(error).__name__,
)
@on_virtual_time
async def test_an_inconclusive_try_is_followed_by_another(ending: BaseException) -> None:
    model, backend = await opened()
    backend.reset()
    model.takes_s = 1
    model.ending = lambda number: ending if number == 2 else None
    first, *others = many(backend, 5)
    await asyncio.sleep(0.5)
    assert len(model.sent) == 2
    if isinstance(ending, asyncio.CancelledError):
        first.cancel()
    with pytest.raises(type(ending)):
        await first
    assert all(isinstance(answer, Answer) for answer in await outcomes(others))


@on_virtual_time
async def test_what_was_sent_before_the_breaker_opened_does_not_move_it() -> None:
    gates = [asyncio.get_running_loop().create_future() for _ in range(4)]

    class Slow(Model):
        async def score(self, query: Query) -> Answer:
            self.sent.append(now())
            await gates[len(self.sent) - 1]
            return Answer(log_probs=((-1.0,),), usage=ONE)

    model = Slow()
    backend = retrying(model, breaker_failures=1)
    gates[0].set_result(None)
    await backend.score(ask())  # the first goes alone
    late, later, broken = many(backend, 3)
    await asyncio.sleep(0)
    gates[3].set_exception(revoked(4))
    with pytest.raises(BackendBlocked, match="revoked"):
        await broken
    gates[1].set_result(None)  # a key that was good a moment ago says nothing of now
    assert (await late).usage == ONE
    with pytest.raises(BackendBlocked, match="revoked"):
        await backend.score(ask())
    gates[2].set_exception(down(3))
    with pytest.raises(BackendBlocked, match="revoked"):
        await later
    assert len(model.sent) == 4
