"""A federation in one process: the clients with their data, and an aggregator with one run."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from fedone_sdk.aggregator import Aggregator, Change, RunHandle, ServedRun, Service
from fedone_sdk.algorithms import load_method
from fedone_sdk.backends import Answer, LLMBackend, Query, Wrapper
from fedone_sdk.backends.judge import Judge, load_score
from fedone_sdk.data import check_examples, load_examples, partition_clients
from fedone_sdk.errors import DataError, SpecError, system_errors
from fedone_sdk.files import replace_file
from fedone_sdk.imports import load_object
from fedone_sdk.local.population import Between, Population, enrolment_token, population_secret
from fedone_sdk.messages import RunResult
from fedone_sdk.metrics import MetricFunction
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import MemoryStore, Store
from fedone_sdk.task import Example, ScoreFunction, TaskSpec, target_of
from fedone_sdk.vocabulary import Vocabulary

_log = structlog.get_logger(__name__)

_FEW_REPEATS = 0.05
"""Share of dev rows that may repeat other rows without a warning."""

_MAX_ROWS = 20_000
"""Maximum number of rows from which a vocabulary is built; more rows only cost time."""

_DIGEST = "{}.rows.sha256"
"""Name of the file with the digest of a run's rows, in the folder of the clients' state."""

Watcher = Callable[[ServedRun, Change | None], None]
"""Called with the run before it starts (the change is None), and then with each of its changes."""

Ask = Callable[[Sequence[Query]], Awaitable[list[Answer]]]
"""Sends queries to the run's model; their usage counts as evaluation."""

First = Callable[[Ask], Awaitable[None]]
"""Called before the first client enrols, with a function that sends queries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Federation:
    """A run with its data, split among clients.

    Attributes:
        shards: The rows of each client.
        reused_rows: Whether some clients have the same rows, because there are too few rows.
        score: The score function, for loss ``score``.
        measure: The metric function, for a custom metric.
    """

    spec: RunSpec
    shards: tuple[tuple[Example, ...], ...]
    dev: tuple[Example, ...]
    vocabulary: Vocabulary
    reused_rows: bool
    score: ScoreFunction | None = None
    measure: MetricFunction | None = None

    @property
    def rows_sha256(self) -> str:
        """The digest of the rows of all clients and of the dev split."""
        digest = hashlib.sha256()
        for rows in (*self.shards, self.dev):
            digest.update(json.dumps(rows, skipkeys=True, default=str).encode())
        return digest.hexdigest()

    @classmethod
    def load(
        cls,
        spec: RunSpec,
        base_dir: str | Path = ".",
        *,
        score: ScoreFunction | None = None,
    ) -> Federation:
        """Load a run's data and partition it over clients.

        Args:
            spec: The run; its ``data`` is required.
            base_dir: Base of relative paths: the folder of RUN.yaml.
            score: The score function; if None, the function that the task names is imported.

        Raises:
            SpecError: The run has no training data, or names an object that cannot be imported.
            DataError: A file or an example cannot be used.
        """
        data, task = spec.data, spec.task
        if data is None or data.train is None:
            raise SpecError("data.train: is required to tune on this machine")
        load_method(spec.method, base_dir)
        with _prefixed_errors("data.train"):
            train = load_examples(data.train, folder=base_dir)
            check_examples(task, train, data.train)
        with _prefixed_errors("data.dev"):
            dev: list[Example] = []
            if data.dev is not None:
                dev = [*load_examples(data.dev, split="validation", folder=base_dir)]
            check_examples(task, dev, data.dev or "")
        _warn_of_repeats(task, train, dev)
        with _prefixed_errors("data.num_clients"):
            partition = partition_clients(
                # Without labels, all rows form one class.
                ["" if task.generates else str(target_of(task, row)) for row in train],
                num_clients=data.num_clients,
                shots=data.shots,
                alpha=data.dirichlet,
                seed=spec.seed,
            )
        if partition.reused_rows:
            _log.warning("clients share rows: there are too few for all", rows=len(train))
        # The vocabulary is built from a sample of the clients' texts.
        rows = sorted({row for shard in partition.shards for row in shard})
        rows = rows[:: len(rows) // _MAX_ROWS + 1]
        texts = (str(train[row][name]) for row in rows for name in task.fields)
        with _prefixed_errors("prompt" if spec.prompt.slots else "prompt.vocabulary"):
            vocabulary = spec.prompt.build(task, texts, base_dir)
        return cls(
            spec=spec,
            shards=tuple(tuple(train[row] for row in shard) for shard in partition.shards),
            dev=tuple(dev),
            vocabulary=vocabulary,
            reused_rows=partition.reused_rows,
            score=score or load_score(task, base_dir),
            measure=load_measure(task, base_dir),
        )


def _warn_of_repeats(task: TaskSpec, train: Sequence[Example], dev: Sequence[Example]) -> None:
    """Log a warning if more than a few dev rows have the texts of training or other dev rows."""
    known = {tuple(row[name] for name in task.fields) for row in train}
    texts = [tuple(row[name] for name in task.fields) for row in dev]
    shared, repeated = sum(text in known for text in texts), len(texts) - len(set(texts))
    if shared > _FEW_REPEATS * len(texts):
        problem = "dev rows are also training rows: the measured gain may be too high"
        _log.warning(problem, rows=shared, dev_rows=len(texts))
    if repeated > _FEW_REPEATS * len(texts):
        problem = "dev rows repeat other dev rows: the measured intervals are too narrow"
        _log.warning(problem, rows=repeated, dev_rows=len(texts))


def load_measure(task: TaskSpec, base_dir: str | Path = ".") -> MetricFunction | None:
    """Import the metric function that a task names; None for a built-in metric."""
    if ":" not in task.metric:
        return None
    measure: MetricFunction = load_object("task.metric", task.metric, base_dir)
    return measure


@contextmanager
def _prefixed_errors(key: str) -> Iterator[None]:
    """Prefix data errors with the key of RUN.yaml that caused them."""
    try:
        yield
    except DataError as exc:
        raise DataError(f"{key}: {exc}") from exc


@asynccontextmanager
async def running(
    federation: Federation,
    *,
    backend: LLMBackend,
    store: Store | None = None,
    state_dir: str | Path | None = None,
    watch: Watcher | None = None,
    first: First | None = None,
    between: Between | None = None,
    proposer: LLMBackend | None = None,
) -> AsyncIterator[RunHandle]:
    """Run a federation in this process: a real aggregator, and one edge client per shard.

    The clients work within the ``async with`` block. If the block is left early, pending queries
    are still answered, and the run ends with its current result. On exit its prompt is measured.

    Example:
        ```python
        async with running(Federation.load(spec), backend=backend) as run:
            async for event in run.events():
                print(event)
        print(run.result().prompt.text)
        ```

    Args:
        federation: The run and its data.
        backend: The model behind the gateway; the caller closes it.
        store: The aggregator's store, by default in memory. A run in the store is resumed, even
            after a stop.
        state_dir: Folder of the clients' state, so that a stored run resumes with the same clients.
            It also lets the run keep the open work of a round if the block is left early.
        watch: Called with the run and its changes.
        first: Called before the run starts or resumes; its queries count as evaluation.
        between: Wraps the transport of each client, for example to inject faults or attacks.
        proposer: The model of ``prompt.proposer``; the caller closes it.

    Raises:
        SpecError: The run cannot be performed as described.
        LabelWordError: A label word is not one token of the model.
    """
    spec, score, measure = federation.spec, federation.score, federation.measure
    if spec.task.loss == "score" and score is None:
        raise SpecError("task.score: `loss: score` requires Federation.score")
    if ":" in spec.task.metric and measure is None:
        raise SpecError(f"task.metric: {spec.task.metric} needs Federation.measure")
    folder = None if state_dir is None else Path(state_dir)
    secret = population_secret(folder)
    async with AsyncExitStack() as stack:
        aggregator = Aggregator(
            # All devices belong to one person, so they share cached answers.
            backend=Wrapper(backend, scope=()),
            store=store or MemoryStore(),
            enrolment_tokens=[enrolment_token(secret)],
        )
        await stack.enter_async_context(aggregator)
        service = aggregator.service
        await _resume(service, federation, folder)
        run = await service.add_run(spec, federation.vocabulary)
        if watch is not None:
            service.listeners.append(watch)
            watch(run, None)
        if first is not None:
            await first(partial(service.query_model, run))
        if isinstance(score, Judge):
            await stack.enter_async_context(score.backend)
        population = Population(
            service=service,
            shards=federation.shards,
            task=spec.task,
            secret=secret,
            score=service.charge_judge(run, score),
            state_dir=folder,
            between=between,
        )
        await stack.enter_async_context(population)
        # Enrolment may fail, so it precedes `add_run` below, which starts paid measurements.
        await population.enrol()
        options: dict[str, Any] = {"dev": federation.dev, "score": score, "measure": measure}
        await service.add_run(spec, federation.vocabulary, proposer=proposer, **options)
        async with population.working():
            yield RunHandle(service, run)
            if run.state.running:
                keep = folder is not None
                await service.stop_run(run, "interrupted", gently=True, keep=keep)
        await service.wait(run)


async def _resume(service: Service, federation: Federation, folder: Path | None) -> None:
    """Resume a stored run that was stopped, so that `add_run` can measure its prompts."""
    spec = federation.spec
    run = await service.registry.get_or_load(spec.name)
    if run is not None and not run.spec.is_same_run(spec):
        return  # `add_run` refuses the run.
    if folder is not None:
        file = folder / _DIGEST.format(spec.name)
        await asyncio.to_thread(_check_rows, file, federation, is_new=run is None)
    if run is not None and run.was_stopped:
        await service.resume_run(run)


def _check_rows(file: Path, federation: Federation, *, is_new: bool) -> None:
    """Store the digest of a new run's rows; check that a stored run began with the same rows."""
    digest = federation.rows_sha256.encode()
    with system_errors(DataError, f"{file}: cannot be used"):
        if is_new or not file.exists():
            replace_file(file, digest, mode=0o600)
        elif file.read_bytes() != digest:
            raise DataError(
                "data: the rows have changed since the run began; restore them, use another name, "
                "or start over (with fedone: --fresh, which keeps the paid answers)"
            )


async def simulate(
    federation: Federation,
    *,
    backend: LLMBackend,
    stop: asyncio.Event | None = None,
    **options: Any,
) -> RunResult:
    """Run a federation to its end, or until `stop` is set; the options are those of `running`."""
    async with running(federation, backend=backend, **options) as run:
        waits = (run.wait_ended(), (stop or asyncio.Event()).wait())
        tasks = [asyncio.create_task(wait) for wait in waits]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
    return run.result()
