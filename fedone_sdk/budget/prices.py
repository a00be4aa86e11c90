"""What models cost: the SDK's dated price table."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from decimal import Decimal
from functools import cache

from fedone_sdk import assets
from fedone_sdk.budget.usage import Usage

__all__ = ["FREE", "Price", "known_price"]

_SNAPSHOT = re.compile(r"-\d{4}-\d{2}-\d{2}$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What a model costs, US dollars.

    Attributes:
        prompt: Per million prompt tokens.
        completion: Per million completion tokens.
        request: Per request.
    """

    prompt: Decimal
    completion: Decimal
    request: Decimal = Decimal(0)

    def priced(self, usage: Usage) -> Usage:
        """The same amount with its money, exactly; whatever money it had is replaced."""
        tokens = usage.prompt_tokens * self.prompt + usage.completion_tokens * self.completion
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
        name: Price(prompt=Decimal(row["prompt"]), completion=Decimal(row["completion"]))
        for name, row in shipped["models"].items()
    }
