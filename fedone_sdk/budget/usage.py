"""Usage in five units, and caps on it."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, model_validator

_Count = Annotated[int, Field(ge=0, le=2**53)]
# Decimal, so that sums of many small charges are exact.
_Usd = Annotated[
    Decimal,
    # Bounded, so that sums are exact to far below a cent.
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
        """Return the maximum of both amounts in each unit."""
        return Usage(
            queries=max(self.queries, other.queries),
            requests=max(self.requests, other.requests),
            prompt_tokens=max(self.prompt_tokens, other.prompt_tokens),
            completion_tokens=max(self.completion_tokens, other.completion_tokens),
            usd=max(self.usd, other.usd),
        )

    def beyond(self, other: Usage) -> Usage:
        """Return by how much this exceeds the other amount in each unit, at least 0."""
        return Usage(
            queries=max(self.queries - other.queries, 0),
            requests=max(self.requests - other.requests, 0),
            prompt_tokens=max(self.prompt_tokens - other.prompt_tokens, 0),
            completion_tokens=max(self.completion_tokens - other.completion_tokens, 0),
            usd=max(self.usd - other.usd, Decimal(0)),
        )

    def exact(self) -> dict[str, int | str]:
        """Return JSON values that are exact in both directions: money is text, not a float."""
        # Part of every commit: ten times faster than pydantic's dump.
        return {
            "queries": self.queries,
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "usd": str(self.usd),
        }

    def without_queries(self) -> Usage:
        """Return the amount without queries, for evaluation, which costs money but no queries."""
        if not self.queries:
            return self
        return Usage(
            requests=self.requests,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            usd=self.usd,
        )


NOTHING = Usage()
"""Zero usage."""


class Budget(BaseModel):
    """Caps; None means no cap in that unit.

    Attributes:
        queries: Cap on training queries.
        requests: Cap on provider calls of any kind.
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
        """Return these caps, raised to those of `caps`.

        Raises:
            ValueError: A cap is lower, or there is no cap in its unit.
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
        """Return (unit, cap, amount of `usage`) for each capped unit."""
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
