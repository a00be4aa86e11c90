"""`BudgetGuard` stops spending at a cap; a ledger (memory or SQLite file) stores the amounts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from decimal import Context, localcontext
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError

from fedone_sdk._values import NOTHING, Usage
from fedone_sdk.budget.account import Account, Budget, Lease
from fedone_sdk.errors import DataError, UnknownLease
from fedone_sdk.files import open_database, transaction, use_wal

T = TypeVar("T")

PATIENCE_S = 60.0
"""Maximum wait of a transaction for another process, seconds."""

_EXACT = Context(prec=200)
"""Decimal context in which sums and differences of amounts are exact."""

_TABLES = (
    "leases (lease_id TEXT PRIMARY KEY, worst TEXT NOT NULL)",
    "spent (only INTEGER PRIMARY KEY, used TEXT)",
)


class Payer(Protocol):
    """An account that pays for requests: it reserves their cost first, and settles it later."""

    @property
    def name(self) -> str:
        """Name for fair queuing: payers with different names take turns at a model's rate limit."""

    def reserve(self, worst: Usage) -> contextlib.AbstractAsyncContextManager[Lease]:
        """Reserve `worst` while the body runs, then charge the amount that the body has set.

        Raises:
            BudgetExhausted: The reservation exceeds a cap; the body does not run.
        """


class BudgetGuard:
    """Stops spending at a cap, under any interleaving of tasks, threads and processes.

    Example:
        ```python
        guard = BudgetGuard(Budget(requests=100, usd=5), ledger=SqliteLedger("budget.db"))
        async with guard.reserve(Usage(requests=1, usd=Decimal("0.02"))) as lease:
            answer = await ask_the_model()
            lease.settle(Usage(requests=1, usd=answer.cost))
        ```

    If the body ends without a call of `Lease.settle` or `Lease.release`, for example by an error,
    the whole reservation is charged, because the request may have been sent.

    Args:
        budget: The caps; with None, usage is counted but not limited.
        ledger: Where amounts are stored; in memory by default.
        name: See `Payer.name`.
    """

    def __init__(
        self,
        budget: Budget | None,
        *,
        ledger: MemoryLedger | SqliteLedger | None = None,
        name: str = "",
    ) -> None:
        self.budget = budget
        self.name = name
        self._ledger = ledger or MemoryLedger()

    @contextlib.asynccontextmanager
    async def reserve(self, worst: Usage) -> AsyncIterator[Lease]:
        """See `Payer.reserve`."""
        lease = Lease(uuid.uuid4().hex, worst)
        reserving = self._call(lambda ledger: ledger.reserve(lease.lease_id, worst, self.budget))
        try:
            await asyncio.shield(reserving)
        except asyncio.CancelledError:
            # Retrieves the exception, because asyncio logs exceptions that are not retrieved.
            reserving.add_done_callback(lambda done: done.cancelled() or done.exception())
            # Shielded: a second cancellation must not leave the lease open.
            await asyncio.shield(self._undo(lease))
            raise
        try:
            yield lease
        finally:
            # Shielded: a cancellation must not prevent the settlement.
            settling = self._call(lambda ledger: ledger.settle(lease.lease_id, lease.charge))
            try:
                await asyncio.shield(settling)
            except asyncio.CancelledError:
                await asyncio.wait({settling})  # so that it completes before the loop ends
                raise

    def _undo(self, lease: Lease) -> asyncio.Future[None]:
        def undo(ledger: MemoryLedger) -> None:
            with contextlib.suppress(UnknownLease):  # raised if the reservation was refused
                ledger.settle(lease.lease_id, NOTHING)

        return self._call(undo)

    async def account(self) -> Account:
        """Return the current account."""
        return await self._call(lambda ledger: ledger.account(self.budget))

    async def remaining(self) -> Budget | None:
        """Return the amount that can still be reserved in each capped unit; None without caps."""
        return (await self.account()).remaining

    def _call(self, call: Callable[[MemoryLedger], T]) -> asyncio.Future[T]:
        """Submit a call to the ledger; not in a task, which the end of the loop would cancel."""
        if isinstance(self._ledger, SqliteLedger):
            return asyncio.wrap_future(self._ledger.submit(call))
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        try:
            done.set_result(call(self._ledger))
        except Exception as exc:
            done.set_exception(exc)
        return done


class MemoryLedger:
    """A ledger in memory, thread-safe."""

    def __init__(self, account: Account | None = None) -> None:
        account = Account() if account is None else account
        self._lock = Lock()
        self._spent = account.spent
        self._leases = dict(account.leases)
        with localcontext(_EXACT):
            # A running sum, so that a call does not take longer when there are more leases.
            self._leased = account.leased

    def reserve(self, lease_id: str, worst: Usage, cap: Budget | None) -> None:
        """Reserve `worst`, or raise `BudgetExhausted`."""
        with self._lock, localcontext(_EXACT):
            if lease_id in self._leases:
                raise ValueError(f"lease {lease_id!r} is open already")
            if cap is not None:
                Account(cap=cap, spent=self._spent + self._leased).reserve(lease_id, worst)
            self._leased += worst
            self._leases[lease_id] = worst

    def settle(self, lease_id: str, used: Usage) -> None:
        """Close a lease, or raise `UnknownLease`."""
        with self._lock:
            if lease_id not in self._leases:
                raise UnknownLease(lease_id)
            spent = self._spent + used
            with localcontext(_EXACT):
                self._leased -= self._leases[lease_id]
            del self._leases[lease_id]
            self._spent = spent

    def account(self, cap: Budget | None) -> Account:
        """Return the current account."""
        with self._lock:
            return Account(cap=cap, spent=self._spent, leases=dict(self._leases))


class SqliteLedger:
    """A ledger in a SQLite file (WAL), shared by threads and processes.

    The file is created if missing. The leases of a process that dies stay open and count against
    the cap, because its requests may have been sent. A call returns when its change is on disk;
    concurrent calls share one transaction. A process must not fork during a call.

    Raises:
        DataError: The file cannot be used; each method may raise it too.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = str(path)
        self._writer = _Writer(self._path)
        with _naming(self._path), contextlib.closing(_connect(self._path)) as db, transaction(db):
            for table in _TABLES:
                db.execute(f"CREATE TABLE IF NOT EXISTS {table}")
            db.execute("INSERT OR IGNORE INTO spent VALUES (0, ?)", (_dump(NOTHING),))

    def submit(self, call: Callable[[MemoryLedger], T]) -> Future[T]:
        """Submit a call for the next transaction, without waiting for it.

        Calls are applied in the order of submission. A call that raises an error changes nothing.
        """
        if self._writer.pid != os.getpid():
            # A forked child does not have the parent's thread.
            self._writer = _Writer(self._path)
        return self._writer.submit(call)

    def reserve(self, lease_id: str, worst: Usage, cap: Budget | None) -> None:
        """See `MemoryLedger.reserve`."""
        self.submit(lambda ledger: ledger.reserve(lease_id, worst, cap)).result()

    def settle(self, lease_id: str, used: Usage) -> None:
        """Close a lease, or raise `UnknownLease`."""
        self.submit(lambda ledger: ledger.settle(lease_id, used)).result()

    def account(self, cap: Budget | None) -> Account:
        """Return the current account."""
        return self.submit(lambda ledger: ledger.account(cap)).result()


class _Writer:
    """Executes the calls of one process in a thread, which ends when the queue is empty."""

    def __init__(self, path: str) -> None:
        self.pid = os.getpid()
        self._path = path
        self._lock = Lock()
        self._waiting: list[tuple[Callable[[MemoryLedger], Any], Future[Any]]] = []
        self._running = False

    def submit(self, call: Callable[[MemoryLedger], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            self._waiting.append((call, future))
            if not self._running:
                # Not a daemon thread, so that pending calls are written before the process exits.
                Thread(target=self._run, name="budget-ledger").start()
                self._running = True
        return future

    def _run(self) -> None:
        # The connection is closed afterwards: SQLite connections must not survive a fork.
        db: sqlite3.Connection | None = None
        try:
            while calls := self._take():
                try:
                    with _naming(self._path):
                        db = _connect(self._path) if db is None else db
                        outcomes = _apply(db, [call for call, _ in calls])
                except Exception as exc:
                    for _, future in calls:
                        future.set_exception(exc)
                else:
                    for (_, future), resolve in zip(calls, outcomes, strict=True):
                        resolve(future)
        finally:
            if db is not None:
                db.close()

    def _take(self) -> list[tuple[Callable[[MemoryLedger], Any], Future[Any]]]:
        with self._lock:
            waiting, self._waiting = self._waiting, []
            calls = [call for call in waiting if call[1].set_running_or_notify_cancel()]
            self._running = bool(calls)
            return calls


def _apply(
    db: sqlite3.Connection, calls: list[Callable[[MemoryLedger], Any]]
) -> list[Callable[[Future[Any]], None]]:
    """Execute calls in one transaction; return a function per call that resolves its future."""
    with transaction(db):
        before = _read(db)
        ledger = MemoryLedger(before)
        outcomes = [_outcome(call, ledger) for call in calls]
        after = ledger.account(None)
        closed = [(key,) for key in before.leases.keys() - after.leases.keys()]
        db.executemany("DELETE FROM leases WHERE lease_id = ?", closed)
        opened = [
            (key, _dump(worst))
            for key, worst in after.leases.items()
            if before.leases.get(key) != worst
        ]
        db.executemany("INSERT OR REPLACE INTO leases VALUES (?, ?)", opened)
        if after.spent != before.spent:
            db.execute("UPDATE spent SET used = ?", (_dump(after.spent),))
    return outcomes


def _outcome(
    call: Callable[[MemoryLedger], Any], ledger: MemoryLedger
) -> Callable[[Future[Any]], None]:
    try:
        result = call(ledger)
    except Exception as exc:
        error = exc
        return lambda future: future.set_exception(error)
    return lambda future: future.set_result(result)


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Turn errors of SQLite and damaged rows into a `DataError` that names the file."""
    try:
        yield
    except (OSError, sqlite3.Error, ValidationError) as exc:
        reason = "a row is damaged" if isinstance(exc, ValidationError) else exc
        raise DataError(f"{path}: cannot be used as a ledger: {reason}") from exc


def _connect(path: str) -> sqlite3.Connection:
    with open_database(path, PATIENCE_S) as db:
        use_wal(db, PATIENCE_S)
        db.execute("PRAGMA synchronous=FULL")
        return db


def _read(db: sqlite3.Connection) -> Account:
    (spent,) = db.execute("SELECT used FROM spent").fetchone()
    leases = db.execute("SELECT lease_id, worst FROM leases")
    return Account(
        spent=Usage.model_validate_json(spent),
        leases={lease_id: Usage.model_validate_json(worst) for lease_id, worst in leases},
    )


def _dump(usage: Usage) -> str:
    return json.dumps(usage.exact())
