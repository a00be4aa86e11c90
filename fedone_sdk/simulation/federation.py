"""A whole federation in one process: data spread over clients, an aggregator, and its run."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import structlog

from fedone_sdk.aggregator import Aggregator, ServedRun
from fedone_sdk.aggregator.events import Effect
from fedone_sdk.backends import LLMBackend
from fedone_sdk.client import EdgeClient, HttpTransport
from fedone_sdk.data import Partition, check_examples, load_examples, partition_clients
from fedone_sdk.errors import DataError, SpecError
from fedone_sdk.messages import RunResult
from fedone_sdk.simulation.memory_transport import MemoryTransport
from fedone_sdk.spec import DirichletSpec, RunSpec
from fedone_sdk.stores import Store
from fedone_sdk.task import Example
from fedone_sdk.vocabulary import Vocabulary, build_vocabulary

__all__ = ["Federation", "simulate"]

_log = structlog.get_logger(__name__)

Watcher = Callable[[ServedRun, Effect | None], None]
"""Told of the run before it begins (no effect yet), and of every effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Federation:
    """A RunSpec with its data in place.

    Attributes:
        spec: The run.
        shards: Each client's examples.
        dev: Held-out examples.
        vocabulary: The candidates.
        reused_rows: Whether clients share rows, because there were too few.
    """

    spec: RunSpec
    shards: tuple[tuple[Example, ...], ...]
    dev: tuple[Example, ...]
    vocabulary: Vocabulary
    reused_rows: bool

    @classmethod
    def load(cls, spec: RunSpec, base_dir: str | Path = ".") -> Federation:
        """Reads and spreads a run's data.

        Args:
            spec: The run; its ``data`` is required.
            base_dir: Where relative paths start: the folder of RUN.yaml.

        Raises:
            SpecError: The run names no data.
            DataError: A file or an example cannot be used.
        """
        data, task = spec.data, spec.task
        if data is None:
            raise SpecError("data: is required to tune on this machine")
        with _about("data.train"):
            train = _examples(data.train, base_dir, "train")
            check_examples(task, train, data.train)
        with _about("data.dev"):
            dev = [] if data.dev is None else _examples(data.dev, base_dir, "validation")
            check_examples(task, dev, data.dev or "")
        with _about("data.num_clients"):
            partition: Partition = partition_clients(
                train,
                label_of=lambda example: str(example[task.label_field]),
                num_clients=data.num_clients,
                shots=data.shots,
                kind=data.partition.kind,
                alpha=data.partition.alpha if isinstance(data.partition, DirichletSpec) else 1.0,
                seed=spec.seed,
            )
        if partition.reused_rows:
            _log.warning("clients share rows: too few for disjoint shards", rows=len(train))
        # The vocabulary comes from text that the clients hold, and from no other.
        held = sorted({row for shard in partition.shards for row in shard})
        texts = (str(train[row][name]) for row in held for name in task.fields)
        with _about("prompt.vocabulary"):
            vocabulary = build_vocabulary(spec.prompt.vocabulary, texts, base_dir)
        return cls(
            spec=spec,
            shards=tuple(tuple(train[row] for row in shard) for shard in partition.shards),
            dev=tuple(dev),
            vocabulary=vocabulary,
            reused_rows=partition.reused_rows,
        )


@contextmanager
def _about(key: str) -> Iterator[None]:
    """Says which key of the run an unusable file or number of rows belongs to."""
    try:
        yield
    except DataError as exc:
        raise DataError(f"{key}: {exc}") from exc


def _examples(source: str, base_dir: str | Path, split: str) -> list[Example]:
    if source.startswith("hf:"):
        return list(load_examples(source, split=split))
    return list(load_examples(Path(base_dir) / source))


async def simulate(
    federation: Federation,
    *,
    backend: LLMBackend,
    transport: Literal["http", "memory"] = "http",
    store: Store | None = None,
    state_dir: str | Path | None = None,
    watch: Watcher | None = None,
    stop: asyncio.Event | None = None,
) -> RunResult:
    """Runs a federation to its end: a real aggregator, and one edge client per shard.

    Args:
        federation: The run and its data.
        backend: The model behind the gateway; stays open.
        transport: ``http`` over loopback, or ``memory`` without sockets.
        store: Where the aggregator keeps the run; in memory by default. A run that it holds
            already goes on where it was, also after it was stopped.
        state_dir: Where the clients keep their state, so that a stored run goes on with the same
            clients.
        watch: Told of progress.
        stop: Ends the run early, with what it has learnt.

    Raises:
        SpecError: The run cannot work as described.
        LabelWordError: A label word is not one token of the model.
    """
    token = secrets.token_urlsafe(32)
    async with AsyncExitStack() as stack:
        aggregator = Aggregator(backend=backend, store=store, enrolment_tokens=[token])
        await stack.enter_async_context(aggregator)
        url = await aggregator.listen() if transport == "http" else "memory:"
        known = aggregator.service.runs.get(federation.spec.name)
        if known is not None and known.spec == federation.spec and _can_go_on(known):
            # Before `add_run`, which looks whether there is something to measure.
            await aggregator.service.resume_run(known)
        run = await aggregator.add_run(federation.spec, federation.vocabulary, dev=federation.dev)
        if watch is not None:
            aggregator.service.listeners.append(watch)
            watch(run, None)
        clients = [
            await stack.enter_async_context(
                EdgeClient(
                    # A name rather than the URL: the next start listens on another port.
                    "simulation",
                    token=token,
                    data=shard,
                    state_dir=None if state_dir is None else Path(state_dir) / str(number),
                    transport=(
                        MemoryTransport(aggregator.service)
                        if transport == "memory"
                        else HttpTransport(url)
                    ),
                )
            )
            for number, shard in enumerate(federation.shards)
        ]
        # One after the other: a client's enrolment index, which draws go by, is its shard's.
        for client in clients:
            await client.enrol()
        async with asyncio.TaskGroup() as group:
            working = [
                group.create_task(client.run_forever(), name=f"client {number}")
                for number, client in enumerate(clients)
            ]
            await _ended(aggregator, run, stop)
            for task in working:
                # Whoever still waits for work learns of the end at its next request.
                task.cancel()
        await aggregator.wait(run)
        return run.result()


def _can_go_on(run: ServedRun) -> bool:
    """Whether a stored run was broken off: who starts it again wants it to go on."""
    return run.state.status in ("stopped", "failed")


async def _ended(aggregator: Aggregator, run: ServedRun, stop: asyncio.Event | None) -> None:
    waits: Sequence[asyncio.Task[bool]] = [
        asyncio.create_task(event.wait()) for event in (run.ended, stop) if event is not None
    ]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    if run.state.running:
        await aggregator.service.stop_run(run, "interrupted")
