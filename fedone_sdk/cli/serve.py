"""`fedone serve` and `fedone db`: the aggregator as a service, and its store."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Annotated, NamedTuple

import structlog
import typer

from fedone_sdk import aggregator, backends, errors, local, stores
from fedone_sdk.backends.build import build_backend, proposer_of
from fedone_sdk.backends.judge import Judge
from fedone_sdk.cli._options import command, group
from fedone_sdk.cli._output import plural
from fedone_sdk.cli._process import errors_in, json_logs, quiet_logs, stopping
from fedone_sdk.errors import FedOneError, SpecError
from fedone_sdk.metrics import MetricFunction
from fedone_sdk.task import Example, ScoreFunction

_log = structlog.get_logger(__name__)

_TRACE_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""OpenTelemetry's variables for the destination of traces."""

_NO_DEFENCE = "defence: is none, so false updates of a few devices can decide the prompt"


class _Settings(NamedTuple):
    """A configuration, its runs, and the errors of runs that cannot be served."""

    config: aggregator.ServeConfig
    folder: Path
    runs: list[aggregator.RunToServe]
    failures: list[FedOneError]


def serve(
    config_path: Annotated[Path | None, typer.Argument()] = None, check: bool = False
) -> None:
    """Serve tuning runs to edge clients, until SIGTERM or Ctrl-C.

    CONFIG.yaml: {listen: HOST:PORT, store: FILE or URL, auth: {enrolment_tokens: [...],
    admin_token: ...}, tls: {certificate: FILE, key: FILE}, backend: {kind: onnx} or null, runs:
    [RUN.yaml ...], metrics: {...}, tracing: {...}, log: {...}, drain_s: 20}. A token is text or
    {env: NAME}. Environment variables override keys: FEDONE_AUTH__ADMIN_TOKEN sets
    auth.admin_token. Logs are JSON lines on standard output.

    Example: fedone serve config.yaml

    Args:
        config_path (CONFIG.yaml): The server's configuration.
        check: Only check whether the server would start; change nothing.
    """
    config = aggregator.ServeConfig.load(config_path)
    if check:
        quiet_logs()
    else:
        json_logs(config.log.level)
    name = "environment" if config_path is None else str(config_path)
    folder = Path() if config_path is None else config_path.parent
    with errors_in(name):
        settings = _Settings(config, folder, *config.load_runs(folder, name))
        if not check:
            asyncio.run(_serve(settings))
            return
        store = asyncio.run(_check(settings))
        if settings.failures:
            raise ExceptionGroup("runs that cannot be served", settings.failures)
        for warning in config.warnings:
            typer.echo(f"warning: {name}: {warning}", err=True)
        would = f"would serve {plural(len(settings.runs), 'run')} at {config.listen}"
        typer.echo(f"{name}: {would}; {store}")
        for run in settings.runs:
            dev = _dev_of(run)
            measured = f"measured on {len(dev.rows)} rows" if dev.rows else "not measured"
            measured += dev.why and f": {dev.why}"
            typer.echo(f"{run.spec.name}: prompts are {measured}; defence: {run.spec.defence.kind}")
            if not run.spec.defence.checks_updates:
                typer.echo(f"warning: {run.path}: {_NO_DEFENCE}", err=True)


async def _check(settings: _Settings) -> str:
    """Do all steps of a start except listening, on a copy of the runs; describe the store."""
    config, folder, runs, failures = settings
    config.server_tls(folder)
    store = await config.store.check(folder)
    copy = stores.MemoryStore()
    for record in await config.store.stored(folder, [run.spec.name for run in runs]):
        await copy.add_run(record)
    async with AsyncExitStack() as stack:
        _observers(config, stack)
        backend = await _backend(config, folder, None, stack)
        server = aggregator.Aggregator(backend=backend, store=copy, **dict(config.auth))
        await stack.enter_async_context(server)
        # Without measurements of prompts, because these cost queries.
        await _add_runs(server, runs, failures, stack, measured=False)
    return store


async def _serve(settings: _Settings) -> None:
    config, folder, runs, failures = settings
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
        server = aggregator.Aggregator(
            backend=backend,
            store=store,
            observers=observers,
            drain_s=config.drain_s,
            limits=config.limits,
            cors=config.cors,
            retention=config.retention,
            **dict(config.auth),
        )
        stack.push_async_exit(server)
        await server.open()
        json_logs(config.log.level, replica=store.replica)
        for warning in config.warnings:
            _log.warning("check the configuration", reason=warning)
        # Listen first, so that probes get responses while stored runs are loaded.
        with errors.system_errors(SpecError, f"listen: {config.listen}"):
            host, port = config.address
            url = await server.listen(
                host=host, port=port, ssl_context=None if tls is None else tls.context
            )
        if config.metrics.address is not None:
            with errors.system_errors(SpecError, f"metrics.listen: {config.metrics.listen}"):
                host, port = config.metrics.address
                await server.listen_metrics(host=host, port=port)
        await server.service.wait_until_loaded()
        await _add_runs(server, runs, failures, stack)
        for failure in failures:
            _log.error("a configured run is not served", reason=errors.one_line(failure))
        if failures and not server.service.registry.summaries:
            raise ExceptionGroup("no run can be served", failures)
        server.service.admit_devices()
        favour_latency()
        _log.info("serving", url=url, runs=sorted(server.service.runs), store=str(config.store))
        await stopped.wait()
        _log.info("stopping", notice_s=config.drain_notice_s, drain_s=config.drain_s)
        server.drain()
        await asyncio.sleep(config.drain_notice_s)
    _log.info("stopped")


async def _backend(
    config: aggregator.ServeConfig,
    folder: Path,
    observers: aggregator.Observers | None,
    stack: AsyncExitStack,
) -> backends.LLMBackend | None:
    if config.backend is None:
        return None
    watch = None if observers is None else observers.model_request
    return await stack.enter_async_context(build_backend(config.backend, folder, watch=watch))


async def _add_runs(
    server: aggregator.Aggregator,
    runs: list[aggregator.RunToServe],
    failures: list[FedOneError],
    stack: AsyncExitStack,
    *,
    measured: bool = True,
) -> None:
    for run in runs:
        if await server.service.store.deleted(run.spec.name) is not None:
            _log.warning("a configured run was deleted and is not served", run_id=run.spec.name)
            continue
        try:
            with errors_in(str(run.path)):
                await _add_run(server, run, stack, measured=measured)
        except errors.StoreUnavailable:
            raise
        except FedOneError as exc:
            if isinstance(exc.__cause__, errors.BackendUnavailable):
                raise  # The model is unavailable: after a restart the run may be served.
            failures.append(exc)


async def _add_run(
    server: aggregator.Aggregator,
    run: aggregator.RunToServe,
    stack: AsyncExitStack,
    *,
    measured: bool,
) -> None:
    proposer = await stack.enter_async_context(proposer_of(run.spec, run.path.parent))
    dev = _dev_of(run) if measured else _Dev()
    if isinstance(dev.score, Judge):
        await stack.enter_async_context(dev.score.backend)
    await server.add_run(
        run.spec,
        run.vocabulary,
        dev=dev.rows,
        score=dev.score,
        measure=dev.measure,
        proposer=proposer,
    )
    if measured and not run.spec.defence.checks_updates:
        _log.warning("no defence", run_id=run.spec.name, reason=_NO_DEFENCE)
    if dev.rows:
        _log.info("prompts are measured", run_id=run.spec.name, rows=len(dev.rows))
    elif measured:
        _log.warning("prompts are not measured", run_id=run.spec.name, reason=dev.why)


class _Dev(NamedTuple):
    rows: tuple[Example, ...] = ()
    why: str = ""  # Why there are no rows.
    score: ScoreFunction | None = None
    measure: MetricFunction | None = None


def _dev_of(run: aggregator.RunToServe) -> _Dev:
    if not run.dev:
        return _Dev(why=run.unmeasured or "")
    task, folder = run.spec.task, run.path.parent
    try:
        return _Dev(run.dev, "", local.load_score(task, folder), local.load_measure(task, folder))
    except SpecError as exc:  # The function may be installed on devices only.
        return _Dev(why="; ".join(exc.problems))


def _observers(config: aggregator.ServeConfig, stack: AsyncExitStack) -> aggregator.Observers:
    observers = aggregator.Observers.create(
        metrics=config.metrics.enabled,
        traces=_traced(config),
        endpoint=None if config.tracing is None else config.tracing.endpoint,
        request_level=config.log.requests,
    )
    stack.callback(observers.close)
    return observers


def _traced(config: aggregator.ServeConfig) -> bool:
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    return config.tracing is not None or any(map(os.environ.get, _TRACE_VARIABLES))


def _allow_connections() -> None:
    """Raise the limit of open files: one caller's idle connections could use up a low limit."""
    with suppress(ImportError, OSError, ValueError):  # Windows has no such limit.
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def favour_latency() -> None:
    """Set up the interpreter for a process with many connections and some threads.

    With thousands of connections, a full garbage collection stops the event loop for 0.1 s. If
    another thread is busy, Python's default lets the event loop wait 5 ms after each socket call.
    """
    sys.setswitchinterval(0.0005)
    gc.collect()
    gc.freeze()
    gc.set_threshold(1_000, 10, 2_000)


db = group("Manage a store.", example="fedone db upgrade config.yaml")


@command(db)
def upgrade(
    config_path: Annotated[Path | None, typer.Argument()] = None,
    url: Annotated[str | None, typer.Option("--store")] = None,
) -> None:
    """Upgrade a store to the newest schema; its contents are kept.

    First stop every server that uses the store, and make a backup. Without arguments, the
    environment variables of `fedone serve` (FEDONE_STORE__URL ...) are the configuration.

    Example: fedone db upgrade --store postgresql://fedone@db.example/fedone

    Args:
        config_path (CONFIG.yaml): The server's configuration.
        url (URL): The store: a SQLite file, or postgresql://USER@HOST/DATABASE.
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

    First stop every server that uses either store. Then serve only the copy: servers on both
    stores would each spend up to the caps.

    Example: fedone db copy fedone.db postgresql://fedone@db.example/fedone

    Args:
        source (FROM): A store: a SQLite file, or postgresql://USER@HOST/DATABASE.
        target (TO): An empty store, in the same form as FROM.
    """
    copied = asyncio.run(
        stores.SqlStore.at(source).copy_to(stores.SqlStore.at(target), aggregator.snapshot_sha256)
    )
    for run_id, digest in copied.digests.items():
        typer.echo(f"run {run_id}: alpha_sha256 {digest}")
    rows = copied.rows
    typer.echo(
        f"copied {plural(rows['runs'], 'run')}, {plural(rows['log'], 'log line')}, "
        f"{plural(rows['clients'], 'client')}, {plural(rows['tokens'], 'token')}"
    )


def _store(config_path: Path | None, url: str | None) -> stores.SqlStore:
    if config_path is not None and url is not None:
        raise errors.ArgumentError("give CONFIG.yaml or --store, not both")
    if url is not None:
        return stores.SqlStore.at(url)
    if config_path is not None and _is_database(config_path):
        raise errors.ArgumentError(f"{config_path}: is a database, not a CONFIG.yaml; use --store")
    config = aggregator.ServeConfig.load(config_path)
    folder = Path() if config_path is None else config_path.parent
    with errors_in(str(config_path or "environment")):
        return config.store.build(folder)


def _is_database(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:
        return file.read(16) == b"SQLite format 3\0"
    return False
