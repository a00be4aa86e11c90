"""A cooperative stop signal for the client's turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterator
from typing import TypeVar

T = TypeVar("T")


class StopSignal:
    """Cooperative stop signal, cleared once every task inside `scope` has exited.

    It applies to the tasks inside `scope`, or else to the next one that enters, so that a task
    that was created but has not started yet stops too.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._num_inside = 0

    def set(self) -> None:
        """Request the stop."""
        self._event.set()

    def is_set(self) -> bool:
        """Return whether a stop is requested."""
        return self._event.is_set()

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Mark a task that returns soon after the signal; the last one to exit clears it."""
        self._num_inside += 1
        try:
            yield
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                # A new event instead of `clear`: an event is bound to the loop that waited for
                # it, and the next task may run in another loop.
                self._event = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        """Sleep, or return early at the signal."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._event.wait()

    async def cancel_on(self, call: Awaitable[T]) -> T | None:
        """Return the call's result, or None if the signal came first and cancelled the call."""
        working = asyncio.ensure_future(call)
        stopping = asyncio.create_task(self._event.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            working.cancel()
            stopping.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)
