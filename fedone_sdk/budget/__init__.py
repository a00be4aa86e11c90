"""Budgets: caps on queries, requests, tokens and money, with reservation before spending."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedone_sdk._lazy import lazy

# Lazy imports: an edge device only loads the modules that it uses.
if TYPE_CHECKING:
    from fedone_sdk._usage import NOTHING, Usage
    from fedone_sdk.budget.account import Account, Budget
    from fedone_sdk.budget.guard import BudgetGuard, Lease, Payer
    from fedone_sdk.budget.ledger import Ledger, MemoryLedger, SqliteLedger
    from fedone_sdk.budget.prices import FREE, Price, PriceTier, known_price
else:
    __getattr__, __dir__ = lazy(globals(), "account guard prices ledger")

__all__ = [
    "Account",
    "Budget",
    "BudgetGuard",
    "FREE",
    "Lease",
    "Ledger",
    "MemoryLedger",
    "NOTHING",
    "Payer",
    "Price",
    "PriceTier",
    "SqliteLedger",
    "Usage",
    "known_price",
]
