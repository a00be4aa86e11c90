"""Time as an argument, so that tests of deadlines do not wait; and waits with a limit."""

from __future__ import annotations

import asyncio
import email.utils
import inspect
import time
from collections.abc import Awaitable
from typing import Any, Protocol, TypeVar

__all__ = ["Clock", "SystemClock", "answer_of", "end", "wait_until_s", "within"]

T = TypeVar("T")


class Clock(Protocol):
    """A source of the current time, which advances by what has elapsed."""

    def now(self) -> float:
        """Return seconds since the Unix epoch."""
        ...


def _elapsed_s() -> float:
    """Return the seconds since some moment, with those of a suspended machine where it tells."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


class SystemClock:
    """The machine's clock as of the start, advanced by a monotonic clock.

    A store keeps durations (deadlines, pauses, retention) as instants. They hold when somebody sets
    the machine's clock, because this clock never jumps.
    """

    def __init__(self) -> None:
        self.set(time.time())

    def set(self, now: float) -> None:
        """Continue from a time, seconds since the epoch: that of the store that replicas share."""
        self._start = now - _elapsed_s()

    def now(self) -> float:
        """Return seconds since the Unix epoch."""
        return self._start + _elapsed_s()


def wait_until_s(then: str, now: str | None) -> float | None:
    """Return the seconds between two dates of HTTP, such as ``Retry-After`` and ``Date``.

    Both are by the sender's clock: that of this machine may be wrong. None without one of them.
    """
    try:
        until, at = [email.utils.parsedate_to_datetime(text or "") for text in (then, now)]
        return max((until - at).total_seconds(), 0.0)
    except (ValueError, TypeError, OverflowError):
        return None


async def within(call: Awaitable[T], seconds: float | None = None, *, grace_s: float = 1.0) -> T:
    """Return the result of a call, which ends with its time or with the caller, by `end`.

    Raises:
        TimeoutError: Its time is over.
    """
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        await end(task, grace_s)


async def end(task: asyncio.Future[Any], grace_s: float = 1.0) -> None:
    """Cancel a task; one that ignores it for `grace_s` seconds is left behind."""
    # Also of a task that failed while its caller was cancelled, or asyncio logs it.
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    if not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=grace_s)


async def answer_of(given: Any) -> Any:
    """Return the answer of an app's function, plain or async, which cannot hold up the caller."""
    return await within(given, grace_s=0.1) if inspect.isawaitable(given) else given
