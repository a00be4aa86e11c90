"""Aggregators and devices as processes of their own, which can be killed.

Processes are forked from one that has imported everything, so that a restart costs milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import structlog

from fedone_sdk.aggregator import Aggregator
from fedone_sdk.aggregator.rounds import RoundMachine
from fedone_sdk.aggregator.rounds.run_state import RunState, decode
from fedone_sdk.algorithms import alpha_sha256
from fedone_sdk.backends import Query
from fedone_sdk.client.transport import HttpTransport
from fedone_sdk.errors import TransportError
from fedone_sdk.messages import Receipt
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import ClosedWork, LogEntry, RunRecord, SqlStore, Store
from fedone_sdk.testing import ScriptedBackend
from fedone_sdk.vocabulary import Vocabulary
from tests.edge import edge_client
from tests.processes import free_port
from tests.runs import run_spec

TOKEN = "enrolment-token-of-the-chaos"
WORDS = Vocabulary(candidates=(" good", " bad", " fine", " poor"))
PATIENCE_S = 300.0
"""How long a run may take; it is a second of work."""

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["tests.chaos.serving", "fedone_sdk.stores.sql", "aiosqlite"])

WRITES = frozenset(
    (
        *("add_run", "commit", "restore", "enrol", "change_client"),
        *("join", "leave", "put_token", "revoke_token"),
    )
)
"""The methods of a store that change it: the points of its journal."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A run, with keys of RUN.yaml, the devices that work for it, and the model's latency."""

    seed: int = 0
    exchange: str = "alpha"
    method: str = "gs-bdpl"
    optimizer: str = "adamw"
    clients_per_round: int = 1
    local_steps: int = 1
    rounds: int = 4
    num_clients: int = 3
    latency_s: float = 0.0
    deadline_s: float = 600.0  # A machine under load must not cost a client its seat.

    NUM_SAMPLES = 3

    @classmethod
    def draw(cls, seed: int) -> Scenario:
        """Another one for each seed."""
        rng = random.Random(f"scenario {seed}")
        scenario = cls(
            seed=seed,
            exchange=rng.choice(["alpha", "losses"]),
            method=rng.choice(["gs-bdpl", "gs-bdpl", "gs-bdpl", "random"]),
            optimizer=rng.choice(["adamw", "sgd"]),
            clients_per_round=rng.choice([1, 1, 2, 3]),
            local_steps=rng.choice([1, 1, 2]),
            rounds=rng.randint(4, 8),
            num_clients=rng.randint(3, 5),
            latency_s=rng.choice([0.0, 0.005, 0.02]),
        )
        if scenario.method == "random":
            return replace(scenario, clients_per_round=1, exchange="losses")
        return scenario

    @property
    def queries(self) -> int:
        """What the run takes: exactly its cap."""
        return self.rounds * self.clients_per_round * self.local_steps * self.NUM_SAMPLES

    @property
    def spec(self) -> RunSpec:
        """The run."""
        method: dict[str, Any] = {"name": self.method, "num_samples": self.NUM_SAMPLES}
        method |= {"batch_size": 2, "local_steps": self.local_steps}
        if self.method == "gs-bdpl":
            method |= {"tau": 1.0, "optimizer": self.optimizer, "learning_rate": 0.05}
        return run_spec(
            name="chaos",
            prompt={
                "length": 3,
                "vocabulary": {"kind": "list", "candidates": list(WORDS.candidates)},
            },
            method=method,
            participation={
                "exchange": self.exchange,
                "clients_per_round": self.clients_per_round,
                "min_clients": self.num_clients,
                "deadline_s": self.deadline_s,
            },
            budget={"queries": self.queries, "requests": 1_000_000},
            rounds=self.rounds,
            seed=self.seed,
        )

    def examples(self, client: int) -> list[dict[str, object]]:
        """What a device holds."""
        rng = random.Random(f"data {self.seed} {client}")
        count = rng.randint(2, 6)
        return [{"text": f"text {rng.random()}", "label": rng.randint(0, 1)} for _ in range(count)]


# A server


@dataclass(frozen=True, kw_only=True)
class Death:
    """Where a server dies: before the operation `at`, `delay_s` later, or once it is durable."""

    at: int
    what: Literal["write", "question", "lead"] = "write"
    when: Literal["before", "during", "after"] = "before"
    delay_s: float = 0.0005


class Fate:
    """Counts what a server does, until its death."""

    def __init__(self, death: Death | None) -> None:
        self._death = death
        self._counts: dict[str, int] = {}

    def meets(self, what: str) -> Death | None:
        """Its death, if it is this time."""
        self._counts[what] = self._counts.get(what, 0) + 1
        death = self._death
        if death is not None and (death.what, death.at) == (what, self._counts[what]):
            return death
        return None


class Journal:
    """A store that kills its process at a write, and writes commits over the cap to a file."""

    def __init__(self, store: Store, fate: Fate, trouble: Path) -> None:
        self._store, self._fate, self._trouble = store, fate, trouble

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name not in WRITES:
            return method

        async def write(*args: Any) -> Any:
            if name == "commit":
                self._check(args[2].document)
            death = self._fate.meets("write")
            if death is not None and death.when == "before":
                _die()
            if death is not None and death.when == "during":
                asyncio.get_running_loop().call_later(death.delay_s, _die)
            result = await method(*args)
            if death is not None and death.when == "after":
                _die()
            return result

        return write

    async def lead(self) -> bool:
        leads = await self._store.lead()
        if leads and self._fate.meets("lead"):
            _die()
        return leads

    def _check(self, document: str) -> None:
        account = json.loads(document)["account"]
        held = account["spent"]["queries"] + sum(
            lease["queries"] for lease in account["leases"].values()
        )
        if held > account["cap"]["queries"]:
            with self._trouble.open("a") as file:
                file.write(f"{held} queries held of {account['cap']['queries']}\n")


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class _ServerPlan:
    scenario: Scenario
    store: str
    port: int
    death: Death | None
    folder: Path


def _server(plan: _ServerPlan) -> None:
    _begin(plan.folder / f"server-{plan.port}.log")
    asyncio.run(_serve(plan))


async def _serve(plan: _ServerPlan) -> None:
    RoundMachine.CLAIM_TIMEOUT_S = 600.0  # A machine under load must not cost a client its seat.
    rng, fate = random.Random(), Fate(plan.death)

    def asked(query: Query) -> Awaitable[None] | None:
        with (plan.folder / "asked").open("a") as file:
            file.write("1\n")
        if fate.meets("question"):
            _die()
        if not plan.scenario.latency_s:
            return None
        return asyncio.sleep(rng.uniform(0, plan.scenario.latency_s))

    store = Journal(_store(plan.store), fate, plan.folder / "trouble")
    aggregator = Aggregator(
        backend=ScriptedBackend(gate=asked),
        store=store,  # type: ignore[arg-type]  # it is one: by __getattr__
        enrolment_tokens=[TOKEN],
    )
    async with aggregator:
        await aggregator.add_run(plan.scenario.spec, WORDS)
        await aggregator.listen(port=plan.port)
        await asyncio.Event().wait()


def _store(url: str, *, serving: bool = True) -> SqlStore:
    if "://" in url:
        return SqlStore.at(url, serving=serving)
    return SqlStore.sqlite(url, serving=serving)


def _begin(log: Path) -> None:
    """What each process does first: what it says goes to a file."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    structlog.configure(
        processors=[structlog.processors.JSONRenderer()],
        logger_factory=structlog.PrintLoggerFactory(),
    )


# Devices


class Rotating:
    """A transport that takes the next replica for each message, as a load balancer does.

    It writes down which updates were acknowledged.
    """

    def __init__(self, urls: Sequence[str], folder: Path, first: int) -> None:
        self._transports = [HttpTransport(url) for url in urls]
        self._next = first
        self._folder = folder

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any) -> Any:
            self._next += 1
            replica = self._next % len(self._transports)
            answer = await getattr(self._transports[replica], name)(*args)
            if isinstance(answer, Receipt):
                self._write("receipts", answer.model_dump())
            return answer

        return call

    def _write(self, name: str, line: dict[str, Any]) -> None:
        with (self._folder / name).open("a") as file:
            file.write(json.dumps(line) + "\n")

    async def aclose(self) -> None:
        for transport in self._transports:
            await transport.aclose()


@dataclass(frozen=True, kw_only=True)
class _DevicesPlan:
    scenario: Scenario
    urls: tuple[str, ...]
    folder: Path


def _devices(plan: _DevicesPlan) -> None:
    _begin(plan.folder / "devices.log")
    asyncio.run(_work(plan))


async def _work(plan: _DevicesPlan) -> None:
    async with AsyncExitStack() as stack:
        clients = []
        for number in range(plan.scenario.num_clients):
            client = await stack.enter_async_context(
                edge_client(
                    plan.urls[0],
                    token=TOKEN,
                    data=plan.scenario.examples(number),
                    state_dir=plan.folder / f"device-{number}",
                    transport=Rotating(plan.urls, plan.folder, number),  # type: ignore[arg-type]  # by __getattr__
                    wait_s=5.0,
                )
            )
            # One after the other: draws are over the enrolment index.
            while True:
                try:
                    await client.enrol()
                    break
                except TransportError:
                    pass
            clients.append(client)
        await asyncio.gather(*(client.run_forever() for client in clients))


# Both


@dataclass(kw_only=True)
class Outcome:
    """How a run ended: its rounds (round, clients, queries, mean loss), spent and asked."""

    status: str = ""
    alpha_sha256: str = ""
    history: list[tuple[int, tuple[int, ...], int, float]] = field(default_factory=list)
    queries: int = 0
    requests: int = 0
    asked: int = 0
    receipts: int = 0
    lost: int = 0
    kills: int = 0
    wall_s: float = 0.0
    violations: list[str] = field(default_factory=list)


class Deployment:
    """Servers on one store (a SQLite file or a URL), and devices that work with them."""

    def __init__(
        self, scenario: Scenario, folder: Path, *, store: str | None = None, replicas: int = 1
    ) -> None:
        self.scenario, self.folder = scenario, folder
        self.outcome = Outcome()
        self._store = store or str(folder / "store.db")
        self._ports = [free_port() for _ in range(replicas)]
        self._servers: dict[int, BaseProcess] = {}

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(f"http://127.0.0.1:{port}" for port in self._ports)

    async def play(
        self,
        deaths: Mapping[int, Death] | None = None,
        *,
        chaos: Callable[[Deployment], Awaitable[None]] | None = None,
    ) -> Outcome:
        """Plays the run to its end, with planned deaths of servers, and with `chaos` that kills."""
        began = time.monotonic()
        devices: BaseProcess | None = None
        with ExitStack() as stack:
            stack.callback(self.kill_all)
            tasks = self.start(deaths)
            plan = _DevicesPlan(scenario=self.scenario, urls=self.urls, folder=self.folder)
            devices = _started(_devices, plan)
            stack.callback(devices.kill)
            if chaos is not None:
                tasks.append(asyncio.create_task(_forever(chaos(self))))
            working = asyncio.create_task(_ended(devices))
            try:
                await asyncio.wait(
                    [working, *tasks], timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                for task in (*tasks, working):
                    task.cancel()
                ends = await asyncio.gather(*tasks, working, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end
        self.outcome.wall_s = time.monotonic() - began
        if devices.exitcode != 0:
            self._violated(f"the devices ended with {devices.exitcode}: {self._tail('devices')}")
        if not self.outcome.violations:
            await self._judge()
        return self.outcome

    def start(self, deaths: Mapping[int, Death] | None = None) -> list[asyncio.Task[None]]:
        """Starts the servers, and keeps them up while the tasks run."""
        return [
            asyncio.create_task(self._keep_up(number, (deaths or {}).get(number)))
            for number in range(len(self._ports))
        ]

    def kill(self, number: int) -> bool:
        """Kills a server, if it runs; it is started again at once."""
        process = self._servers.get(number)
        if process is None or process.exitcode is not None:
            return False
        process.kill()
        return True

    @asynccontextmanager
    async def store(self) -> AsyncIterator[Store]:
        store = _store(self._store, serving=False)
        await store.open()
        try:
            yield store
        finally:
            await store.close()

    async def _keep_up(self, number: int, death: Death | None) -> None:
        while True:
            plan = _ServerPlan(
                scenario=self.scenario,
                store=self._store,
                port=self._ports[number],
                death=death,
                folder=self.folder,
            )
            process = self._servers[number] = _started(_server, plan)
            code = await _ended(process)
            if code != -signal.SIGKILL:
                tail = self._tail(f"server-{self._ports[number]}")
                raise RuntimeError(f"a server ended with {code}: {tail}")
            self.outcome.kills += 1
            death = None

    def kill_all(self) -> None:
        for process in self._servers.values():
            process.kill()

    def _tail(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()[-3000:]

    def _violated(self, what: str) -> None:
        self.outcome.violations.append(what)

    async def _judge(self) -> None:
        """Compares what was told to devices, asked of the model and promised with what is kept."""
        outcome = self.outcome
        receipts = [Receipt.model_validate_json(line) for line in _lines(self.folder / "receipts")]
        async with self.store() as store:
            record, log = await store.run("chaos"), await store.log("chaos")
            kept = {one.assignment_id: await store.closed(one.assignment_id) for one in receipts}
        if record is None:
            self._violated("the run is not in the store")
            return
        state = state_of(record)
        outcome.status = state.status
        outcome.alpha_sha256 = alpha_sha256(state.method.alpha)
        outcome.history = history_of(log)
        outcome.queries = state.account.spent.queries
        outcome.requests = state.account.spent.requests
        if state.account.leases:
            self._violated(f"{len(state.account.leases)} leases are open at the end")
        for receipt in receipts:
            outcome.receipts += 1
            if not _is_kept(receipt, kept[receipt.assignment_id]):
                outcome.lost += 1
                self._violated(f"an acknowledged update is lost: {receipt}")
        outcome.asked = len(_lines(self.folder / "asked"))
        if outcome.asked > outcome.requests:
            self._violated(f"{outcome.asked} requests were asked, {outcome.requests} are charged")
        for line in _lines(self.folder / "trouble"):
            self._violated(line)
        per_client = [(entry[0], client) for entry in outcome.history for client in entry[1]]
        if len(set(per_client)) < len(per_client):
            self._violated("an update counts twice")


def judge(outcome: Outcome, whole: Outcome) -> list[str]:
    """What a run that was killed did otherwise than the one that was not."""
    found = [*whole.violations, *outcome.violations]
    for name in ("status", "alpha_sha256", "history", "queries"):
        ours, theirs = getattr(outcome, name), getattr(whole, name)
        if ours != theirs:
            found.append(f"{name} is {ours!r}, without kills {theirs!r}")
    return found


def state_of(record: RunRecord) -> RunState:
    """Where a stored run stands."""
    document = json.loads(record.document)
    del document["counters"]
    return decode(document, record.arrays)


def history_of(log: list[LogEntry]) -> list[tuple[int, tuple[int, ...], int, float]]:
    """The rounds, by enrolment indices: client ids differ from run to run."""
    history = []
    for entry in log:
        if entry.kind == "round":
            body = json.loads(entry.body)
            clients = tuple(sorted(seat["client"] for seat in body["seats"]))
            report = body["report"]
            history.append((report["round"], clients, report["queries"], report["mean_loss"]))
    return history


def _is_kept(receipt: Receipt, work: ClosedWork | None) -> bool:
    return (
        work is not None
        and work.receipt is not None
        and Receipt.model_validate_json(work.receipt) == receipt
    )


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _started(target: Callable[[Any], None], plan: object) -> BaseProcess:
    process = _PROCESSES.Process(target=target, args=(plan,), daemon=True)
    process.start()
    return process


async def _ended(process: BaseProcess) -> int | None:
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    loop.add_reader(process.sentinel, lambda: ended.done() or ended.set_result(None))
    try:
        await ended
    finally:
        loop.remove_reader(process.sentinel)
    process.join()
    return process.exitcode


async def _forever(work: Awaitable[None]) -> None:
    await work
    await asyncio.Event().wait()
