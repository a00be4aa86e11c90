"""Budget guard for calls to a paid model, without an aggregator."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Protocol, TypeVar

from fedone_sdk._usage import NOTHING, Usage
from fedone_sdk.budget.account import Account, Budget
from fedone_sdk.budget.ledger import Ledger, MemoryLedger, SqliteLedger
from fedone_sdk.errors import UnknownLease

T = TypeVar("T")


class Lease:
    """An open reservation, settled by the body of `BudgetGuard.reserve`."""

    def __init__(self, lease_id: str, worst: Usage) -> None:
        self.lease_id = lease_id
        self.worst = worst
        self.used: Usage | None = None

    @property
    def charge(self) -> Usage:
        """The amount used, or the whole reservation if the body has not settled it."""
        return self.worst if self.used is None else self.used

    def settle(self, used: Usage) -> None:
        """Set the amount used; the rest of the reservation is released."""
        self.used = used

    def release(self) -> None:
        """Release the whole reservation, because no request was sent."""
        self.used = NOTHING


class Payer(Protocol):
    """The account that pays for requests: reserved before sending, settled afterwards.

    Attributes:
        name: Key of fair queuing: payers that wait for one model take turns by name.
    """

    @property
    def name(self) -> str: ...  # noqa: D102 (described above)

    def reserve(self, worst: Usage) -> AbstractAsyncContextManager[Lease]:
        """Reserve `worst` while the body runs, then charge the amount that the body settles.

        Raises:
            BudgetExhausted: The reservation exceeds a cap; the body does not run.
        """
        ...


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
    is charged in full, because its request may have been sent.

    Args:
        budget: The caps; None only counts.
        ledger: Ledger of the account; in memory by default.
        name: Key of fair queuing among guards that share one model.
    """

    def __init__(
        self, budget: Budget | None, *, ledger: Ledger | None = None, name: str = ""
    ) -> None:
        self.budget = budget
        self.name = name
        self._ledger = ledger if ledger is not None else MemoryLedger()

    @asynccontextmanager
    async def reserve(self, worst: Usage) -> AsyncIterator[Lease]:
        """Reserve `worst` while the body runs, then charge the amount that the body settles."""
        lease = Lease(uuid.uuid4().hex, worst)
        reserving = self._call(lambda ledger: ledger.reserve(lease.lease_id, worst, self.budget))
        try:
            await asyncio.shield(reserving)
        except asyncio.CancelledError:
            # A refusal has no receiver left: without this, asyncio logs it as never retrieved.
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
                await asyncio.wait({settling})  # Completes before the event loop ends.
                raise

    def _undo(self, lease: Lease) -> asyncio.Future[None]:
        def undo(ledger: MemoryLedger) -> None:
            with suppress(UnknownLease):  # The reservation was refused.
                ledger.settle(lease.lease_id, NOTHING)

        return self._call(undo)

    async def account(self) -> Account:
        """Return the current account."""
        return await self._call(lambda ledger: ledger.account(self.budget))

    async def remaining(self) -> Budget | None:
        """Return what can still be reserved, by capped unit; None without a budget."""
        return (await self.account()).remaining

    def _call(self, call: Callable[[MemoryLedger], T]) -> asyncio.Future[T]:
        """Submit a call at once, not as a task, which the end of the event loop would cancel."""
        if isinstance(self._ledger, SqliteLedger):
            return asyncio.wrap_future(self._ledger.submit(call))
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        try:
            done.set_result(call(self._ledger))
        except Exception as exc:
            done.set_exception(exc)
        return done
