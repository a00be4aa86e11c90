"""`fedone quickstart`: a first run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from fedone_sdk import assets
from fedone_sdk.backends.local_models import is_present
from fedone_sdk.cli._options import Cap, JsonFile, Seed
from fedone_sdk.cli._output import Output, exit_code, note, print_result, printable
from fedone_sdk.cli._process import quiet_logs
from fedone_sdk.cli._run_file import RunFile
from fedone_sdk.cli._tuning import run_here
from fedone_sdk.cli.report import check_report, write_report
from fedone_sdk.errors import ArgumentError, MissingExtraError, SpecError

if TYPE_CHECKING:
    from fedone_sdk.local import Federation
    from fedone_sdk.messages import RunResult
    from fedone_sdk.reports import Change
    from fedone_sdk.stores import Store


_SHOWN_CHANGES = 3
_REPORT = Path("quickstart.html")


_FILES = {"smollm2-135m-instruct": "quickstart.yaml", "mini": "quickstart-mini.yaml"}


def quickstart(
    model: Literal["smollm2-135m-instruct", "mini"] = "smollm2-135m-instruct",
    seed: Seed = None,
    cap: Cap = None,
    json_file: JsonFile = None,
) -> None:
    """Tune a prompt for a small language model on feedback sentences that come with the SDK.

    A real aggregator and edge clients work in this process, under a hard cap on queries. A report
    is written to quickstart.html.

    Example: fedone quickstart --json result.json

    Args:
        model: An instruct model of 135 million parameters (98 MB, fetched once), or the embedded
            masked model (10 seconds, no network).
    """
    from fedone_sdk.reports import read_export

    output = Output(json_file)
    quiet_logs()
    run = RunFile.load(assets.path(_FILES[_available(model)]), seed=seed, cap=cap)
    federation = run.federation()
    result, changes, exported = asyncio.run(_tuned(run, federation))
    output.write_json(result)
    print_result(output, result, num_clients=len(federation.shards))
    if changes is not None:
        output.console.print()
        _print_changes(output, run, result, changes)
    try:
        check_report("report", _REPORT)
        write_report("report", _REPORT, read_export(exported))
        output.console.print(f"A report, for a browser: {_REPORT.resolve()}")
    except (ArgumentError, MissingExtraError) as exc:  # The run has ended well without it.
        note(f"no report: {exc}")
    raise typer.Exit(exit_code(result))


def _available(model: str) -> str:
    if model == "mini":
        return model
    from fedone_sdk.backends.local_models import local_model
    from fedone_sdk.cli.models import fetch

    try:
        if not is_present(local_model(model)):
            fetch(model)
    except SpecError as exc:
        note(f"{exc}; using the embedded mini model")
        return "mini"
    return model


async def _tuned(
    run: RunFile, federation: Federation
) -> tuple[RunResult, list[Change] | None, bytes]:
    """Return the run, the answers that its prompt changes (None if it was stopped), its export."""
    from fedone_sdk.aggregator import exported_run
    from fedone_sdk.stores import MemoryStore

    async with run.backend() as backend:
        store = MemoryStore()
        result = await run_here(federation, source=run.path, backend=backend, store=store)
    changes = None if exit_code(result) else await _changes(store, federation, result)
    return result, changes, await exported_run(store, result.run_id)


async def _changes(store: Store, federation: Federation, result: RunResult) -> list[Change]:
    from fedone_sdk.evaluation.outcomes import OUTCOMES, newest_outcomes
    from fedone_sdk.reports import changed_answers

    outcomes = newest_outcomes(await store.log(result.run_id, OUTCOMES))
    bias = None if result.verdict is None else result.verdict.bias
    return changed_answers(federation.spec.task, outcomes, federation.dev, bias)


def _print_changes(output: Output, run: RunFile, result: RunResult, changes: list[Change]) -> None:
    task = run.spec.task
    words = [word.strip() for word in task.label_words]
    right = sum(change.after == change.target for change in changes)
    if changes:
        output.heading(f"It changes {len(changes)} answers, {right} for the better; for example")
    for change in changes[:_SHOWN_CHANGES]:
        text = " ".join(printable(str(change.example[name])) for name in task.fields)
        verdict = "right" if change.after == change.target else "wrong"
        output.console.print(
            f"  {text!r}: {_word(words, change.before)} -> {_word(words, change.after)} ({verdict})"
        )
    spent, cap = result.spent, result.cap.queries
    output.console.print()
    output.console.print(
        f"Spent {spent.queries} of {cap} training queries. "
        "Next, a run of your own: fedone init TABLE.csv"
    )


def _word(words: Sequence[str], index: int) -> str:
    return words[index] if index >= 0 else "no label"
