"""Kills aggregators with -9, and compares each run with the same run without kills.

    python -m tests.chaos.servers writes      before and after every write to the store
    python -m tests.chaos.servers moments     at random moments
    python -m tests.chaos.servers replicas    three replicas on one PostgreSQL, then at random

Each prints a table, and exits with 1 after a violation.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.counts import Counts
from tests.chaos.serving import Death, Deployment, Outcome, Scenario, judge
from tests.postgres import Cluster, cluster

NUM_REPLICAS = 3
SCENARIOS = {
    "alpha": Scenario(exchange="alpha", local_steps=2, rounds=3),
    "losses": Scenario(exchange="losses", clients_per_round=2, rounds=3),
}
Databases = Callable[[], AbstractContextManager[str]]
"""Creates a database for one run, and gives its URL."""


def databases_of(server: Cluster) -> Databases:
    """Return databases of a PostgreSQL server, which are dropped after use."""

    @contextmanager
    def fresh() -> Iterator[str]:
        name = server.create()
        try:
            yield server.url(name)
        finally:
            server.drop(name)

    return fresh


@dataclass
class Figures(Counts):
    """Counts over any number of runs; `violations` must stay empty."""

    deaths: Counter[str] = field(default_factory=Counter)
    updates_acknowledged: int = 0
    acknowledged_updates_lost: int = 0
    queries_over_a_cap: int = 0
    requests_that_reached_the_model: int = 0
    requests_charged: int = 0
    runs_as_without_kills: int = 0


async def play(
    scenario: Scenario,
    deaths: Mapping[int, Death] | None = None,
    *,
    whole: Outcome | None = None,
    databases: Databases | None = None,
    replicas: int = 1,
    random_kills: int = 0,
    keep: bool = True,
) -> Figures:
    """Play a run under kills, and compare it with the run without kills.

    Args:
        deaths: Planned deaths, by the number of the server.
        whole: The run without kills; by default it is played first, on SQLite.
        databases: Databases of PostgreSQL; without them the store is SQLite.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"fedone-chaos-{scenario.seed}-"))
    if whole is None:
        (folder / "whole").mkdir()
        whole = await Deployment(scenario, folder / "whole").play()
    rng, longest_s = random.Random(f"kills {scenario.seed}"), max(whole.wall_s / 2, 0.1)

    async def kill(deployment: Deployment) -> None:
        for _ in range(random_kills):
            await asyncio.sleep(rng.uniform(0.02, longest_s))
            deployment.kill(rng.randrange(replicas))

    (folder / "killed").mkdir()
    with ExitStack() as stack:
        store = None if databases is None else stack.enter_context(databases())
        killed = Deployment(scenario, folder / "killed", store=store, replicas=replicas)
        outcome = await killed.play(deaths, chaos=kill)
    found = [f"run {scenario.seed}: {each}" for each in judge(outcome, whole)]
    if found and keep:
        found.append(f"run {scenario.seed}: see {folder}")
    else:
        shutil.rmtree(folder)
    return Figures(
        runs=1,
        killed_runs=int(outcome.kills > 0),
        kills=outcome.kills,
        deaths=Counter(f"{death.what} {death.when}" for death in (deaths or {}).values()),
        updates_acknowledged=outcome.receipts,
        acknowledged_updates_lost=outcome.lost,
        queries_over_a_cap=max(outcome.queries - scenario.queries, 0),
        requests_that_reached_the_model=outcome.asked,
        requests_charged=outcome.requests,
        runs_as_without_kills=int(outcome.alpha_sha256 == whole.alpha_sha256),
        violations=found,
    )


async def kill_at_writes(
    scenario: Scenario,
    *,
    numbers: Iterable[int] | None = None,
    databases: Databases | None = None,
    jobs: int = 2,
) -> Figures:
    """Kill the server before and after one write after the other, by default of all of the run."""
    with tempfile.TemporaryDirectory(prefix="fedone-chaos-") as folder:
        whole = await Deployment(scenario, Path(folder)).play()
    deaths = (
        Death(at=number, when=when)
        for number in (itertools.count(1) if numbers is None else numbers)
        for when in ("before", "after")
    )

    async def one() -> Figures | None:
        death = next(deaths, None)
        if death is None:
            return None
        figures = await play(scenario, {0: death}, whole=whole, databases=databases)
        # Without a kill, the run has ended before that write.
        return figures if figures.kills or figures.violations else None

    return await Figures().add_all(one, jobs)


async def kill_at_moments(
    runs: int, *, first_seed: int, jobs: int = 2, databases: Databases | None = None
) -> Figures:
    """Kill the server two to six times in each of many runs."""
    seeds = iter(range(first_seed, first_seed + runs))

    async def one() -> Figures | None:
        seed = next(seeds, None)
        if seed is None:
            return None
        kills = random.Random(f"number {seed}").randint(2, 6)
        return await play(Scenario.draw(seed), databases=databases, random_kills=kills)

    return await Figures().add_all(one, jobs)


async def kill_replicas(runs: int, *, first_seed: int, databases: Databases) -> Figures:
    """Kill each of three replicas once by plan, and then two at random moments."""
    seeds = iter(range(first_seed, first_seed + runs))

    async def one() -> Figures | None:
        seed = next(seeds, None)
        if seed is None:
            return None
        return await play(
            Scenario.draw(seed),
            _deaths(random.Random(f"deaths {seed}")),
            databases=databases,
            replicas=NUM_REPLICAS,
            random_kills=2,
        )

    return await Figures().add_all(one)


def _deaths(rng: random.Random) -> dict[int, Death]:
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 if anything was violated."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("mode", choices=["writes", "moments", "replicas"])
    parser.add_argument("--runs", type=int, default=30, help="of moments and replicas")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once")
    parser.add_argument("--store", choices=["sqlite", "postgres"], default="sqlite")
    options = parser.parse_args(arguments)
    total = Figures()
    with ExitStack() as stack:
        databases = None
        if options.store == "postgres" or options.mode == "replicas":
            databases = databases_of(stack.enter_context(cluster()))
        if options.mode == "writes":
            for name, scenario in SCENARIOS.items():
                figures = asyncio.run(
                    kill_at_writes(scenario, databases=databases, jobs=options.jobs)
                )
                print(f"\n{name}\n\n{figures.table()}")
                total.add(figures)
        elif options.mode == "moments":
            total = asyncio.run(
                kill_at_moments(
                    options.runs, first_seed=options.seed, jobs=options.jobs, databases=databases
                )
            )
            print(total.table())
        elif databases is not None:
            total = asyncio.run(
                kill_replicas(options.runs, first_seed=options.seed, databases=databases)
            )
            print(total.table())
    return 1 if total.violations else 0


if __name__ == "__main__":
    sys.exit(main())
