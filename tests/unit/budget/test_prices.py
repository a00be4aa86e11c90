from __future__ import annotations

import json
from datetime import date
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedone_sdk import assets
from fedone_sdk.budget import Usage
from fedone_sdk.budget.prices import FREE, Price, known_price


def test_the_shipped_table_says_when_and_where_each_price_was_read() -> None:
    table = json.loads(assets.path("prices.json").read_text(encoding="utf-8"))
    date.fromisoformat(table["date"])
    assert (table["currency"], table["per"]) == ("USD", 1_000_000)
    assert len(table["models"]) >= 9
    for name, row in table["models"].items():
        assert set(row) == {"prompt", "completion", "source"}, name
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
        ("gpt-4o-2024-05-13", "5.00", "15.00"),  # has a line of its own
        ("gpt-4o-mini-2024-07-18", "0.15", "0.60"),
        ("gpt-4.1-nano-2025-04-14", "0.10", "0.40"),
        ("davinci-002", "2.00", "2.00"),
        ("gpt-6-luna", "0.10", "0.50"),
    ],
)
def test_a_snapshot_costs_what_its_model_costs(model: str, prompt: str, completion: str) -> None:
    assert known_price(model) == Price(prompt=Decimal(prompt), completion=Decimal(completion))


@pytest.mark.parametrize(
    "model",
    [
        "",
        "gpt-4",
        "gpt-4o-audio-preview",
        "gpt-4o-audio-preview-2024-12-17",
        "gpt-4o-realtime-preview",
        "gpt-4o-2024-08",
        "gpt-4o-2024-08-06-finetuned",
        "ft:gpt-4o-mini-2024-07-18:company::id",
        "openai/gpt-4o",
        "GPT-4o",
    ],
)
def test_no_price_is_guessed(model: str) -> None:
    assert known_price(model) is None


def test_money_is_counted_exactly() -> None:
    price = Price(prompt=Decimal("0.15"), completion=Decimal("0.60"), request=Decimal("0.001"))
    usage = Usage(queries=2, requests=3, prompt_tokens=7, completion_tokens=1)
    # (7 * 0.15 + 1 * 0.60) / 1e6 + 3 * 0.001
    assert price.priced(usage) == usage.model_copy(update={"usd": Decimal("0.00300165")})


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
