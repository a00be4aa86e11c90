from __future__ import annotations

import asyncio
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedone_sdk.backends import Answer, AnswerCache, LLMBackend, ModelClient, Query
from fedone_sdk.backends.base import RateLimits
from fedone_sdk.budget import NOTHING, Budget, BudgetGuard, Usage
from fedone_sdk.errors import (
    BackendBlocked,
    BackendError,
    BackendUnavailable,
    BudgetExhausted,
    LabelWordError,
)
from fedone_sdk.spec import LimitsSpec
from fedone_sdk.task import Part
from fedone_sdk.testing import ScriptedBackend

WORDS = (" bad", " good")
ONE = Usage(requests=1, prompt_tokens=1)
FULL = BudgetExhausted("nothing left", unit="requests")
REFUSED = BackendError("too long", usage=Usage(requests=1))
DOWN = BackendUnavailable("busy", usage=Usage(requests=1), retry_after_s=3.0)
WRONG_KEY = BackendBlocked("set OPENAI_API_KEY", usage=Usage(requests=1))


class Narrow(ScriptedBackend):
    """Accept few inputs per request, and answer each as `say` defines by its text."""

    def __init__(self, max_inputs: int | None, say: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.max_inputs = max_inputs
        self.say = say or {}
        self.under_way = self.most_under_way = 0

    async def score(self, query: Query) -> Answer:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            answer = await super().score(query)
            await settle(5)  # The first parts have started.
            for text in map(text_of, query.inputs):
                said = self.say.get(text)
                if isinstance(said, asyncio.Event):
                    await said.wait()
                elif said is not None:
                    raise said
            return answer
        finally:
            self.under_way -= 1

    async def quote(self, query: Query) -> Usage:
        return Usage(queries=1, requests=1, prompt_tokens=sum(map(len, map(text_of, query.inputs))))


class Paid(LLMBackend):
    """Answers everything there is to an answer, from a function of the texts."""

    max_inputs = 2
    fingerprint = "paid"

    def __init__(self, answer: Callable[[list[str]], Answer]) -> None:
        self.answer = answer
        self.asked: list[Query] = []

    async def score(self, query: Query) -> Answer:
        self.asked.append(query)
        return self.answer([text_of(rendered) for rendered in query.inputs])


def text_of(rendered: tuple[Part, ...]) -> str:
    return "".join(part.text for part in rendered)


def ask(texts: str, **more: Any) -> Query:
    inputs = tuple((Part("field", text), Part("mask", "")) for text in texts)
    return Query(inputs=inputs, **{"label_words": WORDS, **more})


async def settle(turns: int = 20) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 5))
async def test_the_answer_is_that_of_the_whole_query(
    num_inputs: int, max_inputs: int, concurrency: int
) -> None:
    query = ask("".join(chr(97 + index) for index in range(num_inputs)))
    inner = Narrow(max_inputs)
    split = ModelClient(inner, limits=LimitsSpec(concurrency=concurrency))
    assert split.max_inputs is None
    answer = await split.score(query)
    whole = await ScriptedBackend().score(query)
    assert answer.log_probs == whole.log_probs
    num_requests = -(-num_inputs // max_inputs)
    assert answer.usage == Usage(requests=num_requests, prompt_tokens=num_inputs)
    assert [len(part.inputs) for part in inner.asked[:-1]] == [max_inputs] * (num_requests - 1)
    assert inner.most_under_way <= concurrency
    quote = Usage(queries=1, requests=num_requests, prompt_tokens=num_inputs)
    assert await split.quote(query) == quote == split.worst_case(num_inputs)


@pytest.mark.parametrize("cache", [None, AnswerCache()])
async def test_a_query_without_inputs_asks_nothing(cache: AnswerCache | None) -> None:
    inner = Narrow(2, {"": DOWN})
    empty = Query(inputs=(), label_words=WORDS)
    assert await ModelClient(inner, cache=cache).score(empty) == Answer(log_probs=(), usage=NOTHING)
    assert inner.asked == []


async def test_the_parts_keep_all_queries_and_the_payer() -> None:
    payer = BudgetGuard(Budget(requests=9))
    query = ask("abc", want="reference", references=("x", "y", "z"), label_words=(), payer=payer)
    inner = Paid(lambda texts: Answer(log_probs=((-1.0,),) * len(texts), usage=ONE))
    await ModelClient(inner).score(query)
    assert [part.references for part in inner.asked] == [("x", "y"), ("z",)]
    assert {part.want for part in inner.asked} == {"reference"}
    assert all(part.payer is payer for part in inner.asked)
    await ModelClient(inner).score(ask("abc", want="text", max_tokens=7))
    assert [part.max_tokens for part in inner.asked[2:]] == [7, 7]
    assert [part.references for part in inner.asked[2:]] == [(), ()]


async def test_texts_censoring_and_model_are_merged() -> None:
    def answer(texts: list[str]) -> Answer:
        return Answer(
            log_probs=tuple(None if text == "b" else () for text in texts),
            texts=tuple(None if text == "b" else text.upper() for text in texts),
            usage=Usage(requests=1, usd=Decimal("0.1")),
            censored=len(texts),
            model=f"snapshot of {texts[0]}",
            limits=RateLimits(requests=len(texts)),
        )

    merged = await ModelClient(Paid(answer)).score(ask("abc"))
    assert merged == Answer(
        log_probs=((), None, ()),
        texts=("A", None, "C"),
        usage=Usage(requests=2, usd=Decimal("0.2")),
        censored=3,
        model="snapshot of c",
        limits=RateLimits(requests=1),
    )


async def test_known_inputs_are_in_no_request() -> None:
    split = ModelClient(Narrow(2), cache=AnswerCache())
    assert not (await split.score(ask("abc"))).cached
    again = await split.score(ask("abc"))
    assert again.cached == 3
    assert again.usage == NOTHING
    mixed = await split.score(ask("abcd"))
    assert mixed.cached == 3
    assert mixed.usage == Usage(requests=1, prompt_tokens=1)
    # A quote counts nothing for the inputs that are known.
    assert await split.quote(ask("abxyz")) == Usage(queries=1, requests=2, prompt_tokens=3)


async def test_pending_parts_are_not_lost_when_one_fails() -> None:
    gate = asyncio.Event()
    inner = Narrow(1, {"a": gate, "b": DOWN, "c": gate})
    split = ModelClient(inner, cache=AnswerCache(), limits=LimitsSpec(concurrency=3))
    call = asyncio.create_task(split.score(ask("abcdef")))
    await settle()
    assert not call.done()
    gate.set()
    with pytest.raises(BackendUnavailable) as caught:
        await call
    # No part starts after the failure, whose usage includes those of a, b and c.
    assert [text_of(part.inputs[0]) for part in inner.asked] == ["a", "b", "c"]
    assert caught.value.usage == Usage(requests=3, prompt_tokens=2)
    assert caught.value.retry_after_s == 3.0
    assert DOWN.usage == Usage(requests=1)  # Others may hold the same error.
    inner.say = {}
    answer = await split.score(ask("abcdef"))
    assert answer.usage == Usage(requests=4, prompt_tokens=4)
    assert [text_of(part.inputs[0]) for part in inner.asked[3:]] == ["b", "d", "e", "f"]


@pytest.mark.parametrize(
    ("errors", "raised"),
    [((DOWN, REFUSED), REFUSED), ((REFUSED, FULL, DOWN), FULL),
     ((FULL, DOWN, WRONG_KEY, REFUSED), WRONG_KEY), ((WRONG_KEY, KeyError("bug")), KeyError("bug")),
     ((DOWN, LabelWordError("ab", ["a", "b"])), LabelWordError("ab", ["a", "b"]))],
)  # fmt: skip
async def test_the_most_serious_error_is_raised(
    errors: tuple[Exception, ...], raised: Exception
) -> None:
    inner = Narrow(1, dict(zip("abcd", errors, strict=False)))
    with pytest.raises(type(raised)) as caught:
        await ModelClient(inner).score(ask("abcd"))
    assert type(caught.value) is type(raised)
    assert str(caught.value) == str(raised)


async def test_an_unknown_cost_is_the_bound() -> None:
    inner = Narrow(1, {"a": REFUSED, "b": BackendUnavailable("reset")})
    with pytest.raises(BackendError, match="too long") as caught:
        await ModelClient(inner).score(ask("abc"))
    assert caught.value.usage == Usage(requests=3, prompt_tokens=2)


async def test_a_cancellation_cancels_all_parts() -> None:
    gate = asyncio.Event()
    inner = Narrow(1, dict.fromkeys("abcdef", gate))
    call = asyncio.create_task(
        ModelClient(inner, limits=LimitsSpec(concurrency=3)).score(ask("abcdef"))
    )
    await settle()
    assert inner.under_way == 3
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert inner.under_way == 0
    assert len(inner.asked) == 3
