"""Signal handling: the first Ctrl-C stops gracefully, the second at once."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import typer

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stopping(stop: Callable[[], object]) -> Iterator[None]:
    """Calls `stop` at the first SIGINT or SIGTERM; a second one has its default effect."""
    loop = asyncio.get_running_loop()

    def restore() -> None:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    def first() -> None:
        restore()
        stop()

    # Windows does not support these handlers; Ctrl-C then ends the command at once.
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
    """Exits with 130 at Ctrl-C or SIGTERM, after the body has cleaned up."""

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
