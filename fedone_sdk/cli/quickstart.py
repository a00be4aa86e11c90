"""`fedone quickstart`: the whole thing once, with what comes with the SDK."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from fedone_sdk import assets
from fedone_sdk.cli._logs import quiet_logs
from fedone_sdk.cli._options import Cap, JsonFile, Seed
from fedone_sdk.cli._output import Output
from fedone_sdk.cli._report import exit_code, print_exchanges, print_result
from fedone_sdk.cli._run_file import RunFile
from fedone_sdk.cli._tuning import run_here

if TYPE_CHECKING:
    from fedone_sdk.messages import RunResult
    from fedone_sdk.simulation import Federation

__all__ = ["quickstart"]


def quickstart(seed: Seed = None, cap: Cap = None, json_file: JsonFile = None) -> None:
    """Tune a prompt with the model and the data that come with the SDK.

    A real aggregator and its edge clients talk HTTP over loopback, under a hard cap on queries;
    then the same run again in the other exchange, from the answers that are known by now.
    """
    output = Output(json_file)
    quiet_logs()
    run = RunFile.load(assets.path("quickstart.yaml"), seed=seed, cap=cap, exchange="alpha")
    federation = run.federation()
    result, other = asyncio.run(_both_exchanges(run, federation))

    output.write_json(
        {
            **result.model_dump(mode="json"),
            "losses_exchange": None if other is None else other.model_dump(mode="json"),
        }
    )
    print_result(output, result, num_clients=len(federation.shards))
    if other is not None:
        output.console.print()
        print_exchanges(output, {"alpha": result, "losses": other})
        same = "the same" if other.alpha_sha256 == result.alpha_sha256 else "NOT the same"
        output.console.print(
            f"  alpha after both is {same}; asked again in the second: {other.spent.requests}"
        )
    raise typer.Exit(exit_code(other or result))


async def _both_exchanges(
    run: RunFile, federation: Federation
) -> tuple[RunResult, RunResult | None]:
    async with run.backend() as backend:
        first = await run_here(federation, source=run.path, backend=backend, transport="http")
        if exit_code(first):
            return first, None
        participation = run.spec.participation.model_copy(update={"exchange": "losses"})
        spec = run.spec.model_copy(
            update={"name": f"{run.spec.name}-losses", "participation": participation}
        )
        # The same clients and candidates: only what travels differs.
        federation = replace(federation, spec=spec)
        return first, await run_here(federation, source=run.path, backend=backend, transport="http")
