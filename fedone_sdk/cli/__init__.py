"""The command `fedone`."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from io import TextIOWrapper

from fedone_sdk.errors import installing

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
    # The matrices are small, so several threads of OpenBLAS would mostly wait for each other.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Otherwise the store could get the descriptor of a closed stream, to which libraries write.
    for name, mode in ("stdin", "r"), ("stdout", "w"), ("stderr", "w"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, errors="replace"))  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):
        # Print escapes for characters that the encoding of stdout cannot represent.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _run()
    except KeyboardInterrupt:  # Ctrl-C during imports. A running command handles Ctrl-C itself.
        sys.exit(130)
    except Exception as exc:
        # pydantic raises this error at Ctrl-C while it builds a validator.
        if type(exc).__name__ == "SchemaError" and "KeyboardInterrupt" in str(exc):
            sys.exit(130)
        raise


def _run() -> None:
    if any(find_spec(name) is None for name in ("rich", "typer", "yaml")):
        print(f"the fedone command needs an extra: {installing('cli')}", file=sys.stderr)
        sys.exit(2)
    from fedone_sdk.cli._process import reporting_errors
    from fedone_sdk.cli.app import app

    with reporting_errors():
        app(prog_name="fedone")
