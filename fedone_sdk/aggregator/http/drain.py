"""Drain: ends open streams when the service stops."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class Drain:
    """Signals that the service is stopping and cancels waits."""

    def __init__(self) -> None:
        self._started = False
        self._timeouts: set[asyncio.Timeout] = set()

    @property
    def started(self) -> bool:
        """Whether the service is stopping."""
        return self._started

    def start(self) -> None:
        """Cancel all current and future waits."""
        self._started = True
        for timeout in self._timeouts:
            timeout.reschedule(0)

    async def unless_started(self, waiting: Awaitable[T]) -> T | None:
        """Return the result of `waiting`; None if the drain starts first, which cancels it."""
        try:
            async with asyncio.timeout(0 if self._started else None) as timeout:
                self._timeouts.add(timeout)
                try:
                    return await waiting
                finally:
                    self._timeouts.discard(timeout)
        except TimeoutError:
            if not timeout.expired():
                raise  # Raised by `waiting` itself.
            return None
