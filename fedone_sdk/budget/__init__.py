"""Budgets: caps on queries, requests, tokens and money that are reserved before they are spent."""

from fedone_sdk.budget.account import Account
from fedone_sdk.budget.guard import BudgetGuard, Lease, Payer
from fedone_sdk.budget.leases import LeaseOwner, OpenLease, OwnerState
from fedone_sdk.budget.ledger import Ledger, MemoryLedger, SqliteLedger
from fedone_sdk.budget.prices import FREE, Price, PriceTier, known_price
from fedone_sdk.budget.usage import NOTHING, Budget, Usage

__all__ = [
    "Account",
    "Budget",
    "BudgetGuard",
    "FREE",
    "Lease",
    "LeaseOwner",
    "Ledger",
    "MemoryLedger",
    "NOTHING",
    "OpenLease",
    "OwnerState",
    "Payer",
    "Price",
    "PriceTier",
    "SqliteLedger",
    "Usage",
    "known_price",
]
