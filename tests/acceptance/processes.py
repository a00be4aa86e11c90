"""The `fedone` command and other programs as processes, their output in files."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

__all__ = ["PATIENCE_S", "Process", "Start", "free_port", "starting", "until"]

PATIENCE_S = 40.0


class Process:
    """A program under way.

    Args:
        folder: Where it runs and its output is kept.
        number: Names the files of its output.
        arguments: Of `fedone`, or with `program` of Python.
        environment: Variables in addition to the test's own.
        program: Whether the first argument is a file of Python.
    """

    def __init__(
        self,
        folder: Path,
        number: int,
        arguments: tuple[object, ...],
        environment: Mapping[str, str],
        *,
        program: bool = False,
    ) -> None:
        self._out, self._err = folder / f"{number}.out", folder / f"{number}.err"
        module = () if program else ("-m", "fedone_sdk.cli")
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.popen = subprocess.Popen(
                [sys.executable, *module, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
            )

    @property
    def out(self) -> str:
        """What it has printed."""
        return self._out.read_text()

    @property
    def err(self) -> str:
        """What it has printed to standard error."""
        return self._err.read_text()

    def ended(self) -> int:
        """Its exit code, once it has ended."""
        return self.popen.wait(PATIENCE_S)

    def says(self, text: str) -> None:
        """Returns once the output holds `text`."""
        until(lambda: text in self.out + self.err, self)


def until(true: Callable[[], Any], process: Process) -> None:
    """Returns once something is true; a process that ends before is an error."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        # No manual clock reaches into another process.
        assert process.popen.poll() is None, f"ended early: {process.out}{process.err}"
        assert time.monotonic() < deadline, f"waited too long: {process.out}{process.err}"
        time.sleep(0.02)


class Start(Protocol):
    """Starts a `fedone` command, or with `program` a file of Python."""

    def __call__(self, *arguments: object, program: bool = False, **more: str) -> Process: ...


@contextmanager
def starting(folder: Path, **environment: str) -> Iterator[Start]:
    """Starts processes in a folder; those that still run at the end are killed."""
    with ExitStack() as stack:
        count = iter(range(1000))

        def start(*arguments: object, program: bool = False, **more: str) -> Process:
            process = Process(
                folder, next(count), arguments, {**environment, **more}, program=program
            )
            stack.enter_context(process.popen)
            stack.callback(process.popen.kill)
            return process

        yield start


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
