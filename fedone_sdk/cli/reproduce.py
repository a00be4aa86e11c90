"""`fedone reproduce`: a table or figure of the paper."""

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
from fedone_sdk.cli._logs import quiet_logs
from fedone_sdk.cli._options import JsonFile
from fedone_sdk.cli._output import Output
from fedone_sdk.errors import SpecError
from fedone_sdk.glue import GLUE_TASKS

_OUT = Path("reproduction")
_QUICK_OUT = Path("reproduction-quick")


def _list(asked: bool) -> None:
    if asked:
        from fedone_sdk.experiments import EXPERIMENTS, find_experiment

        for name in EXPERIMENTS:
            typer.echo(f"{name:<22}{find_experiment(name).title}")
        raise typer.Exit


def reproduce(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which; see --list.")],
    model: ModelFolder = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder with TASK/train.jsonl and TASK/dev.jsonl for GLUE's tasks, or other data "
            "of the experiment.",
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=1000,
            help="Number of seeds; by default as in the paper, and 1 with --quick.",
        ),
    ] = None,
    quick: Quick = False,
    engine: Engine = EngineName.local,
    workers: Workers = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Results go to DIR/NAME. [default: reproduction, reproduction-quick]",
        ),
    ] = None,
    device: Device = "auto",
    tasks: Annotated[
        list[str] | None,
        typer.Option("--task", metavar="TASK", help="Only this GLUE task; repeatable."),
    ] = None,
    options: Set = None,
    cap: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Cap on training queries of the whole experiment, for paid models.",
        ),
    ] = None,
    cap_usd: Annotated[
        float | None, typer.Option(metavar="X", min=0, help="Cap on its cost, in US dollars.")
    ] = None,
    prices: Annotated[
        tuple[float, float] | None,
        typer.Option(
            metavar="PROMPT COMPLETION",
            help="US dollars per million tokens, if the price is not known.",
        ),
    ] = None,
    base_url: Annotated[
        str | None, typer.Option(metavar="URL", help="OpenAI-compatible endpoint, for table3.")
    ] = None,
    api_model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model's name there.")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable with its key.")
    ] = None,
    only_report: OnlyReport = False,
    json_file: JsonFile = None,
    listing: Annotated[
        bool, typer.Option("--list", callback=_list, is_eager=True, help="List the experiments.")
    ] = False,
) -> None:
    """Run a table or figure of the paper; finished trials are not repeated.

    Each trial's result is kept in DIR/NAME/trials, so that the same command continues after Ctrl-C.
    """
    from fedone_sdk.experiments import Settings, find_experiment

    output = Output(json_file)
    quiet_logs()
    experiment = find_experiment(name)
    settings = Settings(
        model=model,
        data=data,
        seeds=seeds or (1 if quick else experiment.default_seeds),
        quick=quick,
        device=device,
        tasks=None if tasks is None else _known_tasks(tasks),
        options=known_options(experiment, options or []),
        cap_queries=cap,
        cap_usd=cap_usd,
        prices=prices,
        base_url=base_url,
        api_model=api_model,
        api_key_env=api_key_env,
    )
    run_and_report(
        ("fedone", "reproduce", name),
        experiment,
        settings,
        out=out or (_QUICK_OUT if quick else _OUT),
        engine=engine,
        workers=workers,
        seeds=seeds,
        output=output,
        only_report=only_report,
    )


def _known_tasks(tasks: list[str]) -> tuple[str, ...]:
    for task in tasks:
        if task not in GLUE_TASKS:
            raise SpecError(
                f"--task: there is no {task!r}; {', '.join(GLUE_TASKS)}", source="arguments"
            )
    return tuple(dict.fromkeys(tasks))
