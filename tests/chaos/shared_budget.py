"""Kills processes that share one budget, and lets the provider count.

Three processes of 200 concurrent callers each ask through one `SqliteLedger` and one cap until all
are refused; processes are killed at random requests and started again.

    python -m tests.chaos.shared_budget --runs 12
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedone_sdk.budget import NOTHING, Budget, BudgetGuard, SqliteLedger
from tests.chaos.counts import Counts, listed, markdown
from tests.chaos.provider import ERRORS, Provider

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 300.0
"""How long one run may take; it is some seconds of work."""
LOOK_EVERY = 50
"""Requests between two looks at the ledger."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run.

    Attributes:
        seed: Of the provider's errors and of the kills.
        cap: The budget that all share.
        errors: Whether the provider makes any.
        kills: Request numbers at which a process dies.
        num_processes: At once.
        num_callers: In each.
    """

    seed: int
    cap: Budget
    errors: bool
    kills: frozenset[int]
    num_processes: int = 3
    num_callers: int = 200

    @classmethod
    def draw(cls, seed: int, *, num_requests: int, num_kills: int) -> Plan:
        """Another plan for each seed.

        Args:
            seed: Of everything.
            num_requests: About what the cap pays for.
            num_kills: Every fourth run has none.
        """
        rng = random.Random(f"shared {seed}")
        caps = {
            "requests": num_requests,
            "usd": round(num_requests * 0.0005, 4),
            "tokens": num_requests * 30,
        }
        unit = list(caps)[seed % len(caps)]
        count = 0 if seed % 4 == 0 else num_kills
        return cls(
            seed=seed,
            cap=Budget.model_validate({unit: caps[unit]}),
            errors=seed % 2 == 1,
            kills=frozenset(rng.sample(range(1, num_requests), count)),
        )


@dataclass
class Figures(Counts):
    """What was found, over any number of runs."""

    requests: int = 0
    looks: int = 0
    beyond_cap: int = 0
    uncharged: int = 0
    open_leases: int = 0
    most_open_leases: int = 0
    never_sent: int = 0
    capped: Counter[str] = field(default_factory=Counter)


class SharedBudget:
    """The processes of one run, their ledger, and their provider."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self.figures = Figures(runs=1, capped=Counter(u for u, _, _ in plan.cap.pairs(NOTHING)))
        self._rng = random.Random(plan.seed)
        self._processes: list[asyncio.subprocess.Process] = []
        self._look = asyncio.Event()
        self._guard = BudgetGuard(plan.cap, ledger=SqliteLedger(folder / "budget.db"))
        self._provider = Provider(
            cap=plan.cap,
            chances=ERRORS if plan.errors else {},
            seed=plan.seed,
            latency_s=0.05,
            on_request=self._on_request,
        )

    async def play(self) -> Figures:
        """Runs until every process has ended by itself."""
        figures, plan = self.figures, self.plan
        async with self._provider:
            watching = asyncio.create_task(self._watch(), name="watch")
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await asyncio.gather(*(self._process() for _ in range(plan.num_processes)))
            except TimeoutError:
                self._violated(f"did not end within {PATIENCE_S:.0f} s")
            finally:
                for process in self._processes:
                    process.kill()
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            await self._check()
        total = self._provider.total()
        account = await self._guard.account()
        figures.requests = total.requests
        figures.open_leases = len(account.leases)
        figures.never_sent = account.held.requests - total.requests
        figures.beyond_cap = len(self._provider.overshoot)
        self._violated(*self._provider.overshoot)
        for unit, cap, amount in plan.cap.pairs(account.held):
            if amount > cap:
                self._violated(f"charged {amount} {unit} of {cap}")
        # Only what was under way at a kill may be charged and not have been sent.
        if figures.never_sent > len(account.leases):
            self._violated(f"{figures.never_sent} charged and never sent")
        if len(account.leases) > figures.kills * plan.num_callers:
            self._violated(f"{len(account.leases)} leases left open by {figures.kills} kills")
        if plan.cap.requests is not None and account.held.requests != plan.cap.requests:
            self._violated(f"{account.held.requests} of {plan.cap.requests} requests were used")
        return figures

    async def _process(self) -> None:
        """One process, started again whenever it was killed."""
        command = ["-m", "tests.chaos.callers", "--base-url", self._provider.base_url]
        command += ["--budget", self.plan.cap.model_dump_json(exclude_none=True)]
        command += ["--ledger", "budget.db", "--callers", str(self.plan.num_callers)]
        while True:
            with (self.folder / "err").open("ab") as err:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *command,
                    cwd=self.folder,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=err,
                    env=os.environ | {"PYTHONPATH": str(ROOT)},
                )
            self._processes.append(process)
            try:
                code = await process.wait()
            finally:
                self._processes.remove(process)
            if code == 0:
                return
            if code != -9:
                self._violated(f"exit code {code}: {(self.folder / 'err').read_text()[-2000:]}")
                return

    def _on_request(self, number: int) -> None:
        alive = [process for process in self._processes if process.returncode is None]
        if number in self.plan.kills and alive:
            self._rng.choice(alive).kill()
            self.figures.kills += 1
            self._look.set()
        if number % LOOK_EVERY == 0:
            self._look.set()

    async def _watch(self) -> None:
        while True:
            await self._look.wait()
            self._look.clear()
            await self._check()

    async def _check(self) -> None:
        """Whatever was sent by now is leased or spent."""
        total = self._provider.total()
        account = await self._guard.account()
        self.figures.looks += 1
        leases = len(account.leases)
        self.figures.most_open_leases = max(self.figures.most_open_leases, leases)
        uncharged = total.beyond(account.held)
        if uncharged != NOTHING:
            self.figures.uncharged += 1
            self._violated(f"sent but not charged: {uncharged.exact()}")

    def _violated(self, *what: str) -> None:
        self.figures.violations += [f"run {self.plan.seed}: {each}" for each in what]


async def play(plan: Plan) -> Figures:
    """Plays one run."""
    with tempfile.TemporaryDirectory(prefix="fedone-chaos-") as folder:
        return await SharedBudget(plan, Path(folder)).play()


async def campaign(num_runs: int, *, first_seed: int, num_requests: int, num_kills: int) -> Figures:
    """Plays runs one after the other."""
    seeds = iter(range(first_seed, first_seed + num_runs))

    async def one() -> Figures | None:
        seed = next(seeds, None)
        if seed is None:
            return None
        return await play(Plan.draw(seed, num_requests=num_requests, num_kills=num_kills))

    return await Figures().add_all(one)


def report(figures: Figures) -> str:
    """The figures as Markdown."""
    rows = {
        "runs": figures.runs,
        "kills": figures.kills,
        "requests that the provider received": figures.requests,
        "**beyond the cap**": figures.beyond_cap,
        "looks at the ledger": figures.looks,
        "**sent and not charged** at any of them": figures.uncharged,
        "most leases open at once": figures.most_open_leases,
        "leases that kills left open, charged in full": figures.open_leases,
        "of them never sent": figures.never_sent,
        "capped in": listed(figures.capped),
    }
    return markdown(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; 1 if anything was violated."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--requests", type=int, default=3000, help="about what a cap pays for")
    parser.add_argument("--kills", type=int, default=8, help="in three of four runs")
    options = parser.parse_args(arguments)
    figures = asyncio.run(
        campaign(
            options.runs,
            first_seed=options.seed,
            num_requests=options.requests,
            num_kills=options.kills,
        )
    )
    print(report(figures))
    return 1 if figures.violations else 0


if __name__ == "__main__":
    sys.exit(main())
