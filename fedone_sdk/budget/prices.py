"""Prices of models, and the SDK's price table."""

from __future__ import annotations

import json
import operator
import re
from decimal import Decimal
from functools import cache
from itertools import pairwise
from typing import Annotated, Self, TypeVar

from pydantic import Field, model_validator

from fedone_sdk import assets
from fedone_sdk._values import Frozen, Usage

_SNAPSHOT = re.compile(r"-\d{4}-\d{2}-\d{2}$")

_Usd = Annotated[Decimal, Field(ge=0, le=1_000_000, allow_inf_nan=False)]
_AnyPrice = TypeVar("_AnyPrice", bound=Frozen)


class PriceTier(Frozen):
    """Prices, as in `Price`, for all tokens of a request with more than `above` prompt tokens."""

    above: Annotated[int, Field(ge=1, le=1_000_000_000)]
    prompt: _Usd
    completion: _Usd
    cached: _Usd | None = None


class Price(Frozen):
    """Prices of a model, US dollars per million tokens.

    Attributes:
        cached: Price of prompt tokens that the provider has in its cache; null for no discount.
        tiers: Prices for long prompts, in increasing order of `above`. A later tier must not be
            cheaper, so that the last tier is an upper bound on the price of every prompt.
        flex: Price under ``service_tier: flex``, as a fraction of the normal price; null if the
            model does not have this tier.
    """

    prompt: _Usd
    completion: _Usd
    cached: _Usd | None = None
    flex: _Usd | None = None
    tiers: tuple[PriceTier, ...] = Field(default=(), exclude_if=operator.not_)

    @model_validator(mode="after")
    def _check_tiers(self) -> Self:
        if any(one.above >= other.above for one, other in pairwise(self.tiers)):
            raise ValueError("tiers: `above` must increase from tier to tier")
        rates = [(self.prompt, self.completion), *((t.prompt, t.completion) for t in self.tiers)]
        if any(a > c or b > d for (a, b), (c, d) in pairwise(rates)):
            raise ValueError("tiers: a longer prompt must not cost less per token")
        every: tuple[Price | PriceTier, ...] = (self, *self.tiers)
        if any(one.cached is not None and one.cached > one.prompt for one in every):
            raise ValueError("cached: must not be more than prompt")
        return self

    @property
    def units(self) -> frozenset[str]:
        """The units of `Usage` that cost money."""
        most = self.tiers[-1] if self.tiers else self
        costs = {"prompt_tokens": most.prompt, "completion_tokens": most.completion}
        return frozenset(unit for unit, usd in costs.items() if usd)

    @property
    def text(self) -> str:
        """The prices of short prompts as text, for people."""
        cached = "" if self.cached is None else f" ({self.cached:f} if cached)"
        prompt = f"USD {self.prompt:f} per million prompt tokens{cached}"
        return f"{prompt}, {self.completion:f} per million completion tokens"

    def in_flex(self) -> Price | None:
        """Return the prices of ``service_tier: flex``; None without this tier."""
        if self.flex is None:
            return None
        tiers = tuple(_times(tier, self.flex) for tier in self.tiers)
        return _times(self, self.flex).model_copy(update={"tiers": tiers, "flex": None})

    def priced(self, usage: Usage, *, cached_tokens: int = 0) -> Usage:
        """Return `usage` with its exact cost in `usd`.

        `cached_tokens` says how many of the prompt tokens were in the provider's cache.
        """
        rate: Price | PriceTier = self
        for tier in self.tiers:
            if usage.prompt_tokens > tier.above:
                rate = tier
        tokens = usage.prompt_tokens * rate.prompt + usage.completion_tokens * rate.completion
        if rate.cached is not None:
            tokens -= cached_tokens * (rate.prompt - rate.cached)
        return usage.model_copy(update={"usd": tokens.scaleb(-6)})


def _times(price: _AnyPrice, share: Decimal) -> _AnyPrice:
    scaled = {name: value * share for name, value in price if isinstance(value, Decimal)}
    return price.model_copy(update=scaled)


FREE = Price(prompt=Decimal(0), completion=Decimal(0))
"""Price of a self-hosted model."""


def known_price(model: str) -> Price | None:
    """Return the price of one of OpenAI's models from the SDK's price table; None if not listed.

    A dated name (``gpt-4o-mini-2024-07-18``) without its own entry has the price of the name
    without the date. No other suffix is removed: ``gpt-4o-audio-preview`` is not ``gpt-4o``.
    """
    table = _table()
    return table.get(model) or table.get(_SNAPSHOT.sub("", model))


@cache
def _table() -> dict[str, Price]:
    shipped = json.loads(assets.path("prices.json").read_text(encoding="utf-8"))
    return {
        name: Price.model_validate({key: value for key, value in row.items() if key != "source"})
        for name, row in shipped["models"].items()
    }
