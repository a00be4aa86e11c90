"""`fedone runs export`, and reading of stored runs for other commands."""

from __future__ import annotations

import asyncio
import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedone_sdk.cli._failures import naming
from fedone_sdk.cli._options import OptionalServer, OptionalToken, OwnRun, RunId, RunStore, call
from fedone_sdk.cli._output import check_target, plural, size, write_file
from fedone_sdk.cli._run_file import RunFile
from fedone_sdk.cli._state import default_store
from fedone_sdk.errors import ArgumentError, ResultError

if TYPE_CHECKING:
    from fedone_sdk.reports import ReportedRun
    from fedone_sdk.stores import SqlStore, Store


class ExportName(StrEnum):
    """Contents of an export."""

    run = "run"
    prompt = "prompt"


def export_run(
    run_id: RunId,
    target: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="RUN_ID.jsonl, or RUN_ID.prompt.json, by default.",
        ),
    ] = None,
    form: Annotated[
        ExportName,
        typer.Option("--as", help="The run as JSON lines, or its prompt as an artefact."),
    ] = ExportName.run,
    server: OptionalServer = None,
    token: OptionalToken = None,
    store: RunStore = None,
    run_path: OwnRun = None,
) -> None:
    """Write a run to one file: its description, every round, its result; or only its prompt."""
    load_own(run_path)
    if form == ExportName.prompt:
        from fedone_sdk.reports import artefact_of

        target = target or Path(f"{run_id}.prompt.json")
        check_target("--output", target)
        run = stored_run(run_id, server=server, token=token, store=store)
        write_file("--output", target, artefact_of(run).dump())
        typer.echo(f"{target}: prompt of run {run_id}, {plural(run.result.rounds, 'round')}")
        return
    target = target or Path(f"{run_id}.jsonl")
    check_target("--output", target)
    data = _exported(run_id, server, token, store)
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
        ResultError: There is no such run.
        SpecError: Not exactly one of server and store is given.
    """
    from fedone_sdk.reports import read_export

    return read_export(_exported(run_id, server, token, store))


async def exported_from(store: Store, run_id: str) -> bytes:
    """Return the export of a run of an open store."""
    from fedone_sdk.aggregator import export

    run = await export.open_run(store, run_id)
    return b"".join([piece async for piece in export.export_run(store, run)])


def _exported(run_id: str, server: str | None, token: str | None, store: str | None) -> bytes:
    if server is None and store is None and os.path.isfile(default_store(run_id)):
        store = str(default_store(run_id))
    if (server is None) == (store is None):
        raise ArgumentError("give one of --server, --store")
    if server is not None:
        if token is None:
            raise ArgumentError("--admin-token: is required with --server")
        data = call(server, token, lambda admin: admin.log(run_id))
        _check(data, run_id, server)
        return data

    async def of_store(opened: SqlStore) -> bytes:
        await opened.open()
        try:
            return await exported_from(opened, run_id)
        finally:
            await opened.close()

    return asyncio.run(of_store(_readable(store or "")))


def _check(data: bytes, run_id: str, server: str) -> None:
    """Check the export of a server, as it may replace a valid file."""
    from fedone_sdk.reports import read_export

    try:
        found = read_export(data).result.run_id
    except ResultError as exc:
        raise ResultError(f"{server}: {exc}") from exc
    if found != run_id:
        raise ResultError(f"{server}: holds run {found!r}, not {run_id!r}")


def _readable(where: str) -> SqlStore:
    """Return a store that is only read, so that a server may use it, too."""
    from fedone_sdk.stores import SqlStore

    if "://" in where:
        with naming("arguments"):
            return SqlStore(where, serving=False)
    if not Path(where).is_file():
        raise ArgumentError(f"--store: there is no file {where}")
    return SqlStore.sqlite(where, serving=False)
