"""The fake server in a separate process, for tests whose subject runs its own event loop."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.fake_openai.log import Received, read_log

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class FakeProcess:
    """A running server.

    Attributes:
        url: Its base URL.
        log: The file with its requests.
    """

    url: str
    log: Path

    @property
    def received(self) -> list[Received]:
        """All requests so far."""
        return read_log(self.log)


@contextmanager
def fake_process(log: Path, *arguments: str) -> Iterator[FakeProcess]:
    """Run `python -m tests.fake_openai` for the duration of the block."""
    command = [sys.executable, "-m", "tests.fake_openai", "--log", str(log), *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield FakeProcess(process.stdout.readline().strip(), log)
        finally:
            process.kill()
