"""An event loop in its own thread, because Flower calls strategies synchronously."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

T = TypeVar("T")


class Background:
    """Runs coroutines for a synchronous caller.

    The loop also runs between two calls: deadlines expire and evaluations finish while the caller
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

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine, and return its result.

        Raises:
            Exception: The coroutine's exception.
        """
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _work(self) -> None:
        asyncio.run(self._until_over())

    async def _until_over(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self._ready.set()
        await self._over.wait()
