"""Budgeted requests: reserved before they are sent, settled after."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace

import structlog

from fedone_sdk.backends.base import Answer, LLMBackend, Query
from fedone_sdk.backends.wrappers.wrapper import Wrapper
from fedone_sdk.budget import NOTHING, BudgetGuard, Lease, Payer, Price, Usage
from fedone_sdk.errors import BackendError, BudgetExhausted

_log = structlog.get_logger(__name__)


class BudgetedBackend(Wrapper):
    """Charges each request to the query's payer, and to an optional second budget.

    The upper bound of a request's cost is reserved before it is sent; a request that does not fit
    is not sent. The actual cost is charged after the answer, and the rest is released. A request
    of unknown cost (a timeout, a cancelled caller) is charged in full.

    Logical queries are not counted here but by the caller, because a retry is the same query.

    The bound is the inner backend's `quote`, which the adapter must keep above the bill. If a
    provider bills more, the actual cost is charged, a cap may be exceeded by the difference, and a
    warning is logged.

    Args:
        inner: The backend to charge for.
        price: Its price. None keeps the inner backend's cost, so that there is no bound in money
            unless the inner backend has one.
        guard: A budget that is charged in addition to the query's payer.
    """

    def __init__(
        self, inner: LLMBackend, *, price: Price | None = None, guard: BudgetGuard | None = None
    ) -> None:
        self._price = price
        self._guard = guard
        super().__init__(inner)

    def _describe(self) -> None:
        super()._describe()
        self.metered = True
        if self._price is not None:
            # Money is bounded if every unit with a price is.
            if self._price.units <= self.bounds:
                self.bounds |= {"usd"}
            else:
                self.bounds -= {"usd"}

    def worst_case(self, batch_size: int, max_tokens: int = 0) -> Usage:
        """Return the inner backend's bound, with its cost in money."""
        return self._priced(self.inner.worst_case(batch_size, max_tokens))

    async def quote(self, query: Query) -> Usage:
        """Return the inner backend's bound, with its cost in money."""
        return self._priced(await self.inner.quote(query))

    async def score(self, query: Query) -> Answer:
        """Return the inner backend's answer; its usage includes the cost in money.

        Raises:
            BudgetExhausted: The request does not fit a budget and was not sent; or the model's own
                budget is exhausted, and the usage until then is charged.
        """
        worst = (await self.quote(query)).without_queries()
        async with AsyncExitStack() as stack:
            leases = await self._reserve(stack, query.payer, worst)
            try:
                answer = await self.inner.score(query)
            except BackendError as exc:
                if exc.usage is not None:
                    self._settle(leases, worst, self._priced(exc.usage))
                raise
            except BudgetExhausted as exc:  # From another account, behind this model.
                self._settle(leases, worst, self._priced(exc.usage or NOTHING))
                raise
            usage = self._priced(answer.usage)
            self._settle(leases, worst, usage)
            return answer if usage is answer.usage else replace(answer, usage=usage)

    async def _reserve(
        self, stack: AsyncExitStack, payer: Payer | None, worst: Usage
    ) -> list[Lease]:
        payers: list[Payer] = [] if self._guard is None else [self._guard]
        if payer is not None and payer is not self._guard:
            payers.append(payer)
        leases: list[Lease] = []
        try:
            for each in payers:
                leases.append(await stack.enter_async_context(each.reserve(worst)))
        except BaseException:
            for lease in leases:
                lease.release()
            raise
        return leases

    def _settle(self, leases: list[Lease], worst: Usage, usage: Usage) -> None:
        used = usage.without_queries()
        over = used.beyond(worst)
        if over != NOTHING:
            _log.warning(
                "the provider counted more than the request was bounded by",
                model=self.fingerprint,
                quoted=worst.exact(),
                beyond=over.exact(),
            )
        for lease in leases:
            lease.settle(used)

    def _priced(self, usage: Usage) -> Usage:
        return usage if self._price is None else self._price.priced(usage)
