"""table3: prompts for a chat model behind an API, tuned under a hard cap."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedone_paper.chat import run_standing, run_tuned
from fedone_paper.methods import method_of
from fedone_paper.paper import about, score_table
from fedone_paper.settings import Settings
from fedone_paper.study import Point, Report, Results, Study
from fedone_paper.summary import number, table
from fedone_sdk.budget import Usage
from fedone_sdk.errors import ArgumentError
from fedone_sdk.evaluation.engine import Result, Trial
from fedone_sdk.spec import RunSpec, validate_spec

BIAS_ROWS = 64
"""Training rows that the label bias of no prompt is fitted on."""


_MEASURED = {"no-prompt": "none", "no-prompt-bias": "biased", "untrained": "untrained"}
"""What is measured without a run, see `run_standing`; the other rows tune a prompt."""


class Table3(Study):
    """Ways to prompt a chat model; the federated ones (K* = 1) query it to train.

    `Settings.options`: ``concurrency``, the requests under way at once (a small server times out
    with more than it has slots); ``dev_rows``, the dev rows that prompts are measured on;
    ``batch_size``, the examples of a query; ``question=yes-no`` asks SST-2 a yes-or-no question as
    well, for models that do not answer great or terrible.
    """

    def trials(self, settings: Settings, results: Results) -> Sequence[Trial]:
        """All rows; the cap in money is divided evenly among them."""
        trials = super().trials(settings, results)
        usd = settings.cap_usd and str(round(settings.cap_usd / len(trials), 6))
        return [replace(trial, options={**trial.options, "usd": usd}) for trial in trials]

    def seeds(self, settings: Settings, point: Point) -> Sequence[int]:
        """One seed, where the result does not depend on it."""
        return range(settings.seeds if method_of(self.name, point["row"]).seeded else 1)

    def trial(self, settings: Settings, key: str, point: Point) -> Trial:
        """Return a row's run or measurement on a task, its caps left open."""
        name, task, seed = point["row"], point["task"], point["seed"]
        folder = settings.task_folder(task)
        row, run = method_of(self.name, name), self._document(settings)
        run["method"] = {**run["method"], **row.method}
        if row.slots:
            run["prompt"] = {"slots": list(row.slots)}
        if name not in _MEASURED:
            run["budget"] = {"queries": self._queries(settings)}
        options: dict[str, Any] = {
            "run": {**run, "seed": seed},
            "task": task,
            "dev_rows": self.run(settings)["dev_rows"],
            "seed": seed,
        }
        if question := self._questions(settings).get(task):
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
        rows = {name: method_of(self.name, name) for name in self.said["axes"]["row"]}
        for name, row in rows.items():
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
            {name: row.title for name, row in rows.items()},
            {
                name: {
                    task: [one["metric"] for one in runs if one["metric"] is not None]
                    for task, runs in found[row.title].items()
                }
                for name, row in rows.items()
            },
        )
        refused = [
            f"- {label} on {task}: {one['refused']}\n"
            for label, task, one in trials
            if "refused" in one
        ]
        rounds = [one["rounds"] for _, _, one in trials if "rounds" in one]
        return Report(
            markdown=f"{self._caption(settings, rounds)}\n\n{scores}\n"
            + (f"Cells without a number:\n\n{''.join(refused)}\n" if refused else "")
            + f"## What was spent\n\n{self.text('spent')}\n\n{_costs(spent)}\n"
            f"{about(self.name)}\n",
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

    def _queries(self, settings: Settings) -> int:
        """Return the training queries of each run, within the cap.

        Raises:
            SpecError: The cap does not pay for one round of each.
        """
        run, cap = self.run(settings), settings.cap_queries
        per_round: int = run["method"]["num_samples"]
        rows = len(self.said["axes"]["row"]) - len(_MEASURED)
        num_runs = rows * settings.seeds * len(self.grid(settings)["task"])
        queries = run["rounds"] * per_round
        if cap is not None:
            queries = min(queries, cap // num_runs)
        if queries < per_round:
            raise ArgumentError(
                f"--cap: {cap} queries do not pay for one round of {per_round} of each of the "
                f"{num_runs} runs"
            )
        return int(queries)

    def _caption(self, settings: Settings, rounds: Sequence[int]) -> str:
        run, rows = self._document(settings), self.run(settings)["dev_rows"]
        ran = " to ".join(map(str, sorted({min(rounds), max(rounds)}))) if rounds else ""
        return self.text(
            "caption",
            **{**run["data"], **run["method"]},
            model=settings.api_model,
            url=settings.base_url,
            length=run["prompt"]["length"],
            size=run["prompt"]["vocabulary"]["size"],
            paid=f"{ran} rounds were paid for." if ran else "Nothing was tuned.",
            rows=rows,
            error=50 / math.sqrt(rows),
        )

    def _questions(self, settings: Settings) -> dict[str, Any]:
        """Return the differences from the presets, by task.

        Raises:
            SpecError: There are no such questions.
        """
        asked = settings.options.get("question")
        if asked not in (None, "yes-no"):
            raise ArgumentError(f"--set question: must be yes-no, not {asked!r}")
        return {} if asked is None else dict(self.said["yes_no"])


def _costs(spent: Mapping[str, Usage]) -> str:
    return table(
        "",
        spent,
        {
            "training queries": lambda _, usage: f"{usage.queries:,}",
            "requests": lambda _, usage: f"{usage.requests:,}",
            "prompt tokens": lambda _, usage: f"{usage.prompt_tokens:,}",
            "completion tokens": lambda _, usage: f"{usage.completion_tokens:,}",
            "USD": lambda _, usage: f"{usage.usd:.4f}",
        },
    )
