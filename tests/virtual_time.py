"""Waits of minutes in no time: an event loop with a virtual clock."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

_THREADS_S = 10.0


class VirtualTime(asyncio.SelectorEventLoop):
    """An event loop that jumps over every wait, and fails where it would wait for ever."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self.now


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: VirtualTime) -> None:
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            woken = super().select(_THREADS_S)  # by a thread, whose time is real
            if not woken:
                raise RuntimeError("everybody waits, and nothing will ever happen")
            return woken
        self.loop.now += timeout
        return super().select(0)


def on_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualTime) as runner:
            runner.run(test(*args, **kwargs))

    return run


def now() -> float:
    return asyncio.get_running_loop().time() - 1000.0
