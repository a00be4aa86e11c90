"""The base class of immutable models, and usage: queries, requests, tokens and money."""

from __future__ import annotations

import operator
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, WithJsonSchema

Count = Annotated[int, Field(ge=0, le=2**53)]
# Decimal and bounded, so that sums of many small charges are exact.
Usd = Annotated[
    Decimal,
    Field(ge=0, le=2**53, allow_inf_nan=False),
    PlainSerializer(float, return_type=float, when_used="json"),
    WithJsonSchema({"type": "number", "minimum": 0, "maximum": 2**53}),
]


class Frozen(BaseModel):
    """An immutable model that accepts neither infinite numbers nor unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


class Usage(Frozen):
    """How much a model was used, and what it cost.

    Attributes:
        queries: Evaluations of one prompt on one mini-batch, the unit that the paper counts.
        requests: Calls to a model provider.
        prompt_tokens: Tokens sent.
        completion_tokens: Tokens received.
        usd: The cost in US dollars.
    """

    queries: Count = 0
    requests: Count = 0
    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    usd: Usd = Field(Decimal(0), json_schema_extra={"default": 0})

    def __add__(self, other: Usage) -> Usage:
        if self is NOTHING:  # The start value of every sum.
            return other
        return self._with(other, operator.add)

    def __sub__(self, part: Usage) -> Usage:
        return self._with(part, operator.sub)

    def __mul__(self, times: int) -> Usage:
        return Usage(**{unit: amount * times for unit, amount in self})

    def at_least(self, other: Usage) -> Usage:
        """Return the larger amount in each unit."""
        return self._with(other, max)

    def beyond(self, other: Usage) -> Usage:
        """Return the excess over the other amount in each unit, at least 0."""
        return self._with(other, lambda mine, theirs: max(mine - theirs, 0))

    def _with(self, other: Usage, combine: Callable[[Any, Any], Any]) -> Usage:
        mine, theirs = vars(self), vars(other)
        return Usage(**{unit: combine(amount, theirs[unit]) for unit, amount in mine.items()})

    def exact(self) -> dict[str, int | str]:
        """Return JSON values without rounding: money is text, not a float."""
        # Called for every change of a run; ten times faster than pydantic's dump.
        return {**vars(self), "usd": str(self.usd)}

    def without_queries(self) -> Usage:
        """Return the usage with 0 queries; the calls of an evaluation do not count as queries."""
        return self.model_copy(update={"queries": 0}) if self.queries else self


NOTHING = Usage()
"""Zero usage."""
