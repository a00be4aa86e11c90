"""A backend that is asked again, until it is clear that asking does not help."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import structlog
import tenacity

from fedone_sdk.backends.base import Answer, LLMBackend, Query
from fedone_sdk.backends.wrappers.rate_limit import RateLimitedBackend
from fedone_sdk.backends.wrappers.wrapper import Wrapper
from fedone_sdk.budget import NOTHING
from fedone_sdk.errors import (
    BackendBlocked,
    BackendError,
    BackendUnavailable,
    LabelsNotShown,
)

__all__ = ["RetryingBackend"]

_log = structlog.get_logger(__name__)


class RetryingBackend(Wrapper):
    """Sends a request again when that may help (`BackendUnavailable`), and knows when to stop.

    Between two attempts it waits a random time, up to twice as long each time (exponential
    backoff with full jitter), on top of what the provider asks for; never longer than
    `max_wait_s`. Each attempt passes the wrappers inside anew: its turn, its reservation. The
    answer's usage is that of the last attempt; the others were charged when they were made.

    The first request goes alone, and all others wait, until it is known what becomes of it: a wrong
    key or setting costs one request.

    A breaker opens after so many failed attempts in a row, over all queries, or at the first
    `BackendBlocked`. Then every query, also of those that wait, fails with `BackendBlocked`, and
    nothing is sent but what is under way. Who asks after a pause of `max_wait_s`, or after
    `reset`, sends one request, and all others wait for what becomes of it. `LabelsNotShown` leaves
    the breaker closed: it concerns the label words of one query.

    One instance serves one event loop at a time.

    Args:
        inner: The backend to ask. It should be metered, by a `BudgetedBackend`: nobody is charged
            for failed attempts at one that is not.
        attempts: The most attempts at one request.
        max_wait_s: The longest wait between two attempts, seconds.
        breaker_failures: Failed attempts in a row that open the breaker.
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
        self._untried = True  # Nothing is known of the model yet.
        self._refusal: BackendBlocked | None = None  # Why the breaker is open.
        self._refuse_until = 0.0
        self._openings = 0
        self._probe: asyncio.Future[None] | None = None

    async def score(self, query: Query) -> Answer:
        """The inner backend's answer, at the latest of the last attempt.

        Raises:
            BackendBlocked: The breaker is open, or somebody must change something.
        """
        # A copy, because tenacity keeps statistics on the instance.
        return await self._retrying.copy()(self._attempt, query)

    @property
    def trouble(self) -> str | None:
        """Why the breaker is open; None once the pause is over and the model may be tried."""
        if self._refusal is not None and asyncio.get_running_loop().time() < self._refuse_until:
            return str(self._refusal)
        return super().trouble

    def reset(self) -> None:
        """Lets the next query try whether the model can be asked again, without a pause before."""
        self._refuse_until = 0.0
        super().reset()

    async def _attempt(self, query: Query) -> Answer:
        probe = await self._admit()
        openings = self._openings
        try:
            answer = await self.inner.score(query)
        except LabelsNotShown:
            self._answered(openings)  # Queries with other label words are not concerned.
            raise
        except BackendBlocked as exc:
            if openings == self._openings:
                self._failures = 0
                self._open(exc)
            raise
        except BackendUnavailable as exc:
            if openings != self._openings:
                raise  # It was sent before the breaker opened.
            if exc.retry_after_s != 0:  # Else it was asked in a wrong way, and knows a better one.
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
            self._answered(openings)  # A refusal of this query alone.
            raise
        else:
            self._answered(openings)
            return answer
        finally:
            if probe is not None:
                self._probe = None
                probe.set_result(None)

    async def _admit(self) -> asyncio.Future[None] | None:
        """Lets a query in; the one that tries a new model, or an open breaker, gets the probe.

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
        # Without the traceback, which holds texts.
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
