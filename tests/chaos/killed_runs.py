"""Stops `fedone tune` at random moments until it has ended by itself, and lets the provider count.

Each run is a process with a cap, started by the same command each time: with its default flags, or
with a store and a cache that have names. SIGKILL, SIGTERM or SIGINT ends it. The provider that it
asks makes errors, and counts. At each stop and at the end this program compares what the provider
has seen with what the run has charged, and with the answers that the run has kept.

    python -m tests.chaos.killed_runs --runs 200
    python -m tests.chaos.killed_runs --runs 200 --flags named --signals SIGKILL
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedone_sdk import assets
from fedone_sdk.aggregator.rounds.run_state import RunState, decode
from fedone_sdk.budget import NOTHING, Budget, Usage
from fedone_sdk.messages import RunResult
from fedone_sdk.stores import SqlStore
from tests.chaos.counts import Counts
from tests.chaos.provider import ERRORS, GOOD, LABELS, MODEL, PRICE, Provider, text_of
from tests.fake_openai import Received

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 180.0
"""How long one process may take; a run is a few seconds of work."""
FREE = Budget(requests=1_000_000)
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT")
STOPPED = 130
"""Exit status of a process that the first SIGTERM or SIGINT has ended in good order."""
SETTLE_S = 0.05
"""How long what a dead process has sent may still be under way to the provider."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """The signal that ends a process: after `request` (or a start) and `delay_s`; a second one."""

    request: int | None
    delay_s: float
    name: str = "SIGKILL"
    again_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run with keys of RUN.yaml, its provider, and when each process but the last is killed."""

    seed: int
    cap: Budget
    errors: bool
    kills: tuple[Kill, ...]
    exchange: str
    clients_per_round: int
    optimizer: str
    api: str
    concurrency: int
    rounds: int
    evaluates: bool
    latency_s: float
    flags: str = "default"

    @property
    def store(self) -> str:
        """Path of the run's store, from the folder of RUN.yaml."""
        return ".fedone/chaos.db" if self.flags == "default" else "run.db"

    @property
    def answers(self) -> str:
        return ".fedone/answers.sqlite" if self.flags == "default" else "answers.db"

    @property
    def arguments(self) -> tuple[str, ...]:
        named = ("--store", self.store)
        return ("tune", "run.yaml", *(named if self.flags == "named" else ()))

    @classmethod
    def draw(cls, seed: int, *, flags: str = "default", signals: Sequence[str] = SIGNALS) -> Plan:
        """Another plan for each seed; every fourth has no errors, and a cap that binds nothing."""
        rng = random.Random(f"plan {seed}")
        free = seed % 4 == 0
        latency_s = rng.choice([0.0, 0.005, 0.02])
        chosen = random.Random(f"signals {seed}")
        return cls(
            seed=seed,
            cap=FREE if free else _cap(rng),
            errors=not free,
            kills=tuple(
                _with_signal(_kill(rng, latency_s), chosen, signals)
                for _ in range(rng.choice([1, 1, 2, 3, 4]))
            ),
            exchange=rng.choice(["alpha", "losses"]),
            clients_per_round=rng.choice([1, 1, 2, 3]),
            optimizer=rng.choice(["sgd", "adamw"]),
            api=rng.choice(["chat", "completions"]),
            concurrency=rng.choice([1, 4, 16]),
            rounds=rng.randint(3, 5) if free else 12,
            evaluates=rng.random() < 0.5,
            latency_s=latency_s,
            flags=flags,
        )

    def run_yaml(self, base_url: str) -> str:
        """RUN.yaml, with its files beside it."""
        return RUN.format(
            labels=json.dumps(dict(enumerate(LABELS))),
            dev="dev: dev.jsonl, " if self.evaluates else "",
            budget=self.cap.model_dump_json(exclude_none=True),
            cache=self.answers if self.flags == "named" else "null",
            base_url=base_url,
            price=PRICE,
            model=MODEL,
            **vars(self),
        )


# A machine under load must not cost a client its seat.
RUN = """
name: chaos
task: {{template: "{{prompt}} {{text}} It was", labels: {labels}}}
data: {{train: train.jsonl, {dev}num_clients: 3, shots: 3}}
prompt: {{length: 3, vocabulary: {{kind: list, candidates: [" good", " bad", " so", " my"]}}}}
method: {{name: gs-bdpl, num_samples: 4, batch_size: 3, local_steps: 2, tau: 0.5,
  optimizer: {optimizer}, learning_rate: 0.05}}
participation: {{exchange: {exchange}, clients_per_round: {clients_per_round}, deadline_s: 600}}
budget: {budget}
rounds: {rounds}
evaluation: {{every: 2, examples: 4}}
backend: {{kind: openai, model: {model}, base_url: "{base_url}", api_key_env: null, api: {api},
  cache: {cache}, max_input_tokens: 256, timeout_s: 60, retry: {{max_wait_s: 0.02}},
  limits: {{concurrency: {concurrency}}},
  prices: {{prompt: "{price.prompt}", completion: "{price.completion}"}}}}
seed: {seed}
"""
DEV_ROWS = 8


def _cap(rng: random.Random) -> Budget:
    caps: dict[str, Callable[[], float]] = {
        "requests": lambda: rng.randint(30, 150),
        "queries": lambda: rng.randint(8, 60),
        "tokens": lambda: rng.randint(5_000, 25_000),
        "prompt_tokens": lambda: rng.randint(5_000, 25_000),
        "usd": lambda: round(rng.uniform(0.03, 0.15), 3),
    }
    units = rng.sample(sorted(caps), rng.choice([1, 1, 2]))
    return Budget.model_validate({unit: caps[unit]() for unit in units})


def _kill(rng: random.Random, latency_s: float) -> Kill:
    if rng.random() < 0.15:  # While it starts, or soon after.
        return Kill(request=None, delay_s=rng.uniform(0.2, 3.0))
    request = rng.choice([rng.randint(1, 6), rng.randint(1, 30)])
    # Before the answer, about when it arrives, and while it is written down.
    delay_s = rng.choice([0.0, rng.uniform(0, latency_s), latency_s + rng.uniform(0, 0.03)])
    return Kill(request=request, delay_s=delay_s)


def _with_signal(kill: Kill, rng: random.Random, signals: Sequence[str]) -> Kill:
    name = rng.choice(signals)
    again = name != "SIGKILL" and rng.random() < 0.25
    return replace(kill, name=name, again_s=rng.uniform(0.0, 0.3) if again else None)


@dataclass
class Figures(Counts):
    """What was found, over any number of runs."""

    signals: Counter[str] = field(default_factory=Counter)
    kills_by_a_single_signal: int = 0
    answers_lost_by_these_kills: int = 0
    kills_during_requests: int = 0
    kills_before_requests: int = 0
    requests_received: int = 0
    failed_requests: int = 0
    requests_beyond_the_cap: int = 0
    requests_sent_and_not_charged: int = 0
    answers_in_the_caches: int = 0
    stored_answers_lost: int = 0
    stored_answers_paid_twice: int = 0
    finished_rounds_lost: int = 0
    unstored_answers_lost: int = 0
    most_answers_lost_by_a_kill: int = 0
    kills_that_lost_more_than_concurrency: int = 0
    requests_charged_but_not_sent: int = 0
    runs_compared: int = 0
    runs_with_the_same_alpha: int = 0
    final_status: Counter[str] = field(default_factory=Counter)
    caps: Counter[str] = field(default_factory=Counter)


class KilledRun:
    """One run in a folder of its own, with a provider of its own."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self.figures = Figures(runs=1, caps=Counter(_units(plan.cap)))
        self.result: RunResult | None = None
        self._gently = False
        self._aborted = False
        self._recorded: dict[bytes, tuple[float, ...]] = {}
        self._log: list[str] = []
        self._begins = 0
        self._set_aside = 0
        self._code = 0
        self._due: Callable[[int], None] = lambda _: None
        self._provider = Provider(
            cap=plan.cap,
            chances=ERRORS if plan.errors else {},
            seed=plan.seed,
            latency_s=plan.latency_s,
            on_request=lambda number: self._due(number),
        )

    async def play(self) -> Figures:
        """Starts it again until it ends by itself."""
        lines = (assets.path("companion_feedback") / "train.jsonl").read_text().splitlines(True)
        random.Random(self.plan.seed).shuffle(lines)
        (self.folder / "train.jsonl").write_text("".join(lines[: -2 * DEV_ROWS]))
        (self.folder / "dev.jsonl").write_text("".join(lines[-DEV_ROWS:]))
        async with self._provider:
            (self.folder / "run.yaml").write_text(self.plan.run_yaml(self._provider.base_url))
            for kill in (*self.plan.kills, None):
                if await self._process(kill):
                    break
                await self._check_kill()
            await self._check_end()
        figures = self.figures
        figures.killed_runs = int(figures.kills > 0)
        figures.requests_received = len(self._provider.received)
        figures.failed_requests = sum(not _is_good(each) for each in self._provider.received)
        figures.requests_beyond_the_cap = len(self._provider.overshoot)
        self._violated(*self._provider.overshoot)
        return figures

    async def _process(self, kill: Kill | None) -> bool:
        """Runs one process to its end, or to its death; tells whether it ended by itself."""
        command = ["-m", "fedone_sdk.cli", *self.plan.arguments, "--json", "result.json"]
        message = len((self.folder / "err").read_text()) if (self.folder / "err").exists() else 0
        with (self.folder / "out").open("ab") as out, (self.folder / "err").open("ab") as err:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *command,
                cwd=self.folder,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )
        loop = asyncio.get_running_loop()
        sent: list[int] = []
        timers: list[asyncio.TimerHandle] = []

        def send(number: int) -> None:
            if process.returncode is None:
                sent.append(number)
                process.send_signal(number)

        def end() -> None:
            if kill is not None:
                number = signal.Signals[kill.name]
                send(number)
                if kill.again_s is not None:
                    timers.append(loop.call_later(kill.again_s, send, number))

        def on_request(number: int) -> None:
            if kill is not None and number - self._begins == kill.request:
                if kill.delay_s:
                    timers.append(loop.call_later(kill.delay_s, end))
                else:
                    end()

        self._due = on_request
        if kill is not None and kill.request is None:
            timers.append(loop.call_later(kill.delay_s, end))
        try:
            code = await asyncio.wait_for(process.wait(), PATIENCE_S)
        except TimeoutError:
            process.kill()
            await process.wait()
            self._violated(f"did not end within {PATIENCE_S:.0f} s")
            return True
        finally:
            for timer in timers:
                timer.cancel()
            self._due = lambda _: None
        if kill is not None and sent and code in (STOPPED, -sent[-1]):
            # Before the handler of signals is in place, nothing is asked and nothing waited for.
            heard = "stopping, " in (self.folder / "err").read_text()[message:]
            self._gently = heard and code == STOPPED and len(sent) == 1
            self._aborted = code == STOPPED and not self._gently
            self.figures.signals[kill.name] += 1
            return False
        self._code = code
        return True

    async def _check_kill(self) -> None:
        await asyncio.sleep(SETTLE_S)
        figures = self.figures
        total = self._provider.total()
        received = self._provider.received[self._begins :]
        figures.kills += 1
        figures.kills_before_requests += not received
        state, log = await self._stored()
        self._check_charged(state, total)
        # Rounds that were told are kept.
        if log[: len(self._log)] != self._log:
            figures.finished_rounds_lost += 1
            self._violated("finished rounds are gone")
        self._log = log
        self._check_cache()
        # What was answered, and is not in the cache, was under way when the process died.
        known = set(self._recorded.values())
        texts = {text_of(each) for each in received if _is_good(each)}
        lost = {
            text_of(each)
            for each in received
            if text_of(each) in texts and self._provider.values(each) not in known
        }
        figures.unstored_answers_lost += len(lost)
        figures.most_answers_lost_by_a_kill = max(figures.most_answers_lost_by_a_kill, len(lost))
        figures.kills_during_requests += bool(lost)
        # A request's turn is over when its answer is there, and its call when that is on the disk:
        # so these may be more than the concurrency, but not more than the store knows of.
        figures.kills_that_lost_more_than_concurrency += len(lost) > self.plan.concurrency
        under_way = 0 if state is None else _under_way(state)
        if self._gently:
            figures.kills_by_a_single_signal += 1
            figures.answers_lost_by_these_kills += len(lost)
            # The process waits for what it has asked: nothing stays open, and nothing is lost.
            if lost or under_way:
                self._violated(f"a stop lost {len(lost)} answers, {under_way} were under way")
        if self._aborted and state is not None:
            # An abort charges the calls that it cancels, in full, before the process ends.
            charged = state.account.held.requests - total.requests
            under_way = max(under_way, charged + len(lost))
        self._set_aside += under_way
        if len(lost) > under_way:
            self._violated(f"{len(lost)} answers lost, {under_way} requests were under way")
        self._begins = len(self._provider.received)

    async def _check_end(self) -> None:
        figures, plan = self.figures, self.plan
        total = self._provider.total()
        state, log = await self._stored()
        self._check_charged(state, total)
        if log[: len(self._log)] != self._log:
            figures.finished_rounds_lost += 1
            self._violated("finished rounds are gone")
        self._check_cache()
        err = (self.folder / "err").read_text()
        if "Traceback" in err:
            self._violated(err[-3000:])
        if not (self.folder / "result.json").exists():
            self._violated("no result")
            return
        result = RunResult.model_validate_json((self.folder / "result.json").read_bytes())
        self.result = result
        figures.final_status[result.status] += 1
        # Kills may leave too little under the cap for a single round, which is no success.
        expected = int(result.status == "budget_exhausted" and not result.rounds)
        if self._code != expected:
            self._violated(f"exit code {self._code}, not {expected}: {err[-2000:]}")
        if result.status not in ("completed", "budget_exhausted"):
            self._violated(f"ended as {result.status}: {result.reason}")
        if result.leased != NOTHING or state is None or state.account.leases:
            self._violated("a lease is open at the end")
        if [entry.round for entry in result.history] != list(range(result.rounds)):
            self._violated("the history has gaps")
        for unit, cap, amount in plan.cap.pairs(result.spent):
            if amount > cap:
                figures.requests_beyond_the_cap += 1
                self._violated(f"charged {amount} {unit} of {cap}")
        never_sent = result.spent.requests - total.requests
        figures.requests_charged_but_not_sent += never_sent
        if not 0 <= never_sent <= self._set_aside:
            self._violated(f"{never_sent} charged and never sent, {self._set_aside} were under way")

    def _check_charged(self, state: RunState | None, total: Usage) -> None:
        held = NOTHING if state is None else state.account.held
        uncharged = total.beyond(held)
        if uncharged != NOTHING:
            self.figures.requests_sent_and_not_charged += 1
            self._violated(f"sent but not charged: {uncharged.exact()}")

    def _check_cache(self) -> None:
        """Compares the cache with what it held at the last kill, and with what was asked since."""
        recorded = _answers(self.folder / self.plan.answers)
        figures, received = self.figures, self._provider.received
        lost = [key for key, row in self._recorded.items() if recorded.get(key) != row]
        if lost:
            figures.stored_answers_lost += len(lost)
            self._violated(f"{len(lost)} recorded answers lost")
        known = set(self._recorded.values())
        answered: set[str] = set()
        again = []
        for each in received[self._begins :]:
            if self._provider.values(each) in known or text_of(each) in answered:
                again.append(each.number)
            if _is_good(each):
                answered.add(text_of(each))
        if again:
            figures.stored_answers_paid_twice += len(again)
            self._violated(f"requests {again} ask what was known")
        figures.answers_in_the_caches += len(recorded) - len(self._recorded)
        self._recorded = recorded

    async def _stored(self) -> tuple[RunState | None, list[str]]:
        """The run as the store has it, and its rounds."""
        path = self.folder / self.plan.store
        if not path.exists():
            return None, []
        async with _open(path) as store:
            heads = await store.heads()
            record = await store.run(heads[0].run_id) if heads else None
            if record is None:
                return None, []
            document: dict[str, Any] = json.loads(record.document)
            del document["counters"]
            log = [entry.body for entry in await store.log(record.run_id, "round")]
            return decode(document, record.arrays), log

    def _violated(self, *what: str) -> None:
        self.figures.violations += [f"run {self.plan.seed}: {each}" for each in what]


@asynccontextmanager
async def _open(path: Path) -> AsyncIterator[SqlStore]:
    store = SqlStore.sqlite(path)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def _answers(path: Path) -> dict[bytes, tuple[float, ...]]:
    """What a cache holds: its key -> log-probabilities of the one input."""
    if not path.exists():
        return {}
    with closing(sqlite3.connect(path)) as db:
        if not db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'answers'").fetchone():
            return {}
        rows = db.execute("SELECT key, answer FROM answers").fetchall()
    return {key: tuple(json.loads(answer)[0][0]) for key, answer in rows}


def _under_way(state: RunState) -> int:
    """The most requests of the calls that a run has set something aside for."""
    sent = sum(worst.requests for seat in state.seats for worst in seat.sent.values())
    return sent + state.evaluation.leased.requests


def _is_good(received: Received) -> bool:
    return received.behaviour.partition(":")[0] in GOOD


def _units(cap: Budget) -> list[str]:
    return [unit for unit, _, _ in cap.pairs(NOTHING)] if cap != FREE else ["nothing"]


async def play(plan: Plan, *, keep: bool = True) -> Figures:
    """Plays one run; one without errors is played again without kills, and compared."""
    folder = Path(tempfile.mkdtemp(prefix=f"fedone-chaos-{plan.seed}-"))
    run = KilledRun(plan, _made(folder / "killed"))
    figures = await run.play()
    if not plan.errors and run.result is not None and figures.kills:
        whole = KilledRun(replace(plan, kills=()), _made(folder / "whole"))
        other = await whole.play()
        figures.violations += other.violations
        if whole.result is not None:
            figures.runs_compared += 1
            same = run.result.alpha_sha256 == whole.result.alpha_sha256
            figures.runs_with_the_same_alpha += same
            if not same:
                figures.violations.append(f"run {plan.seed}: another alpha than without kills")
    if figures.violations and keep:
        figures.violations.append(f"run {plan.seed}: see {folder}")
    else:
        shutil.rmtree(folder)
    return figures


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


async def campaign(
    num_runs: int,
    *,
    first_seed: int,
    jobs: int,
    flags: str = "default",
    signals: Sequence[str] = SIGNALS,
) -> Figures:
    """Plays runs, several at a time, until so many of them were killed."""
    total = Figures()
    seeds = iter(range(first_seed, first_seed + 10 * num_runs))

    async def one() -> Figures | None:
        if total.killed_runs >= num_runs:
            return None
        return await play(Plan.draw(next(seeds), flags=flags, signals=signals))

    return await total.add_all(one, jobs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; 1 if anything was violated."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=200, help="killed runs")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once")
    parser.add_argument("--flags", choices=["default", "named"], default="default")
    parser.add_argument("--signals", nargs="+", choices=SIGNALS, default=SIGNALS)
    options = parser.parse_args(arguments)
    figures = asyncio.run(
        campaign(
            options.runs,
            first_seed=options.seed,
            jobs=options.jobs,
            flags=options.flags,
            signals=options.signals,
        )
    )
    print(figures.table())
    return 1 if figures.violations else 0


if __name__ == "__main__":
    sys.exit(main())
