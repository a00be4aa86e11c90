"""Budgets: the arithmetic, and the caps under any order of events."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)
from pydantic import ValidationError

import fedone_sdk
from fedone_sdk.budget import (
    NOTHING,
    Account,
    Budget,
    BudgetGuard,
    Lease,
    MemoryLedger,
    SqliteLedger,
    Usage,
)
from fedone_sdk.errors import BudgetExhausted, UnknownLease

UNITS = ("queries", "requests", "tokens", "prompt_tokens", "completion_tokens", "usd")

counts = st.integers(0, 50)
money = st.decimals("0", "5", places=9)
usages = st.builds(
    Usage,
    queries=counts,
    requests=counts,
    prompt_tokens=counts,
    completion_tokens=counts,
    usd=money,
)


def budgets(most: int = 120) -> st.SearchStrategy[Budget]:
    caps = {unit: st.none() | st.integers(0, most) for unit in UNITS[:-1]}
    caps["usd"] = st.none() | st.decimals("0", "12", places=9)
    return (
        st.fixed_dictionaries(caps)
        .filter(lambda chosen: any(cap is not None for cap in chosen.values()))
        .map(Budget.model_validate)
    )


def amounts(usage: Usage) -> dict[str, Any]:
    """The amounts in the units that a cap may be in, computed apart from the code."""
    fields = usage.model_dump()
    return {**fields, "tokens": fields["prompt_tokens"] + fields["completion_tokens"]}


def within(cap: Budget | None, held: Usage) -> bool:
    caps = {} if cap is None else cap.model_dump()
    return all(limit is None or amounts(held)[unit] <= limit for unit, limit in caps.items())


def total(parts: list[Usage]) -> Usage:
    return reduce(Usage.__add__, parts, NOTHING)


class TestUsage:
    def test_a_million_small_charges_sum_to_the_cent(self) -> None:
        tenth = Usage(usd=Decimal("0.1"))
        assert total([tenth] * 1000).usd == 100  # as floats: 99.9999999999986

    @pytest.mark.parametrize(
        "bad",
        [
            {"queries": -1}, {"usd": "-0.01"}, {"usd": "NaN"}, {"usd": "Infinity"},
            {"requests": 2**53 + 1},
        ],
        ids=str,
    )  # fmt: skip
    def test_impossible_amounts(self, bad: dict[str, Any]) -> None:
        with pytest.raises(ValidationError):
            Usage.model_validate(bad)


class TestAccount:
    def test_zero_is_a_cap(self) -> None:
        assert Account(cap=Budget(usd=Decimal(0))).affordable(Usage(usd=Decimal("0.01")), 9) == 0

    @given(budgets(), usages, usages, st.integers(0, 30))
    def test_affordable_is_exactly_what_fits(
        self, cap: Budget, held: Usage, each: Usage, most: int
    ) -> None:
        account = Account(cap=cap)
        with contextlib.suppress(BudgetExhausted):
            account = account.reserve("held", held)
        times = account.affordable(each, most)
        assert 0 <= times <= most
        account.reserve("fits", each * times)
        if times < most:
            with pytest.raises(BudgetExhausted) as excinfo:
                account.reserve("too much", each * (times + 1))
            error = excinfo.value
            assert error.held + error.asked > error.cap  # type: ignore[operator]

    def test_a_refused_reservation_names_the_unit(self) -> None:
        account = Account(cap=Budget(queries=10, usd=Decimal("0.5"))).reserve(
            "a", Usage(queries=1, usd=Decimal("0.4"))
        )
        with pytest.raises(BudgetExhausted, match=r"budget of 0\.5 usd exhausted") as excinfo:
            account.reserve("b", Usage(queries=1, usd=Decimal("0.2")))
        assert (excinfo.value.unit, excinfo.value.held) == ("usd", Decimal("0.4"))

    def test_lease_ids(self) -> None:
        account = Account().reserve("a", NOTHING)
        with pytest.raises(ValueError, match="'a' is open already"):
            account.reserve("a", NOTHING)
        with pytest.raises(UnknownLease, match="'b'"):
            account.settle("b", NOTHING)
        with pytest.raises(UnknownLease):
            account.settle("a", NOTHING).settle("a", NOTHING)


class AccountMachine(RuleBasedStateMachine):
    """An account in any order of reservations and settlements, compared with a plain list."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.account = Account()
        self.open: dict[str, Usage] = {}
        self.settled: list[Usage] = []

    @initialize(cap=st.none() | budgets())
    def begin(self, cap: Budget | None) -> None:
        self.account = Account(cap=cap)

    @rule(target=leases, worst=usages, number=st.integers(0, 10**9))
    def reserve(self, worst: Usage, number: int) -> Any:
        lease_id = f"lease-{number}"
        assume(lease_id not in self.open)
        before = self.account
        fits = within(before.cap, before.held + worst)
        # A unit that is not asked for cannot stand in the way.
        asked = {unit for unit, amount in amounts(worst).items() if amount}
        caps = {} if before.cap is None else before.cap.model_dump()
        short = any(
            limit is not None and unit in asked and amounts(before.held + worst)[unit] > limit
            for unit, limit in caps.items()
        )
        assert fits or short
        try:
            self.account = before.reserve(lease_id, worst)
        except BudgetExhausted:
            assert short
            assert self.account is before
            return multiple()
        assert not short
        self.open[lease_id] = worst
        return lease_id

    @rule(lease_id=consumes(leases), share=st.integers(0, 4))
    def settle(self, lease_id: str, share: int) -> None:
        worst = self.open.pop(lease_id)
        used = Usage(
            queries=worst.queries * share // 4,
            requests=worst.requests * share // 4,
            prompt_tokens=worst.prompt_tokens * share // 4,
            completion_tokens=worst.completion_tokens * share // 4,
            usd=worst.usd * share / 4,
        )
        before = self.account
        self.account = before.settle(lease_id, used)
        assert lease_id in before.leases  # the old account is as it was
        self.settled.append(used)

    @invariant()
    def adds_up(self) -> None:
        assert dict(self.account.leases) == self.open
        assert self.account.spent == total(self.settled)
        assert self.account.held == total([*self.settled, *self.open.values()])
        assert within(self.account.cap, self.account.held)


TestAccountMachine = AccountMachine.TestCase
TestAccountMachine.settings = settings(max_examples=60, stateful_step_count=25)


class _Caller:
    """A task under a guard: its requests, as counted by the provider."""

    def __init__(self, guard: BudgetGuard, worst: Usage) -> None:
        self.worst = worst
        self.entered = False
        self.lease: Lease | None = None
        self.go = asyncio.Event()
        self.ending: Callable[[Lease], None] = lambda lease: None
        self.task = asyncio.ensure_future(self._call(guard))

    async def _call(self, guard: BudgetGuard) -> None:
        async with guard.reserve(self.worst) as lease:
            self.entered, self.lease = True, lease
            await self.go.wait()
            self.ending(lease)
            await asyncio.sleep(0)  # may be cancelled after it has said what it used

    @property
    def charge(self) -> Usage:
        """What must have been charged when the task has ended."""
        if not self.entered:
            return NOTHING
        assert self.lease is not None
        return self.worst if self.lease.used is None else self.lease.used


class GuardMachine(RuleBasedStateMachine):
    """Tasks that reserve, answer, fail and are cancelled at any turn of the event loop."""

    callers = Bundle("callers")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.cap = Budget(queries=40, requests=60, usd=Decimal("7.5"))
        self.guard = BudgetGuard(self.cap, ledger=MemoryLedger())
        self.all: list[_Caller] = []

    def teardown(self) -> None:
        try:
            self.spin(50)
            for caller in self.all:
                caller.task.cancel()
            self.spin(50)
            self.check_the_end()
        finally:
            self.loop.close()

    def check_the_end(self) -> None:
        assert all(caller.task.done() for caller in self.all)
        account = self.account()
        assert dict(account.leases) == {}
        assert account.spent == total([caller.charge for caller in self.all])
        for caller in self.all:
            if not caller.task.cancelled():
                assert isinstance(
                    caller.task.exception(), (BudgetExhausted, RuntimeError, type(None))
                )

    def account(self) -> Account:
        return self.loop.run_until_complete(self.guard.account())

    @rule(target=callers, worst=usages)
    def call(self, worst: Usage) -> _Caller:
        async def start() -> _Caller:
            return _Caller(self.guard, worst)

        caller = self.loop.run_until_complete(start())
        self.all.append(caller)
        return caller

    @rule(turns=st.integers(1, 4))
    def spin(self, turns: int) -> None:
        for _ in range(turns):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()

    @rule(caller=callers, share=st.integers(0, 3))
    def answer(self, caller: _Caller, share: int) -> None:
        used = Usage(queries=caller.worst.queries * share // 3, usd=caller.worst.usd * share / 3)
        caller.ending = lambda lease: lease.settle(used)
        caller.go.set()

    @rule(caller=callers)
    def never_send(self, caller: _Caller) -> None:
        caller.ending = Lease.release
        caller.go.set()

    @rule(caller=callers)
    def fail(self, caller: _Caller) -> None:
        def raising(lease: Lease) -> None:
            raise RuntimeError("the provider hung up")

        caller.ending = raising
        caller.go.set()

    @rule(caller=callers, times=st.integers(1, 3))
    def cancel(self, caller: _Caller, times: int) -> None:
        for _ in range(times):
            caller.task.cancel()
            self.spin(1)

    @invariant()
    def never_over_the_cap(self) -> None:
        account = self.guard._ledger.account(self.cap)  # without a turn of the loop
        assert within(self.cap, account.held)
        for caller in self.all:
            if caller.entered and not caller.task.done() and not caller.go.is_set():
                assert caller.lease is not None
                # Between the cancellation and its settlement the lease is still there.
                assert caller.lease.lease_id in account.leases or caller.task.cancelling()


TestGuardMachine = GuardMachine.TestCase
TestGuardMachine.settings = settings(max_examples=60, stateful_step_count=30)


class TestBudgetGuard:
    @pytest.mark.parametrize("asked", [1, 2], ids=["granted", "refused"])
    async def test_cancelled_while_the_ledger_decides(self, tmp_path: Path, asked: int) -> None:
        """A lease whose caller is gone is returned, however slow the ledger."""
        guard = BudgetGuard(Budget(requests=1), ledger=SqliteLedger(tmp_path / "budget.db"))

        async def body() -> None:
            async with guard.reserve(Usage(requests=asked)):
                pytest.fail("it was cancelled before")

        task = asyncio.create_task(body())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await guard.account()).held == NOTHING

    def test_cancelled_while_the_ledger_grants_and_the_loop_ends(self, tmp_path: Path) -> None:
        """The reservation is undone although no task lives to see to it."""
        ledger, cap = SqliteLedger(tmp_path / "budget.db"), Budget(requests=10)
        guard = BudgetGuard(cap, ledger=ledger)

        async def body(worst: Usage) -> None:
            async with guard.reserve(worst):
                pytest.fail("it was cancelled before")

        async def main() -> None:
            worsts = (Usage(requests=4), Usage(requests=11))  # granted, and refused
            tasks = [asyncio.create_task(body(worst)) for worst in worsts]
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.sleep(0)

        with contextlib.closing(sqlite3.connect(tmp_path / "budget.db")) as other:
            other.isolation_level = None
            other.execute("BEGIN IMMEDIATE")  # Holds the ledger back.
            asyncio.run(main())
            other.execute("ROLLBACK")
        assert ledger.account(cap).held == NOTHING


# Spends cents until nothing fits; says each amount before and after it "sent" a request.
_SPENDER = """
import sys, uuid
from decimal import Decimal
from fedone_sdk.budget import Budget, SqliteLedger, Usage
from fedone_sdk.errors import BudgetExhausted

path, step, hold = sys.argv[1], Decimal(sys.argv[2]), sys.argv[3] == "hold"
ledger, cap = SqliteLedger(path), Budget(usd="1.000", requests=1000)
worst = Usage(requests=1, usd=step * 2)
print("ready", flush=True)
sys.stdin.readline()
while True:
    lease = uuid.uuid4().hex
    try:
        ledger.reserve(lease, worst, cap)
    except BudgetExhausted:
        break
    held = ledger.account(cap).held
    assert held.usd <= 1, held
    print("sent", step, flush=True)
    if hold:
        sys.stdin.read()
    ledger.settle(lease, Usage(requests=1, usd=step))
print("end", flush=True)
"""


class TestSqliteLedger:
    def test_several_processes_and_one_that_is_killed(self, tmp_path: Path) -> None:
        path = tmp_path / "budget.db"
        environment = {**os.environ, "PYTHONPATH": str(Path(fedone_sdk.__file__).parents[1])}
        steps = ["0.0037", "0.0110", "0.0210", "0.0330"]

        def spawn(step: str, mode: str) -> subprocess.Popen[str]:
            return subprocess.Popen(
                [sys.executable, "-W", "error", "-c", _SPENDER, str(path), step, mode],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )

        spenders = [spawn(step, "spend") for step in steps]
        victim = spawn("0.1", "hold")
        with contextlib.ExitStack() as stack:
            for process in (*spenders, victim):
                stack.enter_context(process)
                stack.callback(process.kill)
            for process in (*spenders, victim):
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            assert victim.stdin is not None
            assert victim.stdout is not None
            victim.stdin.write("\n")
            victim.stdin.flush()
            assert victim.stdout.readline() == "sent 0.1\n"
            victim.kill()
            assert victim.wait() == -signal.SIGKILL
            victim.stdin.close()
            outputs = [process.communicate("\n", timeout=60)[0] for process in spenders]
        assert all(output.endswith("end\n") for output in outputs)
        sent = [
            Decimal(line.split()[1])
            for output in outputs
            for line in output.splitlines()
            if line.startswith("sent")
        ]
        account = SqliteLedger(path).account(Budget(usd=Decimal(1)))
        assert account.spent == Usage(requests=len(sent), usd=sum(sent, Decimal(0)))
        # The victim's request may have been sent: it counts until it is settled.
        assert account.leased == Usage(requests=1, usd=Decimal("0.2"))
        # Each ended when its own worst case, and those of the others, left no room.
        assert Decimal("0.86") < account.held.usd <= 1

    @given(st.lists(usages, max_size=6), st.lists(usages, max_size=3))
    @settings(max_examples=10)
    def test_money_comes_back_exactly(
        self, tmp_path_factory: pytest.TempPathFactory, spent: list[Usage], leased: list[Usage]
    ) -> None:
        path = tmp_path_factory.mktemp("ledger") / "budget.db"
        ledger = SqliteLedger(path)
        for number, usage in enumerate(spent):
            ledger.reserve(f"s{number}", usage, None)
            ledger.settle(f"s{number}", usage)
        for number, usage in enumerate(leased):
            ledger.reserve(f"l{number}", usage, None)
        account = SqliteLedger(path).account(None)
        assert account.spent == total(spent)
        assert dict(account.leases) == {f"l{n}": usage for n, usage in enumerate(leased)}

    def test_made_by_many_at_once(self, tmp_path: Path) -> None:
        for number in range(12):
            path, gate = tmp_path / f"{number}.db", threading.Barrier(5)

            def make(path: Path = path, gate: threading.Barrier = gate) -> SqliteLedger:
                gate.wait()
                return SqliteLedger(path)

            with ThreadPoolExecutor(5) as pool:
                ledgers = [making.result() for making in [pool.submit(make) for _ in range(5)]]
            ledgers[0].reserve("a", Usage(requests=1), None)
            assert [ledger.account(None).leased.requests for ledger in ledgers] == [1] * 5
