"""Command line of the bench of queries: compares the methods of this SDK.

python -m tests.benchmarks.queries --data glue --set 'variants=sst2-*-iid'
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedone_sdk.cli._experiments import (
    Device,
    Engine,
    EngineName,
    ModelFolder,
    OnlyReport,
    Quick,
    Set,
    Workers,
    known_options,
    run_and_report,
)
from fedone_sdk.cli._failures import reporting_errors
from fedone_sdk.cli._logs import quiet_logs
from fedone_sdk.cli._options import JsonFile
from fedone_sdk.cli._output import Output
from fedone_sdk.experiments import Settings
from tests.benchmarks.queries.bench import BenchQueries

__all__ = ["main"]

_OUT = Path("bench")
_QUICK_OUT = Path("bench-quick")
_QUICK_SEEDS = 2


def queries(
    model: ModelFolder = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder with TASK/train.jsonl and TASK/dev.jsonl for GLUE's tasks."
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, max=1000, help=f"Repeats; 20, and {_QUICK_SEEDS} with --quick."
        ),
    ] = None,
    quick: Quick = False,
    engine: Engine = EngineName.local,
    workers: Workers = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Results go to DIR/queries. [default: bench, bench-quick]"
        ),
    ] = None,
    device: Device = "auto",
    options: Set = None,
    only_report: OnlyReport = False,
    json_file: JsonFile = None,
) -> None:
    """Queries that methods need for the same loss: curves, targets, goals of the default.

    --set methods=..., variants=... and marks=... select and order the work. Each trial's result is
    stored in DIR/queries/trials: after Ctrl-C the same command resumes.
    """
    output = Output(json_file)
    quiet_logs()
    experiment = BenchQueries()
    settings = Settings(
        model=model,
        data=data,
        seeds=seeds or (_QUICK_SEEDS if quick else experiment.default_seeds),
        quick=quick,
        device=device,
        options=known_options(experiment, options or []),
    )
    run_and_report(
        ("python", "-m", "tests.benchmarks.queries"),
        experiment,
        settings,
        out=out or (_QUICK_OUT if quick else _OUT),
        engine=engine,
        workers=workers,
        seeds=seeds,
        output=output,
        only_report=only_report,
    )


def main() -> None:
    """Run the command line."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(queries)
    with reporting_errors():
        app(prog_name="python -m tests.benchmarks.queries")


if __name__ == "__main__":
    main()
