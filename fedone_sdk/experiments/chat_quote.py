"""What trials of a paid chat model would cost, and how the user's caps are divided among them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import ROUND_DOWN, Decimal
from typing import TYPE_CHECKING, Any

from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.errors import SpecError
from fedone_sdk.experiments.chat import (
    bias_examples,
    chat_backend,
    chat_federation,
    row_run,
    untrained_prompt,
)
from fedone_sdk.experiments.experiment import Result, Workspace

if TYPE_CHECKING:
    from fedone_sdk.backends import LLMBackend
    from fedone_sdk.simulation import Federation

__all__ = ["queries_per_run", "run_quote"]

_MOST_ATTEMPTS = 2
"""A trial may send this many times the requests that it needs at most; the rest are retries."""

_STEP = Decimal("0.000001")
"""Of a divided cap, US dollars."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Costs:
    """What the parts of a task cost.

    Attributes:
        runs: One tuning run of every method, as expected: how many prompts of a draw are equal,
            and so are asked once, depends on the method.
        run_worst: A tuning run at most.
        round_worst: One round of it at most.
        measure: Measuring a prompt on the dev split, as expected.
        measure_worst: The same at most.
        bias: Fitting a label bias, as expected.
        bias_worst: The same at most.
        troubles: What would keep the model from answering.
    """

    runs: Usage
    run_worst: Usage
    round_worst: Usage
    measure: Usage
    measure_worst: Usage
    bias: Usage
    bias_worst: Usage
    troubles: tuple[str, ...]


def run_quote(options: dict[str, Any], workspace: Workspace) -> Result:
    """Works out what all trials would cost, without asking the model, and divides the caps.

    Args:
        options: ``run`` (a run's document without task and data), ``tasks``, ``dev_rows``,
            ``rows`` (each the parts of a run that are its own) and ``seeds`` that are tuned,
            ``measurements`` of each task, ``bias_rows`` (on which one may fit a label bias), and
            the caps ``queries`` (of training) and ``usd`` of everything; null is none. Optionally
            ``questions``: what differs of a task from its preset, by task.
        workspace: Has the inputs ``TASK.train`` and ``TASK.dev``.

    Returns:
        ``caps``: per task those of one ``run`` and of ``measuring`` one prompt, which all together
        are within the user's; ``expected`` and ``worst`` of everything; ``priced``: whether the
        price is known; and ``note``, a summary in words.

    Raises:
        SpecError: The caps do not pay for one round of every run, or money is capped and the price
            is not known.
    """
    return asyncio.run(_quote(options, workspace))


async def _quote(options: dict[str, Any], workspace: Workspace) -> Result:
    queries = queries_per_run(options)
    async with chat_backend(options["run"], workspace) as backend:
        priced = "usd" in backend.bounds
        costs = {
            task: await _costs(options, task, workspace, backend, queries)
            for task in options["tasks"]
        }
    runs, measurements = _runs(options), options["measurements"]
    expected = sum(
        (c.runs * options["seeds"] + c.measure * measurements + c.bias for c in costs.values()),
        NOTHING,
    )
    worst = sum(
        (
            c.run_worst * runs + c.measure_worst * measurements + c.bias_worst
            for c in costs.values()
        ),
        NOTHING,
    )
    share = _share(options, costs, priced=priced)
    caps = {
        task: {
            "run": {"queries": queries, **_cap(found.run_worst, share if priced else None)},
            "measuring": _cap(found.measure_worst, Decimal(1) if priced else None),
            "bias": _cap(found.bias_worst, Decimal(1) if priced else None),
        }
        for task, found in costs.items()
    }
    troubles = dict.fromkeys(text for found in costs.values() for text in found.troubles)
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
        raise SpecError(
            f"--cap: {options['queries']} queries do not pay for one round of {per_round} of each "
            f"of the {num_runs} runs",
            source="arguments",
        )
    return queries


def _federation(options: dict[str, Any], task: str, workspace: Workspace) -> Federation:
    paths = {name: workspace.inputs[f"{task}.{name}"] for name in ("train", "dev")}
    question = options.get("questions", {}).get(task, {})
    asked = {**options, "task": task, "question": question}
    return chat_federation(asked, replace(workspace, inputs=paths))


async def _costs(
    options: dict[str, Any], task: str, workspace: Workspace, backend: LLMBackend, queries: int
) -> _Costs:
    from fedone_sdk.backends import prediction_queries
    from fedone_sdk.simulation import plan_run

    plans = []
    for row in options["rows"]:
        run = {**row_run(options["run"], row), "budget": {"queries": queries}}
        federation = _federation({**options, "run": run}, task, workspace)
        # Without dev rows, which a run here does not measure on by itself.
        plans.append(await plan_run(replace(federation, dev=()), backend=backend))
    federation = _federation(options, task, workspace)
    spec, size = federation.spec, federation.spec.method.batch_size
    asked = prediction_queries(
        backend, spec.task, untrained_prompt(federation), federation.dev, size
    )
    measure = sum([await backend.quote(query) for query in asked], NOTHING)
    measure_worst = backend.worst_case(size) * math.ceil(len(federation.dev) / size)
    rows = bias_examples(federation, options["bias_rows"])
    asked_for_bias = prediction_queries(backend, spec.task, "", rows, size)
    bias = sum([await backend.quote(query) for query in asked_for_bias], NOTHING)
    bias_worst = backend.worst_case(size) * len(asked_for_bias)
    most_expensive = max(plans, key=lambda plan: plan.worst.requests)
    return _Costs(
        runs=sum((plan.expected for plan in plans), NOTHING),
        run_worst=most_expensive.worst,
        round_worst=most_expensive.smallest_cap,
        measure=measure.without_queries(),
        measure_worst=measure_worst.without_queries(),
        bias=bias.without_queries(),
        bias_worst=bias_worst.without_queries(),
        troubles=tuple(text for text in plans[0].warnings if text.startswith("backend: ")),
    )


def _share(options: dict[str, Any], costs: Mapping[str, _Costs], *, priced: bool) -> Decimal:
    """How much of their worst case the runs may spend, so that the cap in money holds.

    Measuring comes first: a run that is not measured is worth nothing.
    """
    if options["usd"] is None:
        return Decimal(1)
    if not priced:
        raise SpecError(
            "--cap-usd: the price of this model is not known; say it with --prices",
            source="arguments",
        )
    cap, runs = Decimal(str(options["usd"])), _runs(options)
    measuring = sum(
        c.measure_worst.usd * options["measurements"] + c.bias_worst.usd for c in costs.values()
    )
    training = sum(c.run_worst.usd for c in costs.values()) * runs
    least = sum(c.round_worst.usd for c in costs.values()) * runs
    if cap < measuring + least:
        raise SpecError(
            f"--cap-usd: {cap} is too little: measuring may cost {measuring:.4f}, and one round "
            f"of every run {least:.4f}",
            source="arguments",
        )
    return min(Decimal(1), (cap - measuring) / training) if training else Decimal(1)


def _cap(worst: Usage, share: Decimal | None) -> dict[str, Any]:
    """A cap as JSON holds it: money as text, to the last digit; None where it has no price."""
    usd = None
    if share is not None:
        usd = worst.usd if share == 1 else (worst.usd * share).quantize(_STEP, ROUND_DOWN)
    return {
        "requests": worst.requests * _MOST_ATTEMPTS,
        "usd": None if usd is None else str(usd),
    }


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
        each = (
            Decimal(cap["run"][unit]) * runs
            + Decimal(cap["measuring"].get(unit, 0)) * measurements
            + Decimal(cap["bias"].get(unit, 0))
            for cap in caps.values()
        )
        return sum(each, Decimal(0))

    spent = f", about USD {expected.usd:.4f}, {worst.usd:.4f} at most" if priced else ""
    money = f"USD {total('usd'):.4f}" if priced else "none in money: the price is not known"
    return (
        f"quote for {', '.join(tasks)}: {expected.queries} training queries in "
        f"{runs * len(tasks)} runs, {measurements * len(tasks)} measurements of "
        f"{options['dev_rows']} rows; about {expected.requests} requests, "
        f"{expected.prompt_tokens + expected.completion_tokens} tokens{spent}. "
        f"Caps: {total('queries')} queries, {total('requests')} requests, {money}"
    )
