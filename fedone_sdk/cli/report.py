"""`fedone report`, and `fedone runs export`, which writes a run or only its prompt to a file."""

from __future__ import annotations

import asyncio
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.filesize import decimal as size_text

from fedone_sdk import aggregator, reports, stores
from fedone_sdk.cli._options import OptionalServer, OptionalToken, OwnRun, RunId, RunStore, call
from fedone_sdk.cli._output import check_target, plural, write_file
from fedone_sdk.cli._run_file import RunFile, default_store
from fedone_sdk.client import AdminClient
from fedone_sdk.errors import ArgumentError, MissingExtraError, ResultError


def report(
    source: str,
    target: Annotated[Path | None, typer.Option("--output", "-o")] = None,
    run_path: OwnRun = None,
    store: RunStore = None,
    server: OptionalServer = None,
    token: OptionalToken = None,
) -> None:
    """Write the results and cost of a run as one HTML page that needs no network.

    The page has the metric with intervals, curves, the prompt before and after, a confusion matrix,
    cost, clients, and programs that use the prompt. It has no texts of examples and no API keys.

    Example: fedone report sst2 --store fedone.db -o sst2.html

    Args:
        source (RUN): A file from `fedone runs export`; or the id of a run in --store, on --server,
            or in this folder's .fedone.
        target (FILE): The page. Default: RUN.html.
    """
    is_here = not os.path.exists(source) and os.path.isfile(default_store(source))
    stored = is_here or store is not None or server is not None
    _load_own(run_path)
    target = target or Path(f"{source if stored else Path(source).stem}.html")
    check_report("--output", target)
    if stored:
        run = stored_run(source, server=server, token=token, store=store)
    else:
        run = reports.read_run(Path(source))
    write_file("--output", target, reports.html_report(run))
    typer.echo(f"{target}: run {run.result.run_id}, {plural(run.result.rounds, 'round')}")


def check_report(option: str, target: Path | None) -> None:
    """Check, before a run costs money, that its report can be written."""
    if target is None:
        return
    if target.suffix != ".html":
        raise ArgumentError(f"{option}: {target} must end in .html")
    check_target(option, target)
    if any(find_spec(name) is None for name in ("jinja2", "matplotlib")):
        raise MissingExtraError("a report", extra="report")


def export_run(
    run_id: RunId,
    target: Annotated[Path | None, typer.Option("--output", "-o")] = None,
    form: Annotated[Literal["run", "prompt"], typer.Option("--as")] = "run",
    server: OptionalServer = None,
    token: OptionalToken = None,
    store: RunStore = None,
    run_path: OwnRun = None,
) -> None:
    """Write a run (its description, rounds and result), or only its prompt, to a file.

    Example: fedone runs export sst2 --as prompt -o sst2.json --store fedone.db

    Args:
        target (FILE): The file to write. Default: RUN_ID.run.jsonl or RUN_ID.prompt.json.
        form: `run` writes the run as JSON lines; `prompt` writes its prompt as an artefact.
    """
    _load_own(run_path)
    target = target or Path(f"{run_id}.{'prompt.json' if form == 'prompt' else 'run.jsonl'}")
    check_target("--output", target)
    data = _exported(run_id, server, token, store)
    if form == "prompt":
        run = reports.read_export(data)
        write_file("--output", target, reports.artefact_of(run).dump())
        typer.echo(f"{target}: prompt of run {run_id}, {plural(run.result.rounds, 'round')}")
    else:
        write_file("--output", target, data, mode=0o600)
        typer.echo(f"{target}: run {run_id}, {size_text(len(data))}")


def _load_own(run_path: Path | None) -> None:
    """Import the user's method that a RUN.yaml names; no store contains its code."""
    if run_path is not None:
        RunFile.load(run_path)


def stored_run(
    run_id: str,
    *,
    server: str | None = None,
    token: str | None = None,
    store: str | stores.Store | None = None,
) -> reports.ReportedRun:
    """Return a run of a server or a store, for reports."""
    return reports.read_export(_exported(run_id, server, token, store))


def _exported(
    run_id: str, server: str | None, token: str | None, store: str | stores.Store | None
) -> bytes:
    if server is None and store is None and os.path.isfile(default_store(run_id)):
        store = str(default_store(run_id))
    if store is not None and server is None:
        opened = stores.SqlStore.at(store, serving=False) if isinstance(store, str) else store
        return asyncio.run(_read(opened, run_id))
    if server is None or store is not None:
        raise ArgumentError("give either --server or --store")
    if token is None:
        raise ArgumentError("FEDONE_ADMIN_TOKEN: is required with --server")
    data = call(server, token, AdminClient.log, run_id)
    try:
        exported_id = reports.read_export(data).result.run_id
    except ResultError as exc:
        raise ResultError(f"{server}: {exc}") from exc
    if exported_id != run_id:
        raise ResultError(f"{server}: sent run {exported_id!r} instead of {run_id!r}")
    return data


async def _read(store: stores.Store, run_id: str) -> bytes:
    await store.open()
    try:
        return await aggregator.exported_run(store, run_id)
    finally:
        await store.close()
