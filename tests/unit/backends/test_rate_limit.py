from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedone_sdk.backends.base import Answer, LLMBackend, Query, RateLimits
from fedone_sdk.backends.model_client import ModelClient
from fedone_sdk.backends.rate_limit import RateLimiter
from fedone_sdk.budget import BudgetGuard, Usage
from fedone_sdk.errors import BackendUnavailable, BudgetExhausted
from fedone_sdk.spec import LimitsSpec
from fedone_sdk.task import Part
from tests.virtual_time import now, on_virtual_time


class Model(LLMBackend):
    """Take `takes_s` for each request, and record when each was sent."""

    def __init__(self, *, takes_s: float = 0.0) -> None:
        self.takes_s = takes_s
        self.sent: list[tuple[float, str]] = []
        self.under_way = self.most_under_way = 0
        self.limits: Callable[[str], RateLimits | None] = lambda text: None
        self.error: Callable[[str], Exception | None] = lambda text: None
        self.used: Callable[[int], int] = lambda tokens: tokens
        self.quotes = 0

    @property
    def fingerprint(self) -> str:
        return "model:1"

    async def quote(self, query: Query) -> Usage:
        self.quotes += 1
        return Usage(queries=1, requests=1, prompt_tokens=tokens_of(query))

    async def score(self, query: Query) -> Answer:
        text = query.inputs[0][0].text
        self.sent.append((now(), text))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(self.takes_s)
        finally:
            self.under_way -= 1
        if (error := self.error(text)) is not None:
            raise error
        usage = Usage(requests=1, prompt_tokens=self.used(tokens_of(query)))
        return Answer(log_probs=((-1.0,),), usage=usage, limits=self.limits(text))

    @property
    def times(self) -> list[float]:
        return [at for at, _ in self.sent]

    @property
    def texts(self) -> list[str]:
        return [text for _, text in self.sent]


def tokens_of(query: Query) -> int:
    """A query's text is its name, and after a colon its tokens."""
    return int(query.inputs[0][0].text.partition(":")[2] or 1)


def limited(model: LLMBackend, max_wait_s: float = 60.0, **settings: Any) -> ModelClient:
    client = ModelClient(model)
    client._limiter = RateLimiter(LimitsSpec(**settings), max_wait_s=max_wait_s)
    return client


def ask(text: str = "a", payer: str | None = None) -> Query:
    return Query(
        inputs=((Part("field", text),),),
        label_words=(" b",),
        payer=None if payer is None else BudgetGuard(None, name=payer),
    )


def most_in_a_minute(sent: list[tuple[float, int]]) -> int:
    """The most that was sent in any 60 seconds, but for a rounding error."""
    return max(
        sum(amount for at, amount in sent if start <= at < start + 60 - 1e-6) for start, _ in sent
    )


@settings(max_examples=60)
@given(
    limit=st.floats(0.3, 30),
    arrivals=st.lists(st.floats(0, 45), min_size=1, max_size=60),
    takes_s=st.sampled_from([0.0, 0.5, 90.0]),
    concurrency=st.integers(1, 80),
)
@on_virtual_time
async def test_no_minute_has_more_requests_than_the_limit(
    limit: float, arrivals: list[float], takes_s: float, concurrency: int
) -> None:
    model = Model(takes_s=takes_s)
    backend = limited(model, requests_per_minute=limit, concurrency=concurrency)

    async def one(after: float) -> None:
        await asyncio.sleep(after)
        await backend.score(ask())

    await asyncio.gather(*(one(after) for after in arrivals))
    assert len(model.sent) == len(arrivals)
    assert model.most_under_way <= concurrency
    most = most_in_a_minute([(at, 1) for at in model.times])
    assert most <= max(limit, 1)
    if limit < 1:
        gaps = [later - at for at, later in zip(model.times, model.times[1:], strict=False)]
        assert all(gap >= 60 / limit - 1e-6 for gap in gaps)
    if concurrency >= len(arrivals) > limit >= 1:
        # Nor is it slower than it must be: all who could go have gone.
        assert model.times[int(limit) - 1] == pytest.approx(sorted(arrivals)[int(limit) - 1])


@settings(max_examples=60)
@given(
    limit=st.integers(1, 100),
    requests=st.lists(st.integers(0, 150), min_size=1, max_size=40),
    share=st.floats(0, 1),
)
@on_virtual_time
async def test_no_minute_has_more_tokens_than_the_limit(
    limit: int, requests: list[int], share: float
) -> None:
    model = Model(takes_s=0.1)
    model.used = lambda tokens: int(tokens * share)
    backend = limited(model, tokens_per_minute=limit, concurrency=3)
    await asyncio.gather(*(backend.score(ask(f"{n}:{size}")) for n, size in enumerate(requests)))
    # As the provider counts in the end; a quote of 0 used stands as it was.
    used = [(int(size * share) or size, size) for size in requests]
    sent = [(at, used[int(text.partition(":")[0])][0]) for at, text in model.sent]
    for start, _ in sent:
        window = [amount for at, amount in sent if start <= at < start + 60 - 1e-6]
        # A request above the limit goes alone. Before an answer its quote counts.
        assert sum(window) <= limit or len([amount for amount in window if amount]) == 1


@on_virtual_time
async def test_payers_take_turns() -> None:
    model = Model(takes_s=1)
    backend = limited(model, concurrency=1)
    many = [asyncio.create_task(backend.score(ask("many", "many"))) for _ in range(100)]
    await asyncio.sleep(4.5)
    few = [asyncio.create_task(backend.score(ask("few", "few"))) for _ in range(3)]
    await asyncio.gather(*few)
    # It waits for no more than the one under way and one of the others each time.
    assert model.texts[:11] == ["many"] * 5 + ["many", "few"] * 3
    for task in many:
        task.cancel()
    await asyncio.gather(*many, return_exceptions=True)
    assert model.under_way == 0


@on_virtual_time
async def test_the_provider_s_remaining_limit_is_not_exceeded() -> None:
    model = Model(takes_s=1)
    model.limits = lambda text: (
        RateLimits(requests=2, requests_reset_s=30) if text == "first" else None
    )
    backend = limited(model, concurrency=2)
    await backend.score(ask("first"))
    await asyncio.gather(*(backend.score(ask()) for _ in range(5)))
    # Two were left; the rest waits until it is full again, 30 s after the answer.
    assert model.times == [0, 1, 1, 31, 31, 32]


@on_virtual_time
async def test_an_answer_that_was_overtaken_changes_nothing() -> None:
    model = Model()
    backend = limited(model)
    old = RateLimits(requests=0, requests_reset_s=50)
    new = RateLimits(requests=100, requests_reset_s=1)
    model.limits = lambda text: old if text == "old" else new
    model.takes_s = 2
    slow = asyncio.create_task(backend.score(ask("old")))
    await asyncio.sleep(0.1)
    model.takes_s = 0
    await backend.score(ask("new"))
    await slow
    await backend.score(ask("last"))
    assert model.times[-1] == 2


@on_virtual_time
async def test_remaining_tokens_hold_back_larger_requests() -> None:
    model = Model()
    model.limits = lambda text: RateLimits(tokens=50, tokens_reset_s=20)
    backend = limited(model)
    await backend.score(ask("a:10"))
    await backend.score(ask("b:50"))
    await backend.score(ask("c:51"))
    assert model.times == [0, 0, 20]


@on_virtual_time
async def test_no_retry_after_holds_longer_than_max_wait() -> None:
    model = Model()
    model.limits = lambda text: RateLimits(requests=0, requests_reset_s=86_400)
    backend = limited(model, max_wait_s=5)
    for _ in range(3):
        await backend.score(ask())
    assert model.times == [0, 5, 10]


@on_virtual_time
async def test_a_retry_after_makes_all_calls_wait() -> None:
    model = Model()
    model.error = lambda text: (
        BackendUnavailable("429", retry_after_s=7, usage=Usage(requests=1))
        if text == "message"
        else None
    )
    backend = limited(model, max_wait_s=60)
    with pytest.raises(BackendUnavailable):
        await backend.score(ask("message", "one run"))
    await backend.score(ask("other", "another run"))
    assert model.sent == [(0, "message"), (7, "other")]


@on_virtual_time
async def test_a_cancelled_waiter_blocks_no_call_and_uses_nothing() -> None:
    model = Model()
    backend = limited(model, requests_per_minute=1, tokens_per_minute=100)
    await backend.score(ask("a:1"))
    tasks = [asyncio.create_task(backend.score(ask(text))) for text in ("big:100", "c:1")]
    await asyncio.sleep(30)
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert model.sent == [(0, "a:1"), (60, "c:1")]


@on_virtual_time
async def test_cancelled_at_the_moment_of_its_turn() -> None:
    model = Model(takes_s=1)
    backend = limited(model, requests_per_minute=3, concurrency=1)
    first, second, third = (asyncio.create_task(backend.score(ask(text))) for text in "123")
    await first
    while (
        not (waiting := [w for q in backend._limiter._queues.values() for w in q])
        or len(waiting) > 1
    ):
        await asyncio.sleep(0)
    second.cancel()  # its turn has come, and it has not run yet
    await asyncio.gather(second, third, return_exceptions=True)
    assert second.cancelled()
    assert model.texts == ["1", "3"]
    await backend.score(ask("4"))
    assert model.times[-1] < 60  # three were allowed, and the second was never sent


@on_virtual_time
async def test_what_the_budget_refuses_takes_no_place() -> None:
    model = Model()
    model.error = lambda text: BudgetExhausted("no money") if text == "poor" else None
    backend = limited(model, requests_per_minute=1)
    with pytest.raises(BudgetExhausted):
        await backend.score(ask("poor"))
    await backend.score(ask("rich"))
    assert model.times == [0, 0]
