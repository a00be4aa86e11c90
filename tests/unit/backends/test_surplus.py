"""Caps hold against providers whose reports and bills are not what was quoted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from decimal import Decimal

import pytest

from fedone_sdk.backends import ModelClient, Query
from fedone_sdk.backends.billing import Surplus
from fedone_sdk.backends.openai import OpenAIBackend
from fedone_sdk.budget import Budget, BudgetGuard, Price, Usage
from fedone_sdk.errors import BudgetExhausted
from fedone_sdk.local.federation import Federation, simulate
from fedone_sdk.spec import LimitsSpec, RetrySpec, RunSpec
from fedone_sdk.task import Part
from tests.fake_openai import FakeOpenAI

LABELS = (" terrible", " great")
PRICE = Price(prompt=Decimal(5), completion=Decimal(15))
Tokens = tuple[int, int]
Bills = Callable[[int, Tokens], tuple[Tokens, Tokens]]


def under_reports(share: float) -> Bills:
    return lambda _, tokens: (tokens, (int(tokens[0] * share), int(tokens[1] * share)))


def reasons(hidden: int, growth: int) -> Bills:
    """Hidden reasoning, of some more tokens with each request."""

    def bills(number: int, tokens: Tokens) -> tuple[Tokens, Tokens]:
        more = tokens[0], tokens[1] + hidden + growth * number
        return more, more

    return bills


def adapter_of(server: FakeOpenAI) -> OpenAIBackend:
    return OpenAIBackend("fake-1", base_url=server.base_url, api_key_env=None, max_input_tokens=64)


async def billed_under(cap: Budget, bills: Bills, concurrency: int) -> list[Usage]:
    """What a real server bills for each request until the cap ends them."""
    guard = BudgetGuard(cap)
    async with FakeOpenAI(bills=bills) as server:
        adapter = adapter_of(server)
        limits = LimitsSpec(concurrency=concurrency)
        async with ModelClient(adapter, retry=RetrySpec(), limits=limits, price=PRICE) as backend:

            async def ask(number: int) -> bool:
                part = Part("field", f"review {number} was")
                query = Query(inputs=((part,),), label_words=LABELS, payer=guard)
                try:
                    await backend.score(query)
                except BudgetExhausted:
                    return False
                return True

            number = 0
            while all(await asyncio.gather(*(ask(number + more) for more in range(64)))):
                number += 64
                assert number < 2_000
    tokens = ((one.prompt_tokens, one.completion_tokens) for one in server.received)
    return [PRICE.priced(Usage(prompt_tokens=p, completion_tokens=c)) for p, c in tokens]


def over_reports(times: int) -> Bills:
    def bills(_: int, tokens: Tokens) -> tuple[Tokens, Tokens]:
        more = tokens[0] * times, tokens[1] * times
        return more, more

    return bills


@pytest.mark.parametrize(
    "bills",
    [under_reports(0.0), over_reports(1), over_reports(5), over_reports(40),
     reasons(100, 2), reasons(800, 0), reasons(500, 15)],
    ids=["reports 0", "honest", "5 times", "40 times", "growing", "hidden", "hidden and growing"],
)  # fmt: skip
@pytest.mark.parametrize(("unit", "concurrency"), [("tokens", 32), ("usd", 8)])
async def test_a_cap_is_exceeded_by_one_first_request_at_most(
    bills: Bills, unit: str, concurrency: int
) -> None:
    cap = Budget(tokens=6_000) if unit == "tokens" else Budget(usd=Decimal("0.04"))
    billed = await billed_under(cap, bills, concurrency)
    first = billed[0]
    ((_, limit, total),) = cap.pairs(sum(billed, Usage()))
    ((_, _, one),) = cap.pairs(first)
    assert total <= limit + one
    assert total >= limit / 16  # It is used, not only kept.


@pytest.mark.parametrize("num_inputs", [1, 4])
def test_a_quote_learns_from_answers(num_inputs: int) -> None:
    surplus = Surplus()
    quoted = Usage(requests=1, prompt_tokens=100, completion_tokens=64 * num_inputs)
    assert surplus.raised(quoted, num_inputs) == quoted
    billed = quoted.model_copy(update={"completion_tokens": 800 * num_inputs})
    assert surplus.learn(quoted, billed, num_inputs) == Usage(completion_tokens=736 * num_inputs)
    surplus.learn(quoted, Usage(requests=1), num_inputs)  # It failed, at no cost.
    assert surplus.unsure
    raised = surplus.raised(quoted, num_inputs)
    assert raised.completion_tokens == (64 + 2 * 736) * num_inputs
    # Another number of inputs, and the same bill again.
    assert surplus.raised(Usage(completion_tokens=64), 1).completion_tokens == 64 + 2 * 736
    assert surplus.learn(quoted, billed, num_inputs) == Usage()
    assert not surplus.unsure
    # Prompt tokens are learnt in proportion.
    surplus.learn(quoted, quoted.model_copy(update={"prompt_tokens": 150}), num_inputs)
    assert surplus.raised(Usage(prompt_tokens=1_000), 1).prompt_tokens == 2_000


async def test_a_run_ends_at_its_cap_when_the_bills_exceed_the_quotes() -> None:
    """Later leases cover what was learnt, so that the run ends, and no client declines for ever."""
    spec = RunSpec.model_validate(
        {
            "name": "reasons",
            "task": {"template": "{prompt} {text}", "labels": {"0": " terrible", "1": " great"}},
            "prompt": {"length": 2, "vocabulary": {"kind": "list", "candidates": ["a", "b", "c"]}},
            "method": {"name": "thompson", "num_samples": 5, "batch_size": 4},
            "budget": {"tokens": 40_000},
            "rounds": 100,
        }
    )
    shard = tuple({"text": f"review {number}", "label": number % 2} for number in range(8))
    federation = Federation(
        spec=spec,
        shards=(shard,) * 2,
        dev=(),
        vocabulary=spec.prompt.build(spec.task, []),
        reused_rows=False,
    )
    async with FakeOpenAI(bills=reasons(800, 0)) as server:
        adapter = adapter_of(server)
        async with ModelClient(adapter, retry=RetrySpec(), limits=LimitsSpec()) as backend:
            result = await simulate(federation, backend=backend)
    billed = sum(one.prompt_tokens + one.completion_tokens for one in server.received)
    assert result.status == "budget_exhausted"
    assert billed == result.spent.prompt_tokens + result.spent.completion_tokens
    assert 10_000 < billed <= 40_000
