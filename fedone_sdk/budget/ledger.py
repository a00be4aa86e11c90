"""Where a `BudgetGuard` keeps its account: in memory, or in a file that processes share."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from fedone_sdk.budget.account import Account
from fedone_sdk.budget.usage import NOTHING, Budget, Usage

__all__ = ["Ledger", "MemoryLedger", "SqliteLedger"]


_PATIENCE_S = 60.0
"""How long a transaction waits for those of others."""


class Ledger(Protocol):
    """Keeps one account. Each method is atomic; a call that raises has changed nothing."""

    def reserve(self, lease_id: str, worst: Usage, cap: Budget | None) -> None:
        """Leases `worst`, or raises `BudgetExhausted`."""
        ...

    def settle(self, lease_id: str, used: Usage) -> None:
        """Closes a lease, or raises `UnknownLease`."""
        ...

    def account(self, cap: Budget | None) -> Account:
        """What is spent and leased now."""
        ...


class MemoryLedger:
    """An account that lives as long as the process."""

    def __init__(self) -> None:
        self._account = Account()

    def reserve(self, lease_id: str, worst: Usage, cap: Budget | None) -> None:
        """Leases `worst`, or raises `BudgetExhausted`."""
        self._account = self.account(cap).reserve(lease_id, worst)

    def settle(self, lease_id: str, used: Usage) -> None:
        """Closes a lease, or raises `UnknownLease`."""
        self._account = self._account.settle(lease_id, used)

    def account(self, cap: Budget | None) -> Account:
        """What is spent and leased now."""
        return Account(cap=cap, spent=self._account.spent, leases=self._account.leases)


class SqliteLedger:
    """An account in a SQLite file (WAL), shared by threads and processes.

    A process that dies leaves its leases open, and open leases count against the cap: what may
    have been sent is never given out twice.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = str(path)
        with self._transaction() as db:
            db.execute(
                "CREATE TABLE IF NOT EXISTS leases (lease_id TEXT PRIMARY KEY, worst TEXT NOT NULL)"
            )
            db.execute("CREATE TABLE IF NOT EXISTS spent (only INTEGER PRIMARY KEY, used TEXT)")
            db.execute("INSERT OR IGNORE INTO spent VALUES (0, ?)", (_dump(NOTHING),))

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        # A connection per transaction keeps the ledger free of thread affinity and fork hazards.
        db = sqlite3.connect(self._path, timeout=_PATIENCE_S, isolation_level=None)
        try:
            _use_wal(db)
            db.execute("PRAGMA synchronous=FULL")
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
            except BaseException:
                db.execute("ROLLBACK")
                raise
            db.execute("COMMIT")
        finally:
            db.close()

    def reserve(self, lease_id: str, worst: Usage, cap: Budget | None) -> None:
        """Leases `worst`, or raises `BudgetExhausted`."""
        with self._transaction() as db:
            _read(db, cap).reserve(lease_id, worst)
            db.execute("INSERT INTO leases VALUES (?, ?)", (lease_id, _dump(worst)))

    def settle(self, lease_id: str, used: Usage) -> None:
        """Closes a lease, or raises `UnknownLease`."""
        with self._transaction() as db:
            spent = _read(db, None).settle(lease_id, used).spent
            db.execute("DELETE FROM leases WHERE lease_id = ?", (lease_id,))
            db.execute("UPDATE spent SET used = ?", (_dump(spent),))

    def account(self, cap: Budget | None) -> Account:
        """What is spent and leased now."""
        with self._transaction() as db:
            return _read(db, cap)


def _use_wal(db: sqlite3.Connection) -> None:
    # Unlike all else, the first change to WAL does not wait for others that open the file.
    give_up = time.monotonic() + _PATIENCE_S
    while True:
        try:
            db.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.01)


def _read(db: sqlite3.Connection, cap: Budget | None) -> Account:
    (spent,) = db.execute("SELECT used FROM spent").fetchone()
    leases = db.execute("SELECT lease_id, worst FROM leases")
    return Account(
        cap=cap,
        spent=Usage.model_validate_json(spent),
        leases={lease_id: Usage.model_validate_json(worst) for lease_id, worst in leases},
    )


def _dump(usage: Usage) -> str:
    return json.dumps(usage.exact())
