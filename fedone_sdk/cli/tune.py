"""`fedone tune`: a run of one's own, with all its clients in this process."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedone_sdk.cli._logs import quiet_logs
from fedone_sdk.cli._options import (
    Cap,
    Exchange,
    JsonFile,
    RunPath,
    Seed,
    Transport,
    TransportName,
)
from fedone_sdk.cli._output import Output
from fedone_sdk.cli._report import exit_code, paused, print_result
from fedone_sdk.cli._run_file import RunFile
from fedone_sdk.cli._tuning import run_here

if TYPE_CHECKING:
    from fedone_sdk.messages import RunResult
    from fedone_sdk.simulation import Federation

__all__ = ["tune"]


def tune(
    run_path: RunPath,
    transport: Transport = TransportName.http,
    exchange: Exchange = None,
    seed: Seed = None,
    cap: Cap = None,
    store: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keep the run in this SQLite file: killed or paused, it goes on where it was. Its "
            "clients are kept beside it, in FILE.fedone-clients, and paid answers in "
            "FILE.fedone-answers unless RUN.yaml names a cache.",
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Tune a prompt for your own model and data, under your own budget.

    Paths in RUN.yaml start at its folder.
    """
    output = Output(json_file)
    quiet_logs()
    run = RunFile.load(run_path, seed=seed, cap=cap, exchange=exchange)
    federation = run.federation()
    if store is not None and not store.exists():
        # Clients of a store that is gone: a new one would not know them.
        shutil.rmtree(_clients_of(store), ignore_errors=True)
    result = asyncio.run(_tune(run, federation, transport, store))
    print_result(output, result, num_clients=len(federation.shards))
    output.write_json(result.model_dump(mode="json"))
    if paused(result):
        print(f"{result.reason}; {_how_to_go_on(run, store)}", file=sys.stderr)
    raise typer.Exit(exit_code(result))


def _how_to_go_on(run: RunFile, store: Path | None) -> str:
    if store is not None:
        return "the same command goes on where this run is"
    cache = run.spec.backend.cache
    kept = "nothing" if cache is None else f"nothing but the answers in {cache}"
    return f"{kept} is kept: with --store FILE a run can go on"


async def _tune(
    run: RunFile, federation: Federation, transport: TransportName, store: Path | None
) -> RunResult:
    cache = None
    if store is not None and store.parent.is_dir():  # else the store says so
        cache = store.with_name(f"{store.name}.fedone-answers")
    async with run.backend(cache=cache) as backend:
        if store is None:
            return await run_here(
                federation, source=run.path, backend=backend, transport=transport.value
            )
        from fedone_sdk.stores import SqlStore

        return await run_here(
            federation,
            source=run.path,
            backend=backend,
            transport=transport.value,
            store=SqlStore.sqlite(store),
            state_dir=_clients_of(store),
        )


def _clients_of(store: Path) -> Path:
    return store.with_name(f"{store.name}.fedone-clients")
