"""How failures are told: a line each for what a person can mend, a traceback for what is a bug."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeGuard

from fedone_sdk.errors import BackendError, DataError, FedOneError, LabelWordError, SpecError

__all__ = ["naming", "told"]

_EXTRAS = {"alembic", "filelock", "numpy", "onnxruntime", "sqlalchemy", "tokenizers"}
"""Packages that only some extras bring, and that some modules import at their top."""

_FULL = {errno.EFBIG, errno.EIO, errno.ENOSPC}


@contextmanager
def told() -> Iterator[None]:
    """Prints expected errors to stderr, one line per problem, and exits with 2."""
    try:
        yield
    except Exception as exc:
        lines = [line for error in _leaves(exc) for line in _lines(error)]
        if None in lines:
            raise
        if any(_is_full(error) for error in _leaves(exc)):
            _forget_output()
        # Several clients may have failed for one reason.
        print(*dict.fromkeys(lines), sep="\n", file=sys.stderr)
        sys.exit(2)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _lines(error: BaseException) -> Iterator[str | None]:
    """What to print for an error; None where it is none of ours."""
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
    """Whether what a command prints could not be written; a file would have a name."""
    return isinstance(error, OSError) and error.errno in _FULL and error.filename is None


def _forget_output() -> None:
    """Else Python tries once more when it ends, and says so."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@contextmanager
def naming(source: str) -> Iterator[None]:
    """Names the file that a mistake, or a model that fails, stands in."""
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
