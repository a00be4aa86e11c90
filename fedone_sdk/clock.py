"""The clock protocol: time as an argument, so that tests of deadlines do not wait."""

from __future__ import annotations

import email.utils
import time
from typing import Protocol

__all__ = ["Clock", "SystemClock", "wait_until_s"]


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
