"""Ledgers under many callers: shared transactions, crashes, cost."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedone_sdk
from fedone_sdk._values import Usage
from fedone_sdk.budget import NOTHING, Account, Budget, BudgetGuard, MemoryLedger, SqliteLedger
from fedone_sdk.budget import guard as module
from fedone_sdk.errors import BudgetExhausted, DataError, UnknownLease

ONE = Usage(requests=1)


@contextmanager
def held_back(path: Path) -> Iterator[None]:
    """Keeps every writer waiting, as another process would."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        yield
        db.execute("ROLLBACK")


def results(futures: list[Future[Any]]) -> list[Any]:
    return [future.exception(timeout=30) or future.result() for future in futures]


def test_calls_that_wait_together_share_a_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cap = tmp_path / "budget.db", Budget(requests=30)
    ledger = SqliteLedger(path)
    sizes: list[int] = []
    apply = module._apply

    def counting(db: sqlite3.Connection, calls: list[Any]) -> Any:
        sizes.append(len(calls))
        return apply(db, calls)

    monkeypatch.setattr(module, "_apply", counting)
    with held_back(path):
        futures: list[Future[Any]] = [
            ledger.submit(lambda inner, name=f"{n}": inner.reserve(name, ONE, cap))  # type: ignore[misc]
            for n in range(50)
        ]
        futures += [
            ledger.submit(lambda inner: inner.settle("7", ONE)),
            ledger.submit(lambda inner: inner.settle("unknown", NOTHING)),
            ledger.submit(lambda inner: inner.settle("8", NOTHING)),
            ledger.submit(lambda inner: inner.settle("9", NOTHING)),
            ledger.submit(lambda inner: inner.reserve("9", ONE * 2, cap)),
            ledger.submit(lambda inner: inner.reserve("9", NOTHING, cap)),
            ledger.submit(lambda inner: inner.account(cap)),
        ]
    found = results(futures)
    # Each has its own verdict, in the order of the calls.
    assert found[:30] == [None] * 30
    assert all(isinstance(error, BudgetExhausted) for error in found[30:50])
    assert isinstance(found[51], UnknownLease)
    assert [found[50], *found[52:55]] == [None] * 4
    assert "'9' is open already" in str(found[55])
    assert (found[56].spent, found[56].leased) == (ONE, Usage(requests=29))
    assert set(found[56].leases) == {str(n) for n in range(30) if n not in (7, 8)}
    assert found[56].leases["9"] == ONE * 2  # It was closed and opened in one transaction.
    assert sum(sizes) == 57
    assert len(sizes) <= 3
    # And the file says the same as memory.
    assert SqliteLedger(path).account(cap) == found[56]


def test_a_transaction_that_fails_fails_its_calls_and_no_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = SqliteLedger(tmp_path / "budget.db")
    ledger.reserve("a", ONE, None)

    def full(_: object) -> Any:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(module, "_dump", full)
        with pytest.raises(DataError, match=r"budget\.db: .*disk is full"):
            ledger.settle("a", ONE)
        with pytest.raises(DataError, match=r"budget\.db: .*disk is full"):
            ledger.reserve("b", ONE, None)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_connect", full)
        with pytest.raises(DataError, match=r"budget\.db: .*disk is full"):
            ledger.account(None)
    assert dict(ledger.account(None).leases) == {"a": ONE}
    ledger.settle("a", ONE)
    assert ledger.account(None) == Account(spent=ONE)


def test_no_thread_and_no_connection_outlives_the_work(tmp_path: Path) -> None:
    ledger = SqliteLedger(tmp_path / "budget.db")
    ledger.reserve("a", ONE, None)
    for thread in threading.enumerate():
        if thread.name == "budget-ledger":
            thread.join(10)
            assert not thread.is_alive()
    # The last connection to a WAL file takes the WAL with it.
    assert [file.name for file in tmp_path.iterdir()] == ["budget.db"]


# The child is forked between two calls: no SQLite connection may be carried over a fork.
_FORK = """
import os, sys, threading
from fedone_sdk.budget import SqliteLedger, Usage
ledger = SqliteLedger(sys.argv[1])
ledger.reserve("parent", Usage(requests=1), None)
for thread in threading.enumerate():
    if thread is not threading.current_thread():
        thread.join()
child = os.fork()
if child == 0:
    ledger.reserve("child", Usage(requests=2), None)
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert sorted(ledger.account(None).leases) == ["child", "parent"]
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_uses_the_same_account(tmp_path: Path) -> None:
    run(_FORK, tmp_path / "budget.db")


def run(program: str, path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(fedone_sdk.__file__).parents[1])}
    command = [sys.executable, "-c", program, str(path)]
    subprocess.run(command, check=True, env=environment, timeout=60)


# Settles as its last act, and does not wait for it.
_LAST_ACT = """
import sys
from fedone_sdk.budget import SqliteLedger, Usage
ledger = SqliteLedger(sys.argv[1])
ledger.reserve("a", Usage(requests=5), None)
ledger.submit(lambda inner: inner.settle("a", Usage(requests=1)))
"""


def test_an_exiting_process_still_writes_pending_changes(tmp_path: Path) -> None:
    path = tmp_path / "budget.db"
    run(_LAST_ACT, path)
    assert SqliteLedger(path).account(None) == Account(spent=ONE)


@given(
    st.lists(
        st.decimals(0, 10**9, places=25) | st.sampled_from([Decimal(1) / 3, Decimal(10**9) / 7]),
        min_size=1,
        max_size=12,
    ),
    st.randoms(use_true_random=False),
)
def test_the_running_total_of_the_leases_never_drifts(amounts: list[Decimal], rng: Any) -> None:
    ledger = MemoryLedger()
    for number, usd in enumerate(amounts):
        ledger.reserve(f"{number}", Usage(usd=usd), None)
    order = list(range(len(amounts)))
    rng.shuffle(order)
    for number in order:
        ledger.settle(f"{number}", NOTHING)
    # All of a cap is free again, to the last digit.
    ledger.reserve("all", Usage(usd=Decimal("0.01")), Budget(usd=Decimal("0.01")))
    with pytest.raises(BudgetExhausted):
        ledger.reserve("more", Usage(usd=Decimal("1E-30")), Budget(usd=Decimal("0.01")))


class TestGuard:
    async def test_what_remains(self, tmp_path: Path) -> None:
        budget = Budget(requests=10, usd=Decimal("0.10"))
        guard = BudgetGuard(budget, ledger=SqliteLedger(tmp_path / "budget.db"))
        assert await guard.remaining() == budget
        async with guard.reserve(Usage(requests=3, usd=Decimal("0.04"))) as lease:
            assert await guard.remaining() == Budget(requests=7, usd=Decimal("0.06"))
            lease.settle(Usage(requests=1, usd=Decimal("0.20")))  # more than was bounded
        assert await guard.remaining() == Budget(requests=9, usd=Decimal(0))
        assert await BudgetGuard(None).remaining() is None

    async def test_a_cancelled_caller_is_gone_when_it_has_settled(self, tmp_path: Path) -> None:
        path = tmp_path / "budget.db"
        guard = BudgetGuard(None, ledger=SqliteLedger(path))
        settling = asyncio.Event()

        async def call() -> None:
            async with guard.reserve(ONE * 3) as lease:
                await go.wait()
                lease.settle(ONE)
                settling.set()

        go = asyncio.Event()
        task = asyncio.create_task(call())
        while not (await guard.account()).leases:
            await asyncio.sleep(0)
        with held_back(path):
            go.set()
            await settling.wait()
            task.cancel()
            for _ in range(20):
                await asyncio.sleep(0)
            assert not task.done()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert SqliteLedger(path).account(None) == Account(spent=ONE)
