"""`fedone`, the command: builds objects, holds no logic."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

__all__ = ["main"]


def main() -> None:
    """Runs the command that the arguments name."""
    # Matrices here are small: on busy cores OpenBLAS's threads wait for one another, not for them.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        _run()
    except KeyboardInterrupt:  # while modules were loaded: a command says more of it
        sys.exit(130)


def _run() -> None:
    if any(find_spec(name) is None for name in ("rich", "typer", "yaml")):
        print("the fedone command needs an extra: pip install 'fedone-sdk[cli]'", file=sys.stderr)
        sys.exit(2)
    from fedone_sdk.cli._failures import told
    from fedone_sdk.cli.app import app

    with told():
        app(prog_name="fedone")
