"""Runs the quickstart, and draws its output as docs/images/quickstart.svg.

.venv/bin/python scripts/record_quickstart.py
"""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

TARGET = Path(__file__).parent.parent / "docs" / "images" / "quickstart.svg"


def main() -> None:
    """Record one run."""
    command = [sys.executable, "-m", "fedone_sdk.cli", "quickstart"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    )
    console = Console(record=True, width=104, file=io.StringIO())
    console.print(Text("$ fedone quickstart", style="bold"))
    for line in done.stdout.splitlines():
        highlighted = line.startswith(("  verdict ", "  Tuned prompt "))
        console.print(Text(line, style="bold green" if highlighted else ""))
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    console.save_svg(str(TARGET), title="fedone quickstart")


if __name__ == "__main__":
    main()
