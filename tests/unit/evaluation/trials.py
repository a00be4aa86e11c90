"""Trials that take no time, for tests of what runs them: workers import them by name."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

from fedone_sdk.errors import DataError
from fedone_sdk.evaluation.engine import Result, Trial, Workspace


def double(options: dict[str, Any], workspace: Workspace) -> Result:
    """Doubles a number, and counts how often it was run."""
    runs = workspace.file("runs.txt")
    count = int(runs.read_text()) + 1 if runs.exists() else 1
    runs.write_text(str(count))
    texts = {name: path.read_text() for name, path in workspace.inputs.items()}
    return {
        "twice": 2 * options["number"],
        "runs": count,
        "texts": texts,
        "pid": os.getpid(),
        "gpu": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "context": workspace.context,
        "note": f"number {options['number']}",
    }


def refuse(options: dict[str, Any], workspace: Workspace) -> Result:
    raise DataError("no such\nthing")


def fail_at_first(options: dict[str, Any], workspace: Workspace) -> Result:
    mark = workspace.file("tried")
    if mark.exists():
        return {"twice": 0}
    mark.touch()
    raise ZeroDivisionError("once")


def die(options: dict[str, Any], workspace: Workspace) -> Result:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def hang(options: dict[str, Any], workspace: Workspace) -> Result:
    """Says who it is, and never ends."""
    Path(options["fifo"]).write_text(str(os.getpid()))
    threading.Event().wait()
    return {}


def not_a_number(options: dict[str, Any], workspace: Workspace) -> Result:
    return {"twice": float("nan")}


def number(value: int, **changes: Any) -> Trial:
    options = {"number": value, "seed": value}
    return Trial(**{"key": f"n{value}", "run": double, "options": options, **changes})
