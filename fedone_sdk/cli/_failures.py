"""Reporting of errors: one line for errors that the user can correct, a traceback for bugs."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeGuard

from fedone_sdk.errors import BackendError, DataError, FedOneError, LabelWordError, SpecError

_EXTRAS = {"alembic", "filelock", "numpy", "onnxruntime", "sqlalchemy", "tokenizers"}
"""Packages of extras that some modules import at their top."""

_FULL = {errno.EFBIG, errno.EIO, errno.ENOSPC}


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Print expected errors to stderr, one line per problem, and exit with 2."""
    try:
        yield
    except Exception as exc:
        lines = [line for error in _leaves(exc) for line in _lines(error)]
        if None in lines:
            raise
        if any(_is_full(error) for error in _leaves(exc)):
            _detach_stdout()
        # Several clients may have failed for the same reason.
        print(*dict.fromkeys(lines), sep="\n", file=sys.stderr)
        sys.exit(2)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _lines(error: BaseException) -> Iterator[str | None]:
    """Yield the lines to print for an error; None for an unexpected one."""
    if isinstance(error, SpecError):
        for problem in error.problems:
            yield " ".join(f"{error.source}: {problem}".splitlines())
    elif isinstance(error, FedOneError):
        yield " ".join(str(error).splitlines())
    elif isinstance(error, ModuleNotFoundError) and error.name in _EXTRAS:
        yield f"this command needs {error.name}: pip install 'fedone-sdk[all]'"
    elif _is_full(error):
        yield f"output cannot be written: {error.strerror}"
    else:
        yield None


def _is_full(error: BaseException) -> TypeGuard[OSError]:
    """Whether standard output could not be written; errors of files have a file name."""
    return isinstance(error, OSError) and error.errno in _FULL and error.filename is None


def _detach_stdout() -> None:
    """Prevents Python's flush at exit, which would print another error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@contextmanager
def naming(source: str) -> Iterator[None]:
    """Add the file to errors in it, and to failures of its model."""
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
