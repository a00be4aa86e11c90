from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import date
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fedone_sdk import assets
from fedone_sdk.budget import Usage
from fedone_sdk.budget.prices import FREE, Price, PriceTier, known_price


def test_the_shipped_table_has_date_and_source_of_each_price() -> None:
    table = json.loads(assets.path("prices.json").read_text(encoding="utf-8"))
    date.fromisoformat(table["date"])
    assert (table["currency"], table["per"]) == ("USD", 1_000_000)
    assert len(table["models"]) >= 9
    for name, row in table["models"].items():
        assert set(row) - {"tiers", "cached", "flex"} == {"prompt", "completion", "source"}, name
        assert row["source"].startswith("https://")
        # As text: a float in JSON would not be the price that is printed.
        assert isinstance(row["prompt"], str)
        assert isinstance(row["completion"], str)
        price = known_price(name)
        assert price is not None
        assert 0 < price.prompt <= price.completion <= 100


@pytest.mark.parametrize(
    ("model", "prompt", "completion"),
    [
        ("gpt-4o", "2.50", "10.00"),
        ("gpt-4o-2024-08-06", "2.50", "10.00"),
        ("gpt-4o-2024-05-13", "5.00", "15.00"),  # has a separate line
        ("gpt-4o-mini-2024-07-18", "0.15", "0.60"),
        ("gpt-4.1-nano-2025-04-14", "0.10", "0.40"),
        ("davinci-002", "2.00", "2.00"),
        ("gpt-6-luna", "0.10", "0.50"),
    ],
)
def test_a_snapshot_costs_what_its_model_costs(model: str, prompt: str, completion: str) -> None:
    price = known_price(model)
    assert price is not None
    assert (price.prompt, price.completion) == (Decimal(prompt), Decimal(completion))


@pytest.mark.parametrize(
    "model",
    ["", "gpt-4", "gpt-4o-audio-preview", "gpt-4o-audio-preview-2024-12-17",
     "gpt-4o-realtime-preview", "gpt-4o-2024-08", "gpt-4o-2024-08-06-finetuned",
     "ft:gpt-4o-mini-2024-07-18:company::id", "openai/gpt-4o", "GPT-4o"],
)  # fmt: skip
def test_no_price_is_guessed(model: str) -> None:
    assert known_price(model) is None


@given(st.integers(0, 400_000), st.floats(0, 1), st.sampled_from(["gpt-6-luna", "gpt-4o-mini"]))
def test_cached_tokens_and_flex_cost_less_and_never_more_than_the_quote(
    tokens: int, share: float, model: str
) -> None:
    price = known_price(model)
    assert price is not None
    usage, cached = (
        Usage(requests=1, prompt_tokens=tokens, completion_tokens=3),
        int(share * tokens),
    )
    quote, paid = price.priced(usage).usd, price.priced(usage, cached_tokens=cached).usd
    assert paid <= quote
    if cached == tokens <= 1023:
        assert price.cached is not None
        assert paid == (tokens * price.cached + 3 * price.completion).scaleb(-6)
    flex = price.in_flex()
    assert (flex is None) is (model == "gpt-4o-mini")
    if flex is not None:
        assert flex.priced(usage, cached_tokens=cached).usd == paid / 2
        assert flex.in_flex() is None


def test_money_is_counted_exactly() -> None:
    price = Price(prompt=Decimal("0.15"), completion=Decimal("0.60"))
    usage = Usage(queries=2, requests=3, prompt_tokens=7, completion_tokens=1)
    # (7 * 0.15 + 1 * 0.60) / 1e6
    assert price.priced(usage) == usage.model_copy(update={"usd": Decimal("0.00000165")})


def test_the_money_that_was_there_is_replaced() -> None:
    assert FREE.priced(Usage(prompt_tokens=5, usd=Decimal(3))) == Usage(prompt_tokens=5)


@given(
    st.lists(st.integers(0, 10**9), min_size=1, max_size=20),
    st.decimals("0", "1000", places=4),
    st.decimals("0", "1000", places=4),
)
def test_parts_cost_together_what_the_whole_costs(
    tokens: list[int], prompt: Decimal, completion: Decimal
) -> None:
    price = Price(prompt=prompt, completion=completion)
    parts = [Usage(requests=1, prompt_tokens=n, completion_tokens=n // 3) for n in tokens]
    whole = sum(parts[1:], parts[0])
    assert sum((price.priced(part).usd for part in parts), Decimal(0)) == price.priced(whole).usd


# Long prompts


def tiered(*rates: tuple[int, str, str], prompt: str = "1", completion: str = "2") -> Price:
    tiers = tuple(
        PriceTier(above=above, prompt=Decimal(one), completion=Decimal(other))
        for above, one, other in rates
    )
    return Price(prompt=Decimal(prompt), completion=Decimal(completion), tiers=tiers)


@pytest.mark.parametrize(
    ("tokens", "usd"), [(100, "0.000120"), (101, "0.000333"), (200, "0.00063"), (201, "0.001105")]
)
def test_a_tier_prices_all_of_a_request(tokens: int, usd: str) -> None:
    price = tiered((100, "3", "3"), (200, "5", "10"))
    usage = Usage(requests=1, prompt_tokens=tokens, completion_tokens=10)
    assert price.priced(usage).usd == Decimal(usd)


@pytest.mark.parametrize(
    "rates",
    [[(100, "3", "3"), (100, "4", "4")], [(200, "3", "3"), (100, "4", "4")], [(100, "0.5", "3")],
     [(100, "3", "1")], [(100, "3", "3"), (200, "2", "4")], [(0, "3", "3")]],
)  # fmt: skip
def test_tiers_that_do_not_rise_are_refused(rates: Sequence[tuple[int, str, str]]) -> None:
    with pytest.raises(ValidationError):
        tiered(*rates)


@given(
    st.lists(st.integers(0, 3000), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 9), st.integers(0, 9)), max_size=3),
)
def test_more_tokens_never_cost_less(tokens: list[int], steps: list[tuple[int, int, int]]) -> None:
    prompt = completion = 1
    rates = []
    for above in sorted({step[0] for step in steps}):
        _, more, most = next(step for step in steps if step[0] == above)
        prompt, completion = prompt + more, completion + most
        rates.append((above, str(prompt), str(completion)))
    price = tiered(*rates, completion="1")
    parts = [Usage(requests=1, prompt_tokens=n, completion_tokens=n // 3) for n in tokens]
    whole = sum(parts[1:], parts[0])
    apart = sum((price.priced(part).usd for part in parts), Decimal(0))
    assert apart <= price.priced(whole).usd
    for part in parts:
        more_tokens = part.model_copy(update={"prompt_tokens": part.prompt_tokens + 1})
        assert price.priced(part).usd <= price.priced(more_tokens).usd


def test_the_newer_models_cost_more_from_1024_tokens_on() -> None:
    """They write such prompts to their cache unasked."""
    price = known_price("gpt-6-luna-2026-09-22")
    assert price is not None
    costs = {
        tokens: price.priced(Usage(requests=1, prompt_tokens=tokens)).usd / tokens
        for tokens in (1023, 1024, 272_000, 272_001)
    }
    assert list(costs.values()) == [
        Decimal(usd).scaleb(-6) for usd in ("0.10", "0.125", "0.125", "0.25")
    ]


def test_units_that_cost_money() -> None:
    assert FREE.units == frozenset()
    assert tiered(prompt="0", completion="0").units == frozenset()
    assert tiered((9, "1", "0"), prompt="0", completion="0").units == {"prompt_tokens"}
    assert tiered(prompt="0", completion="1").units == {"completion_tokens"}
