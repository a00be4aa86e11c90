"""Ledgers of `BudgetGuard`: in memory, or in a file shared by processes."""

from __future__ import annotations

import json
import os
import platform
import sqlite3
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from decimal import Context, localcontext
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Literal, Protocol, Self, TypeVar

from fedone_sdk._usage import NOTHING, Usage
from fedone_sdk.budget.account import Account, Budget
from fedone_sdk.errors import UnknownLease, needs_extra
from fedone_sdk.files import transaction, use_wal

OwnerState = Literal["running", "ended", "unknown"]

_CLOCK_S = 2.0
"""Tolerance of a process's start time, seconds: some systems report whole seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOwner:
    """The process that opened a lease, and when."""

    host: str
    pid: int
    program: str
    opened_at: float

    @classmethod
    def here(cls, program: str) -> Self:
        """Return this process as the owner of a lease opened now."""
        return cls(host=platform.node(), pid=os.getpid(), program=program, opened_at=time.time())

    def state(self) -> OwnerState:
        """Return whether the process still runs; ``unknown`` for a process of another host.

        A process that started after the lease was opened is another one with the same id.
        """
        if self.host != platform.node():
            return "unknown"
        with needs_extra("looking for processes", "cli"):
            import psutil
        try:
            process = psutil.Process(self.pid)
            another = process.create_time() > self.opened_at + _CLOCK_S
            ended = another or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return "ended"
        except psutil.AccessDenied:
            return "running"
        return "ended" if ended else "running"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLease:
    """A reservation that is not settled yet."""

    lease_id: str
    worst: Usage
    owner: LeaseOwner


T = TypeVar("T")

PATIENCE_S = 60.0
"""Maximal wait of a transaction for another process, seconds."""

_EXACT = Context(prec=200)
"""Decimal context in which sums and differences of amounts are exact."""


_TABLES = (
    "leases (lease_id TEXT PRIMARY KEY, worst TEXT NOT NULL, host TEXT NOT NULL, "
    "pid INTEGER NOT NULL, program TEXT NOT NULL, opened_at REAL NOT NULL)",
    "released (lease_id TEXT PRIMARY KEY, charge TEXT NOT NULL)",
    "spent (only INTEGER PRIMARY KEY, used TEXT)",
)


class Ledger(Protocol):
    """Storage of one account."""

    def submit(self, call: Callable[[MemoryLedger], T]) -> Future[T]:
        """Apply a call to the account, atomically and in the order of submission.

        After an error nothing has changed.
        """
        ...


class MemoryLedger:
    """A ledger in memory, thread-safe."""

    def __init__(
        self, account: Account | None = None, *, released: Mapping[str, Usage] | None = None
    ) -> None:
        account = Account() if account is None else account
        self._lock = Lock()
        self._spent = account.spent
        self._leases = dict(account.leases)
        self._released = dict(released or {})
        with localcontext(_EXACT):
            # Running sum, so that the cost of a call does not depend on the number of leases.
            self._leased = account.leased

    @property
    def released(self) -> Mapping[str, Usage]:
        """Charges of leases that `release` closed and no owner has settled since."""
        with self._lock:
            return dict(self._released)

    def reserve(self, lease_id: str, worst: Usage, cap: Budget | None) -> None:
        """Reserve `worst`, or raise `BudgetExhausted`."""
        with self._lock, localcontext(_EXACT):
            if lease_id in self._leases or lease_id in self._released:
                raise ValueError(f"lease {lease_id!r} is open already")
            if cap is not None:
                Account(cap=cap, spent=self._spent + self._leased).reserve(lease_id, worst)
            self._leased += worst
            self._leases[lease_id] = worst

    def settle(self, lease_id: str, used: Usage) -> None:
        """Close a lease, or raise `UnknownLease`.

        For a released lease, `used` replaces the charge.
        """
        with self._lock:
            charge = self._released.pop(lease_id, None)
            if charge is None:
                self._close(lease_id, used)
                return
            with localcontext(_EXACT):
                self._spent = self._spent.at_least(charge) - charge + used

    def release(self, lease_id: str, *, charge: Usage | None = None) -> None:
        """Close a lease whose owner may still settle it, or raise `UnknownLease`."""
        with self._lock:
            charge = self._leases.get(lease_id, NOTHING) if charge is None else charge
            self._close(lease_id, charge)
            self._released[lease_id] = charge

    def submit(self, call: Callable[[MemoryLedger], T]) -> Future[T]:
        """Apply a call at once."""
        done: Future[T] = Future()
        _outcome(call, self)(done)
        return done

    def account(self, cap: Budget | None) -> Account:
        """Return the current account."""
        with self._lock:
            return Account(cap=cap, spent=self._spent, leases=dict(self._leases))

    def _close(self, lease_id: str, used: Usage) -> None:
        if lease_id not in self._leases:
            raise UnknownLease(lease_id)
        spent = self._spent + used
        with localcontext(_EXACT):
            self._leased -= self._leases[lease_id]
        del self._leases[lease_id]
        self._spent = spent


class SqliteLedger:
    """A ledger in a SQLite file (WAL), shared by threads and processes.

    The leases of a process that dies stay open and count against the cap, because its requests may
    have been sent. `leases` lists them with their processes, and `release` closes them. A call
    returns when its change is on disk; concurrent calls share one transaction, each with its own
    result. A process must not fork during a call.

    Args:
        path: The file, created if missing.
        program: Description of this process in `leases`; by default the name of the program's file.
    """

    def __init__(self, path: str | Path, *, program: str | None = None) -> None:
        self._path = str(path)
        self._program = Path(sys.argv[0]).name if program is None else program
        self._writer = _Writer(self._path, self._program)
        with closing(_connect(self._path)) as db, transaction(db):
            for table in _TABLES:
                db.execute(f"CREATE TABLE IF NOT EXISTS {table}")
            db.execute("INSERT OR IGNORE INTO spent VALUES (0, ?)", (_dump(NOTHING),))

    @staticmethod
    def is_ledger(path: str | Path) -> bool:
        """Return whether a file is a ledger, without writing to it."""
        uri = f"{Path(path).absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=PATIENCE_S)) as db:
            found = {name for (name,) in db.execute("SELECT name FROM sqlite_schema")}
        return {"leases", "spent"} <= found

    def submit(self, call: Callable[[MemoryLedger], T]) -> Future[T]:
        """Submit a call for the next transaction, without waiting for it."""
        if self._writer.pid != os.getpid():
            # A forked child does not have the parent's thread.
            self._writer = _Writer(self._path, self._program)
        return self._writer.submit(call)

    def reserve(self, lease_id: str, worst: Usage, cap: Budget | None) -> None:
        """Reserve `worst`, or raise `BudgetExhausted`."""
        self.submit(lambda ledger: ledger.reserve(lease_id, worst, cap)).result()

    def settle(self, lease_id: str, used: Usage) -> None:
        """Close a lease, or raise `UnknownLease`."""
        self.submit(lambda ledger: ledger.settle(lease_id, used)).result()

    def release(self, lease_id: str, *, charge: Usage | None = None) -> None:
        """Close another process's lease, or raise `UnknownLease`.

        If the owner settles it later, its usage replaces the charge.
        """
        self.submit(lambda ledger: ledger.release(lease_id, charge=charge)).result()

    def account(self, cap: Budget | None) -> Account:
        """Return the current account."""
        return self.submit(lambda ledger: ledger.account(cap)).result()

    def leases(self) -> list[OpenLease]:
        """Return the open leases and their owners, oldest first."""
        with closing(_connect(self._path)) as db:
            rows = db.execute(
                "SELECT lease_id, worst, host, pid, program, opened_at FROM leases "
                "ORDER BY opened_at, lease_id"
            ).fetchall()
        return [
            OpenLease(
                lease_id=lease_id,
                worst=Usage.model_validate_json(worst),
                owner=LeaseOwner(host=host, pid=pid, program=program, opened_at=opened_at),
            )
            for lease_id, worst, host, pid, program, opened_at in rows
        ]


class _Writer:
    """Executes the calls of one process in a thread, which ends when the queue is empty."""

    def __init__(self, path: str, program: str) -> None:
        self.pid = os.getpid()
        self._path = path
        self._program = program
        self._lock = Lock()
        self._waiting: list[tuple[Callable[[MemoryLedger], Any], Future[Any]]] = []
        self._at_work = False

    def submit(self, call: Callable[[MemoryLedger], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            self._waiting.append((call, future))
            if not self._at_work:
                # Not a daemon: pending calls are written before the process exits.
                Thread(target=self._work, name="budget-ledger").start()
                self._at_work = True
        return future

    def _work(self) -> None:
        # The connection is closed afterwards: SQLite connections must not survive a fork.
        db: sqlite3.Connection | None = None
        try:
            while calls := self._take():
                try:
                    db = _connect(self._path) if db is None else db
                    verdicts = _apply(db, [call for call, _ in calls], self._program)
                except Exception as exc:
                    for _, future in calls:
                        future.set_exception(exc)
                else:
                    for (_, future), verdict in zip(calls, verdicts, strict=True):
                        verdict(future)
        finally:
            if db is not None:
                db.close()

    def _take(self) -> list[tuple[Callable[[MemoryLedger], Any], Future[Any]]]:
        with self._lock:
            waiting, self._waiting = self._waiting, []
            calls = [call for call in waiting if call[1].set_running_or_notify_cancel()]
            self._at_work = bool(calls)
            return calls


def _apply(
    db: sqlite3.Connection, calls: list[Callable[[MemoryLedger], Any]], program: str
) -> list[Callable[[Future[Any]], None]]:
    """Execute calls in one transaction; return their results after the commit."""
    with transaction(db):
        before, released = _read(db)
        ledger = MemoryLedger(before, released=released)
        verdicts = [_outcome(call, ledger) for call in calls]
        after, owner = ledger.account(None), LeaseOwner.here(program)
        closed = [(key,) for key in before.leases.keys() - after.leases.keys()]
        db.executemany("DELETE FROM leases WHERE lease_id = ?", closed)
        opened = [
            (key, _dump(worst), owner.host, owner.pid, owner.program, owner.opened_at)
            for key, worst in after.leases.items()
            if before.leases.get(key) != worst
        ]
        db.executemany("INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?, ?)", opened)
        if after.spent != before.spent:
            db.execute("UPDATE spent SET used = ?", (_dump(after.spent),))
        if ledger.released != released:
            db.execute("DELETE FROM released")
            charges = [(key, _dump(charge)) for key, charge in ledger.released.items()]
            db.executemany("INSERT INTO released VALUES (?, ?)", charges)
    return verdicts


def _outcome(
    call: Callable[[MemoryLedger], Any], ledger: MemoryLedger
) -> Callable[[Future[Any]], None]:
    try:
        result = call(ledger)
    except Exception as exc:
        error = exc
        return lambda future: future.set_exception(error)
    return lambda future: future.set_result(result)


def _connect(path: str) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=PATIENCE_S, isolation_level=None)
    try:
        use_wal(db, PATIENCE_S)
        db.execute("PRAGMA synchronous=FULL")
    except BaseException:
        db.close()
        raise
    return db


def _read(db: sqlite3.Connection) -> tuple[Account, dict[str, Usage]]:
    (spent,) = db.execute("SELECT used FROM spent").fetchone()
    leases = db.execute("SELECT lease_id, worst FROM leases")
    released = db.execute("SELECT lease_id, charge FROM released")
    account = Account(
        spent=Usage.model_validate_json(spent),
        leases={lease_id: Usage.model_validate_json(worst) for lease_id, worst in leases},
    )
    return account, {lease_id: Usage.model_validate_json(charge) for lease_id, charge in released}


def _dump(usage: Usage) -> str:
    return json.dumps(usage.exact())
