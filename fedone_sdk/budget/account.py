"""Caps on usage (`Budget`), and the amounts spent and reserved under the caps (`Account`).

A lease is an open reservation: an upper bound on the cost of requests that are not settled yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import reduce

from pydantic import model_validator

from fedone_sdk._values import NOTHING, Count, Frozen, Usage, Usd
from fedone_sdk.errors import BudgetExhausted, UnknownLease

_Amount = int | Decimal


class Budget(Frozen):
    """Caps in the units of `Usage`; None means no cap in that unit.

    Attributes:
        tokens: Cap on prompt and completion tokens together.
    """

    queries: Count | None = None
    requests: Count | None = None
    tokens: Count | None = None
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    usd: Usd | None = None

    @model_validator(mode="after")
    def _check_some(self) -> Budget:
        if all(value is None for value in self.model_dump().values()):
            raise ValueError("needs at least one cap")
        return self

    def raised(self, caps: Budget) -> Budget:
        """Return a copy with the caps in `caps`, each of which must be at least the present cap."""
        higher = caps.model_dump(exclude_none=True)
        for unit, cap in higher.items():
            current = getattr(self, unit)
            if current is None:
                raise ValueError(f"{unit}: has no cap; a new cap would lower what may be spent")
            if cap < current:
                raise ValueError(f"{unit}: the cap is {current}, and a cap can only be raised")
        return self.model_copy(update=higher)

    def pairs(self, usage: Usage) -> list[tuple[str, _Amount, _Amount]]:
        """Return (unit, cap, amount of `usage`) for each capped unit."""
        amounts = {**dict(usage), "tokens": usage.prompt_tokens + usage.completion_tokens}
        return [(unit, cap, amounts[unit]) for unit, cap in self if cap is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Immutable account of spending and leases under a cap.

    The invariant is ``spent + leased <= cap`` in every capped unit: `reserve` refuses amounts that
    would violate it, and `settle` moves an amount from leased to spent. The only exception is a
    provider that charges more than the upper bound (`raise_lease`).
    """

    cap: Budget | None = None
    spent: Usage = NOTHING
    leases: Mapping[str, Usage] = field(default_factory=dict)

    @property
    def leased(self) -> Usage:
        """Sum of all open leases."""
        return reduce(Usage.__add__, self.leases.values(), NOTHING)

    @property
    def held(self) -> Usage:
        """Sum of spent and leased amounts."""
        return self.spent + self.leased

    @property
    def remaining(self) -> Budget | None:
        """The amount that can still be reserved in each capped unit; None without a cap."""
        if self.cap is None:
            return None
        rest = {unit: max(cap - held, 0) for unit, cap, held in self.cap.pairs(self.held)}
        return Budget.model_validate(rest)

    def _amounts(self, usage: Usage) -> Iterator[tuple[str, _Amount, _Amount, _Amount]]:
        """Yield (unit, cap, amount held, amount of `usage`) for each capped unit."""
        if self.cap is not None:
            added = self.cap.pairs(usage)
            for (unit, cap, held), (*_, amount) in zip(
                self.cap.pairs(self.held), added, strict=True
            ):
                yield unit, cap, held, amount

    def affordable(self, each: Usage, most: int) -> int:
        """Return how many leases of `each` fit under the cap, but not more than `most`."""
        for _, cap, held, amount in self._amounts(each):
            if amount > 0:
                most = min(most, int(max(cap - held, 0) // amount))
        return most

    def reserve(self, lease_id: str, worst: Usage) -> Account:
        """Open a lease of `worst`, an upper bound on a cost.

        Raises:
            BudgetExhausted: `worst` does not fit under a cap; nothing was reserved.
            ValueError: The lease id is in use.
        """
        if lease_id in self.leases:
            raise ValueError(f"lease {lease_id!r} is open already")
        return self.add(lease_id, worst)

    def add(self, lease_id: str, worst: Usage) -> Account:
        """Open a lease, or add `worst` to an open one."""
        for unit, cap, held, amount in self._amounts(worst):
            if amount > 0 and held + amount > cap:
                raise BudgetExhausted(unit=unit, cap=cap, held=held, asked=amount)
        before = self.leases.get(lease_id, NOTHING)
        return replace(self, leases={**self.leases, lease_id: before + worst})

    def raise_lease(self, lease_id: str, used: Usage) -> Account:
        """Raise a lease to `used`, or open it, even if the account then exceeds a cap.

        A provider may charge more than the upper bound. The whole charge must then count against
        the cap, so that no later lease uses this amount.
        """
        lease = self.leases.get(lease_id, NOTHING).at_least(used)
        return replace(self, leases={**self.leases, lease_id: lease})

    def settle(self, lease_id: str, used: Usage) -> Account:
        """Close a lease, and count `used` as spent. Raises `UnknownLease` if it is not open."""
        if lease_id not in self.leases:
            raise UnknownLease(lease_id)
        open_leases = {key: worst for key, worst in self.leases.items() if key != lease_id}
        return replace(self, leases=open_leases).charge(used)

    def charge(self, used: Usage) -> Account:
        """Count `used` as spent, even above a cap; see `raise_lease`."""
        return replace(self, spent=self.spent + used)


class Lease:
    """An open reservation. The body of ``async with guard.reserve(...)`` sets the amount used."""

    def __init__(self, lease_id: str, worst: Usage) -> None:
        self.lease_id = lease_id
        self.worst = worst
        self.used: Usage | None = None

    @property
    def charge(self) -> Usage:
        """The amount used; the whole reservation if the body has not set an amount."""
        return self.worst if self.used is None else self.used

    def settle(self, used: Usage) -> None:
        """Set the amount used, and release the rest of the reservation."""
        self.used = used

    def release(self) -> None:
        """Release the whole reservation, because no request was sent."""
        self.used = NOTHING

    def add(self, used: Usage) -> None:
        """Add to the amount used. Call it before a request: a failed request may cost too."""
        self.used = (self.used or NOTHING) + used
