"""The clock protocol: time as an argument, so that tests of deadlines do not wait."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """A source of the current time."""

    def now(self) -> float:
        """Return seconds since the Unix epoch."""
        ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        """Return seconds since the Unix epoch."""
        return time.time()
