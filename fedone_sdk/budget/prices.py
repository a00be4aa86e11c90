"""What models cost: the SDK's dated price table."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from fedone_sdk import assets
from fedone_sdk.budget.usage import Usage

__all__ = ["FREE", "Price", "PriceTier", "known_price"]

_SNAPSHOT = re.compile(r"-\d{4}-\d{2}-\d{2}$")

_Usd = Annotated[Decimal, Field(ge=0, le=1_000_000, allow_inf_nan=False)]


class _Priced(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class PriceTier(_Priced):
    """What a request with a long prompt costs, US dollars; all of its tokens, not the last ones.

    Attributes:
        above: It holds for requests of more prompt tokens than this.
        prompt: Per million prompt tokens.
        completion: Per million completion tokens.
    """

    above: Annotated[int, Field(ge=1, le=1_000_000_000)]
    prompt: _Usd
    completion: _Usd


class Price(_Priced):
    """What a model costs, US dollars.

    Attributes:
        prompt: Per million prompt tokens.
        completion: Per million completion tokens.
        request: Per request.
        tiers: Prices of long prompts, the shortest first. None may be less than the one before:
            then the price of the longest prompt bounds all others.
    """

    prompt: _Usd
    completion: _Usd
    request: _Usd = Decimal(0)
    tiers: tuple[PriceTier, ...] = ()

    @model_serializer(mode="wrap")
    def _without_empty_tiers(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Older files have no tiers; the digests of their specs stay what they are."""
        found: dict[str, Any] = handler(self)
        if not self.tiers:
            found.pop("tiers", None)
        return found

    @model_validator(mode="after")
    def _check_tiers(self) -> Self:
        if any(one.above >= other.above for one, other in pairwise(self.tiers)):
            raise ValueError("tiers: must be in the order of `above`, each one larger")
        rates = [(self.prompt, self.completion), *((t.prompt, t.completion) for t in self.tiers)]
        if any(a > c or b > d for (a, b), (c, d) in pairwise(rates)):
            raise ValueError("tiers: a longer prompt must not cost less per token")
        return self

    @property
    def units(self) -> frozenset[str]:
        """The units that cost money."""
        most = self.tiers[-1] if self.tiers else self
        costs = {
            "prompt_tokens": most.prompt,
            "completion_tokens": most.completion,
            "requests": self.request,
        }
        return frozenset(unit for unit, usd in costs.items() if usd)

    def priced(self, usage: Usage) -> Usage:
        """The same amount with its money, exactly; whatever money it had is replaced.

        Args:
            usage: Of one request. Of several together it is priced as one with all their tokens,
                which is never too little.
        """
        rate: Price | PriceTier = self
        for tier in self.tiers:
            if usage.prompt_tokens > tier.above:
                rate = tier
        tokens = usage.prompt_tokens * rate.prompt + usage.completion_tokens * rate.completion
        usd = tokens.scaleb(-6) + usage.requests * self.request
        return usage.model_copy(update={"usd": usd})


FREE = Price(prompt=Decimal(0), completion=Decimal(0))
"""The price of a model of one's own."""


def known_price(model: str) -> Price | None:
    """The list price of a model in the SDK's table, or None.

    A dated snapshot (``gpt-4o-mini-2024-07-18``) that the table does not name costs what its
    model does. No other name is guessed at: ``gpt-4o-audio-preview`` is not ``gpt-4o``.

    Args:
        model: As its own provider names it; others may charge otherwise for the same name.
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
