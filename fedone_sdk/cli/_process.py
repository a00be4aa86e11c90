"""Signals, logs and printed errors of a command's process."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeGuard

import structlog
import typer

from fedone_sdk import errors
from fedone_sdk.cli._output import note
from fedone_sdk.errors import BackendError, DataError, FedOneError, LabelWordError, SpecError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ONE_SIGNAL_S = 0.1


@contextmanager
def stopping(stop: Callable[[], object], *, then_cancel: bool = False) -> Iterator[None]:
    """Call `stop` at the first SIGINT or SIGTERM; a second signal ends the process at once.

    Signals within `_ONE_SIGNAL_S` count as one, because GNU's `timeout` sends each signal twice.
    With `then_cancel`, a second SIGINT only cancels the main task of `asyncio.run`.
    """
    loop = asyncio.get_running_loop()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}

    def restore() -> None:
        for number, handler in handlers.items():
            if loop.remove_signal_handler(number) and then_cancel:
                signal.signal(number, handler)

    def first() -> None:
        for number in _SIGNALS:
            loop.add_signal_handler(number, lambda: None)
        loop.call_later(_ONE_SIGNAL_S, restore)
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
    """At Ctrl-C or SIGTERM, let the ``with`` body clean up, print `message`, and exit with 130."""

    def interrupt(*_: object) -> None:
        # SIGINT cancels the main task of asyncio.run, and raises KeyboardInterrupt in other code.
        signal.raise_signal(signal.SIGINT)

    handler = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        note(message)
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, handler)


class _Printer(structlog.PrintLogger):
    """Drops a line that cannot be written, so that a full disk fails no request."""

    def msg(self, message: str) -> None:
        with suppress(OSError):
            super().msg(message)

    debug = info = warning = error = critical = msg


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
        # stderr is looked up for each line, because a progress display replaces it.
        logger_factory=lambda *_: _Printer(sys.stderr),
        cache_logger_on_first_use=False,
    )


def json_logs(level: str = "info", **fields: str) -> None:
    """Log one JSON object per line to stdout; `fields` are added to each object."""

    def add(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {**fields, **event}

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
        logger_factory=lambda *_: _Printer(sys.stdout),
    )


_EXTRAS = {"alembic", "filelock", "numpy", "onnxruntime", "sqlalchemy", "tokenizers"}
"""Packages of optional extras that some modules import at their top."""

_WRITE_ERRORS = {errno.EFBIG, errno.EIO, errno.ENOSPC}


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Print expected errors to stderr, one line per problem, and exit with 2."""
    try:
        yield
    except Exception as exc:
        leaves = [*_leaves(exc)]
        lines = [line for error in leaves for line in _lines(error)]
        if None in lines:
            raise
        if any(map(_is_write_error, leaves)):
            # Python's flush of stdout at exit would print another error.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        # Several clients may fail for the same reason: print each line once.
        print(*dict.fromkeys(lines), sep="\n", file=sys.stderr)
        sys.exit(2)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _lines(error: BaseException) -> Iterator[str | None]:
    """Yield the lines to print for an error; None for an unexpected error."""
    if isinstance(error, SpecError):
        for problem in error.problems:
            yield " ".join(f"{error.source}: {problem}".splitlines())
    elif isinstance(error, FedOneError):
        yield " ".join(str(error).splitlines())
    elif isinstance(error, ModuleNotFoundError) and error.name in _EXTRAS:
        yield f"this command needs more packages: {errors.installing('cli', 'local', 'server')}"
    elif _is_write_error(error):
        yield f"output cannot be written: {error.strerror}"
    else:
        yield None


def _is_write_error(error: BaseException) -> TypeGuard[OSError]:
    return isinstance(error, OSError) and error.errno in _WRITE_ERRORS and error.filename is None


@contextmanager
def errors_in(source: str) -> Iterator[None]:
    """Add a file's name to errors about the file's contents, and about the model that it names."""
    try:
        yield
    except SpecError as exc:
        if exc.source != "spec":
            raise
        raise SpecError(exc.problems, source=source) from exc
    except LabelWordError as exc:
        problems = [f"task.labels: {problem}" for problem in exc.problems]
        raise SpecError(problems, source=source) from exc
    except (BackendError, DataError) as exc:
        raise SpecError(str(exc), source=source) from exc
