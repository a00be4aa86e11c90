"""Ctrl-C once ends things in good order; twice ends them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

__all__ = ["stopping"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stopping(stop: Callable[[], object]) -> Iterator[None]:
    """Calls `stop` at the first SIGINT or SIGTERM; a second one has its ordinary effect."""
    loop = asyncio.get_running_loop()

    def restore() -> None:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    def first() -> None:
        restore()
        stop()

    # Windows has no such handlers; Ctrl-C then ends the command at once.
    with suppress(NotImplementedError):
        for number in _SIGNALS:
            loop.add_signal_handler(number, first)
    try:
        yield
    finally:
        with suppress(NotImplementedError):
            restore()
