"""What is spent, and what may be: the five counted units and the caps on them."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, model_validator

__all__ = ["Budget", "NOTHING", "Usage"]

_Count = Annotated[int, Field(ge=0, le=2**53)]
# Money is added up as Decimal, so that a million small charges still sum to the cent.
_Usd = Annotated[
    Decimal,
    # A bound that no bill comes near: sums stay exact to far below a cent.
    Field(ge=0, le=2**53, allow_inf_nan=False),
    PlainSerializer(float, return_type=float, when_used="json"),
]


class Usage(BaseModel):
    """An amount in the five units.

    Attributes:
        queries: Logical (prompt, mini-batch) evaluations, the paper's count.
        requests: Calls to a model provider.
        prompt_tokens: Tokens sent.
        completion_tokens: Tokens received.
        usd: Money, US dollars.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    queries: _Count = 0
    requests: _Count = 0
    prompt_tokens: _Count = 0
    completion_tokens: _Count = 0
    usd: _Usd = Decimal(0)

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            queries=self.queries + other.queries,
            requests=self.requests + other.requests,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            usd=self.usd + other.usd,
        )

    def __sub__(self, part: Usage) -> Usage:
        return Usage(
            queries=self.queries - part.queries,
            requests=self.requests - part.requests,
            prompt_tokens=self.prompt_tokens - part.prompt_tokens,
            completion_tokens=self.completion_tokens - part.completion_tokens,
            usd=self.usd - part.usd,
        )

    def __mul__(self, times: int) -> Usage:
        return Usage(
            queries=self.queries * times,
            requests=self.requests * times,
            prompt_tokens=self.prompt_tokens * times,
            completion_tokens=self.completion_tokens * times,
            usd=self.usd * times,
        )

    def at_least(self, other: Usage) -> Usage:
        """The larger of the two amounts in each unit."""
        return Usage(
            queries=max(self.queries, other.queries),
            requests=max(self.requests, other.requests),
            prompt_tokens=max(self.prompt_tokens, other.prompt_tokens),
            completion_tokens=max(self.completion_tokens, other.completion_tokens),
            usd=max(self.usd, other.usd),
        )

    def beyond(self, other: Usage) -> Usage:
        """By how much this exceeds the other amount in each unit; 0 where it does not."""
        return self.at_least(other) - other

    def exact(self) -> dict[str, int | str]:
        """For JSON that must come back exactly: the money as text, not through a float."""
        # By hand: this is part of every commit, and pydantic's dump takes ten times as long.
        return {
            "queries": self.queries,
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "usd": str(self.usd),
        }

    def without_queries(self) -> Usage:
        """The same amount with no queries: evaluation is billed, but is not training."""
        return self.model_copy(update={"queries": 0}) if self.queries else self


NOTHING = Usage()
"""The zero amount."""


class Budget(BaseModel):
    """Caps; None means no cap in that unit.

    Attributes:
        queries: Cap on training queries.
        requests: Cap on provider calls, whatever they are for.
        tokens: Cap on prompt and completion tokens together.
        prompt_tokens: Cap on tokens sent.
        completion_tokens: Cap on tokens received.
        usd: Cap on money, US dollars.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    queries: _Count | None = None
    requests: _Count | None = None
    tokens: _Count | None = None
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    usd: _Usd | None = None

    @model_validator(mode="after")
    def _check_some(self) -> Budget:
        if all(value is None for value in self.model_dump().values()):
            raise ValueError("needs at least one cap")
        return self

    def raised(self, caps: Budget) -> Budget:
        """These caps with those that `caps` names put higher.

        Raises:
            ValueError: One of them is lower, or there is no cap in its unit.
        """
        wanted = caps.model_dump(exclude_none=True)
        for unit, cap in wanted.items():
            now = getattr(self, unit)
            if now is None:
                raise ValueError(f"{unit}: has no cap; one would lower what may be spent")
            if cap < now:
                raise ValueError(f"{unit}: the cap is {now}, and a cap can only be raised")
        return self.model_copy(update=wanted)

    def pairs(self, usage: Usage) -> list[tuple[str, int | Decimal, int | Decimal]]:
        """The capped units as (unit, cap, the amount of `usage` in that unit)."""
        amounts: dict[str, int | Decimal] = {
            "queries": usage.queries,
            "requests": usage.requests,
            "tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "usd": usage.usd,
        }
        caps = {unit: getattr(self, unit) for unit in amounts}
        return [(unit, cap, amounts[unit]) for unit, cap in caps.items() if cap is not None]
