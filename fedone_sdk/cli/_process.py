"""The process of a command: signals, and its log."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import structlog
import typer

from fedone_sdk.cli._output import note

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stopping(stop: Callable[[], object], *, then_cancel: bool = False) -> Iterator[None]:
    """Call `stop` at the first SIGINT or SIGTERM; a second one ends the process at once.

    With `then_cancel`, a second SIGINT cancels the main task of `asyncio.run`, which cleans up.
    """
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def restore() -> None:
        for number, handler in before.items():
            if loop.remove_signal_handler(number) and then_cancel:
                signal.signal(number, handler)

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
    """Exit with 130 at Ctrl-C or SIGTERM, after the body has cleaned up."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        note(message)
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def quiet_logs() -> None:
    """Log warnings and errors to stderr, in human-readable form."""
    structlog.configure(
        processors=[
            structlog.stdlib.add_log_level,
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(),
                # The default formatter prints local variables, which may contain private texts.
                exception_formatter=structlog.dev.plain_traceback,
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        # Resolved for each line, because a live display replaces stderr.
        logger_factory=_current_stderr,
        cache_logger_on_first_use=False,
    )


def json_logs(level: str = "info", **always: str) -> None:
    """Log one JSON object per line to stdout."""

    def add(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {**always, **event}

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            add,
            structlog.stdlib.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.PrintLoggerFactory(sys.stdout),
    )


def _current_stderr(*_: Any) -> structlog.PrintLogger:
    return structlog.PrintLogger(sys.stderr)
