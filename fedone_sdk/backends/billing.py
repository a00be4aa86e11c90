"""Cost of requests: an upper bound is reserved first, and the actual cost is charged later."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from decimal import Decimal

import structlog

from fedone_sdk.backends.base import Answer
from fedone_sdk.budget import NOTHING, BudgetGuard, Lease, Payer, Price, Usage
from fedone_sdk.errors import BackendError, BudgetExhausted

_log = structlog.get_logger(__name__)

_MARGIN = 2
"""Bounds are raised by this multiple of the largest surplus so far (see `Surplus`)."""

_MAX = 2**53


class Surplus:
    """The largest amount by which a provider has billed more than the upper bound (`quote`).

    For prompt tokens and money, the surplus is a fraction of the quote. For completion tokens, the
    surplus is a number of tokens per input.
    """

    def __init__(self) -> None:
        # Whether the last bill exceeded the raised quote. Then the next request is sent alone.
        self.unsure = False
        self._prompt = 0.0
        self._completion = 0.0
        self._usd = Decimal(0)

    def raised(self, quoted: Usage, num_inputs: int) -> Usage:
        """Return the bound on a request's usage: the quote, raised by the surplus."""
        if not (self._prompt or self._completion or self._usd):
            return quoted
        prompt = quoted.prompt_tokens * (1 + _MARGIN * self._prompt)
        completion = quoted.completion_tokens + _MARGIN * self._completion * num_inputs
        return quoted.model_copy(
            update={
                "prompt_tokens": min(math.ceil(prompt), _MAX),
                "completion_tokens": min(math.ceil(completion), _MAX),
                "usd": min(quoted.usd * (1 + _MARGIN * self._usd), Decimal(_MAX)),
            }
        )

    def learn(self, quoted: Usage, billed: Usage, num_inputs: int) -> Usage:
        """Update the surplus after a bill. Return how much the bill exceeds the raised quote."""
        excess, counts = billed.beyond(quoted), {"queries": 0, "requests": 0}
        if not (excess.prompt_tokens or excess.completion_tokens or excess.usd):
            if billed.model_copy(update=counts) != NOTHING:  # A failed request has no bill.
                self.unsure = False
            return NOTHING
        over = billed.beyond(self.raised(quoted, num_inputs)).model_copy(update=counts)
        self.unsure = over != NOTHING
        self._prompt = max(self._prompt, excess.prompt_tokens / max(quoted.prompt_tokens, 1))
        self._completion = max(self._completion, excess.completion_tokens / num_inputs)
        if quoted.usd:
            self._usd = max(self._usd, excess.usd / quoted.usd)
        return over


class Billing:
    """Reserves the bound of each request before it is sent, and charges its bill."""

    def __init__(self, price: Price | None, guard: BudgetGuard | None) -> None:
        self._price, self._guard = price, guard
        self.surplus = Surplus()

    def bound(self, quoted: Usage, num_inputs: int) -> Usage:
        """Return the upper bound on the cost of a request, given the backend's quote."""
        return self._priced(self.surplus.raised(quoted, num_inputs))

    async def pay(
        self,
        payer: Payer | None,
        quoted: Usage,
        num_inputs: int,
        ask: Callable[[], Awaitable[Answer]],
    ) -> Answer:
        """Reserve the bound, send a request by `ask`, charge its cost, and return the answer.

        Raises:
            BudgetExhausted: The bound does not fit a budget, and the request was not sent.
            BackendError: The error of `ask`, with the cost of the request.
        """
        worst = self.bound(quoted, num_inputs).without_queries()
        leases: list[Lease] = []

        def settle(billed: Usage, cached_tokens: int = 0) -> Usage:
            over = self._priced(self.surplus.learn(quoted, billed, num_inputs))
            if over != NOTHING:
                _log.warning(
                    "the provider billed more than the bound of the request",
                    quoted=worst.exact(),
                    beyond=over.exact(),
                )
            usage = self._priced(billed, cached_tokens)
            for lease in leases:
                lease.settle(usage.without_queries())
            return usage

        async with AsyncExitStack() as stack:
            try:
                for budget in (self._guard, None if payer is self._guard else payer):
                    if budget is not None:
                        leases.append(await stack.enter_async_context(budget.reserve(worst)))
            except BaseException:
                for lease in leases:
                    lease.release()
                raise
            try:
                answer = await ask()
            except BackendError as exc:
                if exc.usage is None:
                    exc.usage = worst  # The reservations are charged in full.
                else:
                    settle(exc.usage)
                raise
            except BudgetExhausted:  # The backend has its own budget, and sent nothing.
                settle(NOTHING)
                raise
            usage = settle(answer.usage, answer.cached_tokens)
            return answer if usage is answer.usage else replace(answer, usage=usage)

    def _priced(self, usage: Usage, cached_tokens: int = 0) -> Usage:
        if self._price is None:
            return usage
        return self._price.priced(usage, cached_tokens=cached_tokens)


def with_usage(error: Exception, usage: Usage | None) -> Exception:
    """Return a copy of a `BackendError` with this usage; other errors are returned unchanged."""
    if not isinstance(error, BackendError):
        return error
    # A copy, because the error may be shared with other callers, or raised again.
    copied = type(error).__new__(type(error), *error.args)
    copied.__dict__.update(error.__dict__)
    copied.usage = usage
    copied.__cause__ = error.__cause__
    return copied.with_traceback(error.__traceback__)
