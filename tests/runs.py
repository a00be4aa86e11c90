"""A small run, its service and its clients, for tests to vary."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fedone_sdk.aggregator import ServedRun, Service
from fedone_sdk.aggregator.authority import Authority
from fedone_sdk.backends import LLMBackend
from fedone_sdk.client import EdgeClient, Idle
from fedone_sdk.clock import Clock
from fedone_sdk.local import MemoryTransport
from fedone_sdk.messages import Claim, Decline, Receipt, Score, Scores
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import MemoryStore, Store
from fedone_sdk.testing import ManualClock
from fedone_sdk.vocabulary import Vocabulary
from tests.edge import edge_client

TOKEN = "enrolment-token"
WORDS = Vocabulary(candidates=(" good", " bad", " fine"))
TASK = {"template": "{prompt} {text} {mask}", "labels": {0: " no", 1: " yes"}}
PROMPT = {"length": 2, "vocabulary": {"kind": "list", "candidates": ["x", "y"]}}
_METHOD = {"name": "gs-bdpl", "num_samples": 4, "batch_size": 2, "tau": 1.0, "optimizer": "sgd"}


def run_spec(
    *,
    method: Mapping[str, Any] | None = None,
    participation: Mapping[str, Any] | None = None,
    **changes: Any,
) -> RunSpec:
    """Return three rounds of GS-BDPL over the losses exchange, without evaluation.

    `participation` is merged with the defaults, and so is `method` unless it has another name;
    other sections are replaced.
    """
    defaults = {} if "name" in (method or {}) else _METHOD
    return RunSpec.model_validate(
        {
            "name": "run",
            "task": TASK,
            "prompt": PROMPT,
            "method": {**defaults, **(method or {})},
            "participation": {
                "exchange": "losses",
                "deadline_s": 100,
                "model": "scripted",
                "own_models": "charged",  # tests send updates that the gateway did not answer
                **(participation or {}),
            },
            "rounds": 3,
            "evaluation": {"every": 0},
            **changes,
        }
    )


async def start(service: Service) -> None:
    await service.open()
    await service.wait_until_loaded()
    service.admit_devices()


@asynccontextmanager
async def serving(
    *specs: RunSpec,
    backend: LLMBackend | None = None,
    store: Store | None = None,
    clock: Clock | None = None,
    words: Vocabulary = WORDS,
) -> AsyncIterator[Service]:
    """Start an aggregator without HTTP, on a manual clock, and add the runs."""
    service = Service(
        store=store or MemoryStore(),
        clock=clock or ManualClock(),
        authority=Authority(enrolment_tokens=[TOKEN]),
        backend=backend,
    )
    try:
        await start(service)
        for spec in specs:
            await service.add_run(spec, words)
        yield service
    finally:
        await service.stop()


def memory_client(service: Service, **options: Any) -> EdgeClient:
    """Return an edge client of a service in this process; options as for `edge_client`."""
    return edge_client(
        "memory:", **{"token": TOKEN, "transport": MemoryTransport(service), **options}
    )


async def train(service: Service, run: ServedRun, data: Sequence[Mapping[str, Any]]) -> None:
    """Do all the work of a run by one client, and wait for the last measurements."""
    async with asyncio.timeout(10), memory_client(service, data=data) as client:
        await client.run_forever()
        await service.wait(run)


class RecordingTransport(MemoryTransport):
    """Keep the messages that a client sends, with refused updates, in order."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.claims: list[Claim] = []
        self.works: list[Any] = []
        self.scores: list[Score] = []
        self.updates: list[Any] = []
        self.declines: list[Decline] = []

    async def claim(self, credential: str, message: Claim) -> Any:
        self.claims.append(message)
        answer = await super().claim(credential, message)
        if not isinstance(answer, Idle):
            self.works.append(answer)
        return answer

    async def score(self, credential: str, message: Score) -> Scores:
        self.scores.append(message)
        return await super().score(credential, message)

    async def update(self, credential: str, assignment_id: str, message: Any) -> Receipt:
        self.updates.append(message)
        return await super().update(credential, assignment_id, message)

    async def decline(self, credential: str, assignment_id: str, message: Decline) -> None:
        self.declines.append(message)
        await super().decline(credential, assignment_id, message)


class DyingTransport(RecordingTransport):
    """End the device at a request for scores."""

    def __init__(self, service: Service, *, dies_at: int) -> None:
        super().__init__(service)
        self._dies_at = dies_at

    async def score(self, credential: str, message: Score) -> Scores:
        if len(self.scores) + 1 == self._dies_at:
            self.scores.append(message)
            raise asyncio.CancelledError
        return await super().score(credential, message)


async def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Wait for something that signals no event."""
    turns = 0
    async with asyncio.timeout(timeout_s):
        while not condition():
            # At first every turn of the loop, for states that soon pass.
            await asyncio.sleep(0 if turns < 10_000 else 0.001)
            turns += 1
