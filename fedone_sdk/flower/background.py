"""An event loop in a thread of its own, for Flower's strategies, which are called synchronously."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

__all__ = ["Background"]

T = TypeVar("T")


class Background:
    """Runs coroutines for a caller that has no event loop.

    The loop goes on between two calls: deadlines pass and prompts are measured while the caller
    waits for nodes.
    """

    def __init__(self) -> None:
        self._thread = threading.Thread(target=self._work, name="fedone strategy", daemon=True)
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._over: asyncio.Event

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result.

        Raises:
            Exception: What the coroutine raises.
        """
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _work(self) -> None:
        asyncio.run(self._until_over())

    async def _until_over(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self._ready.set()
        await self._over.wait()
