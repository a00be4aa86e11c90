"""table3: prompts for a chat model behind an API, tuned under a hard cap."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fedone_paper.chat import run_chat
from fedone_paper.glue import glue_task
from fedone_paper.methods import method_of
from fedone_paper.settings import Settings
from fedone_paper.study import Point, Report, Results, Study
from fedone_paper.tables import Column, about, score_table, table
from fedone_sdk.backends.build import build_backend, price_of
from fedone_sdk.budget import Usage
from fedone_sdk.errors import ArgumentError
from fedone_sdk.evaluation.engine import Result, Trial
from fedone_sdk.spec import RunSpec, load_yaml, validate_spec

BIAS_ROWS = 64
"""Number of training rows for fitting the label bias of "no prompt"."""


_MEASURED = {"no-prompt": "none", "no-prompt-bias": "biased", "untrained": "untrained"}
"""Rows of the table without tuning, with their `run_chat` option ``prompt``."""


class Table3(Study):
    """Prompts for a chat model: without tuning, or tuned with one client per round.

    `Settings.options`: ``dev_rows``, the number of dev rows to measure on; ``batch_size``, examples
    per query; ``question=yes-no`` adds a yes-or-no question for SST-2, for models that do not
    answer "great" or "terrible".
    """

    def trials(self, settings: Settings, results: Results) -> Sequence[Trial]:
        """Return the trials of all rows; the cap in dollars is divided evenly among them."""
        trials = super().trials(settings, results)
        usd = settings.cap_usd and str(round(settings.cap_usd / len(trials), 6))
        return [replace(trial, options={**trial.options, "usd": usd}) for trial in trials]

    def seeds(self, settings: Settings, point: Point) -> Sequence[int]:
        """Return the seeds of a row; one seed if the result does not depend on it."""
        return range(settings.seeds if method_of(self.name, point["row"]).seeded else 1)

    def trial(self, settings: Settings, key: str, point: Point) -> Trial:
        """Return the trial of a row on a task; `trials` sets its caps."""
        name, task, seed = point["row"], point["task"], point["seed"]
        row, run = method_of(self.name, name), self._document(settings)
        run["method"] = {**run["method"], **row.method}
        if row.slots:
            run["prompt"] = {"slots": list(row.slots)}
        options = {"task": task, "dev_rows": self.run(settings)["dev_rows"], "seed": seed}
        if question := self._questions(settings).get(task):
            options["question"] = question
        if name in _MEASURED:
            options |= {"prompt": _MEASURED[name], "bias_rows": BIAS_ROWS}
        else:
            run["budget"] = {"queries": self._queries(settings)}
        options["run"] = {**run, "seed": seed}
        inputs = settings.inputs(task)
        del inputs["model"]
        return Trial(key=key, run=run_chat, options=options, inputs=inputs)

    def report(self, settings: Settings, results: Results) -> Report:
        """Return the table, and the cost of each row."""
        tasks, rows = self.grid(settings)["task"], self.said["axes"]["row"]
        titles = {name: method_of(self.name, name).title for name in rows}
        found: dict[str, dict[str, list[Result]]] = {}
        for name in rows:
            runs = self.runs(settings, results, row=name)
            found[name] = {task: [*runs.get(task, {}).values()] for task in tasks}
        scores = {
            name: {
                task: [one["metric"] for one in runs if one["metric"] is not None]
                for task, runs in by_task.items()
            }
            for name, by_task in found.items()
        }
        trials = {
            titles[name]: [one for runs in by_task.values() for one in runs]
            for name, by_task in found.items()
        }
        spent = {
            title: sum((Usage.model_validate(one["spent"]) for one in runs), Usage())
            for title, runs in trials.items()
        }
        refused = [
            f"- {titles[name]} on {task}: {one['refused']}\n"
            for name, by_task in found.items()
            for task, runs in by_task.items()
            for one in runs
            if "refused" in one
        ]
        rounds = {one["rounds"] for runs in trials.values() for one in runs if "rounds" in one}
        columns: dict[str, Column] = {
            "training queries": lambda _, usage: f"{usage.queries:,}",
            "requests": lambda _, usage: f"{usage.requests:,}",
            "prompt tokens": lambda _, usage: f"{usage.prompt_tokens:,}",
            "completion tokens": lambda _, usage: f"{usage.completion_tokens:,}",
            "USD": lambda _, usage: f"{usage.usd:.4f}",
        }
        parts = [
            self._caption(settings, rounds),
            score_table(self.name, titles, scores, quick=settings.quick),
            f"Cells without a number:\n\n{''.join(refused)}" if refused else "",
            f"## What was spent\n\n{self.text('spent')}\n\n{table('', spent, columns)}",
            about(self.name),
        ]
        return Report(markdown="\n\n".join(filter(None, parts)))

    def _document(self, settings: Settings) -> dict[str, Any]:
        """Return a run without its task and data.

        Raises:
            SpecError: The file of the backend is missing or wrong, or its cost is not capped.
        """
        file = settings.backend_file
        if file is None:
            raise ArgumentError(
                "--backend: is required, also with --quick: a YAML file with the keys of `backend` "
                "in a run (kind, model, base_url, api_key_env, prices ...)"
            )
        run = self.run(settings)
        del run["dev_rows"]
        document: dict[str, Any] = {"name": "trial", **run, "backend": load_yaml(file)}
        data = {**document["data"], "train": "train"}
        task = glue_task("sst2", "chat")
        spec = validate_spec(
            RunSpec, {**document, "task": task, "data": data}, source=str(file)
        ).backend
        asyncio.run(build_backend(spec, file.parent).aclose())  # Raises if the API key is missing.
        if (price := price_of(spec)) is None:
            raise ArgumentError(f"{file}: prices: are required: no price of {spec.model} is known")
        if settings.cap_usd is None and price.units:
            raise ArgumentError(f"--cap-usd: is required: {spec.model} in {file} costs money")
        return document

    def _queries(self, settings: Settings) -> int:
        """Return the training queries of each run, within the cap.

        Raises:
            SpecError: The cap does not pay for one round of each run.
        """
        run, cap = self.run(settings), settings.cap_queries
        per_round: int = run["method"]["num_samples"]
        rows = len(self.said["axes"]["row"]) - len(_MEASURED)
        num_runs = rows * settings.seeds * len(self.grid(settings)["task"])
        queries = min(run["rounds"] * per_round, math.inf if cap is None else cap // num_runs)
        if queries < per_round:
            raise ArgumentError(
                f"--cap: {cap} queries do not pay for one round of {per_round} of each of the "
                f"{num_runs} runs"
            )
        return int(queries)

    def _caption(self, settings: Settings, rounds: set[int]) -> str:
        run, rows = self._document(settings), self.run(settings)["dev_rows"]
        backend = run["backend"]
        ran = " to ".join(map(str, sorted({min(rounds), max(rounds)}))) if rounds else "no"
        return self.text(
            "caption",
            **{**run["data"], **run["method"]},
            model=backend.get("model"),
            url=backend.get("base_url") or "its provider",
            length=run["prompt"]["length"],
            size=run["prompt"]["vocabulary"]["size"],
            ran=ran,
            rows=rows,
            error=50 / math.sqrt(rows),
        )

    def _questions(self, settings: Settings) -> dict[str, Any]:
        """Return the changes of tasks for ``question``, by task.

        Raises:
            SpecError: The question is not known.
        """
        asked = settings.options.get("question")
        if asked not in (None, "yes-no"):
            raise ArgumentError(f"--set question: must be yes-no, not {asked!r}")
        return {} if asked is None else dict(self.said["yes_no"])
