"""How long a device waits before it tries again."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog
import tenacity

from fedone_sdk.errors import ProblemError, TransportError, is_retryable

__all__ = ["Backoff", "MAX_WAIT_S", "PATIENCE_S", "RetryPolicy", "asked_s"]

_log = structlog.get_logger(__name__)

MAX_WAIT_S = 3600.0
"""The longest that a server's ``Retry-After`` is honoured, seconds."""

PATIENCE_S = 3.0
"""The longest ``Retry-After`` that a call waits for, seconds; a longer one ends the turn. An app
that the system has woken has no more than some minutes."""

_ATTEMPTS = 5
_JITTER = tenacity.wait_random_exponential(multiplier=0.2, max=20)

T = TypeVar("T")


class RetryPolicy:
    """Repeats calls that fail for reasons that pass: a few times at once, for blips.

    Args:
        pause: Waits so many seconds, or less when the client stops.
        stopping: Whether the client stops; then nothing is repeated.
        failed: Told of each failure that passes.
        succeeded: Told of each call that is answered.
    """

    def __init__(
        self,
        *,
        pause: Callable[[float], Awaitable[None]],
        stopping: Callable[[], bool],
        failed: Callable[[Exception], None],
        succeeded: Callable[[], None],
    ) -> None:
        self._pause = pause
        self._stopping = stopping
        self._failed = failed
        self._succeeded = succeeded

    async def persist(self, call: Callable[[], Awaitable[T]]) -> T:
        """The call's result.

        Raises:
            TransportError: The server cannot be reached.
            ProblemError: The server refuses, or is not able to answer for some time.
        """
        try:
            return await self._once(call)
        except Exception as exc:
            if not is_retryable(exc):
                raise
            failure: Exception | None = exc
        # Built for calls that failed only: it costs as much as the message that a call sends.
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(is_retryable),
            wait=_wait_s,
            stop=self._gives_up,
            sleep=self._pause,
            before_sleep=_log_retry,
            reraise=True,
        )
        async for attempt in retrying:
            with attempt:
                if failure is not None:
                    first, failure = failure, None
                    raise first
                return await self._once(call)
        raise AssertionError("unreachable: retrying ends by returning or raising")

    async def _once(self, call: Callable[[], Awaitable[T]]) -> T:
        try:
            result = await call()
        except Exception as exc:
            self._failed(exc)
            raise
        self._succeeded()
        return result

    def _gives_up(self, state: tenacity.RetryCallState) -> bool:
        tried_enough = state.attempt_number >= _ATTEMPTS
        return tried_enough or self._stopping() or asked_s(_failure(state)) > PATIENCE_S


class Backoff:
    """Waits that grow while turns come to nothing: exponential, with full jitter and a cap.

    Full jitter spreads devices that lost the same server at the same moment evenly over the wait
    (Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015).

    Args:
        first_s: Bound of the first wait, seconds.
        max_s: Bound of all, seconds.
    """

    def __init__(self, first_s: float = 1.0, max_s: float = 300.0) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._failures = 0

    def reset(self) -> None:
        """Something worked."""
        self._failures = 0

    def next_s(self, asked_s: float | None = None) -> float:
        """How long to wait after one more failure, seconds.

        Args:
            asked_s: The wait that the server asks for; honoured up to `MAX_WAIT_S`, on top.
        """
        bound = min(self._max_s, self._first_s * 2.0 ** min(self._failures, 32))
        self._failures += 1
        return min(asked_s or 0.0, MAX_WAIT_S) + random.uniform(0.0, bound)


def asked_s(failure: BaseException | None) -> float:
    """The wait that a server asks for, seconds; 0 where it does not say."""
    asked = failure.retry_after_s if isinstance(failure, (ProblemError, TransportError)) else None
    return asked or 0.0


def _wait_s(state: tenacity.RetryCallState) -> float:
    return asked_s(_failure(state)) + _JITTER(state)


def _log_retry(state: tenacity.RetryCallState) -> None:
    _log.debug("trying again", attempt=state.attempt_number, reason=str(_failure(state)))


def _failure(state: tenacity.RetryCallState) -> BaseException | None:
    return state.outcome.exception() if state.outcome else None
