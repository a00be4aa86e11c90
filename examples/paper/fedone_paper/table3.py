"""table3: prompts for a chat model behind an API, tuned under a hard cap."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedone_paper.chat import row_run, run_standing, run_tuned
from fedone_paper.chat_quote import queries_per_run, run_quote
from fedone_paper.experiment import Report, Results
from fedone_paper.methods import METHODS, Method
from fedone_paper.paper import about, printed, score_table
from fedone_paper.settings import Settings
from fedone_paper.study import Design, Point, Study
from fedone_paper.summary import number, table
from fedone_sdk.budget import Usage
from fedone_sdk.errors import ArgumentError
from fedone_sdk.evaluation.engine import Result, Trial
from fedone_sdk.glue import GLUE_TASKS
from fedone_sdk.spec import RunSpec, validate_spec

BIAS_ROWS = 64
"""Training rows that the label bias of no prompt is fitted on."""


_POLICY = {"learning_rate": 1e-3}

_ROWS: Mapping[str, Method] = {
    "no-prompt": METHODS["no-prompt"],
    "no-prompt-bias": replace(METHODS["no-prompt"], title="No prompt, label bias"),
    "untrained": METHODS["untrained"],
    "bdpl": METHODS["bdpl"].variant("FedOne-BDPL", changes=_POLICY),
    "gs-bdpl": METHODS["gs-bdpl"].variant("FedOne-GS-BDPL", changes=_POLICY),
    "default": METHODS["default"],
}

_MEASURED = {"no-prompt": "none", "no-prompt-bias": "biased", "untrained": "untrained"}
"""What is measured without a run, see `run_standing`; the other rows tune a prompt."""

_YES_NO: Mapping[str, Mapping[str, Any]] = {
    "sst2": {
        "chat": {"user": "{prompt} {sentence} great? yes or no:"},
        "labels": {"0": " no", "1": " yes"},
    }
}
"""Questions in the one form that the paper prints, for tasks whose preset has another form."""


class Table3(Study):
    """Ways to prompt a chat model; the federated ones (K* = 1) query it to train.

    `Settings.options`: ``concurrency``, the requests under way at once (a small server times out
    with more than it has slots); ``dev_rows``, the dev rows that prompts are measured on;
    ``batch_size``, the examples of a query; ``question=yes-no`` asks SST-2 a yes-or-no question as
    well, for models that do not answer great or terrible.
    """

    name = "table3"
    title = "A chat model behind an API: no prompt, an untrained one, FedOne's methods"
    options = ("batch_size", "concurrency", "dev_rows", "question")
    takes = (
        "tasks",
        "cap_queries",
        "cap_usd",
        "prices",
        "base_url",
        "api_model",
        "api_key_env",
    )
    # n, N, I, B and the clients are those of the authors' run_GPT.sh, which has 10 rounds and the
    # rate 5e-3.
    design = Design(
        base={
            "data": {"num_clients": 100, "shots": 16},
            "prompt": {"length": 20, "vocabulary": {"kind": "pmi", "size": 200}},
            "method": {"name": "gs-bdpl", "num_samples": 3, "batch_size": 16},
            "rounds": 100,
            "dev_rows": 200,
        },
        small={
            "data": {"num_clients": 10, "shots": 4},
            "prompt": {"length": 4, "vocabulary": {"kind": "pmi", "size": 20}},
            "method": {"batch_size": 4},
            "rounds": 3,
            "dev_rows": 16,
        },
        axes={"row": tuple(_ROWS), "task": GLUE_TASKS},
        small_axes={"task": ("sst2",)},
        key="{task}_{row}_s{seed}",
    )

    def trials(self, settings: Settings, results: Results) -> Sequence[Trial]:
        """First the quote; then all rows, under the caps that follow from it."""
        quote = self._quote_trial(settings)
        if quote.key not in results:
            return [quote]
        caps = results[quote.key]["caps"]
        return [quote, *(_capped(trial, caps) for trial in super().trials(settings, results))]

    def seeds(self, settings: Settings, point: Point) -> Sequence[int]:
        """One seed, where the result does not depend on it."""
        return range(settings.seeds if _ROWS[point["row"]].seeded else 1)

    def trial(self, settings: Settings, key: str, point: Point) -> Trial:
        """Return a row's run or measurement on a task, its caps left open."""
        name, task, seed = point["row"], point["task"], point["seed"]
        folder = settings.task_folder(task)
        options: dict[str, Any] = {
            "run": {**row_run(self._document(settings), _own(_ROWS[name])), "seed": seed},
            "task": task,
            "dev_rows": self.run(settings)["dev_rows"],
            "seed": seed,
        }
        if question := _questions(settings).get(task):
            options["question"] = question
        if name in _MEASURED:
            options |= {"prompt": _MEASURED[name], "bias_rows": BIAS_ROWS}
        return Trial(
            key=key,
            run=run_standing if name in _MEASURED else run_tuned,
            options=options,
            inputs={name: folder / f"{name}.jsonl" for name in ("train", "dev")},
        )

    def report(self, settings: Settings, results: Results) -> Report:
        """Return the table, and what each row has spent."""
        tasks, found = self.grid(settings)["task"], dict[str, dict[str, list[Result]]]()
        for name, row in _ROWS.items():
            runs = self.runs(settings, results, row=name)
            found[row.title] = {task: [*runs.get(task, {}).values()] for task in tasks}
        trials = [
            (label, task, one)
            for label, by_task in found.items()
            for task, runs in by_task.items()
            for one in runs
        ]
        spent = {label: Usage() for label in found}
        for label, _, one in trials:
            spent[label] += Usage.model_validate(one["spent"])
        scores = score_table(
            self.name,
            {name: row.title for name, row in _ROWS.items()},
            {
                name: {
                    task: [one["metric"] for one in runs if one["metric"] is not None]
                    for task, runs in found[row.title].items()
                }
                for name, row in _ROWS.items()
            },
        )
        refused = [
            f"- {label} on {task}: {one['refused']}\n"
            for label, task, one in trials
            if "refused" in one
        ]
        quote = results.get("quote", {})
        rounds = [one["rounds"] for _, _, one in trials if "rounds" in one]
        return Report(
            markdown=f"{self._caption(settings, rounds)}\n\n{scores}\n"
            + (f"Cells without a number:\n\n{''.join(refused)}\n" if refused else "")
            + "## What was spent\n\nTraining, measuring, retries and interrupted attempts; a known "
            f"answer costs nothing.\n\n{_costs(spent, quote)}\n{quote.get('note', '')}\n\n"
            f"{about(self.name)}\n",
            data={
                "endpoint": settings.base_url,
                "model": settings.api_model,
                "models": sorted({model for _, _, one in trials for model in one["models"]}),
                "rows": found,
                "spent": {label: usage.model_dump(mode="json") for label, usage in spent.items()},
                "quote": quote,
                "paper": printed(self.name),
            },
        )

    def _document(self, settings: Settings) -> dict[str, Any]:
        """Return a run without its task and data.

        Raises:
            SpecError: The endpoint or the model is missing.
        """
        if settings.base_url is None or settings.api_model is None:
            raise ArgumentError(
                "--base-url and --api-model: are required, also with --quick: an OpenAI-compatible "
                "endpoint, and the model's name there"
            )
        prices = None
        if settings.prices is not None:
            prices = {"prompt": str(settings.prices[0]), "completion": str(settings.prices[1])}
        run = self.run(settings)
        del run["dev_rows"]
        at_once = number(settings.options, "concurrency", 0)
        document: dict[str, Any] = {
            "name": "trial",
            **run,
            "backend": {
                "kind": "openai",
                "base_url": settings.base_url,
                "model": settings.api_model,
                "api_key_env": settings.api_key_env,
                "prices": prices,
                **({"limits": {"concurrency": at_once}} if at_once else {}),
            },
        }
        data = {**document["data"], "train": "train"}
        validate_spec(RunSpec, {**document, "task": "sst2/chat", "data": data}, source="arguments")
        return document

    def _quote_trial(self, settings: Settings) -> Trial:
        tasks = self.grid(settings)["task"]
        options = {
            "run": self._document(settings),
            "tasks": list(tasks),
            "dev_rows": self.run(settings)["dev_rows"],
            "bias_rows": BIAS_ROWS,
            "rows": [_own(row) for name, row in _ROWS.items() if name not in _MEASURED],
            "seeds": settings.seeds,
            "measurements": sum(len(self.seeds(settings, {"row": name})) for name in _ROWS),
            "queries": settings.cap_queries,
            "usd": settings.cap_usd,
        }
        if questions := _questions(settings):
            options["questions"] = questions
        queries_per_run(options)  # an error comes before the work
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

    def _caption(self, settings: Settings, rounds: Sequence[int]) -> str:
        run, rows = self._document(settings), self.run(settings)["dev_rows"]
        method, data = run["method"], run["data"]
        ran = " to ".join(map(str, sorted({min(rounds), max(rounds)}))) if rounds else ""
        paid = f"{ran} rounds were paid for." if ran else "Nothing was tuned."
        as_theirs = method["batch_size"] == self.design.base["method"]["batch_size"]
        return (
            f"{settings.api_model} at {settings.base_url}, chat templates. {data['num_clients']} "
            f"clients with {data['shots']} rows per class, n={run['prompt']['length']}, "
            f"N={run['prompt']['vocabulary']['size']}, I={method['num_samples']}, mini-batches of "
            f"{method['batch_size']} ({'as' if as_theirs else 'smaller than'} in the authors' "
            f"run_GPT.sh), AdamW with learning rate {_POLICY['learning_rate']}; one "
            f"client per round. {paid} The first {rows} dev rows, times 100 (the "
            f"standard error of one accuracy alone is up to {50 / math.sqrt(rows):.1f}); mean and "
            "standard deviation "
            "over seeds."
        )


def _own(row: Method) -> dict[str, Any]:
    """Return the parts of the run that are a row's own."""
    prompt = {"prompt": {"slots": list(row.slots)}} if row.slots else {}
    return {"method": dict(row.method), **prompt}


def _questions(settings: Settings) -> dict[str, Any]:
    """Return the differences from the presets, by task.

    Raises:
        SpecError: There are no such questions.
    """
    asked = settings.options.get("question")
    if asked not in (None, "yes-no"):
        raise ArgumentError(f"--set question: must be yes-no, not {asked!r}")
    return {} if asked is None else {task: dict(question) for task, question in _YES_NO.items()}


def _capped(trial: Trial, caps: dict[str, dict[str, Any]]) -> Trial:
    cap = caps[trial.options["task"]]
    parts = ["measuring"] if "prompt" in trial.options else ["run", "measuring"]
    if trial.options.get("prompt") == "biased":
        parts.append("bias")
    return replace(trial, options={**trial.options, "caps": [cap[part] for part in parts]})


def _costs(spent: Mapping[str, Usage], quote: Result) -> str:
    return table(
        "",
        spent,
        {
            "training queries": lambda _, usage: f"{usage.queries:,}",
            "requests": lambda _, usage: f"{usage.requests:,}",
            "prompt tokens": lambda _, usage: f"{usage.prompt_tokens:,}",
            "completion tokens": lambda _, usage: f"{usage.completion_tokens:,}",
            "USD": lambda _, usage: f"{usage.usd:.4f}" if quote.get("priced") else "no price known",
        },
    )
