"""Run a table or figure of the paper: ``python examples/paper/reproduce.py NAME``.

Each trial's result is kept in OUT/NAME/trials, so that the same command continues after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from fedone_paper import Settings, Study, declared, find_study, run_study
from fedone_sdk.errors import ArgumentError, FedOneError, SpecError
from fedone_sdk.evaluation.engine import Progress
from fedone_sdk.glue import GLUE_TASKS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    words = sys.argv[1:] if arguments is None else [*arguments]
    given = _parser().parse_args(words, argparse.Namespace(words=words))
    if given.list:
        for name in declared()["studies"]:
            print(f"{name:<22}{find_study(name).title}")
        return 0

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _reproduce(given)
    except SpecError as exc:
        print(*(f"{exc.source}: {problem}" for problem in exc.problems), sep="\n", file=sys.stderr)
        return 2
    except FedOneError as exc:
        print(exc, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            f"stopped; trials are kept in {_folder(given)}, and the same command continues from "
            "there",
            file=sys.stderr,
        )
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("name", metavar="NAME", nargs="?", default="", help="which; see --list")
    add("--list", action="store_true", help="list the tables and figures")
    text = "model folder or GGUF file; by default the SDK's own"
    add("--model", type=Path, metavar="PATH", help=text)
    text = "folder with TASK/train.jsonl and TASK/dev.jsonl for GLUE's tasks, or MNIST's files"
    add("--data", type=Path, metavar="DIR", help=text)
    add("--seeds", type=int, metavar="N", help="repeats; by default the paper's, 1 with --quick")
    add("--quick", action="store_true", help="a small version, to see that everything works")
    text = "run trials on this Ray cluster, or on one that is started here"
    add("--ray", nargs="?", const="local", metavar="ADDRESS", help=text)
    add("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="trials at once")
    text = "results go to DIR/NAME; by default reproduction, or reproduction-quick"
    add("--out", type=Path, metavar="DIR", help=text)
    add("--device", default="auto", help="where torch computes: auto, cpu, cuda ...")
    text = "only this GLUE task; repeatable"
    add("--task", dest="tasks", action="append", metavar="TASK", help=text)
    text = "a setting of the study; repeatable"
    add("--set", dest="options", action="append", default=[], metavar="NAME=VALUE", help=text)
    text = "cap on training queries of the whole study, for paid models"
    add("--cap", dest="cap_queries", type=int, metavar="N", help=text)
    add("--cap-usd", type=float, metavar="X", help="cap on its cost, US dollars")
    text = "US dollars per million tokens, if the price is not known"
    add("--prices", type=float, nargs=2, metavar=("PROMPT", "COMPLETION"), help=text)
    add("--base-url", metavar="URL", help="OpenAI-compatible endpoint, for table3")
    add("--api-model", metavar="NAME", help="the model's name there")
    add("--api-key-env", metavar="NAME", help="environment variable with its key")
    add("--only-report", action="store_true", help="report existing trials without running any")
    return parser


def _folder(given: argparse.Namespace) -> Path:
    out: Path = given.out or Path("reproduction-quick" if given.quick else "reproduction")
    name: str = given.name
    return out / name


def _reproduce(given: argparse.Namespace) -> int:
    study = find_study(given.name)
    settings = Settings(
        model=given.model,
        data=given.data,
        seeds=given.seeds or (1 if given.quick else study.default_seeds),
        quick=given.quick,
        device=given.device,
        tasks=None if given.tasks is None else _known_tasks(given.tasks),
        options=_known_options(study, given.options),
        cap_queries=given.cap_queries,
        cap_usd=given.cap_usd,
        prices=given.prices and tuple(given.prices),
        base_url=given.base_url,
        api_model=given.api_model,
        api_key_env=given.api_key_env,
    )
    _check(study, settings)
    folder = _folder(given)
    finished = run_study(
        study,
        settings,
        out=folder.parent,
        workers=given.workers,
        ray=given.ray,
        command=shlex.join(["python", "examples/paper/reproduce.py", *given.words]),
        watch=lambda progress: _print_progress(study.name, progress),
        run_missing=not given.only_report,
    )
    if finished.report is not None:
        print(study.title, finished.report.markdown, sep="\n\n")
        print(*(f"  {file}" for file in finished.files), sep="\n")
    elif given.only_report:
        raise ArgumentError(f"--out: there is nothing to report in {folder}")
    for key, message in finished.failures.items():
        print(f"{key} failed: {message}", file=sys.stderr)
    if finished.failures:
        print(
            f"{len(finished.failures)} trials failed; the same command tries them again "
            f"({folder / 'trials'}/KEY.failed.txt has the details)",
            file=sys.stderr,
        )
    return 1 if finished.failures else 0


def _print_progress(name: str, progress: Progress) -> None:
    if progress.note is not None:
        print(progress.note, file=sys.stderr)
    print(f"{name}: {progress.text}", file=sys.stderr, flush=True)


def _known_tasks(tasks: Sequence[str]) -> tuple[str, ...]:
    for task in tasks:
        if task not in GLUE_TASKS:
            raise ArgumentError(f"--task: there is no {task!r}; {', '.join(GLUE_TASKS)}")
    return tuple(dict.fromkeys(tasks))


def _known_options(study: Study, given: Sequence[str]) -> dict[str, str]:
    """Return the settings of `--set`, by name."""
    found = {}
    for text in given:
        option, separator, value = text.partition("=")
        if not separator or option not in study.options:
            known = ", ".join(study.options) or "none"
            raise ArgumentError(
                f"--set: {text!r} is no NAME=VALUE of {study.name}; its names: {known}"
            )
        found[option] = value
    return found


def _check(study: Study, settings: Settings) -> None:
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
    if study.needs_data and settings.data is None:
        raise ArgumentError(
            f"--data: {study.name} needs a folder with TASK/train.jsonl and TASK/dev.jsonl "
            "for GLUE's tasks (sst2 ...)"
        )


if __name__ == "__main__":
    sys.exit(main())
