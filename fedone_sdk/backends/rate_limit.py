"""Rate limits, with fair queueing between payers (the budgets that requests are charged to)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from fedone_sdk.backends.base import Answer, RateLimits
from fedone_sdk.budget import NOTHING
from fedone_sdk.errors import BackendBlocked, BackendUnavailable, BudgetExhausted
from fedone_sdk.spec import LimitsSpec


@dataclass(slots=True, eq=False)
class _Sent:
    """A sent request, as a meter counts it."""

    at: float
    amount: int  # 1, or the number of tokens.
    total: int  # Sum of all amounts so far, including this one.


@dataclass(slots=True)
class _Meter:
    """Counts requests or tokens against the configured limit and the provider's remaining limit."""

    per_minute: float | None
    _recent: deque[_Sent] = field(default_factory=deque)
    _total: int = 0  # Sum of the amounts of all sent requests.
    _allowed: int = 0  # The provider's limit: the highest total that is allowed.
    _allowed_by: int = -1  # The total of the request whose answer reported this limit.
    _allowed_until: float = 0.0  # When this limit resets.

    def ready_at(self, amount: int, now: float) -> float:
        """Return the time from which an amount may be sent; it may be in the past."""
        ready = 0.0
        if now < self._allowed_until and self._total + amount > self._allowed:
            ready = self._allowed_until
        if self.per_minute is None:
            return ready
        # With a limit below one per minute, the window is longer, and allows one request.
        window_s = max(60.0, 60.0 / self.per_minute)
        while self._recent and self._recent[0].at + window_s <= now:
            self._recent.popleft()
        # An amount above the limit is sent when the window is empty.
        limit = max(self.per_minute, amount, 1)
        excess = sum(sent.amount for sent in self._recent) + amount - limit
        for sent in self._recent:
            if excess <= 0:
                break
            excess -= sent.amount
            ready = max(ready, sent.at + window_s)
        return ready

    def send(self, amount: int, now: float) -> _Sent:
        self._total += amount
        sent = _Sent(now, amount, self._total)
        if self.per_minute is not None:
            self._recent.append(sent)
        return sent

    def allow(self, sent: _Sent, left: int, reset_at: float) -> None:
        """Apply the provider's limit: after `sent`, `left` more may be sent before `reset_at`."""
        if sent.total >= self._allowed_by:  # Answers may be out of order.
            self._allowed_by = sent.total
            self._allowed, self._allowed_until = sent.total + left, reset_at


class _Waiter(NamedTuple):
    tokens: int
    turn: asyncio.Future[tuple[_Sent, _Sent]]


class RateLimiter:
    """Delays requests until the rate limits allow them.

    In any window of a minute, requests and tokens stay within the configured limits. The limits
    that a provider reports (`Answer.limits`) apply until their reset. A pause that a provider asks
    for (`BackendUnavailable.retry_after_s`) applies to all requests. Payers take turns, so that a
    payer with many waiting requests does not delay other payers.

    Until an answer reports its number of tokens, the upper bound is counted. A request with more
    tokens than the limit per minute is sent after a minute without other requests.

    Args:
        max_wait_s: Longest delay that a provider's limits or pause may cause, in seconds.
    """

    def __init__(self, spec: LimitsSpec, *, max_wait_s: float) -> None:
        self._requests = _Meter(spec.requests_per_minute)
        self._tokens = _Meter(spec.tokens_per_minute)
        self._concurrency = spec.concurrency
        self._max_wait_s = max_wait_s
        self._under_way = 0
        self._paused_until = 0.0
        # By payer, in round-robin order.
        self._queues: dict[str, deque[_Waiter]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._pumping: asyncio.Handle | None = None

    async def run(self, payer: str, tokens: int, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        """Return the answer of `ask`, once the limits allow a request of `tokens` tokens."""
        requests, sent = await self._turn(payer, tokens)
        try:
            answer = await ask()
        except BackendUnavailable as exc:
            if exc.retry_after_s is not None:
                self._paused_until = max(self._paused_until, self._until(exc.retry_after_s))
            raise
        except BudgetExhausted:
            requests.amount = sent.amount = 0
            raise
        else:
            used = answer.usage.prompt_tokens + answer.usage.completion_tokens
            sent.amount = used or sent.amount
            limits = answer.limits or RateLimits()
            if limits.requests is not None and limits.requests_reset_s is not None:
                until = self._until(limits.requests_reset_s)
                self._requests.allow(requests, limits.requests, until)
            if limits.tokens is not None and limits.tokens_reset_s is not None:
                self._tokens.allow(sent, limits.tokens, self._until(limits.tokens_reset_s))
            return answer
        finally:
            self._end()

    def _until(self, seconds: float) -> float:
        return asyncio.get_running_loop().time() + min(seconds, self._max_wait_s)

    def refuse_waiting(self, reason: BackendBlocked) -> None:
        """Fail all waiting requests with this reason."""
        for queue in self._queues.values():
            for waiter in queue:
                if not waiter.turn.done():
                    # Copies, because a shared exception would collect every waiter's traceback.
                    refusal = BackendBlocked(reason.summary, usage=NOTHING, **reason.private)
                    waiter.turn.set_exception(refusal)
        self._queues.clear()

    async def _turn(self, name: str, tokens: int) -> tuple[_Sent, _Sent]:
        turn: asyncio.Future[tuple[_Sent, _Sent]] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(name, deque()).append(_Waiter(tokens, turn))
        self._pump_soon()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._pump_soon()  # The cancelled request may have been the first in line.
            elif turn.exception() is None:  # The request was cancelled after it got its turn.
                for sent in turn.result():
                    sent.amount = 0
                self._end()
            raise

    def _pump(self) -> None:
        """Start the next request, if the limits allow it; at most one per event loop iteration."""
        loop = asyncio.get_running_loop()
        self._pumping = None
        if self._under_way >= self._concurrency or (head := self._next()) is None:
            return
        name, waiter = head
        now = loop.time()
        ready = max(
            self._paused_until,
            self._requests.ready_at(1, now),
            self._tokens.ready_at(waiter.tokens, now),
        )
        if ready > now:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_at(ready, self._pump)
            return
        queue = self._queues.pop(name)
        queue.popleft()
        if queue:
            self._queues[name] = queue
        self._under_way += 1
        waiter.turn.set_result((self._requests.send(1, now), self._tokens.send(waiter.tokens, now)))
        self._pump_soon()

    def _pump_soon(self) -> None:
        if self._pumping is None:
            self._pumping = asyncio.get_running_loop().call_soon(self._pump)

    def _next(self) -> tuple[str, _Waiter] | None:
        while self._queues:
            name, queue = next(iter(self._queues.items()))
            while queue and queue[0].turn.done():  # The waiter was cancelled.
                queue.popleft()
            if queue:
                return name, queue[0]
            del self._queues[name]
        return None

    def _end(self) -> None:
        self._under_way -= 1
        # Deferred, so that after a failure the caller can first call `refuse_waiting`.
        self._pump_soon()
