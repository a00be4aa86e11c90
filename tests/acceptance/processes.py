"""The `fedone` command and other programs as processes, their output in files."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from tests.processes import Process

_PATIENCE_S = 40.0
_ROOT = str(Path(__file__).parents[2])


class Start(Protocol):
    """Starts a `fedone` command, or with `program` a file of Python."""

    def __call__(self, *arguments: object, program: bool = False, **more: str) -> Process: ...


@contextmanager
def starting(folder: Path, **environment: str) -> Iterator[Start]:
    """Starts processes in a folder; those that still run at the end are killed."""
    with ExitStack() as stack:
        count = iter(range(1000))

        def start(*arguments: object, program: bool = False, **more: str) -> Process:
            module = () if program else ("-m", "fedone_sdk.cli")
            process = Process(
                [sys.executable, *module, *map(str, arguments)],
                {**os.environ, "PYTHONPATH": _ROOT, **environment, **more},
                folder,
                str(next(count)),
                separate=True,
                patience_s=_PATIENCE_S,
            )
            stack.enter_context(process.popen)
            stack.callback(process.popen.kill)
            return process

        yield start
