"""What a call costs: the service tier and the provider's cache, against what a server bills."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from fedone_sdk.backends.base import Query
from fedone_sdk.backends.build import build_adapter, build_backend
from fedone_sdk.budget import BudgetGuard
from fedone_sdk.errors import BackendBlocked, BackendUnavailable
from fedone_sdk.spec import BackendSpec
from fedone_sdk.task import Part
from tests.fake_openai import FakeOpenAI, Script

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
