"""Budgets: caps on queries, requests, tokens and money, with reservation before spending."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedone_sdk.imports import lazy

# Lazy imports: an edge device only loads the modules that it uses.
if TYPE_CHECKING:
    from fedone_sdk._values import NOTHING, Usage
    from fedone_sdk.budget.account import Account, Budget, Lease
    from fedone_sdk.budget.guard import BudgetGuard, MemoryLedger, Payer, SqliteLedger
    from fedone_sdk.budget.prices import FREE, Price, known_price
else:
    __getattr__, __dir__ = lazy(globals(), "account prices guard")

__all__ = [
    "Account",
    "Budget",
    "BudgetGuard",
    "FREE",
    "Lease",
    "MemoryLedger",
    "NOTHING",
    "Payer",
    "Price",
    "SqliteLedger",
    "Usage",
    "known_price",
]
