from __future__ import annotations

import asyncio
import gc
from collections import Counter
from contextlib import suppress
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedone_sdk.backends import Answer, CachedBackend, LLMBackend, Query
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.errors import BackendUnavailable, LabelWordError
from fedone_sdk.task import Part

WORDS = (" bad", " good")
PAID = Usage(requests=1, prompt_tokens=7, usd=Decimal("0.01"))


class Oracle(LLMBackend):
    """Answers by the length of the text, when `gate` is open."""

    bounds = frozenset({"queries", "requests", "usd"})

    def __init__(self) -> None:
        self.name = "oracle:1"
        self.asked: Counter[str] = Counter()
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.failed_input = False
        self.closed = False

    @property
    def fingerprint(self) -> str:
        return self.name

    async def score(self, query: Query) -> Answer:
        text = "".join(part.text for rendered in query.inputs for part in rendered)
        self.asked[text] += 1
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        row = None if self.failed_input else (-float(len(text)), -0.1)
        return Answer(log_probs=(row, (-1.0, -2.0)), usage=PAID)

    async def check(self, label_words: tuple[str, ...]) -> None:
        raise LabelWordError(label_words[0], [])

    def worst_case(self, batch_size: int) -> Usage:
        return Usage(queries=1, requests=batch_size)

    async def aclose(self) -> None:
        self.closed = True


def ask(text: str, words: tuple[str, ...] = WORDS) -> Query:
    return Query(inputs=((Part("field", text), Part("mask", "")),), label_words=words)


async def settle() -> None:
    """Lets every ready task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_hit_is_the_same_answer_for_nothing() -> None:
    inner = Oracle()
    cached = CachedBackend(inner)
    first, second = await cached.score(ask("a")), await cached.score(ask("a"))
    assert first == await Oracle().score(ask("a"))
    assert first.usage == PAID
    assert not first.cached
    assert second.log_probs == first.log_probs
    assert second.usage == NOTHING
    assert second.cached
    assert (cached.hits, cached.misses, inner.asked["a"]) == (1, 1, 1)


@pytest.mark.parametrize(
    "other",
    [
        ask("b"),
        ask("a", (" good", " bad")),
        Query(inputs=ask("a").inputs * 2, label_words=WORDS),
        # The same text, but a field may be shortened and a prompt may not.
        Query(inputs=((Part("prompt", "a"), Part("mask", "")),), label_words=WORDS),
        Query(inputs=((Part("mask", ""), Part("field", "a")),), label_words=WORDS),
        Query(
            inputs=((Part("field", ""), Part("field", "a"), Part("mask", "")),), label_words=WORDS
        ),
    ],
)
async def test_another_query_is_asked(other: Query) -> None:
    cached = CachedBackend(Oracle())
    await cached.score(ask("a"))
    assert not (await cached.score(other)).cached


async def test_another_model_is_asked() -> None:
    inner = Oracle()
    cached = CachedBackend(inner)
    await cached.score(ask("a"))
    inner.name = "oracle:2"
    assert not (await cached.score(ask("a"))).cached


@given(st.lists(st.text(st.characters(), max_size=4), min_size=2, max_size=2, unique=True))
async def test_different_texts_have_different_keys(texts: list[str]) -> None:
    # st.characters() has lone surrogates too: a JSON file may hold them.
    cached = CachedBackend(Oracle())
    for text in texts:
        assert not (await cached.score(ask(text))).cached


async def test_the_least_recently_used_answer_goes_first() -> None:
    cached = CachedBackend(Oracle(), max_entries=2)
    for text in "abac":  # c pushes b out: a was used since
        await cached.score(ask(text))
    assert [(await cached.score(ask(text))).cached for text in "acb"] == [True, True, False]


async def test_equal_queries_under_way_share_one_call() -> None:
    inner = Oracle()
    inner.gate.clear()
    cached = CachedBackend(inner)
    tasks = [asyncio.create_task(cached.score(ask("a"))) for _ in range(5)]
    await settle()
    inner.gate.set()
    answers = await asyncio.gather(*tasks)
    assert [answer.cached for answer in answers] == [False, True, True, True, True]
    assert [answer.usage for answer in answers] == [PAID, *[NOTHING] * 4]
    assert len({answer.log_probs for answer in answers}) == 1
    assert (cached.hits, cached.misses, inner.asked["a"]) == (4, 1, 1)


async def test_when_the_asker_is_cancelled_one_waiter_asks_anew() -> None:
    inner = Oracle()
    inner.gate.clear()
    cached = CachedBackend(inner)
    tasks = [asyncio.create_task(cached.score(ask("a"))) for _ in range(4)]
    await settle()
    tasks[0].cancel()
    await settle()
    assert inner.asked["a"] == 2
    inner.gate.set()
    answers = await asyncio.gather(*tasks[1:])
    assert tasks[0].cancelled()
    # Exactly one of those who are left reports what the second call cost.
    assert sorted(answer.cached for answer in answers) == [False, True, True]
    assert (cached.hits, cached.misses) == (2, 2)


async def test_a_cancelled_waiter_leaves_the_call_alone() -> None:
    inner = Oracle()
    inner.gate.clear()
    cached = CachedBackend(inner)
    asker, waiter, other = (asyncio.create_task(cached.score(ask("a"))) for _ in range(3))
    await settle()
    waiter.cancel()
    await settle()
    assert waiter.cancelled()
    inner.gate.set()
    assert not (await asker).cached
    assert (await other).cached
    assert inner.asked["a"] == 1


async def test_an_error_reaches_all_who_wait_and_is_not_remembered() -> None:
    inner = Oracle()
    inner.gate.clear()
    inner.error = BackendUnavailable("busy")
    cached = CachedBackend(inner)
    tasks = [asyncio.create_task(cached.score(ask("a"))) for _ in range(3)]
    await settle()
    inner.gate.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(error, BackendUnavailable) for error in found)
    assert (cached.hits, cached.misses, inner.asked["a"]) == (0, 1, 1)
    inner.error = None
    assert not (await cached.score(ask("a"))).cached


@pytest.mark.filterwarnings("error")
async def test_an_error_that_nobody_waits_for_makes_no_noise(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inner = Oracle()
    inner.error = BackendUnavailable("busy")
    with suppress(BackendUnavailable):
        await CachedBackend(inner).score(ask("a"))
    inner.error = None
    gc.collect()  # asyncio complains when the forgotten future dies
    await settle()
    assert not caplog.records


async def test_an_answer_with_a_failed_input_is_not_remembered() -> None:
    inner = Oracle()
    inner.failed_input = True
    cached = CachedBackend(inner)
    assert (await cached.score(ask("a"))).log_probs[0] is None
    inner.failed_input = False
    assert (await cached.score(ask("a"))).log_probs[0] is not None
    assert cached.misses == 2


async def test_the_rest_is_the_inner_backends() -> None:
    inner = Oracle()
    async with CachedBackend(inner) as cached:
        assert cached.fingerprint == "oracle:1"
        assert cached.bounds == inner.bounds
        assert cached.worst_case(3) == inner.worst_case(3)
        with pytest.raises(LabelWordError):
            await cached.check(WORDS)
    assert inner.closed


def test_a_cache_must_hold_something() -> None:
    with pytest.raises(ValueError, match="max_entries"):
        CachedBackend(Oracle(), max_entries=0)
