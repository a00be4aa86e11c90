"""Kills replicas during rounds, and compares the result with that of one server without kills.

Three servers on one PostgreSQL; each message of a device goes to the next of them. Each dies once:
while it asks the model, at or during a commit, or when it leads; then some die at random moments.

    python -m tests.chaos.replicas --runs 30
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.databases import Databases, databases_on
from tests.chaos.serving import Death, Deployment, Outcome, Scenario, judge

NUM_REPLICAS = 3


@dataclass
class Figures:
    """What was found, over any number of runs."""

    runs: int = 0
    kills: int = 0
    deaths: Counter[str] = field(default_factory=Counter)
    receipts: int = 0
    lost: int = 0
    asked: int = 0
    requests: int = 0
    same: int = 0
    violations: list[str] = field(default_factory=list)

    def add(self, other: Figures) -> None:
        """Takes other figures in."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            if isinstance(mine, Counter):
                mine.update(value)
            else:
                setattr(self, name, mine + value)


def deaths_of(rng: random.Random) -> dict[int, Death]:
    """How each replica dies first."""
    deaths = [
        Death(at=rng.randint(1, 12), what="question"),
        Death(
            at=rng.randint(2, 20),
            when=rng.choice(["before", "during", "after"]),
            delay_s=rng.uniform(0.0, 0.003),
        ),
        Death(at=rng.randint(1, 3), what="lead"),
    ]
    rng.shuffle(deaths)
    return dict(enumerate(deaths))


async def play(
    scenario: Scenario,
    deaths: Mapping[int, Death],
    databases: Databases,
    *,
    more_kills: int = 0,
    keep: bool = True,
) -> Figures:
    """Plays a run on one server in peace, and again on replicas that die.

    Args:
        scenario: The run.
        deaths: How replicas die first.
        databases: Where.
        more_kills: At random moments.
        keep: Whether the folder of a run with violations stays.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"fedone-replicas-{scenario.seed}-"))
    for name in ("one", "three"):
        (folder / name).mkdir()
    rng = random.Random(f"kills {scenario.seed}")

    async def kill(deployment: Deployment) -> None:
        for _ in range(more_kills):
            await asyncio.sleep(rng.uniform(0.1, 1.5))
            deployment.kill(rng.randrange(NUM_REPLICAS))

    one = await Deployment(scenario, folder / "one").play()
    with ExitStack() as stack:
        three = Deployment(
            scenario,
            folder / "three",
            store=stack.enter_context(databases()),
            replicas=NUM_REPLICAS,
        )
        outcome = await three.play(deaths, chaos=kill)
    figures = _figures(scenario, outcome, one)
    figures.deaths.update(f"{death.what} {death.when}" for death in deaths.values())
    if figures.violations and keep:
        figures.violations.append(f"run {scenario.seed}: see {folder}")
    else:
        shutil.rmtree(folder)
    return figures


def _figures(scenario: Scenario, outcome: Outcome, one: Outcome) -> Figures:
    return Figures(
        runs=1,
        kills=outcome.kills,
        receipts=outcome.receipts,
        lost=outcome.lost,
        asked=outcome.asked,
        requests=outcome.requests,
        same=int(outcome.alpha_sha256 == one.alpha_sha256),
        violations=[f"run {scenario.seed}: {each}" for each in judge(outcome, one)],
    )


async def campaign(runs: int, *, first_seed: int, databases: Databases) -> Figures:
    """Plays runs, one after the other."""
    total, began = Figures(), time.monotonic()
    for seed in range(first_seed, first_seed + runs):
        deaths = deaths_of(random.Random(f"deaths {seed}"))
        total.add(await play(Scenario.draw(seed), deaths, databases, more_kills=2))
        if total.runs % 5 == 0:
            print(
                f"{total.runs} runs, {total.kills} kills, {len(total.violations)} violations, "
                f"{time.monotonic() - began:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    return total


async def wakes(databases: Databases, *, rounds: int = 200) -> list[float]:
    """How long a device that waits at one replica is without news of a seat given at another.

    Returns:
        Seconds from the receipt of the update that ended a round to the answer of the long poll
        that got the next round's work, where both were at different replicas.
    """
    scenario = Scenario(rounds=rounds, num_clients=6, exchange="losses", optimizer="sgd")
    folder = Path(tempfile.mkdtemp(prefix="fedone-wakes-"))
    try:
        with databases() as url:
            deployment = Deployment(scenario, folder, store=url, replicas=NUM_REPLICAS)
            outcome = await deployment.play()
        if outcome.violations:
            raise RuntimeError("; ".join(outcome.violations))
        turns = [json.loads(line) for line in (folder / "turns").read_text().splitlines()]
    finally:
        shutil.rmtree(folder)
    updates = {turn["round"]: turn for turn in turns if turn["kind"] == "update"}
    found = []
    for turn in turns:
        if turn["kind"] == "claim" and turn["round"]:
            update = updates[turn["round"] - 1]
            waited = turn["began"] < update["began"]
            if waited and turn["replica"] != update["replica"]:
                found.append(turn["ended"] - update["ended"])
    return found


def report(figures: Figures, found: Sequence[float]) -> str:
    """The figures as Markdown."""
    rows: dict[str, object] = {
        "runs on three replicas": figures.runs,
        "kills of a replica": figures.kills,
        "of them planned": ", ".join(f"{k}: {n}" for k, n in sorted(figures.deaths.items())),
        "updates acknowledged to devices": figures.receipts,
        "**of them lost**, or counted twice": figures.lost,
        "requests that reached the model": figures.asked,
        "requests charged": figures.requests,
        "**same alpha, history and queries as on one server**": f"{figures.same} of {figures.runs}",
        "violations of any kind": len(figures.violations),
        "wakes across replicas": len(found),
        "wake, p50": f"{1000 * statistics.median(found):.1f} ms",
        "wake, p99": f"{1000 * statistics.quantiles(found, n=100)[-1]:.1f} ms",
    }
    lines = [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join(["| | |", "|---|---|", *lines])


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; 1 if anything was violated."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    options = parser.parse_args(arguments)
    with databases_on("postgres") as databases:
        assert databases is not None
        figures = asyncio.run(campaign(options.runs, first_seed=options.seed, databases=databases))
        found = asyncio.run(wakes(databases))
    print(report(figures, found))
    for violation in figures.violations:
        print(violation, file=sys.stderr)
    return 1 if figures.violations else 0


if __name__ == "__main__":
    sys.exit(main())
