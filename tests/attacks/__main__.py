"""Run all attacks and print one table; exit with 1 if one reaches its goal.

Arguments are parts of names: only attacks that contain one of them are run.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path

import structlog
from rich.console import Console
from rich.table import Table

from tests.attacks import all_attacks, before, run_attack


def _outcome(name: str) -> tuple[bool, str]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            return True, run_attack(name, Path(folder))
        except Exception as exc:
            return False, f"SUCCEEDS: {type(exc).__name__}: {exc}"


def main(parts: list[str]) -> int:
    """Run the attacks whose name contains one of the parts; all without parts."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    table = Table("attack", "before", "now", show_lines=True)
    wanted = [one for one in all_attacks() if not parts or any(part in one for part in parts)]
    held = []
    for name in wanted:
        passed, reached = _outcome(name)
        held.append(passed)
        table.add_row(name, before(name), reached)
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    print(f"{sum(held)} of {len(held)} attacks fail")
    return 0 if held and all(held) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
