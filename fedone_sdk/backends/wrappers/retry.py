"""Retries with exponential backoff and a circuit breaker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import structlog
import tenacity

from fedone_sdk.backends.base import Answer, LLMBackend, Query
from fedone_sdk.backends.wrappers.rate_limit import RateLimitedBackend
from fedone_sdk.backends.wrappers.wrapper import Wrapper
from fedone_sdk.budget import NOTHING
from fedone_sdk.errors import BackendBlocked, BackendError, BackendUnavailable, LabelsNotShown

_log = structlog.get_logger(__name__)


class RetryingBackend(Wrapper):
    """Retries requests after `BackendUnavailable`, with a circuit breaker.

    Delays between attempts use exponential backoff with full jitter, in addition to the pause that
    the provider requests, and are at most `max_wait_s`. Each attempt passes the inner wrappers
    again, with its own turn and reservation. The answer's usage is that of the last attempt;
    earlier attempts were charged when they were sent, if the inner backend is metered.

    The first request is sent alone, so that a wrong key or setting costs one request.

    The breaker opens after `breaker_failures` failed attempts in a row, over all queries, or at the
    first `BackendBlocked`. While it is open, all queries, including waiting ones, fail with
    `BackendBlocked`, and only pending requests complete. After a pause of `max_wait_s`, or after
    `reset`, one probe request is sent, and all other queries wait for its result. `LabelsNotShown`
    does not open the breaker, because it concerns the label words of one query.

    One instance serves one event loop at a time. The arguments are options of `RetrySpec`.
    """

    def __init__(
        self,
        inner: LLMBackend,
        *,
        attempts: int = 6,
        max_wait_s: float = 60.0,
        breaker_failures: int = 100,
    ) -> None:
        if attempts < 1 or breaker_failures < 1:
            raise ValueError("attempts and breaker_failures must be at least 1")
        super().__init__(inner)
        self._max_wait_s = max_wait_s
        self._breaker_failures = breaker_failures
        self._jitter = tenacity.wait_random_exponential(multiplier=0.5, max=max_wait_s)
        self._retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(BackendUnavailable),
            wait=self._wait_s,
            stop=tenacity.stop_after_attempt(attempts),
            sleep=self._pause,
            before_sleep=_log_retry,
            reraise=True,
        )
        self._pauses: set[asyncio.Future[None]] = set()
        self._failures = 0  # in a row
        self._untried = True  # No request has completed yet.
        self._refusal: BackendBlocked | None = None  # Reason of the open breaker.
        self._refuse_until = 0.0
        self._openings = 0
        self._probe: asyncio.Future[None] | None = None

    async def score(self, query: Query) -> Answer:
        """Return the answer of the first successful attempt.

        Raises:
            BackendBlocked: The breaker is open, or a setting, key or quota must change.
        """
        # A copy, because tenacity stores statistics on the instance.
        return await self._retrying.copy()(self._attempt, query)

    @property
    def trouble(self) -> str | None:
        """Why the breaker is open; None once the pause is over and a probe may be sent."""
        if self._refusal is not None and asyncio.get_running_loop().time() < self._refuse_until:
            return str(self._refusal)
        return super().trouble

    def reset(self) -> None:
        """Make the next query the probe, without the pause before it."""
        self._refuse_until = 0.0
        super().reset()

    async def _attempt(self, query: Query) -> Answer:
        probe = await self._admit()
        openings = self._openings
        try:
            answer = await self.inner.score(query)
        except LabelsNotShown:
            self._answered(openings)  # Other label words may work.
            raise
        except BackendBlocked as exc:
            if openings == self._openings:
                self._failures = 0
                self._open(exc)
            raise
        except BackendUnavailable as exc:
            if openings != self._openings:
                raise  # It was sent before the breaker opened.
            if exc.retry_after_s != 0:  # 0: the form of the request changes.
                self._untried = False
            self._failures += 1
            if self._failures < self._breaker_failures:
                self._refusal = None
                raise
            times = f"{self._failures} time{'s' * (self._failures > 1)}"
            reason = f"{self.fingerprint} failed {times} in a row, last: {exc.summary}"
            blocked = BackendBlocked(reason, usage=exc.usage, **exc.private)
            self._open(blocked)
            raise blocked from exc
        except BackendError:
            self._answered(openings)  # The model refused only this query.
            raise
        else:
            self._answered(openings)
            return answer
        finally:
            if probe is not None:
                self._probe = None
                probe.set_result(None)

    async def _admit(self) -> asyncio.Future[None] | None:
        """Admits a query; the first one, or the first after the pause, becomes the probe.

        Raises:
            BackendBlocked: The breaker is open.
        """
        while self._untried or self._refusal is not None:
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
        # Without the traceback, which contains private texts.
        self._refusal = BackendBlocked(reason.summary, usage=NOTHING, **reason.private)
        self._refuse_until = asyncio.get_running_loop().time() + self._max_wait_s
        self._openings += 1
        _log.warning("the model is not asked any more", reason=str(reason))
        for pause in self._pauses:
            if not pause.done():
                pause.set_result(None)
        for backend in _layers(self.inner):
            if isinstance(backend, RateLimitedBackend):
                backend.refuse_waiting(reason)

    def _answered(self, openings: int) -> None:
        self._untried = False
        if openings == self._openings:
            self._failures = 0
            self._refusal = None

    def _wait_s(self, state: tenacity.RetryCallState) -> float:
        asked = 0.0
        failure = state.outcome.exception() if state.outcome else None
        if isinstance(failure, BackendUnavailable) and failure.retry_after_s is not None:
            asked = failure.retry_after_s
        return min(asked + self._jitter(state), self._max_wait_s)

    async def _pause(self, seconds: float) -> None:
        if self._refusal is not None:
            return
        loop = asyncio.get_running_loop()
        pause: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(seconds, _end, pause)
        self._pauses.add(pause)
        try:
            await pause
        finally:
            timer.cancel()
            self._pauses.discard(pause)


def _end(pause: asyncio.Future[None]) -> None:
    if not pause.done():
        pause.set_result(None)


def _layers(backend: LLMBackend) -> Iterator[LLMBackend]:
    yield backend
    while isinstance(backend, Wrapper):
        backend = backend.inner
        yield backend


def _log_retry(state: tenacity.RetryCallState) -> None:
    failure = state.outcome.exception() if state.outcome else None
    _log.info("trying again", attempt=state.attempt_number, reason=str(failure))
