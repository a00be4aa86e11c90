"""Rate limiting with fair queueing between payers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from fedone_sdk.backends.base import Answer
from fedone_sdk.budget import NOTHING
from fedone_sdk.errors import BackendBlocked, BackendUnavailable, BudgetExhausted
from fedone_sdk.spec import LimitsSpec


class RateLimiter:
    """Delays requests until the rate limits allow them.

    In any window of a minute, requests and tokens stay within the limits, bursts included. The
    provider's remaining limits (`Answer.limits`) hold until their reset, and a requested pause
    (`BackendUnavailable.retry_after_s`) applies to all requests. Payers take turns (round robin),
    so that a payer with many waiting requests does not delay one with few.

    Tokens count as quoted until the answer reports their number. A request with more tokens than
    the limit per minute is sent after a minute without others.

    One instance serves one event loop at a time.

    Args:
        spec: The configured limits.
        max_wait_s: Longest delay that a provider's limits or pause may cause, in seconds.
    """

    def __init__(self, spec: LimitsSpec, *, max_wait_s: float) -> None:
        self._requests = Meter(spec.requests_per_minute)
        self._tokens = Meter(spec.tokens_per_minute)
        self._concurrency = spec.concurrency
        self._max_wait_s = max_wait_s
        self._under_way = 0
        self._held_until = 0.0
        # By payer, in round-robin order.
        self._queues: dict[str, deque[_Waiter]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._pumping: asyncio.Handle | None = None

    async def run(self, payer: str, tokens: int, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        """Return the answer of `ask`, once the limits allow a request of `tokens` tokens."""
        sent = await self._turn(payer, tokens)
        try:
            answer = await ask()
        except BackendUnavailable as exc:
            if exc.retry_after_s is not None:
                wait = min(exc.retry_after_s, self._max_wait_s)
                self._held_until = max(self._held_until, asyncio.get_running_loop().time() + wait)
            raise
        except BudgetExhausted:
            sent.undo()
            raise
        else:
            self._update(sent, answer)
            return answer
        finally:
            self._end()

    def refuse_waiting(self, reason: BackendBlocked) -> None:
        """Fails all waiting requests with this reason, without sending them."""
        for queue in self._queues.values():
            for waiter in queue:
                if not waiter.turn.done():
                    # A copy each: a shared exception would collect the traceback of every waiter.
                    refusal = BackendBlocked(reason.summary, usage=NOTHING, **reason.private)
                    waiter.turn.set_exception(refusal)
        self._queues.clear()

    async def _turn(self, name: str, tokens: int) -> _Sent:
        waiter = _Waiter(tokens, asyncio.get_running_loop().create_future())
        self._queues.setdefault(name, deque()).append(waiter)
        self._pump_soon()
        turn = waiter.turn
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._pump_soon()  # The cancelled request may have been the first in line.
            elif turn.exception() is None:  # It was cancelled after it got its turn.
                turn.result().undo()
                self._end()
            raise

    def _pump(self) -> None:
        """Give the next request its turn: one per turn of the loop, as sending takes its time."""
        loop = asyncio.get_running_loop()
        self._pumping = None
        if self._under_way < self._concurrency and (head := self._next()) is not None:
            name, waiter = head
            now = loop.time()
            ready = max(
                self._held_until,
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
            sent = _Sent(self._requests.send(1, now), self._tokens.send(waiter.tokens, now))
            waiter.turn.set_result(sent)
            self._pump_soon()

    def _pump_soon(self) -> None:
        if self._pumping is None:
            self._pumping = asyncio.get_running_loop().call_soon(self._pump)

    def _next(self) -> tuple[str, _Waiter] | None:
        while self._queues:
            name, queue = next(iter(self._queues.items()))
            while queue and queue[0].turn.done():  # cancelled
                queue.popleft()
            if queue:
                return name, queue[0]
            del self._queues[name]
        return None

    def _end(self) -> None:
        self._under_way -= 1
        # Deferred, because the caller of a failed request may call `refuse_waiting` first.
        self._pump_soon()

    def _update(self, sent: _Sent, answer: Answer) -> None:
        used = answer.usage.prompt_tokens + answer.usage.completion_tokens
        if used > 0:
            sent.tokens.correct(used)
        limits = answer.limits
        if limits is None:
            return
        now = asyncio.get_running_loop().time()
        if limits.requests is not None and limits.requests_reset_s is not None:
            until = now + min(limits.requests_reset_s, self._max_wait_s)
            self._requests.allow(sent.requests, limits.requests, until)
        if limits.tokens is not None and limits.tokens_reset_s is not None:
            until = now + min(limits.tokens_reset_s, self._max_wait_s)
            self._tokens.allow(sent.tokens, limits.tokens, until)


class _Waiter(NamedTuple):
    tokens: int
    turn: asyncio.Future[_Sent]


class _Sent(NamedTuple):
    requests: _Count
    tokens: _Count

    def undo(self) -> None:
        self.requests.correct(0)
        self.tokens.correct(0)


@dataclass(slots=True, eq=False)
class _Count:
    meter: Meter
    at: float
    amount: int
    sum: int
    recent: bool

    def correct(self, amount: int) -> None:
        if self.recent:
            self.meter.in_window += amount - self.amount
            self.amount = amount


@dataclass(slots=True)
class Meter:
    """Counts one unit against a configured limit, if any, and the provider's remaining limit."""

    per_minute: float | None
    in_window: int = 0
    _recent: deque[_Count] = field(default_factory=deque)
    _sum: int = 0
    _allowed: int = 0
    _allowed_by: int = -1
    _allowed_until: float = 0.0

    @property
    def _window_s(self) -> float:
        # A limit below one per minute is one in a longer window.
        return 60.0 if self.per_minute is None else max(60.0, 60.0 / self.per_minute)

    def ready_at(self, amount: int, now: float) -> float:
        """Return the time at which an amount may be sent; a past time means now."""
        ready = 0.0
        if now < self._allowed_until and self._sum + amount > self._allowed:
            ready = self._allowed_until
        if self.per_minute is None:
            return ready
        while self._recent and self._recent[0].at + self._window_s <= now:
            old = self._recent.popleft()
            old.recent = False
            self.in_window -= old.amount
        # An amount above the limit waits for an empty window.
        excess = self.in_window + amount - max(self.per_minute, amount, 1)
        for old in self._recent:
            if excess <= 0:
                break
            excess -= old.amount
            ready = max(ready, old.at + self._window_s)
        return ready

    def send(self, amount: int, now: float) -> _Count:
        """Count an amount as sent now."""
        self._sum += amount
        count = _Count(self, now, amount, self._sum, recent=self.per_minute is not None)
        if count.recent:
            self.in_window += amount
            self._recent.append(count)
        return count

    def allow(self, sent: _Count, left: int, until: float) -> None:
        """Apply the provider's limit: `left` after `sent`, reset at `until`."""
        if sent.sum >= self._allowed_by:  # Answers may be out of order.
            self._allowed_by = sent.sum
            self._allowed, self._allowed_until = sent.sum + left, until
