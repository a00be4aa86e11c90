"""Kills servers at random moments until their run has ended, and compares it with one in peace.

python -m tests.chaos.served_runs --runs 200 --jobs 2 --store sqlite
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.databases import Databases, databases_on
from tests.chaos.serving import Deployment, Outcome, Scenario, judge


@dataclass
class Figures:
    """What was found, over any number of runs."""

    runs: int = 0
    killed_runs: int = 0
    kills: int = 0
    receipts: int = 0
    lost: int = 0
    same: int = 0
    asked: int = 0
    requests: int = 0
    over_cap: int = 0
    violations: list[str] = field(default_factory=list)

    def add(self, scenario: Scenario, outcome: Outcome, whole: Outcome) -> None:
        """Takes another run in."""
        found = judge(outcome, whole)
        self.runs += 1
        self.killed_runs += outcome.kills > 0
        self.kills += outcome.kills
        self.receipts += outcome.receipts
        self.lost += outcome.lost
        self.same += outcome.alpha_sha256 == whole.alpha_sha256
        self.asked += outcome.asked
        self.requests += outcome.requests
        self.over_cap += max(outcome.queries - scenario.queries, 0)
        self.violations += [f"run {scenario.seed}: {each}" for each in found]


async def play(
    seed: int, *, databases: Databases | None = None, replicas: int = 1, keep: bool = True
) -> Figures:
    """Plays a run in peace and again under kills.

    Args:
        seed: Of everything that is random about it.
        databases: For PostgreSQL.
        replicas: Servers, all of which may be killed.
        keep: Whether the folder of a run with violations stays.
    """
    scenario, figures = Scenario.draw(seed), Figures()
    folder = Path(tempfile.mkdtemp(prefix=f"fedone-served-{seed}-"))
    with ExitStack() as stack:
        stores = [None if databases is None else stack.enter_context(databases()) for _ in range(2)]
        for name in ("whole", "killed"):
            (folder / name).mkdir()
        whole = await Deployment(scenario, folder / "whole", store=stores[0]).play()
        rng = random.Random(f"kills {seed}")

        async def kill(deployment: Deployment) -> None:
            # About three in each life of a run in peace; a start takes a part of it, too.
            for _ in range(rng.randint(2, 6)):
                await asyncio.sleep(rng.uniform(0.02, whole.wall_s / 2))
                deployment.kill(rng.randrange(replicas))

        killed = Deployment(scenario, folder / "killed", store=stores[1], replicas=replicas)
        figures.add(scenario, await killed.play(chaos=kill), whole)
    if figures.violations and keep:
        figures.violations.append(f"run {seed}: see {folder}")
    else:
        shutil.rmtree(folder)
    return figures


async def campaign(
    runs: int, *, first_seed: int, jobs: int, databases: Databases | None, replicas: int = 1
) -> Figures:
    """Plays runs, several at a time, until so many of them were killed."""
    total = Figures()
    seed = first_seed
    began = time.monotonic()

    async def work() -> None:
        nonlocal seed
        while total.killed_runs < runs:
            seed += 1
            figures = await play(seed - 1, databases=databases, replicas=replicas)
            for name, value in vars(figures).items():
                setattr(total, name, getattr(total, name) + value)
            if total.runs % 10 == 0:
                print(
                    f"{total.killed_runs} killed runs, {total.kills} kills, "
                    f"{len(total.violations)} violations, {time.monotonic() - began:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )

    async with asyncio.TaskGroup() as group:
        for _ in range(jobs):
            group.create_task(work())
    return total


def report(figures: Figures) -> str:
    """The figures as Markdown."""
    rows = {
        "runs killed at least once": figures.killed_runs,
        "runs that ended before their kill": figures.runs - figures.killed_runs,
        "kills of a server": figures.kills,
        "updates acknowledged to devices": figures.receipts,
        "**of them lost**": figures.lost,
        "**queries over a cap**": figures.over_cap,
        "requests that reached the model": figures.asked,
        "requests charged (under way at a kill: in full)": figures.requests,
        "**same alpha as without kills**": f"{figures.same} of {figures.runs}",
        "violations of any kind": len(figures.violations),
    }
    lines = [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join(["| | |", "|---|---|", *lines])


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; 1 if anything was violated."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=200, help="killed runs")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once")
    parser.add_argument("--store", choices=["sqlite", "postgres"], default="sqlite")
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        databases = stack.enter_context(databases_on(options.store))
        figures = asyncio.run(
            campaign(options.runs, first_seed=options.seed, jobs=options.jobs, databases=databases)
        )
    print(report(figures))
    for violation in figures.violations:
        print(violation, file=sys.stderr)
    return 1 if figures.violations else 0


if __name__ == "__main__":
    sys.exit(main())
