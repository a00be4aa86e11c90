"""`fedone reproduce`: a table or figure of the paper."""

from __future__ import annotations

import os
import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedone_sdk.cli._options import JsonFile
from fedone_sdk.cli._output import Output, note
from fedone_sdk.cli._process import interruptible, quiet_logs
from fedone_sdk.cli.progress import trial_progress
from fedone_sdk.errors import ArgumentError
from fedone_sdk.glue import GLUE_TASKS

if TYPE_CHECKING:
    from fedone_sdk.experiments import Experiment, Settings

_ONLY_SOME = {
    "--task": "tasks",
    "--cap": "cap_queries",
    "--cap-usd": "cap_usd",
    "--prices": "prices",
    "--base-url": "base_url",
    "--api-model": "api_model",
    "--api-key-env": "api_key_env",
}
"""Options by setting, for settings of some experiments only."""


class EngineName(StrEnum):
    """Engine of the trials."""

    local = "local"
    ray = "ray"


def _list(asked: bool) -> None:
    if asked:
        from fedone_sdk.experiments import EXPERIMENTS, find_experiment

        for name in EXPERIMENTS:
            typer.echo(f"{name:<22}{find_experiment(name).title}")
        raise typer.Exit


def reproduce(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which; see --list.")],
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Model folder or GGUF file; the SDK's own model without it."
        ),
    ] = None,
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
    quick: Annotated[
        bool, typer.Option("--quick", help="A small version, to see that everything works.")
    ] = False,
    engine: Annotated[
        EngineName,
        typer.Option(help="This machine's processes, or Ray (RAY_ADDRESS, else a local cluster)."),
    ] = EngineName.local,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=10_000, help="Trials at once; one per core."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Results go to DIR/NAME. [default: reproduction, reproduction-quick]",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Where torch computes: auto, cpu, cuda ...")] = "auto",
    tasks: Annotated[
        list[str] | None,
        typer.Option("--task", metavar="TASK", help="Only this GLUE task; repeatable."),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="A setting of the experiment; repeatable."
        ),
    ] = None,
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
    only_report: Annotated[
        bool,
        typer.Option("--only-report", help="Report the existing trials without running any."),
    ] = False,
    json_file: JsonFile = None,
    listing: Annotated[
        bool, typer.Option("--list", callback=_list, is_eager=True, help="List the experiments.")
    ] = False,
) -> None:
    """Run a table or figure of the paper; finished trials are not repeated.

    Each trial's result is kept in DIR/NAME/trials, so that the same command continues after Ctrl-C.
    """
    from fedone_sdk.experiments import Settings, find_experiment, run_experiment

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
        options=_known_options(experiment, options or []),
        cap_queries=cap,
        cap_usd=cap_usd,
        prices=prices,
        base_url=base_url,
        api_model=api_model,
        api_key_env=api_key_env,
    )
    _check(experiment, settings)
    out = out or Path("reproduction-quick" if quick else "reproduction")
    folder = out / experiment.name
    _check_writable(folder)
    stopped = f"stopped; trials are kept in {folder}, and the same command continues from there"
    with interruptible(stopped), trial_progress(experiment.name) as watch:
        finished = run_experiment(
            experiment,
            settings,
            out=out,
            workers=workers or os.cpu_count() or 1,
            engine=engine.value,
            command=_command(experiment, seeds, settings),
            watch=watch,
            run_missing=not only_report,
        )
    if finished.report is not None:
        output.write_json(finished.document)
        output.heading(experiment.title)
        output.console.print()
        output.console.print(finished.report.markdown)
        for file in finished.files:
            output.console.print(f"  {file}")
    elif only_report:
        raise ArgumentError(f"--out: there is nothing to report in {folder}")
    for key, message in finished.failures.items():
        note(f"{key} failed: {message}")
    if finished.failures:
        note(
            f"{len(finished.failures)} trials failed; the same command tries them again "
            f"({folder / 'trials'}/KEY.failed.txt has the details)"
        )
        raise typer.Exit(1)


def _known_tasks(tasks: list[str]) -> tuple[str, ...]:
    for task in tasks:
        if task not in GLUE_TASKS:
            raise ArgumentError(f"--task: there is no {task!r}; {', '.join(GLUE_TASKS)}")
    return tuple(dict.fromkeys(tasks))


def _known_options(experiment: Experiment, given: list[str]) -> dict[str, str]:
    """Return the settings of `--set`, by name."""
    found = {}
    for text in given:
        option, separator, value = text.partition("=")
        if not separator or option not in experiment.options:
            known = ", ".join(experiment.options) or "none"
            raise ArgumentError(
                f"--set: {text!r} is no NAME=VALUE of {experiment.name}; its names: {known}"
            )
        found[option] = value
    return found


def _check(experiment: Experiment, settings: Settings) -> None:
    """Check the settings before any work."""
    model = None if settings.is_gguf and settings.model_folder.is_file() else settings.model
    for option, folder in (("--model", model), ("--data", settings.data)):
        if folder is not None and not folder.is_dir():
            raise ArgumentError(f"{option}: there is no folder {folder}")
    if model is not None and not (settings.is_onnx or settings.has_weights):
        raise ArgumentError(
            f"--model: {model} holds no model: neither model.onnx, nor config.json and "
            "weights for the transformers library"
        )
    if experiment.needs_data and settings.data is None:
        raise ArgumentError(
            f"--data: {experiment.name} needs a folder with TASK/train.jsonl and TASK/dev.jsonl "
            "for GLUE's tasks (sst2 ...)"
        )
    for option, setting in _ONLY_SOME.items():
        if getattr(settings, setting) is not None and setting not in experiment.takes:
            raise ArgumentError(f"{option}: {experiment.name} has no use for it")


def _check_writable(folder: Path) -> None:
    """Check the folder before any work."""
    above = next(path for path in (folder, *folder.parents) if path.exists())
    if not above.is_dir():
        raise ArgumentError(f"--out: {above} is no folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ArgumentError(f"--out: {above} cannot be written to")


def _command(experiment: Experiment, seeds: int | None, settings: Settings) -> str:
    """Return the command that reproduces the results."""
    given: list[tuple[object, ...]] = [
        ("--model", settings.model),
        ("--data", settings.data),
        ("--seeds", seeds),
        ("--device", None if settings.device == "auto" else settings.device),
        *(("--task", task) for task in settings.tasks or ()),
        *(("--set", f"{option}={value}") for option, value in settings.options.items()),
        ("--cap", settings.cap_queries),
        ("--cap-usd", settings.cap_usd),
        ("--prices", *(settings.prices or (None,))),
        ("--base-url", settings.base_url),
        ("--api-model", settings.api_model),
        ("--api-key-env", settings.api_key_env),
    ]
    options = [str(word) for row in given if row[-1] is not None for word in row]
    quick = ["--quick"] if settings.quick else []
    return shlex.join(["fedone", "reproduce", experiment.name, *options, *quick])
