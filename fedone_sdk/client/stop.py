"""An app's wish that its client stops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterator
from typing import TypeVar

__all__ = ["Stop"]

T = TypeVar("T")


class Stop:
    """A wish to stop: it ends waits, and is over when all whom it is meant for have returned.

    It is meant for who is inside `heeded`, or else for who enters next: a task that was made, but
    has not begun yet, is stopped too.
    """

    def __init__(self) -> None:
        self._wished = asyncio.Event()
        self._num_inside = 0

    def wish(self) -> None:
        """Asks to stop."""
        self._wished.set()

    def wished(self) -> bool:
        """Whether to stop."""
        return self._wished.is_set()

    @contextlib.contextmanager
    def heeded(self) -> Iterator[None]:
        """Those inside return soon after a wish; the last of them fulfils it."""
        self._num_inside += 1
        try:
            yield
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                # Not `clear`: an event belongs to the loop in which it was waited for, and the
                # next to enter may be in another.
                self._wished = asyncio.Event()

    async def pause(self, seconds: float) -> None:
        """Waits so long, or until there is a wish."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wished.wait()

    async def unless_wished(self, call: Awaitable[T]) -> T | None:
        """The call's result, or None if there was a wish first."""
        working = asyncio.ensure_future(call)
        stopping = asyncio.create_task(self._wished.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            working.cancel()
            stopping.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)
