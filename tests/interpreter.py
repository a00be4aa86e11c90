"""Programs in a new interpreter, in which no other test has imported anything."""

from __future__ import annotations

import subprocess
import sys


def printed_by(code: str) -> str:
    """Return what a program prints; warnings are errors."""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def loaded_by(code: str, *modules: str) -> list[str]:
    """Return which of these modules a program loads."""
    report = f"import sys; print(*(name for name in {modules} if name in sys.modules))"
    return printed_by(f"{code}\n{report}").split()
