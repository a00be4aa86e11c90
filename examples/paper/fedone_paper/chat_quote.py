"""The cost of trials on a paid chat model, and the division of the user's caps among them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import ROUND_DOWN, Decimal
from typing import Any

from fedone_paper.chat import bias_examples, chat_federation, row_run
from fedone_paper.federated import trial_backend, untrained_prompt
from fedone_sdk.backends import LLMBackend, prediction_queries
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.errors import ArgumentError
from fedone_sdk.evaluation.engine import Result, Workspace
from fedone_sdk.local import plan_run

_MOST_ATTEMPTS = 2
"""A trial may send this many times the requests that it needs at most; the rest are retries."""

_STEP = Decimal("0.000001")
"""Of a divided cap, US dollars."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Costs:
    """What the trials of a task cost: all as expected, and each part at most.

    Attributes:
        expected: All of them.
        run: One tuning run.
        round: One round of it.
        measure: Measuring one prompt on the dev split.
        bias: Fitting a label bias.
        troubles: What would keep the model from answering.
    """

    expected: Usage
    run: Usage
    round: Usage
    measure: Usage
    bias: Usage
    troubles: tuple[str, ...]


def run_quote(options: dict[str, Any], workspace: Workspace) -> Result:
    """Compute the cost of all trials without a query, and divide the caps.

    Args:
        options: ``run`` (a run's document without task and data), ``tasks``, ``dev_rows``,
            ``rows`` (each the parts of a run that are its own) and ``seeds`` that are tuned,
            ``measurements`` of each task, ``bias_rows`` (on which one may fit a label bias), and
            the caps ``queries`` (of training) and ``usd`` of everything; null is none. Optionally
            ``questions``: what differs of a task from its preset, by task.
        workspace: Has the inputs ``TASK.train`` and ``TASK.dev``.

    Returns:
        ``caps``: per task those of one ``run``, of ``measuring`` one prompt and of the ``bias``,
        which all together are within the user's; ``expected`` and ``worst`` of everything;
        ``priced``: whether the price is known; and ``note``, a summary in words.

    Raises:
        SpecError: The caps do not pay for one round of every run, or money is capped and the price
            is not known.
    """
    return asyncio.run(_quote(options, workspace))


async def _quote(options: dict[str, Any], workspace: Workspace) -> Result:
    queries = queries_per_run(options)
    async with trial_backend(options["run"]["backend"], workspace) as backend:
        priced = "usd" in backend.bounds
        costs = {
            task: await _costs(options, task, workspace, backend, queries)
            for task in options["tasks"]
        }
    runs, measurements = _runs(options), options["measurements"]
    expected = sum((each.expected for each in costs.values()), NOTHING)
    training = sum((each.run * runs for each in costs.values()), NOTHING)
    measuring = sum((each.measure * measurements + each.bias for each in costs.values()), NOTHING)
    least = sum((each.round * runs for each in costs.values()), NOTHING)
    share = _share(options["usd"], training, measuring, least, priced=priced)
    caps = {
        task: {
            "run": {"queries": queries, **_cap(each.run, share if priced else None)},
            "measuring": _cap(each.measure, Decimal(1) if priced else None),
            "bias": _cap(each.bias, Decimal(1) if priced else None),
        }
        for task, each in costs.items()
    }
    troubles = dict.fromkeys(text for each in costs.values() for text in each.troubles)
    worst = training + measuring
    return {
        "caps": caps,
        "expected": expected.model_dump(mode="json"),
        "worst": worst.model_dump(mode="json"),
        "priced": priced,
        "note": "\n".join([_note(options, caps, expected, worst, priced=priced), *troubles]),
    }


def _runs(options: dict[str, Any]) -> int:
    """Tuning runs of each task."""
    return len(options["rows"]) * int(options["seeds"])


def queries_per_run(options: dict[str, Any]) -> int:
    """Training queries of each run, within the cap.

    Raises:
        SpecError: It does not pay for one round of each.
    """
    per_round = int(options["run"]["method"]["num_samples"])
    queries = int(options["run"]["rounds"]) * per_round
    num_runs = _runs(options) * len(options["tasks"])
    if options["queries"] is not None:
        queries = min(queries, options["queries"] // num_runs)
    if queries < per_round:
        raise ArgumentError(
            f"--cap: {options['queries']} queries do not pay for one round of {per_round} of each "
            f"of the {num_runs} runs"
        )
    return queries


async def _costs(
    options: dict[str, Any], task: str, workspace: Workspace, backend: LLMBackend, queries: int
) -> _Costs:
    inputs = {name: workspace.inputs[f"{task}.{name}"] for name in ("train", "dev")}
    workspace = replace(workspace, inputs=inputs)
    options = {**options, "task": task, "question": options.get("questions", {}).get(task, {})}
    plans = []
    for row in options["rows"]:
        run = {**row_run(options["run"], row), "budget": {"queries": queries}}
        # Without dev rows: a run here does not measure.
        federation = replace(chat_federation({**options, "run": run}, workspace), dev=())
        plans.append(await plan_run(federation, backend=backend))
    federation = chat_federation(options, workspace)
    spec, size = federation.spec, federation.spec.method.batch_size

    async def expected(prompt: str, rows: Any) -> Usage:
        asked = prediction_queries(backend, spec.task, prompt, rows, size)
        return sum([await backend.quote(query) for query in asked], NOTHING).without_queries()

    def worst(rows: Any) -> Usage:
        return (backend.worst_case(size) * math.ceil(len(rows) / size)).without_queries()

    rows = bias_examples(federation, options["bias_rows"])
    # How many prompts of a draw are equal, and so cost once, depends on the method.
    runs = sum((plan.expected for plan in plans), NOTHING) * options["seeds"]
    measure = await expected(untrained_prompt(federation), federation.dev)
    most_expensive = max(plans, key=lambda plan: plan.most.requests)
    return _Costs(
        expected=runs + measure * options["measurements"] + await expected("", rows),
        run=most_expensive.most,
        round=most_expensive.smallest_cap,
        measure=worst(federation.dev),
        bias=worst(rows),
        troubles=tuple(text for text in plans[0].warnings if text.startswith("backend: ")),
    )


def _share(
    cap: float | None, training: Usage, measuring: Usage, least: Usage, *, priced: bool
) -> Decimal:
    """Return the share of their worst case that the runs may spend under the cap in money.

    Measuring is paid first: a run without a measurement has no result.
    """
    if cap is None:
        return Decimal(1)
    if not priced:
        raise ArgumentError("--cap-usd: the price of this model is not known; say it with --prices")
    money = Decimal(str(cap))
    if money < measuring.usd + least.usd:
        raise ArgumentError(
            f"--cap-usd: {money} is too little: measuring may cost {measuring.usd:.4f}, and one "
            f"round of every run {least.usd:.4f}"
        )
    return min(Decimal(1), (money - measuring.usd) / training.usd) if training.usd else Decimal(1)


def _cap(worst: Usage, share: Decimal | None) -> dict[str, Any]:
    """Return a cap as JSON holds it: money as text; None where it has no price."""
    usd = None
    if share is not None:
        usd = worst.usd if share == 1 else (worst.usd * share).quantize(_STEP, ROUND_DOWN)
    return {"requests": worst.requests * _MOST_ATTEMPTS, "usd": None if usd is None else str(usd)}


def _note(
    options: dict[str, Any],
    caps: Mapping[str, Any],
    expected: Usage,
    worst: Usage,
    *,
    priced: bool,
) -> str:
    runs, measurements, tasks = _runs(options), options["measurements"], options["tasks"]

    def total(unit: str) -> Decimal:
        times = {"run": runs, "measuring": measurements, "bias": 1}
        each = [(cap[part], n) for cap in caps.values() for part, n in times.items()]
        return sum((Decimal(cap.get(unit, 0)) * n for cap, n in each), Decimal(0))

    spent = f", about USD {expected.usd:.4f}, {worst.usd:.4f} at most" if priced else ""
    money = f"USD {total('usd'):.4f}" if priced else "none in money: the price is not known"
    return (
        f"quote for {', '.join(tasks)}: {expected.queries} training queries in "
        f"{runs * len(tasks)} runs, {measurements * len(tasks)} measurements of "
        f"{options['dev_rows']} rows; about {expected.requests} requests, "
        f"{expected.prompt_tokens + expected.completion_tokens} tokens{spent}. "
        f"Caps: {total('queries')} queries, {total('requests')} requests, {money}"
    )
