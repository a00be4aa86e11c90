"""`fedone plan`: estimated cost and duration of a run."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Annotated

import typer

from fedone_sdk.cli._failures import naming
from fedone_sdk.cli._options import Cap, JsonFile, RunPath, Seed, Transport, TransportName
from fedone_sdk.cli._output import Output, money, plural, size
from fedone_sdk.cli._process import quiet_logs
from fedone_sdk.cli._run_file import RunFile

if TYPE_CHECKING:
    from fedone_sdk.local import RunPlan


def plan(
    run_path: RunPath,
    seed: Seed = None,
    cap: Cap = None,
    transport: Transport = TransportName.http,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe/--no-probe",
            help="Measure the speed of a local model on the run's first rounds, for about 5 "
            "seconds; --no-probe does not load it.",
        ),
    ] = True,
    json_file: JsonFile = None,
) -> None:
    """Estimate the cost of a run, and check whether its cap suffices.

    It sends no request to a hosted model.
    """
    output = Output(json_file)
    quiet_logs()
    found, local = asyncio.run(_plan(RunFile.load(run_path, seed=seed, cap=cap), probe, transport))
    output.write_json(found)
    _print(output, found, _time(found, local=local, probe=probe))


async def _plan(run: RunFile, probe: bool, transport: TransportName) -> tuple[RunPlan, bool]:
    from fedone_sdk.local import plan_run

    federation = run.federation()
    async with run.backend() as backend:
        with naming(str(run.path)):
            # Loading modules and data keeps one core busy.
            startup_s = time.process_time()
            found = await plan_run(
                federation,
                backend=backend,
                probe=probe,
                transport=transport.value,
                startup_s=startup_s,
            )
        return found, backend.local


def _print(output: Output, plan: RunPlan, time_taken: str) -> None:
    cap, evaluation = plan.cap.queries, plan.evaluation
    likely = plan.rounds_expected >= plan.rounds_planned
    verdict = "yes" if plan.sufficient else "probably" if likely else "no"
    output.heading(f"{plan.name}: {plural(plan.clients, 'client')}, {plan.vocab_size} candidates")
    output.facts(
        {
            "training queries": f"{plan.training_queries} at most"
            f"{'' if cap is None else f', cap {cap}'} ({plan.queries_per_round} per round)",
            "cap suffices": f"{verdict}: pays about {plan.rounds_expected} of "
            f"{plural(plan.rounds_planned, 'round')}, {plan.rounds_affordable} at worst",
            "evaluation queries": f"{evaluation.queries} (no prompt {evaluation.no_prompt}, "
            f"untrained {evaluation.before}, curve {evaluation.curve}, tuned {evaluation.after})",
            "requests": f"about {plan.expected.requests} ({plan.distinct_share:.0%} of prompts "
            f"differ), {plan.most.requests} at most",
            "prompt tokens": f"about {plan.expected.prompt_tokens} "
            f"({plan.per_query.prompt_tokens} per query), {plan.most.prompt_tokens} at most",
            "completion tokens": f"about {plan.expected.completion_tokens}, "
            f"{plan.most.completion_tokens} at most",
            "money": f"about USD {plan.expected.usd:.4f}, {plan.most.usd:.4f} at most"
            if plan.priced
            else "unknown: name the model's price in backend.prices",
            "time": time_taken,
            "log-probabilities": "exact"
            if plan.censoring == "exact"
            else "only of the likeliest tokens; other labels count by an upper bound",
            "smallest useful cap": f"{plan.smallest_cap.queries} queries, "
            f"{plan.smallest_cap.requests} requests, "
            f"{plan.smallest_cap.prompt_tokens + plan.smallest_cap.completion_tokens} tokens, "
            f"USD {money(plan.smallest_cap, priced=plan.priced)}",
        }
    )
    output.console.print()
    rows = (
        [
            name,
            size(wire.federated.upload_bytes),
            size(wire.federated.download_bytes),
            size(wire.gateway.upload_bytes),
            size(wire.gateway.download_bytes),
        ]
        for name, wire in plan.exchanges.items()
    )
    output.table(["exchange", "up", "down", "gateway up", "gateway down"], rows)
    for warning in plan.warnings:
        output.console.print(f"  warning: {warning}")


def _time(plan: RunPlan, *, local: bool, probe: bool) -> str:
    found = plan.duration
    if found is None and local:
        return "not known: the probe failed" if probe else "not measured (--no-probe)"
    if found is None:
        return "no rate limit is set"
    if found.basis == "rate_limits":
        return f"{found.seconds:.0f} s at least, by the rate limits"
    return (
        f"about {found.seconds:.0f} s on this machine (from a probe of "
        f"{found.probe_queries} queries, {found.probe_s:.1f} s)"
    )
