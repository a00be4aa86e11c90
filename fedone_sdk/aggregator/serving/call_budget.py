"""What pays for one call: money that a run has set aside already, and more for retries."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

from fedone_sdk.budget import NOTHING, Account, Lease, Usage
from fedone_sdk.errors import BudgetExhausted, ProblemError

__all__ = ["CallBudget", "Reservations"]


class Reservations:
    """What a call has set aside: each amount under a name of its own, so that it is settled once.

    The others charge in full what a replica had under way that they take for dead. One that lives
    gets another name, and asks for more under that: what was charged already is not reserved any
    more, and must not be charged again.

    Args:
        replica: Names this process now.
    """

    def __init__(self, replica: Callable[[], str]) -> None:
        self._replica = replica
        self._granted: dict[str, Usage] = {}
        self._unknown: list[str] = []

    async def set_aside(self, worst: Usage, reserve: Callable[[str], Awaitable[object]]) -> None:
        """Has `worst` reserved under a fresh name.

        Raises:
            ProblemError: It was refused.
        """
        attempt = f"{self._replica()}/{uuid.uuid4().hex}"
        self._unknown.append(attempt)  # Where the store goes away, it may be there or not.
        try:
            await reserve(attempt)
        except ProblemError:
            self._unknown.remove(attempt)
            raise
        self._unknown.remove(attempt)
        self._granted[attempt] = worst

    def shares(self, spent: Usage) -> Iterator[tuple[str, Usage]]:
        """What each name has to bear of all that was spent, never more than it has if possible."""
        for attempt in self._unknown:
            yield attempt, NOTHING
        last = next(reversed(self._granted), None)
        for attempt, granted in self._granted.items():
            share = spent if attempt == last else spent - spent.beyond(granted)
            spent -= share
            yield attempt, share


class CallBudget:
    """Pays for the requests of one call out of what was granted to it beforehand.

    The grant covers one attempt at each request, so that a call is admitted whole or not at all.
    What fails and is sent again needs more, and that is asked of the run's account first.

    Args:
        name: The run, for a fair share of the model.
        granted: What is set aside already.
        more: Sets more aside, or raises a `ProblemError`.

    Attributes:
        granted: All that was set aside by now.
        refusal: Why the run could not pay for a request, where that happened.
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
        """What was spent; a request whose end is not known counts in full."""
        return self._account.held

    @asynccontextmanager
    async def reserve(self, worst: Usage) -> AsyncIterator[Lease]:
        """Holds `worst` back while the body runs, then charges what the body settled.

        Raises:
            BudgetExhausted: The run cannot pay for it; the body does not run.
        """
        lease = Lease(uuid.uuid4().hex, worst)
        self._account = self._account.reserve(lease.lease_id, worst)
        missing = self._account.held.beyond(self.granted)
        if missing != Usage():
            # Counted before it is asked for: whoever comes meanwhile must not count on it too.
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
            used = worst if lease.used is None else lease.used
            self._account = self._account.settle(lease.lease_id, used)
