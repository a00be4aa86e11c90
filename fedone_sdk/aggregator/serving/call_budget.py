"""Budget of one model call: a reserved amount, and further reservations for retries."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

from fedone_sdk.budget import NOTHING, Account, Lease, Usage
from fedone_sdk.errors import BudgetExhausted, ProblemError


class Reservations:
    """Reservations of a call, each under its own id, so that each is settled once.

    Other replicas charge the reservations of a replica that they consider dead. If it is alive, it
    gets a new id and reserves under that, so that nothing is charged twice.

    Args:
        replica: Returns the current id of this process.
    """

    def __init__(self, replica: Callable[[], str]) -> None:
        self._replica = replica
        self._granted: dict[str, Usage] = {}
        self._unknown: list[str] = []

    async def reserve_more(self, worst: Usage, reserve: Callable[[str], Awaitable[object]]) -> None:
        """Reserve `worst` under a new id.

        Raises:
            ProblemError: The reservation was refused.
        """
        attempt = f"{self._replica()}/{uuid.uuid4().hex}"
        self._unknown.append(attempt)  # If the store fails, the reservation may exist or not.
        try:
            await reserve(attempt)
        except ProblemError:
            self._unknown.remove(attempt)
            raise
        self._unknown.remove(attempt)
        self._granted[attempt] = worst

    def shares(self, spent: Usage) -> Iterator[tuple[str, Usage]]:
        """Yield the part of `spent` that each reservation pays; the last one pays any excess."""
        for attempt in self._unknown:
            yield attempt, NOTHING
        last = next(reversed(self._granted), None)
        for attempt, granted in self._granted.items():
            share = spent if attempt == last else spent - spent.beyond(granted)
            spent -= share
            yield attempt, share


class CallBudget:
    """Payer of the requests of one call.

    The initial grant covers one attempt at each request. Retries reserve more from the run's
    account before they are sent.

    Args:
        name: Id of the run, for fair queuing at the model.
        granted: The amount reserved so far.
        more: Reserves more, or raises a `ProblemError`.

    Attributes:
        granted: The amount reserved so far.
        refusal: The error of the reservation that failed, if any.
    """

    def __init__(
        self, name: str, granted: Usage, more: Callable[[Usage], Awaitable[object]]
    ) -> None:
        self.name = name
        self.granted = granted
        self.refusal: ProblemError | None = None
        self._more = more
        self._account = Account()

    @property
    def spent(self) -> Usage:
        """The amount spent; a request with unknown outcome counts in full."""
        return self._account.held

    @asynccontextmanager
    async def reserve(self, worst: Usage) -> AsyncIterator[Lease]:
        """Reserve `worst` while the body runs, then charge the amount that the body settles.

        Raises:
            BudgetExhausted: The run's budget does not cover it; the body does not run.
        """
        lease = Lease(uuid.uuid4().hex, worst)
        self._account = self._account.reserve(lease.lease_id, worst)
        missing = self._account.held.beyond(self.granted)
        if missing != Usage():
            # Added before the await: a concurrent request must not use the same amount.
            self.granted += missing
            try:
                await self._more(missing)
            except BaseException as exc:
                self.granted -= missing
                self._account = self._account.settle(lease.lease_id, Usage())
                if isinstance(exc, ProblemError):
                    self.refusal = exc
                    raise BudgetExhausted(exc.detail) from exc
                raise
        try:
            yield lease
        finally:
            self._account = self._account.settle(lease.lease_id, lease.charge)
