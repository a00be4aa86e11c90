"""The `fedone` command, run in the test's own process, which saves a second per call."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import structlog
from typer.testing import CliRunner

import fedone_sdk.cli
from fedone_sdk.cli.app import app


class Outcome(NamedTuple):
    """What a command left: its exit status, and what it printed."""

    code: int
    out: str
    err: str


Fedone = Callable[..., Outcome]


def the_line(outcome: Outcome) -> str:
    """Return the one line of a command that refused its arguments or files."""
    assert (outcome.code, outcome.out) == (2, "")
    (line,) = outcome.err.splitlines()
    return line


async def invoked(*arguments: str, admin_token: str) -> str:
    """Run a command next to a server in this event loop; return its output, or raise its error."""
    found = await asyncio.to_thread(
        CliRunner().invoke, app, arguments, env={"FEDONE_ADMIN_TOKEN": admin_token}
    )
    if found.exception is not None:
        raise found.exception
    return found.output


@pytest.fixture
def fedone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Fedone]:
    """Runs the console entry point: ``fedone(*arguments, stdin="")``."""
    # Typer and the commands set these for the whole process.
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def run(*arguments: object, stdin: str | bytes = "") -> Outcome:
        monkeypatch.setattr(sys, "argv", ["fedone", *map(str, arguments)])
        given = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), encoding="utf-8"))
        capsys.readouterr()
        code: Any = 0
        try:
            fedone_sdk.cli.main()
        except SystemExit as exit_:
            code = exit_.code
        captured = capsys.readouterr()
        assert "\x1b" not in captured.out + captured.err
        return Outcome(code or 0, captured.out, captured.err)

    yield run
    structlog.reset_defaults()
