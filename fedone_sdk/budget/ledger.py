"""Where a `BudgetGuard` keeps its account: in memory, or in a file that processes share."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from decimal import Context, localcontext
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Protocol, TypeVar

from fedone_sdk.budget.account import Account
from fedone_sdk.budget.sqlite import PATIENCE_S, use_wal
from fedone_sdk.budget.usage import NOTHING, Budget, Usage
from fedone_sdk.errors import UnknownLease

__all__ = ["Ledger", "MemoryLedger", "SqliteLedger"]

T = TypeVar("T")

_EXACT = Context(prec=200)
"""Wide enough that a sum, less one of its parts, is the sum of the others to the last digit."""


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
    """An account that lives as long as the process; threads may share it.

    Args:
        account: Where it starts; its cap is ignored.
    """

    def __init__(self, account: Account | None = None) -> None:
        account = Account() if account is None else account
        self._lock = Lock()
        self._spent = account.spent
        self._leases = dict(account.leases)
        with localcontext(_EXACT):
            # Kept up to date, so that a call costs the same however many leases are open.
            self._leased = account.leased

    def reserve(self, lease_id: str, worst: Usage, cap: Budget | None) -> None:
        """Leases `worst`, or raises `BudgetExhausted`."""
        with self._lock, localcontext(_EXACT):
            if lease_id in self._leases:
                raise ValueError(f"lease {lease_id!r} is open already")
            Account(cap=cap, spent=self._spent + self._leased).reserve(lease_id, worst)
            self._leased += worst
            self._leases[lease_id] = worst

    def settle(self, lease_id: str, used: Usage) -> None:
        """Closes a lease, or raises `UnknownLease`."""
        with self._lock:
            if lease_id not in self._leases:
                raise UnknownLease(lease_id)
            spent = self._spent + used
            with localcontext(_EXACT):
                self._leased -= self._leases[lease_id]
            del self._leases[lease_id]
            self._spent = spent

    def account(self, cap: Budget | None) -> Account:
        """What is spent and leased now."""
        with self._lock:
            return Account(cap=cap, spent=self._spent, leases=dict(self._leases))


class SqliteLedger:
    """An account in a SQLite file (WAL), shared by threads and processes.

    A process that dies leaves its leases open, and open leases count against the cap: what may
    have been sent is never given out twice. A call returns when its change is on the disk; calls
    that wait at the same time share one transaction, each with a verdict of its own. A process
    must not fork amid a call, as with everything of SQLite.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = str(path)
        self._writer = _Writer(self._path)
        with closing(_connect(self._path)) as db, _transaction(db):
            db.execute(
                "CREATE TABLE IF NOT EXISTS leases (lease_id TEXT PRIMARY KEY, worst TEXT NOT NULL)"
            )
            db.execute("CREATE TABLE IF NOT EXISTS spent (only INTEGER PRIMARY KEY, used TEXT)")
            db.execute("INSERT OR IGNORE INTO spent VALUES (0, ?)", (_dump(NOTHING),))

    def submit(self, call: Callable[[Ledger], T]) -> Future[T]:
        """Makes a call in the next transaction, without waiting for it.

        Args:
            call: What to do, e.g. ``lambda ledger: ledger.settle(lease_id, used)``.
        """
        if self._writer.pid != os.getpid():
            # The parent's thread does not live in a forked child.
            self._writer = _Writer(self._path)
        return self._writer.submit(call)

    def reserve(self, lease_id: str, worst: Usage, cap: Budget | None) -> None:
        """Leases `worst`, or raises `BudgetExhausted`."""
        self.submit(lambda ledger: ledger.reserve(lease_id, worst, cap)).result()

    def settle(self, lease_id: str, used: Usage) -> None:
        """Closes a lease, or raises `UnknownLease`."""
        self.submit(lambda ledger: ledger.settle(lease_id, used)).result()

    def account(self, cap: Budget | None) -> Account:
        """What is spent and leased now."""
        return self.submit(lambda ledger: ledger.account(cap)).result()


class _Writer:
    """Makes the calls of one process in a thread that lives while there are any."""

    def __init__(self, path: str) -> None:
        self.pid = os.getpid()
        self._path = path
        self._lock = Lock()
        self._waiting: list[tuple[Callable[[Ledger], Any], Future[Any]]] = []
        self._at_work = False

    def submit(self, call: Callable[[Ledger], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            self._waiting.append((call, future))
            if not self._at_work:
                # Not a daemon: a process that ends still writes down what it was told.
                Thread(target=self._work, name="budget-ledger").start()
                self._at_work = True
        return future

    def _work(self) -> None:
        # No connection outlives the work: an open one must not be carried over a fork.
        db: sqlite3.Connection | None = None
        try:
            while calls := self._take():
                try:
                    db = _connect(self._path) if db is None else db
                    verdicts = _apply(db, [call for call, _ in calls])
                except Exception as exc:
                    for _, future in calls:
                        future.set_exception(exc)
                else:
                    for (_, future), verdict in zip(calls, verdicts, strict=True):
                        verdict(future)
        finally:
            if db is not None:
                db.close()

    def _take(self) -> list[tuple[Callable[[Ledger], Any], Future[Any]]]:
        with self._lock:
            waiting, self._waiting = self._waiting, []
            calls = [call for call in waiting if call[1].set_running_or_notify_cancel()]
            self._at_work = bool(calls)
            return calls


def _apply(
    db: sqlite3.Connection, calls: list[Callable[[Ledger], Any]]
) -> list[Callable[[Future[Any]], None]]:
    """Makes the calls in one transaction; what each returned or raised is told when it is over."""
    with _transaction(db):
        before = _read(db)
        ledger = MemoryLedger(before)
        verdicts = [_make(call, ledger) for call in calls]
        after = ledger.account(None)
        closed = before.leases.keys() - after.leases.keys()
        db.executemany("DELETE FROM leases WHERE lease_id = ?", [(key,) for key in closed])
        opened = after.leases.keys() - before.leases.keys()
        rows = [(key, _dump(after.leases[key])) for key in opened]
        db.executemany("INSERT INTO leases VALUES (?, ?)", rows)
        if after.spent != before.spent:
            db.execute("UPDATE spent SET used = ?", (_dump(after.spent),))
    return verdicts


def _make(call: Callable[[Ledger], Any], ledger: Ledger) -> Callable[[Future[Any]], None]:
    try:
        result = call(ledger)
    except Exception as exc:
        error = exc
        return lambda future: future.set_exception(error)
    return lambda future: future.set_result(result)


def _connect(path: str) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=PATIENCE_S, isolation_level=None)
    try:
        use_wal(db)
        db.execute("PRAGMA synchronous=FULL")
    except BaseException:
        db.close()
        raise
    return db


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # SQLite itself rolls back after some errors, e.g. a full disk.
            db.execute("ROLLBACK")
        raise


def _read(db: sqlite3.Connection) -> Account:
    (spent,) = db.execute("SELECT used FROM spent").fetchone()
    leases = db.execute("SELECT lease_id, worst FROM leases")
    return Account(
        spent=Usage.model_validate_json(spent),
        leases={lease_id: Usage.model_validate_json(worst) for lease_id, worst in leases},
    )


def _dump(usage: Usage) -> str:
    return json.dumps(usage.exact())
