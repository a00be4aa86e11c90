"""The arithmetic of a cap: amounts are reserved before they are spent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce

from fedone_sdk.budget.usage import NOTHING, Budget, Usage
from fedone_sdk.errors import BudgetExhausted, UnknownLease

__all__ = ["Account"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What was spent and what is leased, under a cap. Pure: every change gives a new account.

    The invariant is ``spent + leased <= cap`` in every capped unit, at every instant: `reserve`
    refuses what would break it, and `settle` moves an amount from leased to spent.

    Attributes:
        cap: The caps; None holds nothing back.
        spent: What was settled.
        leases: Worst cases of what is under way, by lease id.
    """

    cap: Budget | None = None
    spent: Usage = NOTHING
    leases: Mapping[str, Usage] = field(default_factory=dict)

    @property
    def leased(self) -> Usage:
        """The worst cases of all open leases together."""
        return reduce(Usage.__add__, self.leases.values(), NOTHING)

    @property
    def held(self) -> Usage:
        """What may be spent by now: settled and leased."""
        return self.spent + self.leased

    @property
    def remaining(self) -> Budget | None:
        """What is neither spent nor leased, by capped unit; None without a cap."""
        if self.cap is None:
            return None
        left = {unit: max(cap - held, 0) for unit, cap, held in self.cap.pairs(self.held)}
        return Budget.model_validate(left)

    def affordable(self, each: Usage, most: int) -> int:
        """How many times `each` (at most `most` times) still fits under the cap."""
        if self.cap is None:
            return most
        held = {unit: amount for unit, _, amount in self.cap.pairs(self.held)}
        for unit, cap, amount in self.cap.pairs(each):
            if amount > 0:
                most = min(most, int(max(cap - held[unit], 0) // amount))
        return most

    def reserve(self, lease_id: str, worst: Usage) -> Account:
        """Leases the most that something may cost.

        Raises:
            BudgetExhausted: It does not fit; nothing was reserved.
            ValueError: The lease id is in use.
        """
        if lease_id in self.leases:
            raise ValueError(f"lease {lease_id!r} is open already")
        return self.add(lease_id, worst)

    def add(self, lease_id: str, worst: Usage) -> Account:
        """Leases `worst` more under a lease that may be open already.

        Raises:
            BudgetExhausted: It does not fit; nothing was reserved.
        """
        if self.cap is not None:
            held = {unit: amount for unit, _, amount in self.cap.pairs(self.held)}
            for unit, cap, amount in self.cap.pairs(worst):
                if amount > 0 and held[unit] + amount > cap:
                    raise BudgetExhausted(unit=unit, cap=cap, held=held[unit], asked=amount)
        held_before = self.leases.get(lease_id, NOTHING)
        return replace(self, leases={**self.leases, lease_id: held_before + worst})

    def owe(self, lease_id: str, used: Usage) -> Account:
        """Raises an open lease to what was used under it, even past a cap.

        A provider may count more than its requests were bounded by: nobody else may be granted
        what is gone already.
        """
        return replace(self, leases={**self.leases, lease_id: self.leases[lease_id].at_least(used)})

    def settle(self, lease_id: str, used: Usage) -> Account:
        """Closes a lease: what was used is spent, the rest is free again.

        Raises:
            UnknownLease: The lease is not open.
        """
        if lease_id not in self.leases:
            raise UnknownLease(lease_id)
        rest = {key: value for key, value in self.leases.items() if key != lease_id}
        return replace(self, spent=self.spent + used, leases=rest)
