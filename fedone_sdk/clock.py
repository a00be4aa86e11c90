"""Clocks, which tests replace to avoid waiting, and functions that await with a time limit."""

from __future__ import annotations

import asyncio
import email.utils
import inspect
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

__all__ = ["Clock", "SystemClock", "answer_of", "end", "is_async", "wait_until_s", "within"]

T = TypeVar("T")


@runtime_checkable
class Clock(Protocol):
    """A source of the current time."""

    def now(self) -> float:
        """Return seconds since the Unix epoch."""


def _elapsed_s() -> float:
    """Return monotonic seconds; on Linux they also count while the machine is suspended."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


class SystemClock:
    """The machine's time at the start, advanced by a monotonic clock.

    This clock never jumps, so stored deadlines do not move when the machine's clock is set.
    """

    def __init__(self) -> None:
        self.set(time.time())

    def set(self, now: float) -> None:
        """Set the time, seconds since the epoch, for example to that of a shared database."""
        self._start = now - _elapsed_s()

    def now(self) -> float:
        """Return seconds since the Unix epoch."""
        return self._start + _elapsed_s()


def wait_until_s(then: str, now: str | None) -> float | None:
    """Return the seconds between two HTTP dates, such as ``Retry-After`` and ``Date``.

    Both dates come from the sender's clock. Returns None if a date is missing or invalid.
    """
    try:
        until, at = [email.utils.parsedate_to_datetime(text or "") for text in (then, now)]
        return max((until - at).total_seconds(), 0.0)
    except (ValueError, TypeError, OverflowError):
        return None


async def within(call: Awaitable[T], seconds: float | None = None, *, grace_s: float = 1.0) -> T:
    """Return the result of a call; cancel the call after `seconds`, or if the caller is cancelled.

    Raises:
        TimeoutError: The call took longer than `seconds`.
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
    """Cancel a task, and wait at most `grace_s` seconds for it to end."""
    # Retrieves the exception, because asyncio logs exceptions that are not retrieved.
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    if not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=grace_s)


def is_async(function: Callable[..., Any] | None) -> bool:
    """Return whether a function, or an object's ``__call__``, is async."""
    while isinstance(function, partial):
        function = function.func
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


async def answer_of(returned: Any) -> Any:
    """Return what an app's function returned; if that is an awaitable, await it."""
    return await within(returned, grace_s=0.1) if inspect.isawaitable(returned) else returned
