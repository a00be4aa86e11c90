"""`fedone serve` and `fedone db`: the aggregator as a service, and its store."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import structlog
import typer

from fedone_sdk import errors
from fedone_sdk.cli._options import command, group
from fedone_sdk.cli._output import plural
from fedone_sdk.cli._process import json_logs, naming, quiet_logs, stopping
from fedone_sdk.errors import FedOneError, SpecError

if TYPE_CHECKING:
    from fedone_sdk.aggregator import Aggregator, Observers, RunToServe, ServeConfig
    from fedone_sdk.backends import LLMBackend
    from fedone_sdk.metrics import MetricFunction
    from fedone_sdk.stores import SqlStore
    from fedone_sdk.task import Example, ScoreFunction

_log = structlog.get_logger(__name__)

_TRACE_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""OpenTelemetry's variables for the destination of traces."""

_NO_DEFENCE = "defence: is none, so that false updates of a few devices can decide the prompt"


def serve(
    config_path: Annotated[Path | None, typer.Argument()] = None, check: bool = False
) -> None:
    """Serve tuning runs to edge clients, until SIGTERM or Ctrl-C.

    CONFIG.yaml: {listen: HOST:PORT, store: FILE or URL, auth: {enrolment_tokens: [...],
    admin_token: ...}, tls: {certificate: FILE, key: FILE}, backend: {kind: onnx} or null, runs:
    [RUN.yaml ...], metrics: {...}, tracing: {...}, log: {...}, drain_s: 20}. A token is text or
    {env: NAME}. Environment variables override keys: FEDONE_AUTH__ADMIN_TOKEN is
    auth.admin_token. Logs are JSON lines on standard output.

    Example: fedone serve config.yaml

    Args:
        config_path (CONFIG.yaml): The service.
        check: Only check whether it would start; change nothing.
    """
    from fedone_sdk.aggregator import ServeConfig

    config = ServeConfig.load(config_path)
    if check:
        quiet_logs()
    else:
        json_logs(config.log.level)
    name = "environment" if config_path is None else str(config_path)
    folder = Path() if config_path is None else config_path.parent
    with naming(name):
        runs, failures = config.load_runs(folder, name)
        if check:
            store = asyncio.run(_check(config, folder, runs, failures))
            if failures:
                raise ExceptionGroup("runs that cannot be served", failures)
            for warning in config.warnings:
                typer.echo(f"warning: {name}: {warning}", err=True)
            would = f"would serve {plural(len(runs), 'run')} at {config.listen}"
            typer.echo(f"{name}: {would}; {store}")
            for run in runs:
                dev = _dev_of(run)
                measured = f"measured on {len(dev.rows)} rows" if dev.rows else "not measured"
                measured += dev.why and f": {dev.why}"
                typer.echo(f"{run.spec.name}: {measured}; defence: {run.spec.defence.kind}")
                if not run.spec.defence.judges:
                    typer.echo(f"warning: {run.path}: {_NO_DEFENCE}", err=True)
        else:
            asyncio.run(_serve(config, folder, runs, failures))


async def _check(
    config: ServeConfig, folder: Path, runs: list[RunToServe], failures: list[FedOneError]
) -> str:
    """Run all steps of serving before listening, on a copy of the stored runs in memory."""
    from fedone_sdk.aggregator import Aggregator
    from fedone_sdk.stores import MemoryStore

    config.server_tls(folder)
    store = await config.store.check(folder)
    copy = MemoryStore()
    for record in await config.store.stored(folder, [run.spec.name for run in runs]):
        await copy.add_run(record)
    async with AsyncExitStack() as stack:
        _observers(config, stack)
        backend = await _backend(config, folder, None, stack)
        aggregator = Aggregator(backend=backend, store=copy, **dict(config.auth))
        await stack.enter_async_context(aggregator)
        # Without measurements, which cost queries.
        await _add_runs(aggregator, runs, failures, stack, measured=False)
    return store


async def _serve(
    config: ServeConfig, folder: Path, runs: list[RunToServe], failures: list[FedOneError]
) -> None:
    from fedone_sdk.aggregator import Aggregator

    stopped = asyncio.Event()
    _allow_connections()
    async with AsyncExitStack() as stack:
        stack.enter_context(stopping(stopped.set))
        observers = _observers(config, stack)
        backend = await _backend(config, folder, observers, stack)
        tls = config.server_tls(folder)
        if tls is not None:
            await stack.enter_async_context(tls.watching())
        store = config.store.build(folder)
        aggregator = Aggregator(
            backend=backend,
            store=store,
            observers=observers,
            drain_s=config.drain_s,
            limits=config.limits,
            cors=config.cors,
            retention=config.retention,
            **dict(config.auth),
        )
        stack.push_async_exit(aggregator)
        await aggregator.open()
        json_logs(config.log.level, replica=store.replica)
        for warning in config.warnings:
            _log.warning("check the configuration", reason=warning)
        # Listen first, so that probes and people get responses while stored runs are read.
        with errors.system_errors(SpecError, f"listen: {config.listen}"):
            host, port = config.address
            url = await aggregator.listen(
                host=host, port=port, ssl_context=None if tls is None else tls.context
            )
        if config.metrics.address is not None:
            with errors.system_errors(SpecError, f"metrics.listen: {config.metrics.listen}"):
                host, port = config.metrics.address
                await aggregator.listen_metrics(host=host, port=port)
        await aggregator.service.wait_until_loaded()
        await _add_runs(aggregator, runs, failures, stack)
        for error in failures:
            _log.error("a configured run is not served", reason=errors.one_line(error))
        if failures and not aggregator.service.registry.summaries:
            raise ExceptionGroup("no run can be served", failures)
        aggregator.service.admit_devices()
        favour_latency()
        _log.info("serving", url=url, runs=sorted(aggregator.service.runs), store=str(config.store))
        await stopped.wait()
        _log.info("stopping", notice_s=config.drain_notice_s, drain_s=config.drain_s)
        aggregator.drain()
        await asyncio.sleep(config.drain_notice_s)
    _log.info("stopped")


async def _backend(
    config: ServeConfig, folder: Path, observers: Observers | None, stack: AsyncExitStack
) -> LLMBackend | None:
    from fedone_sdk.backends.build import build_backend

    if config.backend is None:
        return None
    watch = None if observers is None else observers.model_request
    return await stack.enter_async_context(build_backend(config.backend, folder, watch=watch))


async def _add_runs(
    aggregator: Aggregator,
    runs: list[RunToServe],
    failures: list[FedOneError],
    stack: AsyncExitStack,
    *,
    measured: bool = True,
) -> None:
    for run in runs:
        if await aggregator.service.store.deleted(run.spec.name) is not None:
            _log.warning("a configured run was deleted and is passed over", run_id=run.spec.name)
            continue
        try:
            with naming(str(run.path)):
                await _add_run(aggregator, run, stack, measured=measured)
        except errors.StoreUnavailable:
            raise
        except FedOneError as exc:
            if isinstance(exc.__cause__, errors.BackendUnavailable):
                raise  # Not a fault of the run: a restart may serve it.
            failures.append(exc)


async def _add_run(
    aggregator: Aggregator, run: RunToServe, stack: AsyncExitStack, *, measured: bool
) -> None:
    from fedone_sdk.backends.build import proposer_of
    from fedone_sdk.backends.judge import Judge

    proposer = await stack.enter_async_context(proposer_of(run.spec, run.path.parent))
    dev = _dev_of(run) if measured else _Dev()
    if isinstance(dev.score, Judge):
        await stack.enter_async_context(dev.score.backend)
    await aggregator.add_run(
        run.spec,
        run.vocabulary,
        dev=dev.rows,
        score=dev.score,
        measure=dev.measure,
        proposer=proposer,
    )
    if measured and not run.spec.defence.judges:
        _log.warning("no defence", run_id=run.spec.name, reason=_NO_DEFENCE)
    if dev.rows:
        _log.info("prompts are measured", run_id=run.spec.name, rows=len(dev.rows))
    elif measured:
        _log.warning("prompts are not measured", run_id=run.spec.name, reason=dev.why)


class _Dev(NamedTuple):
    rows: tuple[Example, ...] = ()
    why: str = ""
    score: ScoreFunction | None = None
    measure: MetricFunction | None = None


def _dev_of(run: RunToServe) -> _Dev:
    from fedone_sdk.local import load_measure, load_score

    if not run.dev:
        return _Dev(why=run.unmeasured or "")
    task, folder = run.spec.task, run.path.parent
    try:
        return _Dev(run.dev, "", load_score(task, folder), load_measure(task, folder))
    except SpecError as exc:  # Devices may have a function that the server does not have.
        return _Dev(why="; ".join(exc.problems))


def _observers(config: ServeConfig, stack: AsyncExitStack) -> Observers:
    from fedone_sdk.aggregator import Observers

    observers = Observers.create(
        metrics=config.metrics.enabled,
        traces=_traced(config),
        endpoint=None if config.tracing is None else config.tracing.endpoint,
        request_level=config.log.requests,
    )
    stack.callback(observers.close)
    return observers


def _traced(config: ServeConfig) -> bool:
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    return config.tracing is not None or any(map(os.environ.get, _TRACE_VARIABLES))


def _allow_connections() -> None:
    """Raise the limit of open files to its maximum.

    A common default is 1,024, which idle connections of one unknown caller use up.
    """
    with suppress(ImportError, OSError, ValueError):  # Not on Windows; macOS has a lower maximum.
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def favour_latency() -> None:
    """Set up the interpreter for a process with many connections and some threads.

    A full collection over the objects of thousands of connections takes a tenth of a second, in
    which no request is served. After each read and write of a socket the event loop waits for a
    computing thread, for 5 ms by default.
    """
    sys.setswitchinterval(0.0005)
    gc.collect()
    gc.freeze()
    gc.set_threshold(1_000, 10, 2_000)


# The store

db = group("Manage a store.", example="fedone db upgrade config.yaml")


@command(db)
def upgrade(
    config_path: Annotated[Path | None, typer.Argument()] = None,
    url: Annotated[str | None, typer.Option("--store")] = None,
) -> None:
    """Upgrade a store to the newest schema; its contents are kept.

    Stop every server on it first, and make a backup. Without arguments the store is that of the
    environment variable FEDONE_STORE__URL.

    Example: fedone db upgrade --store postgresql://fedone@db.example/fedone

    Args:
        config_path (CONFIG.yaml): The server's configuration.
        url (URL): A store: a SQLite file, or postgresql://USER@HOST/DATABASE.
    """
    from fedone_sdk.stores.sql.schema import HEAD

    store = _store(config_path, url)
    before = asyncio.run(store.schema())
    if before == HEAD:
        typer.echo(f"the store has the newest schema, {HEAD}")
        return
    asyncio.run(store.upgrade())
    typer.echo(f"created schema {HEAD}" if before is None else f"upgraded {before} to {HEAD}")


@command(db)
def copy(source: str, target: str) -> None:
    """Copy a store into an empty one, with all runs, clients and tokens.

    Stop every server on both first. Then serve the copy only, because two servers would each spend
    up to the caps.

    Example: fedone db copy fedone.db postgresql://fedone@db.example/fedone

    Args:
        source (FROM): A store: a SQLite file, or postgresql://USER@HOST/DATABASE.
        target (TO): An empty store, in the same form as FROM.
    """
    from fedone_sdk.aggregator import snapshot_sha256
    from fedone_sdk.stores import SqlStore

    copied = asyncio.run(SqlStore.at(source).copy_to(SqlStore.at(target), snapshot_sha256))
    for run_id, digest in copied.digests.items():
        typer.echo(f"run {run_id}: alpha_sha256 {digest}")
    rows = copied.rows
    typer.echo(
        f"copied {plural(rows['runs'], 'run')}, {plural(rows['log'], 'log line')}, "
        f"{plural(rows['clients'], 'client')}, {plural(rows['tokens'], 'token')}"
    )


def _store(config_path: Path | None, url: str | None) -> SqlStore:
    if config_path is not None and url is not None:
        raise errors.ArgumentError("give CONFIG.yaml or --store, not both")
    from fedone_sdk.aggregator import ServeConfig
    from fedone_sdk.stores import SqlStore

    if url is not None:
        return SqlStore.at(url)
    if config_path is not None and _is_database(config_path):
        raise errors.ArgumentError(f"{config_path}: is a database, not a CONFIG.yaml; use --store")
    config = ServeConfig.load(config_path)
    folder = Path() if config_path is None else config_path.parent
    with naming(str(config_path or "environment")):
        return config.store.build(folder)


def _is_database(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:
        return file.read(16) == b"SQLite format 3\0"
    return False
