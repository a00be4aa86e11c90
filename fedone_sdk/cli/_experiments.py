"""Options, checks, progress and report of commands that run an experiment."""

from __future__ import annotations

import os
import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedone_sdk.cli._output import Output
from fedone_sdk.cli._signals import interruptible
from fedone_sdk.cli._trials import trial_progress
from fedone_sdk.errors import SpecError

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


ModelFolder = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="Model folder or GGUF file; the SDK's own model without it."),
]
Quick = Annotated[
    bool, typer.Option("--quick", help="A small version, to see that everything works.")
]
Engine = Annotated[
    EngineName,
    typer.Option(help="This machine's processes, or Ray (RAY_ADDRESS, else a local cluster)."),
]
Workers = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, max=10_000, help="Trials at once; one per core."),
]
Device = Annotated[str, typer.Option(help="Where torch computes: auto, cpu, cuda ...")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A setting of the experiment; repeatable.",
    ),
]
OnlyReport = Annotated[
    bool,
    typer.Option("--only-report", help="Report the existing trials without running any."),
]


def run_and_report(
    words: tuple[str, ...],
    experiment: Experiment,
    settings: Settings,
    *,
    out: Path,
    engine: EngineName,
    workers: int | None,
    seeds: int | None,
    output: Output,
    only_report: bool,
) -> None:
    """Runs an experiment, and prints its report.

    Args:
        words: The command, before its options.
        experiment: The experiment.
        settings: The user's settings.
        out: Parent of the results folder, which has the experiment's name.
        engine: Engine of the trials.
        workers: Concurrent trials; None is one per core.
        seeds: Number of seeds, as given by the user.
        output: Destination of the report.
        only_report: Whether to report existing trials without running any.

    Raises:
        SpecError: The settings are invalid.
    """
    from fedone_sdk.experiments import run_experiment

    _check(experiment, settings)
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
            command=_command(words, seeds, settings),
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
        raise SpecError(f"--out: there is nothing to report in {folder}", source="arguments")
    for key, message in finished.failures.items():
        print(f"{key} failed: {message}", file=sys.stderr)
    if finished.failures:
        print(
            f"{len(finished.failures)} trials failed; the same command tries them again "
            f"({folder / 'trials'}/KEY.failed.txt has the details)",
            file=sys.stderr,
        )
        raise typer.Exit(1)


def known_options(experiment: Experiment, given: list[str]) -> dict[str, str]:
    """Parses the settings of `--set`.

    Raises:
        SpecError: The experiment does not have such a setting.
    """
    found = {}
    for text in given:
        option, separator, value = text.partition("=")
        if not separator or option not in experiment.options:
            known = ", ".join(experiment.options) or "none"
            raise SpecError(
                f"--set: {text!r} is no NAME=VALUE of {experiment.name}; its names: {known}",
                source="arguments",
            )
        found[option] = value
    return found


def _check(experiment: Experiment, settings: Settings) -> None:
    """Checks the settings before any work.

    Raises:
        SpecError: They are invalid.
    """
    model = None if settings.is_gguf and settings.model_folder.is_file() else settings.model
    for option, folder in (("--model", model), ("--data", settings.data)):
        if folder is not None and not folder.is_dir():
            raise SpecError(f"{option}: there is no folder {folder}", source="arguments")
    if model is not None and not (settings.is_onnx or settings.has_weights):
        raise SpecError(
            f"--model: {model} holds no model: neither model.onnx, nor config.json and "
            "weights for the transformers library",
            source="arguments",
        )
    if experiment.needs_data and settings.data is None:
        raise SpecError(
            f"--data: {experiment.name} needs a folder with TASK/train.jsonl and TASK/dev.jsonl "
            "for GLUE's tasks (sst2 ...)",
            source="arguments",
        )
    for option, setting in _ONLY_SOME.items():
        if getattr(settings, setting) is not None and setting not in experiment.takes:
            raise SpecError(f"{option}: {experiment.name} has no use for it", source="arguments")


def _check_writable(folder: Path) -> None:
    """Checks the folder before any work."""
    above = next(path for path in (folder, *folder.parents) if path.exists())
    if not above.is_dir():
        raise SpecError(f"--out: {above} is no folder", source="arguments")
    if not os.access(above, os.W_OK | os.X_OK):
        raise SpecError(f"--out: {above} cannot be written to", source="arguments")


def _command(words: tuple[str, ...], seeds: int | None, settings: Settings) -> str:
    """The command that reproduces the results."""
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
    return shlex.join([*words, *options, *quick])
