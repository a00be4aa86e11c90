"""Retries with exponential backoff and a circuit breaker."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

import structlog

from fedone_sdk import errors
from fedone_sdk.backends.base import Answer, Want
from fedone_sdk.backends.billing import with_usage
from fedone_sdk.budget import NOTHING
from fedone_sdk.errors import BackendBlocked, BackendError, BackendUnavailable
from fedone_sdk.spec import RetrySpec

_log = structlog.get_logger(__name__)

_FIRST_WAIT_S = 0.5
"""Longest delay before the second attempt; it doubles with each attempt."""


class Retries:
    """Repeats requests after `BackendUnavailable`, with a circuit breaker.

    The delay before an attempt is the pause that the provider requests, plus exponential backoff
    with full jitter, and at most `max_wait_s`. The answer's usage is the sum over all attempts.

    The first request of each kind (`Want`) is sent alone, so that a wrong key or setting costs only
    one request. Later requests are also sent one at a time while `alone` returns true.

    The breaker opens at the first `BackendBlocked`, or after `breaker_failures` failed attempts in
    a row, over all requests. `FormBlocked`, which concerns one task, does not open it. While the
    breaker is open, new and waiting requests fail with `BackendBlocked`; requests that are already
    sent complete. After `max_wait_s` or `reset`, one request is sent as a probe. All other requests
    wait for its result.

    Args:
        on_open: Called with the reason when the breaker opens.
        alone: Returns whether the next request must be sent alone.
    """

    def __init__(
        self,
        spec: RetrySpec,
        *,
        on_open: Callable[[BackendBlocked], None] | None,
        alone: Callable[[], bool],
    ) -> None:
        self._spec = spec
        self._on_open = on_open
        self._alone = alone
        self._opened = asyncio.Event()  # Wakes requests that wait for their next attempt.
        self._failures = 0  # Failed attempts in a row.
        self._tried: set[Want] = set()  # Kinds of query with a completed request.
        self._refusal: BackendBlocked | None = None  # Reason of the open breaker.
        self._refuse_until = 0.0  # End of the pause of the open breaker.
        self._openings = 0  # How often the breaker has opened.
        self._probe: asyncio.Future[None] | None = None  # Set while a request is sent alone.

    async def run(self, want: Want, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        """Return the answer of the first successful attempt."""
        spent, failures = NOTHING, 0
        while True:
            try:
                answer = await self._attempt(want, ask)
                return replace(answer, usage=answer.usage + spent)
            except BackendError as exc:
                spent += exc.usage or NOTHING
                if isinstance(exc, errors.FormChanged):
                    continue  # This loop is finite: no format is tried twice.
                failures += 1
                if failures == self._spec.attempts or not isinstance(exc, BackendUnavailable):
                    raise with_usage(exc, spent) from exc.__cause__
                wait_s = self._wait_s(failures, exc)
                _log.info("trying again", attempt=failures, wait_s=wait_s, reason=str(exc))
            if self._refusal is None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._opened.wait()

    @property
    def trouble(self) -> str | None:
        """Why the breaker is open; None after the pause, when a probe may be sent."""
        if self._refusal is not None and asyncio.get_running_loop().time() < self._refuse_until:
            return str(self._refusal)
        return None

    def reset(self) -> None:
        """End the pause, so that the next request is the probe."""
        self._refuse_until = 0.0

    async def _attempt(self, want: Want, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        probe = await self._admit(want)
        openings = self._openings
        try:
            answer = await ask()
        except errors.FormBlocked:
            self._answered(want, openings)  # Requests of other tasks may succeed.
            raise
        except BackendBlocked as exc:
            if openings == self._openings:
                self._failures = 0
                self._open(exc)
            raise
        except errors.FormChanged:
            raise  # `want` stays untried, so that the next format is tried alone too.
        except BackendUnavailable as exc:
            if openings != self._openings:
                raise  # Sent before the breaker opened, so it is not counted.
            self._tried.add(want)
            self._failures += 1
            if self._failures < self._spec.breaker_failures:
                self._refusal = None
                raise
            times = f"{self._failures} time{'s' * (self._failures > 1)}"
            reason = f"the model failed {times} in a row; last error: {exc.summary}"
            blocked = BackendBlocked(reason, usage=exc.usage, **exc.private)
            self._open(blocked)
            raise blocked from exc
        except BackendError:
            self._answered(want, openings)  # The model refused only this query.
            raise
        else:
            self._answered(want, openings)
            return answer
        finally:
            if probe is not None:
                self._probe = None
                probe.set_result(None)

    async def _admit(self, want: Want) -> asyncio.Future[None] | None:
        """Wait until a request may be sent; return a future if the request is sent alone."""
        while want not in self._tried or self._refusal is not None or self._alone():
            loop = asyncio.get_running_loop()
            if self._probe is not None:
                await asyncio.wait({self._probe})
            elif self._refusal is not None and loop.time() < self._refuse_until:
                refusal = self._refusal
                raise BackendBlocked(refusal.summary, usage=NOTHING, **refusal.private)
            else:
                self._probe = loop.create_future()
                return self._probe
        return None

    def _open(self, reason: BackendBlocked) -> None:
        # A new error without the traceback, which contains private texts.
        self._refusal = BackendBlocked(reason.summary, usage=NOTHING, **reason.private)
        self._refuse_until = asyncio.get_running_loop().time() + self._spec.max_wait_s
        self._openings += 1
        _log.warning("no more requests are sent to the model", reason=str(reason))
        self._opened.set()
        self._opened = asyncio.Event()
        if self._on_open is not None:
            self._on_open(reason)

    def _answered(self, want: Want, openings: int) -> None:
        self._tried.add(want)
        if openings == self._openings:
            self._failures = 0
            self._refusal = None

    def _wait_s(self, number: int, failure: BackendUnavailable) -> float:
        bound = min(_FIRST_WAIT_S * 2 ** (number - 1), self._spec.max_wait_s)
        jitter = random.uniform(0, bound)
        return min((failure.retry_after_s or 0.0) + jitter, self._spec.max_wait_s)
