"""`fedone runs replay, export, import`: replay of a run, and its transfer between stores."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Awaitable, Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from fedone_sdk.cli._options import (
    JsonFile,
    OptionalServer,
    OptionalToken,
    OwnRun,
    RunId,
    RunStore,
    StoreUrl,
    call,
)
from fedone_sdk.cli._output import Output, check_target, plural, size, write_file
from fedone_sdk.cli._process import naming
from fedone_sdk.cli._run_file import RunFile, default_store
from fedone_sdk.errors import ArchiveError, ArgumentError

if TYPE_CHECKING:
    from fedone_sdk.reports import ReportedRun
    from fedone_sdk.stores import RunSnapshot, SqlStore

T = TypeVar("T")


class ExportName(StrEnum):
    """Contents of an export."""

    archive = "archive"
    prompt = "prompt"


def replay(
    run_id: RunId,
    server: OptionalServer = None,
    token: OptionalToken = None,
    store: RunStore = None,
    archive: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="An archive, written by `fedone runs export`."),
    ] = None,
    run_path: OwnRun = None,
    json_file: JsonFile = None,
) -> None:
    """Recompute a run's alpha from its log, and compare it after every round.

    Exits with 1 at the first difference.
    """
    from fedone_sdk.aggregator.rounds.replay import compare

    output = Output(json_file)
    load_own(run_path)
    if archive is not None:
        _one_of({"--server": server, "--store": store, "--archive": str(archive)})
        data = _read(archive)
    else:
        data = _exported(run_id, server, token, store)
    snapshot = _snapshot(data, run_id, str(archive or run_id))
    try:
        report = compare(snapshot)
    except ValueError as exc:
        raise ArchiveError(f"run {run_id!r} cannot be replayed: {exc}") from exc
    output.write_json({"agrees": report.agrees, **dataclasses.asdict(report)})
    output.heading(f"{run_id}: {'the same' if report.agrees else 'another'} alpha")
    facts = {"rounds": str(report.rounds), "rollbacks": str(report.rollbacks)}
    if report.difference is not None:
        facts |= {
            "first difference": f"{report.difference.what}, "
            f"{plural(report.difference.round, 'round')} done",
            "stored": report.difference.stored,
            "replayed": report.difference.replayed,
        }
    output.facts({**facts, "alpha_sha256": report.alpha_sha256})
    raise typer.Exit(int(not report.agrees))


def export_run(
    run_id: RunId,
    target: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="RUN_ID.fedone, or RUN_ID.prompt.json, by default.",
        ),
    ] = None,
    form: Annotated[
        ExportName,
        typer.Option("--as", help="The run as an archive, or its prompt as an artefact."),
    ] = ExportName.archive,
    server: OptionalServer = None,
    token: OptionalToken = None,
    store: RunStore = None,
    with_credentials: Annotated[
        bool,
        typer.Option(
            "--with-credentials",
            help="Include the digests of its clients' credentials, so that they can continue "
            "elsewhere. Protect the file like the store.",
        ),
    ] = False,
    run_path: OwnRun = None,
) -> None:
    """Write a run with its log, state and open work to one file, or its prompt.

    A run may continue in one place only, because two copies would each spend up to the cap.
    """
    load_own(run_path)
    if form == ExportName.prompt:
        if with_credentials:
            raise ArgumentError("--with-credentials: does not go with --as prompt")
        from fedone_sdk.reports import artefact_of

        target = target or Path(f"{run_id}.prompt.json")
        check_target("--output", target)
        run = stored_run(run_id, server=server, token=token, store=store)
        write_file("--output", target, artefact_of(run).dump())
        typer.echo(f"{target}: prompt of run {run_id}, {plural(run.result.rounds, 'round')}")
        return
    target = target or Path(f"{run_id}.fedone")
    check_target("--output", target)
    data = _exported(run_id, server, token, store, with_credentials=with_credentials)
    write_file("--output", target, data, mode=0o600)
    typer.echo(f"{target}: run {run_id}, {size(len(data))}")


def load_own(run_path: Path | None) -> None:
    """Load the method of the user's own that a run's file names, for what is stored of the run."""
    if run_path is not None:
        RunFile.load(run_path)


def stored_run(
    run_id: str, *, server: str | None = None, token: str | None = None, store: str | None = None
) -> ReportedRun:
    """Return a run of a server or a store, for reports.

    Raises:
        ArchiveError: There is no such run.
        SpecError: Not exactly one of server and store is given.
    """
    from fedone_sdk.reports import run_of_archive

    return asyncio.run(run_of_archive(_exported(run_id, server, token, store)))


def import_run(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="The archive.")],
    server: OptionalServer = None,
    token: OptionalToken = None,
    store: StoreUrl = None,
    run_path: OwnRun = None,
) -> None:
    """Import a run that `fedone runs export` wrote; it is stopped, and can be resumed.

    The whole file is checked, and the run replayed, before anything is written.
    """
    from fedone_sdk.aggregator.archives.reading import import_run
    from fedone_sdk.clock import SystemClock

    data = _read(source)
    load_own(run_path)
    _one_of({"--server": server, "--store": store})
    if server is not None:
        result = call(server, _required(token), lambda admin: admin.import_run(data))
        typer.echo(f"run {result.run_id}: {result.status}, {plural(result.rounds, 'round')}")
        return
    # With a server's lock: a server of the same SQLite file would not see the run.
    record = _in_store(
        store or "", True, lambda opened: import_run(opened, data, SystemClock().now())
    )
    typer.echo(f"run {record.run_id}: imported")


def _exported(
    run_id: str,
    server: str | None,
    token: str | None,
    store: str | None,
    *,
    with_credentials: bool = False,
) -> bytes:
    from fedone_sdk.aggregator.archives import writing

    if server is None and store is None and os.path.isfile(default_store(run_id)):
        store = str(default_store(run_id))
    _one_of({"--server": server, "--store": store})
    if server is not None:
        data = call(
            server,
            _required(token),
            lambda admin: admin.export_run(run_id, with_credentials=with_credentials),
        )
        _snapshot(data, run_id, server)  # checked, as it may replace a valid archive
        return data
    return _in_store(
        store or "",
        False,
        lambda opened: writing.export_run(opened, run_id, with_credentials=with_credentials),
    )


def _in_store(where: str, serving: bool, work: Callable[[SqlStore], Awaitable[T]]) -> T:
    from fedone_sdk.stores import SqlStore

    if "://" not in where:
        if not serving and not Path(where).is_file():
            raise ArgumentError(f"--store: there is no file {where}")
        store = SqlStore.sqlite(where, serving=serving)
    else:
        with naming("arguments"):
            store = SqlStore(where, serving=serving)

    async def opened() -> T:
        await store.open()
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(opened())


def _snapshot(data: bytes, run_id: str, source: str) -> RunSnapshot:
    """Return an archive's run, not yet replayed.

    Raises:
        ArchiveError: It is not an archive, or that of another run.
    """
    from fedone_sdk.aggregator.archives.reading import read_archive

    try:
        snapshot = read_archive(data, computes=False).snapshot
    except ArchiveError as exc:
        raise ArchiveError(f"{source}: {exc}") from exc
    if snapshot.record.run_id != run_id:
        raise ArchiveError(f"{source}: holds run {snapshot.record.run_id!r}, not {run_id!r}")
    return snapshot


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise ArchiveError(f"{path}: {exc.strerror or exc}") from exc


def _required(token: str | None) -> str:
    if token is None:
        raise ArgumentError("--admin-token: is required with --server")
    return token


def _one_of(options: dict[str, str | None]) -> None:
    if sum(value is not None for value in options.values()) != 1:
        raise ArgumentError(f"give one of {', '.join(options)}")
