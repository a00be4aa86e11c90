"""Processes under test: own environment, output in a file, always ended."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import ProxyHandler, Request, build_opener

import pytest

PATIENCE_S = 120.0

_opener = build_opener(ProxyHandler({}))


class Process:
    """A running command; `separate` keeps its standard error apart from the log, in `err`."""

    def __init__(
        self,
        argv: list[str],
        environment: Mapping[str, str],
        folder: Path,
        name: str,
        *,
        start_new_session: bool = False,
        separate: bool = False,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.patience_s = patience_s
        self._log = folder / f"{name}.log"
        self._err = folder / f"{name}.err" if separate else None
        files = (self._log,) if self._err is None else (self._log, self._err)
        # Where this process starts: others of its name may have written before it.
        self._starts = {file: file.stat().st_size if file.exists() else 0 for file in files}
        with self._log.open("ab") as log, (self._err or self._log).open("ab") as err:
            self.popen = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=err,
                cwd=folder,
                env=environment,
                start_new_session=start_new_session,
            )

    @property
    def log(self) -> str:
        """All that it wrote, and others of its name before it."""
        return self._log.read_text(errors="replace")

    @property
    def err(self) -> str:
        """Its standard error, if that is separate."""
        return "" if self._err is None else self._err.read_text(errors="replace")

    def says(self, text: str) -> None:
        """Wait until it has written `text`."""
        until(lambda: any(text.encode() in written for written in self._written()), self)

    def _written(self) -> Iterator[bytes]:
        for file, start in self._starts.items():
            yield file.read_bytes()[start:]

    def ended(self) -> int:
        """Its exit status, once it has ended."""
        return self.popen.wait(self.patience_s)

    def stop(self) -> int:
        """Ends it as a service manager does; its exit status."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
        return self.ended()


@contextmanager
def running(
    argv: list[str], environment: Mapping[str, str], folder: Path, name: str
) -> Iterator[Process]:
    """A process that does not outlive the block."""
    process = Process(argv, environment, folder, name)
    try:
        yield process
    finally:
        process.popen.kill()
        process.popen.wait()


def until(true: Callable[[], object], *processes: Process, patience_s: float | None = None) -> None:
    """Waits for something that a process does; an error if one of `processes` ends before."""
    if patience_s is None:
        patience_s = max((each.patience_s for each in processes), default=PATIENCE_S)
    deadline = time.monotonic() + patience_s
    while not true():
        for process in processes:
            assert process.popen.poll() is None, f"ended early: {process.log}{process.err}"
        logs = "\n".join(process.log + process.err for process in processes)
        assert time.monotonic() < deadline, f"waited too long: {logs}"
        time.sleep(0.05)


def fetch(url: str, *, token: str | None = None) -> bytes | None:
    """The body of a 200; None where there is no such answer."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        with _opener.open(Request(url, headers=headers), timeout=10) as response:
            return bytes(response.read())
    except (URLError, OSError):
        return None


def free_port() -> int:
    """A port of loopback without a listener.

    The system gives no port below 32768 to other sockets, so a server that restarts finds it free.
    """
    while True:
        with socket.socket() as listener, suppress(OSError):
            # Test processes with an equal seed would draw the same port.
            port = random.SystemRandom().randrange(20000, 32768)
            listener.bind(("127.0.0.1", port))
            return port


def tool(name: str, package: str) -> str:
    """A program of the system; a skip where it is missing, but not in CI."""
    found = shutil.which(name)
    if found is None:
        reason = f"{name} is not installed: scripts/install-deploy-tools, or {package}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found
