"""Log-probabilities estimated from sampled answers, against a server that counts what it gives."""

from __future__ import annotations

import math
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedone_sdk.backends import LOG_ZERO, build_backend
from fedone_sdk.backends.base import Query
from fedone_sdk.backends.build import build_adapter
from fedone_sdk.backends.completions import FIRST, estimated, requests_of
from fedone_sdk.budget import BudgetGuard, Usage
from fedone_sdk.errors import BackendBlocked, BackendUnavailable
from fedone_sdk.spec import BackendSpec
from fedone_sdk.task import Part
from tests.fake_openai import FakeOpenAI, Script

WORDS = ("no", "yes", "maybe")
SAMPLES = 8


@given(st.lists(st.integers(0, 50), min_size=2, max_size=9), st.integers(0, 50), st.data())
def test_an_estimate_is_a_smoothed_distribution(
    labels: list[int], others: int, data: st.DataObject
) -> None:
    row = estimated((*labels, sum(labels) + others))
    if not any(labels):
        assert set(row) == {LOG_ZERO}
        return
    assert math.fsum(map(math.exp, row)) == pytest.approx(1.0, abs=1e-5)
    one, other = (data.draw(st.integers(0, len(labels) - 1)) for _ in range(2))
    assert (row[one] < row[other]) is (labels[one] < labels[other])
    # Of two labels with the same share, the one of fewer answers is less certain.
    more = estimated((*(3 * count for count in labels), 3 * sum(labels) + others))
    assert max(more) >= max(row)


@given(st.integers(2, 128), st.integers(1, 128))
def test_requests_give_all_samples(samples: int, at_once: int) -> None:
    parts = [*requests_of(samples, at_once)]
    assert sum(parts) == samples
    assert max(parts) <= at_once


@pytest.mark.parametrize("takes_n", ["yes", "ignored", "refused"])
async def test_answers_are_requested_counted_and_paid(
    takes_n: Literal["yes", "ignored", "refused"],
) -> None:
    texts = [f"text {number}" for number in range(12)]
    guard = BudgetGuard(None)
    async with FakeOpenAI(takes_n=takes_n, script=Script({9: "error"})) as server:
        spec = server.spec(
            log_probs={"samples": SAMPLES},
            prices={"prompt": 1, "completion": 10},
            retry={"max_wait_s": 0.01},
        )
        async with build_backend(spec, guard=guard) as backend:
            query = Query(inputs=tuple((Part("field", text),) for text in texts), label_words=WORDS)
            quote = await backend.quote(query)
            answer = await backend.score(query)
            assert (await backend.score(query)).log_probs == answer.log_probs
            assert (await backend.quote(query)).without_queries() == Usage()
    answered = [one for one in server.received if one.behaviour == "ok"]
    counts = {text: Counter[str]() for text in texts}
    for one in answered:
        (message,) = one.body["messages"]
        assert one.body["temperature"] == 1
        given_n = one.body.get("n", 1) if takes_n == "yes" else 1
        counts[message["content"]].update(
            server.model.choose(message["content"], WORDS, f"{one.number}:{index}")
            for index in range(given_n)
        )
    for text, row in zip(texts, answer.log_probs, strict=True):
        found = counts[text]
        # More answers only where the first ones differ.
        assert found.total() == (FIRST if len(found) == 1 else SAMPLES)
        assert row == estimated((*(found[word] for word in WORDS), found.total()))
    assert {len(found) for found in counts.values()} == {1, 2}
    sent = (await guard.account()).spent
    prompt = sum(one.prompt_tokens for one in answered)
    written = sum(one.completion_tokens for one in answered)
    assert sent == Usage(
        requests=len(server.received),
        prompt_tokens=prompt,
        completion_tokens=written,
        usd=Decimal(prompt + 10 * written).scaleb(-6),
    )
    assert answer.usage == sent
    if takes_n == "yes":
        assert len(answered) == len(texts) + sum(len(found) > 1 for found in counts.values())
        assert sent.beyond(quote + Usage(requests=1)) == Usage()


QUERY = Query(
    inputs=((Part("field", "a text"),), (Part("field", "another"),)), label_words=("no", "yes")
)


def flex(server: FakeOpenAI, **more: Any) -> BackendSpec:
    prices = {"prompt": [2, "0.5"], "completion": 10}
    return server.spec(**{"service_tier": "flex", "prices": prices, **more})


async def test_flex_waits_for_capacity_and_cached_tokens_cost_less() -> None:
    async with FakeOpenAI(script=Script({2: "no_capacity"}), caches=5) as server:
        spec, guard = flex(server, retry={"max_wait_s": 0.01}), BudgetGuard(None)
        assert spec.timeout_s == 900
        async with build_backend(spec, guard=guard) as backend:
            answer = await backend.score(QUERY)
    assert [one.behaviour for one in server.received] == ["ok", "no_capacity:429", "ok"]
    assert {one.body["service_tier"] for one in server.received} == {"flex"}
    paid = [one for one in server.received if one.behaviour == "ok"]
    usd = sum(2 * (one.prompt_tokens - 5) + 5 * Decimal("0.5") + 10 for one in paid)
    spent = (await guard.account()).spent
    assert (spent.requests, spent.usd) == (3, Decimal(usd).scaleb(-6))
    assert answer.usage == spent


async def test_an_answer_of_a_dearer_tier_stops_after_one_request() -> None:
    async with FakeOpenAI(tier="default") as server:
        async with build_backend(flex(server)) as backend:
            with pytest.raises(BackendBlocked, match="'default', which costs more than 'flex'"):
                await backend.score(QUERY)
        assert len(server.received) == 1
        # Without a tier of its own the run takes any.
        async with build_backend(flex(server, service_tier=None)) as backend:
            await backend.score(QUERY)


async def test_without_capacity_the_next_attempt_waits_half_a_minute() -> None:
    async with (
        FakeOpenAI(script=Script(default="no_capacity")) as server,
        build_adapter(flex(server), Path()) as adapter,
    ):
        with pytest.raises(BackendUnavailable, match="no capacity now") as caught:
            await adapter.score(QUERY.part([0]))
    assert caught.value.retry_after_s == 30
