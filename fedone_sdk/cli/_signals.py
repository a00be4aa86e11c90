"""Ctrl-C once ends things in good order; twice ends them."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import typer

__all__ = ["interruptible", "stopping"]

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


@contextmanager
def interruptible(message: str) -> Iterator[None]:
    """Ends the command with 130 at Ctrl-C or SIGTERM, after the work inside has cleaned up.

    Args:
        message: What is printed then: what is kept, and how to go on.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        print(message, file=sys.stderr)
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)
