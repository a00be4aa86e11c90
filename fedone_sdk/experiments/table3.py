"""table3: prompts for a chat model behind an API, tuned under a hard cap."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fedone_sdk.budget import Usage
from fedone_sdk.errors import SpecError
from fedone_sdk.experiments.chat import run_standing, run_tuned
from fedone_sdk.experiments.chat_quote import queries_per_run, run_quote
from fedone_sdk.experiments.experiment import Experiment, Report, Result, Results, Trial
from fedone_sdk.experiments.paper import about, paper_row, printed
from fedone_sdk.experiments.settings import Settings
from fedone_sdk.experiments.summary import markdown_table, mean_sd_text
from fedone_sdk.spec import RunSpec, validate_spec

__all__ = ["Table3"]

_Found = dict[str, dict[str, list[Result]]]
"""Results by row, task and seed."""

_TASKS = ("sst2", "cola", "qnli", "rte")

_METRICS = {"accuracy": "accuracy", "f1": "F1", "matthews": "Matthews"}

_SPENT = (
    "Training, measuring, retries and attempts that were broken off; an answer that is known "
    "already costs nothing."
)


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of the table.

    Attributes:
        key: In the names of trials.
        label: What people call it.
        method: Of a tuning run; None where nothing is trained.
        seeded: Whether it differs from seed to seed.
    """

    key: str
    label: str
    method: str | None = None
    seeded: bool = True


_ROWS = (
    _Row("no-prompt", "No prompt", seeded=False),
    _Row("untrained", "Prompt without training"),
    _Row("bdpl", "FedOne-BDPL", "bdpl"),
    _Row("gs-bdpl", "FedOne-GS-BDPL", "gs-bdpl"),
)


class Table3(Experiment):
    """Four ways to prompt a chat model; only FedOne's (K*=1) ask it to train."""

    name = "table3"
    title = "A chat model behind an API: no prompt, an untrained one, FedOne-BDPL, FedOne-GS-BDPL"
    takes = (
        "tasks",
        "cap_queries",
        "cap_usd",
        "prices",
        "base_url",
        "api_model",
        "api_key_env",
    )

    def trials(self, settings: Settings, results: Results) -> Sequence[Trial]:
        """First what it would cost; then, under caps that follow from it, all rows."""
        tasks, run = _tasks(settings), _run_document(settings)
        quote = _quote_trial(settings, tasks, run)
        if quote.key not in results:
            return [quote]
        caps = results[quote.key]["caps"]
        return [quote, *_row_trials(settings, run, caps)]

    def report(self, settings: Settings, results: Results) -> Report:
        """The table, and what each row has spent."""
        tasks = _tasks(settings)
        found = {row.label: {t: _found(settings, results, row, t) for t in tasks} for row in _ROWS}
        spent = {label: _spent(by_task) for label, by_task in found.items()}
        quote = results.get("quote", {})
        return Report(
            markdown=_markdown(settings, tasks, found, spent, quote),
            data={
                "endpoint": settings.base_url,
                "model": settings.api_model,
                "models": sorted({model for one in _all(found) for model in one["models"]}),
                "rows": found,
                "spent": {label: usage.model_dump(mode="json") for label, usage in spent.items()},
                "quote": quote,
                "paper": printed(self.name),
            },
        )


def _tasks(settings: Settings) -> tuple[str, ...]:
    return settings.tasks or (("sst2",) if settings.quick else _TASKS)


def _run_document(settings: Settings) -> dict[str, Any]:
    """A run without its task and data; its sizes are those of the authors' run_GPT.sh.

    Raises:
        SpecError: Nobody said which model is asked.
    """
    if settings.base_url is None or settings.api_model is None:
        raise SpecError(
            "--base-url and --api-model: are required, also with --quick: an OpenAI-compatible "
            "endpoint, and the model's name there",
            source="arguments",
        )
    prices = None
    if settings.prices is not None:
        prices = {"prompt": str(settings.prices[0]), "completion": str(settings.prices[1])}
    quick = settings.quick
    document: dict[str, Any] = {
        "name": "trial",
        "data": {"num_clients": 10 if quick else 100, "shots": 4 if quick else 16},
        "prompt": {
            "length": 4 if quick else 20,
            "vocabulary": {"kind": "pmi", "size": 20 if quick else 200},
        },
        "method": {
            "name": "gs-bdpl",
            "num_samples": 3,
            "batch_size": 4 if quick else 16,
            "learning_rate": 1e-3,
        },
        "rounds": 3 if quick else 100,
        "backend": {
            "kind": "openai",
            "base_url": settings.base_url,
            "model": settings.api_model,
            "api_key_env": settings.api_key_env,
            "prices": prices,
        },
    }
    data = {**document["data"], "train": "train"}
    validate_spec(RunSpec, {**document, "task": "sst2/chat", "data": data}, source="arguments")
    return document


def _dev_rows(settings: Settings) -> int:
    return 16 if settings.quick else 200


def _quote_trial(settings: Settings, tasks: Sequence[str], run: dict[str, Any]) -> Trial:
    measurements = sum(settings.seeds if row.seeded else 1 for row in _ROWS)
    options = {
        "run": run,
        "tasks": list(tasks),
        "dev_rows": _dev_rows(settings),
        "methods": [row.method for row in _ROWS if row.method is not None],
        "seeds": settings.seeds,
        "measurements": measurements,
        "queries": settings.cap_queries,
        "usd": settings.cap_usd,
    }
    queries_per_run(options)  # said before the work
    return Trial(
        key="quote",
        run=run_quote,
        options=options,
        inputs={
            f"{task}.{name}": settings.task_folder(task) / f"{name}.jsonl"
            for task in tasks
            for name in ("train", "dev")
        },
    )


def _row_trials(
    settings: Settings, run: dict[str, Any], caps: dict[str, dict[str, Any]]
) -> Iterator[Trial]:
    for task in _tasks(settings):
        folder = settings.task_folder(task)
        inputs = {name: folder / f"{name}.jsonl" for name in ("train", "dev")}
        for row in _ROWS:
            for seed in _seeds(settings, row):
                options: dict[str, Any] = {
                    "run": {**run, "seed": seed},
                    "task": task,
                    "dev_rows": _dev_rows(settings),
                    "seed": seed,
                }
                if row.method is None:
                    prompt = "untrained" if row.seeded else "none"
                    options |= {"prompt": prompt, "cap": caps[task]["measuring"]}
                else:
                    options["run"]["method"] = {**run["method"], "name": row.method}
                    options["cap"] = caps[task]
                yield Trial(
                    key=_key(task, row, seed),
                    run=run_standing if row.method is None else run_tuned,
                    options=options,
                    inputs=inputs,
                )


def _seeds(settings: Settings, row: _Row) -> range:
    return range(settings.seeds if row.seeded else 1)


def _key(task: str, row: _Row, seed: int) -> str:
    return f"{task}_{row.key}_s{seed}"


def _found(settings: Settings, results: Results, row: _Row, task: str) -> list[Result]:
    keys = (_key(task, row, seed) for seed in _seeds(settings, row))
    return [results[key] for key in keys if key in results]


def _spent(by_task: dict[str, list[Result]]) -> Usage:
    each = (Usage.model_validate(one["spent"]) for runs in by_task.values() for one in runs)
    return sum(each, Usage())


def _all(found: _Found) -> Iterator[Result]:
    return (one for rows in found.values() for runs in rows.values() for one in runs)


def _markdown(
    settings: Settings,
    tasks: Sequence[str],
    found: _Found,
    spent: dict[str, Usage],
    quote: Result,
) -> str:
    names = {
        task: next((_METRICS[one["name"]] for rows in found.values() for one in rows[task]), "")
        for task in tasks
    }
    scores = markdown_table(
        ["", *(f"{task} ({names[task]})" for task in tasks), "mean"],
        [
            line
            for row, (label, rows) in zip(_ROWS, found.items(), strict=True)
            for line in (
                [label, *map(_cell, rows.values()), _mean(rows)],
                ["the paper", *paper_row(Table3.name, row.key, tasks, average=True)],
            )
        ],
    )
    costs = markdown_table(
        ["", "training queries", "requests", "prompt tokens", "completion tokens", "USD"],
        [
            [
                label,
                f"{usage.queries:,}",
                f"{usage.requests:,}",
                f"{usage.prompt_tokens:,}",
                f"{usage.completion_tokens:,}",
                f"{usage.usd:.4f}" if quote.get("priced") else "no price known",
            ]
            for label, usage in spent.items()
        ],
    )
    return (
        f"{_caption(settings, found)}\n\n{scores}\n## What was spent\n\n{_SPENT}\n\n{costs}\n"
        f"{quote.get('note', '')}\n\n{about(Table3.name)}\n"
    )


def _caption(settings: Settings, found: _Found) -> str:
    run, rows = _run_document(settings), _dev_rows(settings)
    method, data = run["method"], run["data"]
    return (
        f"{settings.api_model} at {settings.base_url}, chat templates. {data['num_clients']} "
        f"clients with {data['shots']} rows per class, n={run['prompt']['length']}, "
        f"N={run['prompt']['vocabulary']['size']}, I={method['num_samples']}, mini-batches of "
        f"{method['batch_size']}, AdamW with learning rate {method['learning_rate']} "
        f"({'smaller than' if settings.quick else 'as'} in the authors' run_GPT.sh); one client "
        f"per round. {_rounds(found)} The first {rows} dev rows, times 100 (the standard error of "
        f"one accuracy alone is up to {50 / math.sqrt(rows):.1f}); mean and standard deviation "
        "over seeds."
    )


def _rounds(found: _Found) -> str:
    ran = sorted(one["rounds"] for one in _all(found) if "rounds" in one)
    if not ran:
        return "Nothing was tuned."
    return f"{ran[0] if ran[0] == ran[-1] else f'{ran[0]} to {ran[-1]}'} rounds were paid for."


def _cell(runs: Sequence[Result]) -> str:
    return mean_sd_text(one["metric"] for one in runs if one["metric"] is not None)


def _mean(rows: dict[str, list[Result]]) -> str:
    """Over tasks, where all have a number."""
    means = [
        statistics.fmean(known)
        for runs in rows.values()
        if (known := [one["metric"] for one in runs if one["metric"] is not None])
    ]
    return f"{100 * statistics.fmean(means):.1f}" if len(means) == len(rows) else "-"
