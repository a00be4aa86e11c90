"""Calls to an aggregator, with retries; an assignment's deadline; the app's condition for work."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Concatenate, ParamSpec, TypeVar

import structlog

from fedone_sdk import errors
from fedone_sdk.client.options import EventSink, OnlyWhen
from fedone_sdk.client.rows import Declining
from fedone_sdk.client.state import DeviceState, Identity
from fedone_sdk.client.transport import HttpTransport, Network
from fedone_sdk.clock import answer_of, end, within
from fedone_sdk.errors import ArgumentError, MessageError, ProblemError, TransportError
from fedone_sdk.messages import Enrol, Renewal

_log = structlog.get_logger(__name__)

T = TypeVar("T")


class StopSignal:
    """Stops the tasks inside `scope`. The signal is cleared when the last task has left.

    If no task is inside, the signal stops the next task that enters.
    """

    def __init__(self) -> None:
        self._requested = False
        self._num_inside = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waits: set[asyncio.Timeout] = set()

    def set(self) -> None:
        """Request the stop, from any thread."""
        self._requested = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has just been closed
                self._loop.call_soon_threadsafe(self._end_waits)

    def _end_waits(self) -> None:
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(0.0)

    def is_set(self) -> bool:
        """Return whether a stop is requested."""
        return self._requested

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Context of a task that the signal stops; the last task to exit clears the signal."""
        self._num_inside += 1
        self._loop = asyncio.get_running_loop()
        try:
            yield
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self._loop, self._requested = None, False

    async def sleep(self, seconds: float) -> None:
        """Sleep, or return early at the signal."""
        await self.cancel_on(asyncio.sleep(seconds))

    async def cancel_on(self, call: Awaitable[T]) -> T | None:
        """Return the call's result, or None if the signal comes first and cancels the call."""
        wait = asyncio.timeout(0.0 if self._requested else None)
        self._waits.add(wait)
        try:
            async with wait:
                return await call
        except TimeoutError:
            if not wait.expired():
                raise
            return None
        finally:
            self._waits.discard(wait)


_ATTEMPTS = 5

_ANSWER_S = 900.0
"""The longest wait for any transport's answer, seconds; `HttpTransport` has a shorter limit."""

MAX_WAIT_S = 3600.0
"""The longest ``Retry-After`` that is honoured, seconds."""

MAX_CALL_WAIT_S = 3.0
"""The longest ``Retry-After`` that a call waits for, seconds. If the server asks for a longer wait,
the call fails, and `Turn.next_turn_s` contains the wait."""

P = ParamSpec("P")


class Backoff:
    """Exponential backoff with a cap and full jitter: a wait is random, from 0 to the backoff."""

    def __init__(self, first_s: float = 1.0, max_s: float = 300.0) -> None:
        self._first_s, self._max_s, self._failures = first_s, max_s, 0

    def reset(self) -> None:
        """Start again with the first wait, after a success."""
        self._failures = 0

    def next_s(self, asked_s: float | None = None) -> float:
        """Return the wait after a failure: the backoff plus `asked_s`, a ``Retry-After``."""
        bound = min(self._max_s, self._first_s * 2.0 ** min(self._failures, 32))
        self._failures += 1
        return min(asked_s or 0.0, MAX_WAIT_S) + random.uniform(0.0, bound)


class Session:
    """One device's calls to its aggregator: credential, retries, and whether it is online.

    A call is retried a few times within seconds, unless the client is stopped. During a longer
    outage, each `EdgeClient.run_once` makes a new call.

    Attributes:
        offline_since: Start of an outage, seconds since the epoch; None while online.
    """

    def __init__(
        self,
        network: Network,
        state: DeviceState,
        *,
        token: str | None,
        events: EventSink,
        stop: StopSignal,
    ) -> None:
        self.transport = network.transport or HttpTransport(state.server, network=network)
        self._state, self._token, self._name, self._events = state, token, network.name, events
        self._stop = stop
        self.offline_since: float | None = None

    @property
    def may_enrol_again(self) -> bool:
        """Whether a device whose credential is refused can enrol as a new client."""
        return self._token is not None and bool(self.credential)

    @property
    def credential(self) -> str:
        """The device's credential; empty until it has enrolled."""
        return self._state.identity.credential or ""

    async def call(
        self, method: Callable[Concatenate[str, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a method of the transport with the device's credential."""
        return await self._retried(lambda: method(self.credential, *args, **kwargs))

    async def enrol(self) -> None:
        """Enrol the device unless it has an identity."""
        self._state.acquire()
        if not self.credential:
            token = self._token
            if token is None:
                raise ArgumentError(
                    "token: is required until the device has enrolled "
                    "(`fedone client` reads it from FEDONE_TOKEN)"
                )
            nonce = self._state.identity.nonce or secrets.token_urlsafe(32)
            self._state.identity = Identity(nonce=nonce)
            message = Enrol(name=self._name, nonce=nonce)
            try:
                enrolled = await self._retried(lambda: self.transport.enrol(token, message))
            except ProblemError as exc:
                if exc.code != "not_found":
                    raise
                raise ArgumentError(
                    f"server: {self._state.server} is not the base URL of an aggregator: "
                    f"{exc.detail}; it must be http(s)://HOST[:PORT], plus a proxy's path, if any"
                ) from exc
            self._state.identity = Identity(**dict(enrolled))
            self._events.emit("enrolled")

    async def rotate(self) -> None:
        """Replace the credential."""
        answer = await self.call(self.transport.rotate)
        self._state.identity = self._state.identity.model_copy(update=dict(answer))

    def set_offline(self, reason: Exception) -> None:
        """Log and report that the server cannot be reached, once per outage."""
        if self.offline_since is None:
            self.offline_since = time.time()
            _log.warning(f"offline since {_hour(self.offline_since)}", reason=str(reason))
            self._events.emit("offline", reason=str(reason))

    async def _retried(self, call: Callable[[], Awaitable[T]]) -> T:
        waits = Backoff(first_s=0.2, max_s=20.0)
        for _ in range(_ATTEMPTS - 1):
            try:
                return await self._once(call)
            except (ProblemError, TransportError) as exc:
                later = retry_after_s(exc) > MAX_CALL_WAIT_S
                if self._stop.is_set() or later or not errors.is_retryable(exc):
                    raise
                wait_s = waits.next_s(retry_after_s(exc))
            await self._stop.sleep(wait_s)
        return await self._once(call)

    async def _once(self, call: Callable[[], Awaitable[T]]) -> T:
        try:
            result = await within(call(), _ANSWER_S)
        except (TransportError, TimeoutError) as exc:
            failure = TransportError(f"no answer in {_ANSWER_S:.0f} s")
            failure = exc if isinstance(exc, TransportError) else failure
            self.set_offline(failure)
            raise failure from exc
        if self.offline_since is not None:
            _log.info("online again", offline_since=_hour(self.offline_since))
            self.offline_since = None
            self._events.emit("online")
        return result


def retry_after_s(failure: BaseException | None) -> float:
    """Return a failure's ``Retry-After``, seconds; 0 if it has none."""
    return getattr(failure, "retry_after_s", None) or 0.0


def _hour(at: float) -> str:
    return time.strftime("%H:%M", time.localtime(at))


_RETRY_S, _RETRY_SHARE = 3.0, 0.1
"""Wait after a failed renewal, in seconds and as a share of the deadline; the shorter applies."""

_MIN_WAIT_S = 0.2


class Deadline:
    """An assignment's deadline, which a background task renews until the work has ended.

    The server sends the deadline as a number of seconds. It is measured by the event loop's clock,
    because the device's wall clock may be wrong.
    """

    def __init__(self, deadline_s: float, renew: Callable[[], Awaitable[Renewal]]) -> None:
        self._deadline_s = deadline_s
        self._renew = renew
        self._until = asyncio.get_running_loop().time() + deadline_s
        renewing = self._renew_until_refused()
        self._renewing = asyncio.create_task(renewing, name="edge client renewal")

    async def __aenter__(self) -> Deadline:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._renewing.cancel()
        await asyncio.gather(self._renewing, return_exceptions=True)

    @property
    def left_s(self) -> float:
        """Seconds until the server gives the work to another client, if there is no renewal."""
        return self._until - asyncio.get_running_loop().time()

    @property
    def renewable(self) -> bool:
        """Whether the server may still renew the deadline."""
        return not self._renewing.done()

    async def bounded(self, work: Awaitable[T]) -> T:
        """Return the result of the work; cancel the work at a deadline that cannot be renewed.

        Raises:
            Declining: The work was cancelled.
        """
        working = asyncio.ensure_future(work)
        try:
            while not working.done():
                left_s = self.left_s - _MARGIN_S
                if left_s <= 0 and not self.renewable:
                    raise Declining("the work took longer than its deadline")
                await asyncio.wait({working}, timeout=max(left_s, 1.0))
            return working.result()
        finally:
            await end(working)

    async def _renew_until_refused(self) -> None:
        wait_s = self._deadline_s / 2
        while True:
            await asyncio.sleep(max(wait_s, _MIN_WAIT_S))
            sent_at = asyncio.get_running_loop().time()
            try:
                renewed = await self._renew()
            except (ProblemError, TransportError, MessageError) as exc:
                if isinstance(exc, ProblemError) and not errors.is_retryable(exc):
                    return  # the run allows no more renewals, or another client has the work
                wait_s = max(min(_RETRY_S, self._deadline_s * _RETRY_SHARE), retry_after_s(exc))
            else:
                self._deadline_s = renewed.deadline_s
                self._until = sent_at + self._deadline_s
                wait_s = self._deadline_s / 2


CONDITION_POLL_S = 10.0

_MARGIN_S = 2.0
"""Time before the deadline at which work is declined, seconds."""


class Paused(errors.FedOneError):
    """The client was stopped while the app's condition was false; its work stays stored."""


class Condition:
    """The app's condition `Hooks.only_when`: whether the device may work now.

    The events ``paused`` and ``resumed`` report its changes. While the condition is false, work in
    progress waits. When its deadline can no longer be renewed, the work is declined.
    """

    def __init__(self, only_when: OnlyWhen | None, events: EventSink, stop: StopSignal) -> None:
        self._only_when, self._events, self._stop = only_when, events, stop
        self._holds, self._failing = True, False
        self._waiting = asyncio.Lock()

    async def holds(self) -> bool:
        """Return whether the device may work now; False if the app's function fails."""
        if self._only_when is None:
            return True
        try:
            holds = bool(await answer_of(self._only_when()))
            self._failing = False
        except Exception as exc:
            if not self._failing:
                _log.warning("only_when failed: no work while it fails", error=type(exc).__name__)
            holds, self._failing = False, True
        if holds != self._holds:
            self._holds = holds
            self._events.emit("resumed" if holds else "paused")
        return holds

    async def wait(self) -> None:
        """Wait until a request for scores may be sent."""
        async with self._waiting:  # concurrent queries share one wait
            while not await self.holds():
                if self._stop.is_set():
                    raise Paused
                await self._stop.sleep(CONDITION_POLL_S)
