"""A budget around calls to a paid model, for programs that run no aggregator."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar

from fedone_sdk.budget.account import Account
from fedone_sdk.budget.ledger import Ledger, MemoryLedger
from fedone_sdk.budget.usage import NOTHING, Budget, Usage

__all__ = ["BudgetGuard", "Lease"]

P = ParamSpec("P")
T = TypeVar("T")


class Lease:
    """An open reservation; the body of `BudgetGuard.reserve` says here what it really used."""

    def __init__(self, lease_id: str, worst: Usage) -> None:
        self.lease_id = lease_id
        self.worst = worst
        self.used: Usage | None = None

    def settle(self, used: Usage) -> None:
        """Says what was used; the rest of the reservation becomes free again."""
        self.used = used

    def release(self) -> None:
        """Says that nothing was sent; the whole reservation becomes free again."""
        self.used = NOTHING


class BudgetGuard:
    """Stops spending at a cap, under any interleaving of tasks, threads and processes.

    Example:
        ```python
        guard = BudgetGuard(Budget(requests=100, usd=5), ledger=SqliteLedger("budget.db"))
        async with guard.reserve(Usage(requests=1, usd=Decimal("0.02"))) as lease:
            answer = await ask_the_model()
            lease.settle(Usage(requests=1, usd=answer.cost))
        ```

    A body that ends without `Lease.settle` or `Lease.release`, by an error or a cancellation,
    is charged in full: its request may have been sent.

    Args:
        budget: The caps.
        ledger: Where the account is kept; in memory by default.
    """

    def __init__(self, budget: Budget, *, ledger: Ledger | None = None) -> None:
        self.budget = budget
        self._ledger = ledger if ledger is not None else MemoryLedger()
        # SQLite may wait for another process, so it runs in a thread; memory needs none.
        self._in_thread = not isinstance(self._ledger, MemoryLedger)

    @asynccontextmanager
    async def reserve(self, worst: Usage) -> AsyncIterator[Lease]:
        """Holds `worst` back while the body runs, then charges what the body settled.

        Raises:
            BudgetExhausted: The reservation does not fit; the body does not run.
        """
        lease = Lease(uuid.uuid4().hex, worst)
        reserving = asyncio.ensure_future(
            self._run(self._ledger.reserve, lease.lease_id, worst, self.budget)
        )
        try:
            await asyncio.shield(reserving)
        except asyncio.CancelledError:
            # Shielded: a caller that is cancelled once more must not leave the lease open.
            await asyncio.shield(self._give_back(lease, reserving))
            raise
        try:
            yield lease
        finally:
            used = worst if lease.used is None else lease.used
            # Shielded: a cancelled caller must not leave a settlement undone.
            await asyncio.shield(self._run(self._ledger.settle, lease.lease_id, used))

    async def _give_back(self, lease: Lease, reserving: asyncio.Future[None]) -> None:
        """Waits for a reservation that nobody will use, and undoes it if it was granted."""
        await asyncio.wait({reserving})
        if not reserving.cancelled() and reserving.exception() is None:
            await self._run(self._ledger.settle, lease.lease_id, NOTHING)

    async def account(self) -> Account:
        """What is spent and leased now."""
        return await self._run(self._ledger.account, self.budget)

    async def _run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if not self._in_thread:
            return call(*args, **kwargs)
        return await asyncio.to_thread(call, *args, **kwargs)
