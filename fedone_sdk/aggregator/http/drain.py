"""The end of serving: streams that would go on for ever are cut short."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

__all__ = ["Drain"]

T = TypeVar("T")


class Drain:
    """Says whether the service is about to end, and cuts short what only waits."""

    def __init__(self) -> None:
        self._begun = False
        self._waiting: set[asyncio.Timeout] = set()

    @property
    def begun(self) -> bool:
        """Whether it has begun."""
        return self._begun

    def begin(self) -> None:
        """From now on waiting is over at once, also for those who wait already."""
        self._begun = True
        for patience in self._waiting:
            patience.reschedule(0)

    async def unless_begun(self, waiting: Awaitable[T]) -> T | None:
        """What `waiting` comes to; None when it is cut short.

        It is cancelled then, so it must be safe to cancel.
        """
        try:
            async with asyncio.timeout(0 if self._begun else None) as patience:
                self._waiting.add(patience)
                try:
                    return await waiting
                finally:
                    self._waiting.discard(patience)
        except TimeoutError:
            if not patience.expired():
                raise  # It is the waiting's own.
            return None
