"""Kills a server at every write of its journal, before it and after it, and compares the ends.

python -m tests.chaos.journal
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.databases import Databases, databases_on
from tests.chaos.serving import Death, Deployment, Outcome, Scenario, judge

SCENARIOS = {
    "alpha": Scenario(exchange="alpha", local_steps=2, rounds=3),
    "losses": Scenario(exchange="losses", clients_per_round=2, rounds=3),
}


@dataclass
class Figures:
    """What was found."""

    points: int = 0
    kills: int = 0
    receipts: int = 0
    lost: int = 0
    same: int = 0
    violations: list[str] = field(default_factory=list)


async def play(
    scenario: Scenario, death: Death | None, databases: Databases | None = None
) -> Outcome:
    """One run in a folder of its own, on SQLite or in a database of its own."""
    folder = Path(tempfile.mkdtemp(prefix="fedone-journal-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        store = None if databases is None else stack.enter_context(databases())
        deaths = {} if death is None else {0: death}
        return await Deployment(scenario, folder, store=store).play(deaths)


async def campaign(
    scenario: Scenario,
    *,
    numbers: Iterable[int] | None = None,
    databases: Databases | None = None,
    jobs: int = 2,
) -> Figures:
    """Dies at one write after the other, until a run ends before it comes to that write.

    Args:
        scenario: The run.
        numbers: The writes; all of them by default.
        databases: For PostgreSQL.
        jobs: Runs at once.
    """
    whole = await play(scenario, None, databases)
    figures = Figures(violations=list(whole.violations))
    deaths = (
        Death(at=number, when=when)
        for number in (itertools.count(1) if numbers is None else numbers)
        for when in ("before", "after")
    )
    ended = False

    async def work() -> None:
        nonlocal ended
        for death in deaths:
            if ended:
                return
            outcome = await play(scenario, death, databases)
            figures.kills += outcome.kills
            figures.receipts += outcome.receipts
            figures.lost += outcome.lost
            if outcome.kills:
                figures.points += 1
                figures.same += outcome.alpha_sha256 == whole.alpha_sha256
            elif numbers is None:
                ended = True
            for violation in judge(outcome, whole):
                figures.violations.append(f"{death}: {violation}")

    async with asyncio.TaskGroup() as group:
        for _ in range(jobs):
            group.create_task(work())
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; 1 if anything was violated."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--store", choices=["sqlite", "postgres"], default="sqlite")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once")
    options = parser.parse_args(arguments)
    violations = 0
    print("| run | points | updates acknowledged | lost | same alpha, history and queries | s |")
    print("|---|---|---|---|---|---|")
    with ExitStack() as stack:
        databases = stack.enter_context(databases_on(options.store))
        for name, scenario in SCENARIOS.items():
            began = time.monotonic()
            figures = asyncio.run(campaign(scenario, databases=databases, jobs=options.jobs))
            print(
                f"| {name} | {figures.points} | {figures.receipts} | {figures.lost} | "
                f"{figures.same} | {time.monotonic() - began:.0f} |",
                flush=True,
            )
            for violation in figures.violations:
                print(violation, file=sys.stderr)
            violations += len(figures.violations)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
