"""Authenticated calls to one aggregator, retried while failures are transient."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, TypeVar

import structlog
import tenacity

from fedone_sdk.client.events import EventSink
from fedone_sdk.client.identity import Identity
from fedone_sdk.client.stop import StopSignal
from fedone_sdk.client.transport import Transport
from fedone_sdk.errors import (
    ArgumentError,
    MessageError,
    ProblemError,
    TransportError,
    is_retryable,
)
from fedone_sdk.messages import Enrol

_log = structlog.get_logger(__name__)

_ATTEMPTS = 5
"""Attempts at a call."""
_JITTER = tenacity.wait_random_exponential(multiplier=0.2, max=20)

MAX_WAIT_S = 3600.0
"""The longest ``Retry-After`` that is honoured, seconds."""

MAX_CALL_WAIT_S = 3.0
"""The longest ``Retry-After`` that a call waits for, seconds; a longer one ends the turn. A mobile
system gives an app that it wakes only minutes."""

_SLOW_S = 4.0
"""Time without an answer after which the log says so, seconds."""

P = ParamSpec("P")
T = TypeVar("T")


class Backoff:
    """Waits that grow with consecutive failures: exponential, with full jitter and a cap.

    Full jitter spreads devices that lost the same server at the same moment evenly over the wait
    (Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015).

    Args:
        first_s: Upper bound of the first wait, seconds.
        max_s: Upper bound of every wait, seconds.
    """

    def __init__(self, first_s: float = 1.0, max_s: float = 300.0) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._failures = 0

    def reset(self) -> None:
        """Start again with the first wait, after a success."""
        self._failures = 0

    def next_s(self, asked_s: float | None = None) -> float:
        """Return the wait after one more failure, seconds.

        Args:
            asked_s: The server's ``Retry-After``; honoured up to `MAX_WAIT_S`, and added.
        """
        bound = min(self._max_s, self._first_s * 2.0 ** min(self._failures, 32))
        self._failures += 1
        return min(asked_s or 0.0, MAX_WAIT_S) + random.uniform(0.0, bound)


class Session:
    """One device's calls to its aggregator: credential, retries, and whether it is online.

    A call is retried a few times within seconds, for blips; longer outages are left to the turns.
    After the stop signal nothing is retried.

    Args:
        transport: Reaches the server.
        identity: The device's identity there.
        token: Enrolment token; None where the device has an identity.
        name: The device's display name.
        events: Receives ``enrolled``, ``offline`` and ``online``.
        stop: Ends waits.
    """

    def __init__(
        self,
        transport: Transport,
        identity: Identity,
        *,
        token: str | None,
        name: str | None,
        events: EventSink,
        stop: StopSignal,
    ) -> None:
        self.transport = transport
        self.identity = identity
        self._token = token
        self._name = name
        self._events = events
        self._stop = stop
        self._offline_since: float | None = None
        # Shared by concurrent calls, which mix only its statistics.
        self._retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(is_retryable),
            wait=_wait_s,
            stop=self._gives_up,
            sleep=stop.sleep,
            before_sleep=_log_retry,
            reraise=True,
        )

    @property
    def may_enrol_again(self) -> bool:
        """Whether a device whose identity is refused can get another one."""
        return self._token is not None and bool(self.credential)

    @property
    def credential(self) -> str:
        """The device's credential; empty until it has enrolled."""
        return self.identity.credential or ""

    async def call(
        self,
        method: Callable[Concatenate[str, P], Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call a method of the transport, which raises its errors, with the device's credential."""
        return await self._retried(lambda: method(self.credential, *args, **kwargs))

    async def enrol(self) -> None:
        """Enrol the device unless it has an identity.

        Raises:
            ProblemError: The token is not valid.
            SpecError: There is neither an identity nor a token, or the URL has no enrolment.
            TransportError: The server cannot be reached.
        """
        if not self.credential:
            token = self._token
            if token is None:
                raise ArgumentError("token: is required until the device has enrolled")
            message = Enrol(name=self._name, nonce=self.identity.nonce())
            with self._warn_if_slow(), self._checked_url():
                enrolled = await self._retried(lambda: self.transport.enrol(token, message))
            self.identity.enrolled(enrolled)
            self._events.emit("enrolled")

    async def rotate(self) -> None:
        """Replace the credential."""
        answer = await self.call(self.transport.rotate)
        self.identity.renew(answer.credential)

    async def aclose(self) -> None:
        """Close the connections."""
        await self.transport.aclose()

    def set_offline(self, reason: Exception) -> None:
        """Log and report that the server cannot be reached, once per outage."""
        if self._offline_since is None:
            self._offline_since = time.time()
            _log.warning(f"offline since {_hour(self._offline_since)}", reason=str(reason))
            self._events.emit("offline", reason=str(reason))

    def _set_online(self) -> None:
        if self._offline_since is not None:
            _log.info("online again", offline_since=_hour(self._offline_since))
            self._offline_since = None
            self._events.emit("online")

    async def _retried(self, call: Callable[[], Awaitable[T]]) -> T:
        return await self._retrying(self._once, call)

    def _gives_up(self, state: tenacity.RetryCallState) -> bool:
        long = retry_after_s(_failure(state)) > MAX_CALL_WAIT_S
        return state.attempt_number >= _ATTEMPTS or self._stop.is_set() or long

    async def _once(self, call: Callable[[], Awaitable[T]]) -> T:
        try:
            result = await call()
        except (TransportError, MessageError) as exc:
            self.set_offline(exc)
            raise
        self._set_online()
        return result

    @contextmanager
    def _warn_if_slow(self) -> Iterator[None]:
        """Log when the first call takes long: the address may be wrong."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(
            _SLOW_S, lambda: _log.warning("no answer yet", server=self.identity.server)
        )
        try:
            yield
        finally:
            timer.cancel()

    @contextmanager
    def _checked_url(self) -> Iterator[None]:
        """Name the base URL in the error if an aggregator has no enrolment there."""
        try:
            yield
        except ProblemError as exc:
            if exc.code != "not_found":
                raise
            raise ArgumentError(
                f"server: {self.identity.server} is not the base URL of an aggregator: "
                f"{exc.detail}; allowed is http(s)://HOST[:PORT] and the path that a proxy adds"
            ) from exc


def retry_after_s(failure: BaseException | None) -> float:
    """Return a failure's ``Retry-After``, seconds; 0 if it has none."""
    asked = failure.retry_after_s if isinstance(failure, (ProblemError, TransportError)) else None
    return asked or 0.0


def _wait_s(state: tenacity.RetryCallState) -> float:
    return retry_after_s(_failure(state)) + _JITTER(state)


def _log_retry(state: tenacity.RetryCallState) -> None:
    # Without a configuration, structlog prints every level.
    if structlog.is_configured():
        _log.debug("trying again", attempt=state.attempt_number, reason=str(_failure(state)))


def _failure(state: tenacity.RetryCallState) -> BaseException | None:
    return state.outcome.exception() if state.outcome else None


def _hour(at: float) -> str:
    """Return the local time of day."""
    return time.strftime("%H:%M", time.localtime(at))
