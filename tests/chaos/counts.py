"""Counts over any number of runs."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Self


@dataclass
class Counts:
    """A dataclass of counts, lists and maxima, whose names begin with ``most_``."""

    runs: int = 0
    killed_runs: int = 0
    kills: int = 0
    violations: list[str] = field(default_factory=list)

    def add(self, other: Counts) -> None:
        """Add the counts of other runs."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            if name.startswith("most_"):
                setattr(self, name, max(mine, value))
            elif isinstance(mine, Counter):
                mine.update(value)
            else:
                setattr(self, name, mine + value)

    def table(self) -> str:
        """Return a line per count, as Markdown."""
        rows: dict[str, object] = {"violations": len(self.violations)}
        for name, value in vars(self).items():
            if isinstance(value, Counter):
                value = ", ".join(f"{each} {count}" for each, count in sorted(value.items()))
            rows.setdefault(name.replace("_", " "), value)
        return "\n".join(["| | |", "|---|---|", *(f"| {name} | {rows[name]} |" for name in rows)])

    async def add_all(self, play: Callable[[], Awaitable[Self | None]], jobs: int = 1) -> Self:
        """Add runs, some at once, until there are no more; print the progress."""
        began = time.monotonic()

        async def work() -> None:
            while (found := await play()) is not None:
                self.add(found)
                for violation in found.violations:
                    print(violation, file=sys.stderr, flush=True)
                if self.runs % 10 == 0:
                    print(
                        f"{self.runs} runs, {self.kills} kills, "
                        f"{len(self.violations)} violations, {time.monotonic() - began:.0f} s",
                        file=sys.stderr,
                        flush=True,
                    )

        async with asyncio.TaskGroup() as group:
            for _ in range(jobs):
                group.create_task(work())
        return self
