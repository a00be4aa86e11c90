"""Reproduce a table or figure of the paper: ``python examples/paper/reproduce.py NAME``.

Each trial's result is kept in OUT/NAME/trials, so that the same command continues after Ctrl-C.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from fedone_paper import Settings, Study, declared, find_study, run_study
from fedone_paper.glue import GLUE_TASKS
from fedone_paper.settings import fetch_data, fetch_model
from fedone_sdk.errors import ArgumentError, FedOneError
from fedone_sdk.evaluation.engine import Progress


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    words = sys.argv[1:] if arguments is None else [*arguments]
    given = _parser().parse_args(words)
    if given.list:
        for name in declared()["studies"]:
            print(f"{name:<22}{find_study(name).title}")
        return 0
    out = given.out or Path("reproduction-quick" if given.quick else "reproduction")
    try:
        return _reproduce(given, out, shlex.join(["python", "examples/paper/reproduce.py", *words]))
    except FedOneError as exc:
        print(exc, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        kept = f"stopped; trials are kept in {out / given.name}"
        print(f"{kept}, and the same command continues from there", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("name", metavar="NAME", nargs="?", default="", help="table or figure; see --list")
    add("--list", action="store_true", help="list the tables and figures")
    text = "folder, GGUF file or name on the Hugging Face hub; default: the SDK's own model"
    add("--model", metavar="MODEL", help=text)
    text = "folder with TASK/train.jsonl and TASK/dev.jsonl, or MNIST's files; or hf:glue"
    add("--data", metavar="DIR", help=text)
    add("--seeds", type=int, metavar="N", help="seeds; default: the paper's; --quick: 1")
    add("--quick", action="store_true", help="a small version, to test the installation")
    add("--ray", nargs="?", const="local", metavar="ADDRESS", help="Ray cluster, or a new one")
    text = "parallel trials; default: one per GPU of CUDA_VISIBLE_DEVICES, or one per core"
    add("--workers", type=int, metavar="N", help=text)
    add("--out", type=Path, metavar="DIR", help="results; default: reproduction[-quick]")
    add("--task", action="append", choices=GLUE_TASKS, help="only this GLUE task; repeatable")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting; repeatable")
    add("--cap", type=int, metavar="N", help="cap on training queries of the whole study")
    add("--cap-usd", type=float, metavar="X", help="cap on the study's cost, US dollars")
    add("--backend", type=Path, metavar="FILE", help="YAML of the chat model, for table3")
    add("--only-report", action="store_true", help="report existing trials without running any")
    return parser


def _reproduce(given: argparse.Namespace, out: Path, command: str) -> int:
    study = find_study(given.name)
    tasks = given.task and tuple(dict.fromkeys(given.task))
    named = tasks or study.said.get("axes", {}).get("task", ())
    settings = Settings(
        model=given.model and fetch_model(given.model),
        data=given.data and fetch_data(given.data, named, out / "data"),
        seeds=given.seeds or (1 if given.quick else study.default_seeds),
        quick=given.quick,
        tasks=tasks,
        options=_options(study, given.set),
        cap_queries=given.cap,
        cap_usd=given.cap_usd,
        backend_file=given.backend,
        only_report=given.only_report,
    )

    def watch(progress: Progress) -> None:
        if progress.note is not None:
            print(progress.note, file=sys.stderr)
        print(f"{study.name}: {progress.text}", file=sys.stderr, flush=True)

    finished = run_study(
        study, settings, out=out, workers=given.workers, ray=given.ray, command=command, watch=watch
    )
    if finished.report is not None:
        print(study.title, finished.report.markdown, sep="\n\n")
        print(*(f"  {file}" for file in finished.files), sep="\n")
    elif given.only_report:
        raise ArgumentError(f"--out: there is nothing to report in {out / study.name}")
    for key, message in finished.failures.items():
        print(f"{key} failed: {message}", file=sys.stderr)
    if finished.failures:
        details = f"{out / study.name / 'trials'}/KEY.failed.txt"
        print(f"failed trials ({details}) are tried again by the same command", file=sys.stderr)
    return 1 if finished.failures else 0


def _options(study: Study, given: Sequence[str]) -> dict[str, str]:
    """Return the settings of `--set`, by name."""
    found = dict(text.partition("=")[::2] for text in given)
    for name in found:
        if name not in study.options:
            known = ", ".join(study.options) or "none"
            raise ArgumentError(f"--set: {study.name} has no setting {name!r}; its names: {known}")
    return found


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
