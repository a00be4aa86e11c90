"""Kill a device at every write, message and model call, with and without its machine's cache.

python -m tests.chaos.devices [--pairs]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import structlog

from fedone_sdk import EdgeClient
from fedone_sdk.aggregator import Service
from fedone_sdk.aggregator.authority import Authority
from fedone_sdk.backends import Answer, Query
from fedone_sdk.client import RequiredPrivacy, noise
from fedone_sdk.client.state import DeviceState, Journal
from fedone_sdk.local import MemoryTransport
from fedone_sdk.messages import Message, encode
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import MemoryStore
from fedone_sdk.testing import ManualClock, ScriptedBackend
from fedone_sdk.vocabulary import Vocabulary
from tests.edge import edge_client
from tests.power import Disk, Left
from tests.runs import PROMPT, run_spec, start

Kind = Literal["kill", "nothing", "names", "half", "chance"]
"""``kill`` ends the process; the others cut the power, and keep that part of the cache."""

KINDS: tuple[Kind, ...] = ("kill", "nothing", "names", "half", "chance")

_TOKEN = "enrolment-token"
_WORDS = Vocabulary(candidates=tuple(f" word{n}" for n in range(20)))
_ROWS: list[dict[str, Any]] = [{"text": f"text {n}", "label": n % 2} for n in range(8)]
_SAMPLES, _MULTIPLIER = 3, 4.0
_MOST_TURNS = 50
_FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""In memory: whether it is synced is what the test says."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A run, and the device that works for it: own model, what gets noise, counts epsilon."""

    exchange: str
    own: bool = False
    noise: str | None = None
    local_steps: int = 1
    required: bool = False

    @property
    def spec(self) -> RunSpec:
        """The run."""
        privacy = {"clip": 2.0, "noise_multiplier": _MULTIPLIER, "target": self.noise}
        return run_spec(
            prompt={**PROMPT, "length": 4},
            method={
                "num_samples": _SAMPLES,
                "batch_size": 4,
                "optimizer": "adamw",
                "local_steps": self.local_steps,
            },
            participation={"exchange": self.exchange, "own_models": "trusted"},
            privacy=None if self.noise is None else privacy,
            budget={"queries": 2 * self.queries_per_round},
            rounds=2,
        )

    @property
    def queries_per_round(self) -> int:
        """Prompts of one assignment."""
        return _SAMPLES * self.local_steps


SCENARIOS = {
    "losses, gateway": Scenario(exchange="losses"),
    "alpha, gateway, E = 2": Scenario(exchange="alpha", local_steps=2),
    "losses, own model": Scenario(exchange="losses", own=True),
    "losses, own model, noise": Scenario(
        exchange="losses", own=True, noise="losses", required=True
    ),
    "alpha, own model, noise on losses, E = 2": Scenario(
        exchange="alpha", own=True, noise="losses", local_steps=2, required=True
    ),
    "alpha, own model, noise on alpha": Scenario(
        exchange="alpha", own=True, noise="alpha", required=True
    ),
    "alpha, gateway, noise on losses, E = 2": Scenario(
        exchange="alpha", noise="losses", local_steps=2
    ),
}


class Dead(BaseException):
    """Ends the device's process at a point."""


@dataclass(frozen=True)
class Death:
    """A moment at which a device dies, counted from its start, and what its disk has then."""

    at: int
    kind: Kind

    @property
    def left(self) -> Left | None:
        """The disk after a power cut; None after a kill."""
        if self.kind == "kill":
            return None
        return random.Random(f"left {self.at}") if self.kind == "chance" else self.kind


@dataclass
class Figures:
    """Counts and violations of a campaign."""

    points: int = 0
    deaths: int = 0
    sent_again: int = 0
    asked_again: int = 0
    drawn: int = 0
    violations: list[str] = field(default_factory=list)


@dataclass
class _Seen:
    """Messages, model calls and noise of the device, over all its lives."""

    asked: int = 0
    kept: int = 0
    lost: int = 0
    drawn: int = 0
    released: set[tuple[float, ...]] = field(default_factory=set)
    updates: dict[str, list[bytes]] = field(default_factory=dict)
    scored: dict[str, set[bytes]] = field(default_factory=dict)
    where: list[str] = field(default_factory=list)


class Life:
    """One life of a device: every point that it passes is counted, and one of them ends it."""

    def __init__(self, death: Death | None) -> None:
        self.passed = 0
        self.dead_at: str | None = None
        self._at = None if death is None else death.at

    def point(self, what: str) -> None:
        """Passes a point.

        Raises:
            Dead: The device dies here, or has died.
        """
        if self.dead_at is None:
            self.passed += 1
            if self.passed == self._at:
                self.dead_at = what
        if self.dead_at is not None:
            raise Dead(self.dead_at)


class _Line(MemoryTransport):
    """The device may die before each message, and before each answer arrives."""

    def __init__(self, service: Service, life: Life, seen: _Seen) -> None:
        super().__init__(service)
        self._life, self._seen = life, seen

    async def update(self, credential: str, assignment_id: str, message: Any) -> Any:
        with self._calling("update"):
            body = encode(message)
            self._seen.updates.setdefault(assignment_id, []).append(body)
            return await super().update(credential, assignment_id, message)

    async def score(self, credential: str, message: Any) -> Any:
        with self._calling("score"):
            body = encode(message)
            self._seen.scored.setdefault(message.assignment_id, set()).add(body)
            return await super().score(credential, message)

    async def claim(self, credential: str, message: Any) -> Any:
        with self._calling("claim"):
            return await super().claim(credential, message)

    async def enrol(self, token: str, message: Any) -> Any:
        with self._calling("enrol"):
            return await super().enrol(token, message)

    async def decline(self, credential: str, assignment_id: str, message: Message) -> None:
        self._life.point("before decline")
        raise AssertionError(f"declined: {message}")

    @contextlib.contextmanager
    def _calling(self, what: str) -> Iterator[None]:
        self._life.point(f"before {what}")
        yield
        self._life.point(f"after {what}")


class _Model(ScriptedBackend):
    """The device may die before each call of its own model, and before each answer."""

    def __init__(self, life: Life, seen: _Seen) -> None:
        super().__init__()
        self._life, self._seen = life, seen

    async def score(self, query: Query) -> Answer:
        self._life.point("before model")
        self._seen.asked += 1
        answer = await super().score(query)
        self._life.point("after model")
        return answer


@contextlib.contextmanager
def _watching(life: Life, seen: _Seen) -> Iterator[None]:
    """Count the drawn and the released noise, and the prompts whose losses are stored.

    A device that has died in SQLite gets an error from it, and reaches nothing afterwards.
    """
    draw, keep, release = noise.discrete_gaussian, Journal.keep, Journal.release

    def drawn(count: int, *rest: Any) -> list[int]:
        seen.drawn += 1
        return draw(count, *rest)

    def kept(self: Journal, rows: Any, *rest: Any, **more: Any) -> None:
        keep(self, rows, *rest, **more)
        if life.dead_at is None:
            seen.kept += len(rows)

    def released(self: Journal, *arguments: Any) -> tuple[float, ...]:
        found = release(self, *arguments)
        if life.dead_at is None:
            seen.released.add(found)
        return found

    with (
        mock.patch.object(noise, "discrete_gaussian", drawn),
        mock.patch.object(Journal, "keep", kept),
        mock.patch.object(Journal, "release", released),
    ):
        yield


async def play(scenario: Scenario, deaths: Sequence[Death]) -> Figures:
    """Play a run with one device, whose lives end at these deaths in turn."""
    figures, seen = Figures(), _Seen()
    model = ScriptedBackend()
    service = Service(
        store=MemoryStore(),
        clock=ManualClock(),
        authority=Authority(enrolment_tokens=[_TOKEN]),
        backend=None if scenario.own else model,
    )
    await start(service)
    await service.add_run(scenario.spec, _WORDS)
    try:
        with tempfile.TemporaryDirectory(prefix="fedone-device-", dir=_FOLDER) as name:
            life, epsilon = Life(None), 0.0
            # One disk for all lives: a later cut also loses the cache of a process before.
            with Disk(Path(name), lambda what: life.point(what)) as disk:
                for death in (*deaths, None):
                    life = Life(death)
                    with _watching(life, seen):
                        epsilon = await _live(scenario, service, disk.root, life, seen, epsilon)
                    disk.check_closed()
                    if life.dead_at is None or death is None:
                        break
                    figures.deaths += 1
                    seen.where.append(f"{death.kind} {life.dead_at}")
                    seen.lost, seen.kept = seen.lost + seen.asked - seen.kept, seen.asked
                    if death.left is not None:
                        disk.cut(death.left)
            if scenario.required:
                sent = sum(len(set(bodies)) for bodies in seen.updates.values())
                releases = sent if scenario.noise == "alpha" else len(seen.released)
                with contextlib.closing(DeviceState(Path(name) / "state", "memory:")) as state:
                    counted = state.precisions()
                if abs(sum(counted.values()) * _MULTIPLIER**2 - releases) > 1e-9:
                    figures.violations.append(f"{releases} releases, counted {counted}")
        figures.violations += [
            f"{each} ({'; '.join(seen.where)})" for each in _judge(scenario, service, model, seen)
        ]
    finally:
        await service.stop()
    figures.drawn = seen.drawn
    figures.sent_again = sum(len(bodies) - 1 for bodies in seen.updates.values())
    figures.asked_again = max(seen.asked - 2 * scenario.queries_per_round, 0)
    return figures


async def _live(
    scenario: Scenario, service: Service, root: Path, life: Life, seen: _Seen, epsilon: float
) -> float:
    """Run the device until the run has ended or the device dies; return its epsilon."""
    client: EdgeClient | None = None
    try:
        client = edge_client(
            "memory:",
            token=_TOKEN,
            data=_ROWS,
            label="label",
            fields=["text"],
            backend=_Model(life, seen) if scenario.own else None,
            state_dir=root / "state",
            require_privacy=RequiredPrivacy(max_epsilon=8.0) if scenario.required else None,
            transport=_Line(service, life, seen),
            wait_s=0.0,
        )
        if client.epsilon is not None and client.epsilon < epsilon:
            raise AssertionError(f"epsilon went from {epsilon} to {client.epsilon}")
        async with client:
            for _ in range(_MOST_TURNS):
                if (await client.run_once()).outcome == "ended":
                    break
            else:
                raise AssertionError("the run does not end")
    except BaseException:
        if life.dead_at is None:
            raise
    finally:
        if client is not None:
            client._device.state.close()
    return epsilon if client is None or client.epsilon is None else client.epsilon


def _judge(
    scenario: Scenario, service: Service, model: ScriptedBackend, seen: _Seen
) -> Iterator[str]:
    run = service.runs["run"]
    result, planned = run.result(), 2 * scenario.queries_per_round
    if result.status != "completed" or result.rounds != 2:
        yield f"ended {result.status} after {result.rounds} rounds"
    if result.spent.queries != planned:
        yield f"{result.spent.queries} queries spent, {planned} planned"
    for work, bodies in seen.updates.items():
        if len(set(bodies)) != 1:
            yield f"{len(set(bodies))} different updates for {work}"
    for work, bodies in seen.scored.items():
        if len(bodies) != scenario.local_steps:
            yield f"{len(bodies)} different questions to the gateway for {work}"
    if scenario.own:
        if seen.asked > planned + seen.lost:
            yield f"{seen.asked} asked, {planned} planned, {seen.lost} under way at a death"
        # A device that requires privacy reports one request per query.
        if not scenario.required and result.spent.requests < seen.asked:
            yield f"{seen.asked} asked, {result.spent.requests} charged"
    elif len(model.asked) != planned:
        yield f"the gateway asked {len(model.asked)}, {planned} planned"


async def campaign(scenario: Scenario, deaths: Iterable[Death]) -> Figures:
    """Play a run per moment, in which the device dies there, up to the end of the run."""
    total = Figures()
    for death in deaths:
        if not await add(total, scenario, [death]):
            break
    return total


async def pairs(scenario: Scenario, kinds: Sequence[Kind] = ("nothing", "chance")) -> Figures:
    """Kill the device at each moment, and cut the power at each moment of its next life."""
    total = Figures()
    for first in itertools.count(1):
        for kind in kinds:
            for second in itertools.count(1):
                deaths = [Death(first, "kill"), Death(second, kind)]
                died = await add(total, scenario, deaths)
                if died < 2:
                    break
        if not died:
            return total
    return total


async def add(total: Figures, scenario: Scenario, deaths: Sequence[Death]) -> int:
    """Play a run; return the number of deaths."""
    try:
        found = await play(scenario, deaths)
    except AssertionError as exc:
        total.violations.append(f"{deaths}: {exc}")
        return len(deaths)
    total.points += bool(found.deaths)
    for name in ("deaths", "sent_again", "asked_again", "drawn"):
        setattr(total, name, getattr(total, name) + getattr(found, name))
    total.violations += [f"{deaths}: {each}" for each in found.violations]
    return found.deaths


def every(kinds: Sequence[Kind] = KINDS, first: int = 1, step: int = 1) -> Iterator[Death]:
    """Yield all moments, without end, each with every kind of death."""
    return (Death(at, kind) for at in itertools.count(first, step) for kind in kinds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 1 if there was a violation."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", action="store_true", help="a kill, and then a power cut")
    options = parser.parse_args(arguments)
    structlog.configure(processors=[], logger_factory=structlog.ReturnLoggerFactory())
    violations = 0
    print(
        "| run | deaths | updates sent again | model calls repeated | draws of noise | violations |"
        " s |\n|---|---|---|---|---|---|---|"
    )
    for name, scenario in SCENARIOS.items():
        began = time.monotonic()
        how = pairs(scenario) if options.pairs else campaign(scenario, every())
        figures = asyncio.run(how)
        print(
            f"| {name} | {figures.deaths} | {figures.sent_again} | {figures.asked_again} | "
            f"{figures.drawn} | {len(figures.violations)} | {time.monotonic() - began:.0f} |",
            flush=True,
        )
        for violation in figures.violations:
            print(violation, file=sys.stderr)
        violations += len(figures.violations)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
