"""`fedone plan`: estimated cost and duration of a run."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from fedone_sdk.cli._failures import naming
from fedone_sdk.cli._options import Cap, JsonFile, RunPath, Seed
from fedone_sdk.cli._output import Output, money, plural
from fedone_sdk.cli._process import quiet_logs
from fedone_sdk.cli._run_file import RunFile

if TYPE_CHECKING:
    from fedone_sdk.local import RunPlan


def plan(
    run_path: RunPath,
    seed: Seed = None,
    cap: Cap = None,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe/--no-probe",
            help="Time a local model for about 3 seconds; --no-probe does not load it.",
        ),
    ] = True,
    json_file: JsonFile = None,
) -> None:
    """Estimate the cost of a run, and check whether its cap suffices.

    It sends no paid request to a hosted model.
    """
    output = Output(json_file)
    quiet_logs()
    found, local = asyncio.run(_plan(RunFile.load(run_path, seed=seed, cap=cap), probe))
    output.write_json(found)
    print_plan(output, found, _time(found, local=local, probe=probe))


async def _plan(run: RunFile, probe: bool) -> tuple[RunPlan, bool]:
    from fedone_sdk.backends.build import proposer_of
    from fedone_sdk.local import plan_run

    federation = run.federation()
    async with AsyncExitStack() as stack:
        backend = await stack.enter_async_context(run.backend())
        with naming(str(run.path)):
            proposer = await stack.enter_async_context(proposer_of(run.spec, run.folder, backend))
            found = await plan_run(
                federation,
                backend=backend,
                proposer=proposer,
                probe=probe,
                # Loading modules and data keeps one core busy.
                startup_s=time.process_time(),
            )
        return found, backend.local


def print_plan(output: Output, plan: RunPlan, time_taken: str = "") -> None:
    """Print a plan."""
    cap, evaluation = plan.cap.queries, plan.evaluation
    expected, most, smallest = plan.expected, plan.most, plan.smallest_cap
    likely = plan.rounds_expected >= plan.rounds_planned
    verdict = "yes" if plan.sufficient else "probably" if likely else "no"
    output.heading(f"{plan.name}: {plural(plan.clients, 'client')}, {plan.vocab_size} candidates")
    facts = {
        "training queries": f"{plan.training_queries} at most"
        f"{'' if cap is None else f', cap {cap}'} ({plan.queries_per_round} per round)",
        "cap suffices": f"{verdict}: pays about {plan.rounds_expected} of "
        f"{plural(plan.rounds_planned, 'round')}, {plan.rounds_affordable} at worst",
        "evaluation queries": f"{evaluation.queries} (no prompt {evaluation.no_prompt}, "
        f"untrained {evaluation.before}, curve {evaluation.curve}, tuned {evaluation.after})",
        "proposals": f"{plan.proposals} at most" if plan.proposals else "",
        "requests": f"about {expected.requests} ({plan.distinct_share:.0%} of prompts differ), "
        f"{most.requests} at most",
        "prompt tokens": f"about {expected.prompt_tokens} ({plan.per_query.prompt_tokens} per "
        f"query), {most.prompt_tokens} at most",
        "completion tokens": f"about {expected.completion_tokens}, "
        f"{most.completion_tokens} at most",
        "money": f"about USD {expected.usd:.4f}, {most.usd:.4f} at most"
        if plan.priced
        else "unknown: name the model's price in backend.prices",
        "time": time_taken,
        "smallest useful cap": f"{smallest.queries} queries, {smallest.requests} requests, "
        f"{smallest.prompt_tokens + smallest.completion_tokens} tokens, "
        f"USD {money(smallest, priced=plan.priced)}",
    }
    output.facts({name: text for name, text in facts.items() if text})
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
