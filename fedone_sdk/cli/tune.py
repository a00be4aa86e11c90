"""`fedone tune`: a run of one's own, with all its clients in this process."""

from __future__ import annotations

import asyncio
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedone_sdk.cli._files import check_target, write_file
from fedone_sdk.cli._logs import quiet_logs
from fedone_sdk.cli._options import (
    Cap,
    Exchange,
    JsonFile,
    RunPath,
    Seed,
    Trackers,
    Transport,
    TransportName,
)
from fedone_sdk.cli._output import Output
from fedone_sdk.cli._report import can_go_on, exit_code, print_result
from fedone_sdk.cli._run_file import RunFile
from fedone_sdk.cli._tracking import tracking_of
from fedone_sdk.cli._tuning import run_here
from fedone_sdk.cli.archives import stored_run
from fedone_sdk.cli.report import check_report, write_report
from fedone_sdk.errors import SpecError

if TYPE_CHECKING:
    from fedone_sdk.messages import RunResult
    from fedone_sdk.reports import ReportedRun
    from fedone_sdk.simulation import Federation
    from fedone_sdk.stores import Store
    from fedone_sdk.trackers import Tracking

__all__ = ["tune"]


def tune(
    run_path: RunPath,
    transport: Transport = TransportName.http,
    exchange: Exchange = None,
    seed: Seed = None,
    cap: Cap = None,
    start: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Begin with what an earlier run came to: its archive (`fedone runs export`), or "
            "its result (--json).",
        ),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keep the run in this SQLite file: killed or paused, it goes on where it was. Its "
            "clients are kept beside it, in FILE.fedone-clients, and paid answers in "
            "FILE.fedone-answers unless RUN.yaml names a cache.",
        ),
    ] = None,
    artefact: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Write the prompt with all that says where it comes from (`fedone prompt`).",
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", show_default=False, help="Write a report: FILE.html or FILE.md."
        ),
    ] = None,
    trackers: Trackers = None,
    json_file: JsonFile = None,
) -> None:
    """Tune a prompt for your own model and data, under your own budget.

    Paths in RUN.yaml start at its folder.
    """
    output = Output(json_file)
    quiet_logs()
    if store is not None:
        check_target("--store", store)
    if artefact is not None:
        check_target("--artefact", artefact)
    if report is not None:
        check_report("--report", report)
    tracking = tracking_of(trackers)
    run = RunFile.load(run_path, seed=seed, cap=cap, exchange=exchange, start=_begun(start))
    if artefact is not None and run.spec.method.domain != "tokens":
        raise SpecError(
            f"--artefact: {run.spec.method.name} tunes vectors, no words", source="arguments"
        )
    federation = run.federation()
    if store is not None and not store.exists():
        # Clients of a store that is gone: a new one would not know them.
        shutil.rmtree(_clients_of(store), ignore_errors=True)
    kept = None if artefact is None and report is None else _Kept(store)
    with tracking:
        result = asyncio.run(_tune(run, federation, transport, store, kept, tracking))
    # What was paid for: that one cannot be written, or nobody reads it, costs none of the others.
    with ExitStack() as last_first:
        last_first.callback(print_result, output, result, num_clients=len(federation.shards))
        if kept is not None:
            last_first.callback(_write, kept, result.run_id, artefact, report)
        last_first.callback(output.write_json, result.model_dump(mode="json"))
    if can_go_on(result):
        print(f"{result.reason}; {_how_to_go_on(run, store)}", file=sys.stderr)
    raise typer.Exit(exit_code(result))


def _how_to_go_on(run: RunFile, store: Path | None) -> str:
    if store is not None:
        return "the same command goes on where this run is"
    cache = run.spec.backend.cache
    kept = "nothing" if cache is None else f"nothing but the answers in {cache}"
    return f"{kept} is kept: with --store FILE a run can go on"


def _begun(path: Path | None) -> tuple[dict[str, float], ...] | None:
    from fedone_sdk.reports import read_run, start_of

    return None if path is None else start_of(asyncio.run(read_run(path)))


def _write(kept: _Kept, run_id: str, artefact: Path | None, report: Path | None) -> None:
    from fedone_sdk.reports import artefact_of

    run = kept.run(run_id)
    if artefact is not None:
        write_file("--artefact", artefact, artefact_of(run).dump())
    if report is not None:
        write_report("--report", report, run)


async def _tune(
    run: RunFile,
    federation: Federation,
    transport: TransportName,
    store: Path | None,
    kept: _Kept | None,
    tracking: Tracking,
) -> RunResult:
    cache = None if store is None else store.with_name(f"{store.name}.fedone-answers")
    async with run.backend(cache=cache) as backend:
        return await run_here(
            federation,
            source=run.path,
            backend=backend,
            transport=transport.value,
            store=kept.store if kept is not None else _store(store),
            state_dir=None if store is None else _clients_of(store),
            tracking=tracking,
        )


def _store(path: Path | None) -> Store | None:
    from fedone_sdk.stores import SqlStore

    return None if path is None else SqlStore.sqlite(path)


class _Kept:
    """A run's store, to be read when the run is over.

    Attributes:
        store: The store.
    """

    def __init__(self, path: Path | None) -> None:
        from fedone_sdk.stores import MemoryStore

        self._path = path
        self.store: Store = _store(path) or MemoryStore()

    def run(self, run_id: str) -> ReportedRun:
        """What was kept of a run."""
        if self._path is not None:
            return stored_run(run_id, None, None, str(self._path))
        return asyncio.run(self._from_memory(run_id))

    async def _from_memory(self, run_id: str) -> ReportedRun:
        from fedone_sdk.aggregator.archive import export_run
        from fedone_sdk.reports import run_of_archive

        return await run_of_archive(await export_run(self.store, run_id))


def _clients_of(store: Path) -> Path:
    return store.with_name(f"{store.name}.fedone-clients")
