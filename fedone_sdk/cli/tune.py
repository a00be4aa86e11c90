"""`fedone tune` and `fedone plan`: a run in this process, and its estimated cost."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedone_sdk.cli._options import (
    Cap,
    JsonFile,
    Raised,
    RunPath,
    Seed,
    Trackers,
    caps_of,
    tracking_of,
)
from fedone_sdk.cli._output import (
    Output,
    check_target,
    cost_text,
    exit_code,
    money,
    note,
    plural,
    print_result,
    write_file,
)
from fedone_sdk.cli._process import naming, quiet_logs
from fedone_sdk.cli._run_file import RunFile, RunState
from fedone_sdk.cli._tuning import abortable, next_steps, run_here
from fedone_sdk.cli.report import check_report, stored_run, write_report
from fedone_sdk.errors import ArgumentError

if TYPE_CHECKING:
    from fedone_sdk.local import Federation, RunPlan
    from fedone_sdk.messages import RunResult
    from fedone_sdk.stores import Store
    from fedone_sdk.trackers import Tracking


def tune(
    run_path: RunPath,
    seed: Seed = None,
    cap: Cap = None,
    raised: Raised = None,
    store: Path | None = None,
    no_store: bool = False,
    fresh: bool = False,
    artefact: Path | None = None,
    report: Path | None = None,
    trackers: Trackers = None,
    json_file: JsonFile = None,
) -> None:
    """Tune a prompt for your own model and data, under your own budget.

    The run is kept in .fedone next to RUN.yaml, so that the same command continues after a stop, a
    crash or a pause. Paths in RUN.yaml are relative to its folder.

    Example: fedone tune run.yaml --cap 500 --report run.html

    Args:
        store (FILE): Keep the run in this SQLite file instead of .fedone/NAME.db next to RUN.yaml,
            its clients in FILE.fedone-clients, and answers in FILE.fedone-answers unless RUN.yaml
            names a cache.
        no_store: Keep nothing, so that a stopped run cannot continue.
        fresh: Remove the kept run of this name and start over. Paid answers are kept and reused.
        artefact (FILE): Write the prompt with its provenance (`fedone prompt`).
        report (FILE): Write a report as one HTML page.
    """
    from fedone_sdk.stores import MemoryStore, SqlStore

    output = Output(json_file)
    quiet_logs()
    kept_options = {"--store": store is not None, "--fresh": fresh, "--raise": bool(raised)}
    for option, is_given in kept_options.items():
        if is_given and no_store:
            raise ArgumentError(f"{option}: does not go with --no-store")
    if store is not None:
        check_target("--store", store)
    if artefact is not None:
        check_target("--artefact", artefact)
    if report is not None:
        check_report("--report", report)
    tracking = tracking_of(trackers)
    run = RunFile.load(run_path, seed=seed, cap=cap, raised=caps_of("--raise", raised))
    federation = run.federation()
    state = known = None
    if not no_store:
        state = RunState.of(run.path, run.spec.name, store)
        with naming(str(run.path)):
            known = asyncio.run(state.find(run.spec, federation.vocabulary, fresh=fresh))
    if known is not None and known.raised:
        note(f"raising {', '.join(known.raised)} after round {known.round}")
    store_of_run = MemoryStore() if state is None else SqlStore.sqlite(state.store)
    with tracking, abortable(state):
        result = asyncio.run(_tune(run, federation, state, store_of_run, tracking))
    # These results are paid for, so a failure to write one must not prevent the others.
    with ExitStack() as last_first:
        last_first.callback(print_result, output, result, num_clients=len(federation.shards))
        if artefact is not None or report is not None:
            last_first.callback(_write, store_of_run, result.run_id, artefact, report)
        last_first.callback(output.write_json, result)
    for line in next_steps(run.spec, result, state, known):
        note(line)
    raise typer.Exit(exit_code(result))


def _write(store: Store, run_id: str, artefact: Path | None, report: Path | None) -> None:
    from fedone_sdk.reports import artefact_of

    run = stored_run(run_id, store=store)
    if artefact is not None:
        write_file("--artefact", artefact, artefact_of(run).dump())
    if report is not None:
        write_report("--report", report, run)


async def _tune(
    run: RunFile, federation: Federation, state: RunState | None, store: Store, tracking: Tracking
) -> RunResult:
    if state is not None:
        state.make()
    from fedone_sdk.backends.build import proposer_of

    async with AsyncExitStack() as stack:
        backend = await stack.enter_async_context(
            run.backend(cache=None if state is None else state.answers)
        )
        with naming(str(run.path)):
            proposer = await stack.enter_async_context(proposer_of(run.spec, run.folder, backend))
        return await run_here(
            federation,
            source=run.path,
            backend=backend,
            proposer=proposer,
            store=store,
            state_dir=None if state is None else state.clients,
            tracking=tracking,
        )


def plan(
    run_path: RunPath,
    seed: Seed = None,
    cap: Cap = None,
    probe: Annotated[bool, typer.Option("--probe/--no-probe")] = True,
    json_file: JsonFile = None,
) -> None:
    """Estimate the cost of a run, and check whether its cap suffices.

    It sends no paid request to a hosted model.

    Example: fedone plan run.yaml

    Args:
        probe: Time a local model for about 3 seconds; --no-probe does not load it.
    """
    output = Output(json_file)
    quiet_logs()
    estimate, local = asyncio.run(_plan(RunFile.load(run_path, seed=seed, cap=cap), probe))
    output.write_json(estimate)
    print_plan(output, estimate, _time(estimate, local=local, probe=probe))


async def _plan(run: RunFile, probe: bool) -> tuple[RunPlan, bool]:
    from fedone_sdk.backends.build import proposer_of
    from fedone_sdk.local import plan_run

    federation = run.federation()
    async with AsyncExitStack() as stack:
        backend = await stack.enter_async_context(run.backend())
        with naming(str(run.path)):
            proposer = await stack.enter_async_context(proposer_of(run.spec, run.folder, backend))
            estimate = await plan_run(
                federation,
                backend=backend,
                proposer=proposer,
                probe=probe,
                # Loading modules and data keeps one core busy.
                startup_s=time.process_time(),
            )
        return estimate, backend.local


def print_plan(output: Output, plan: RunPlan, time_taken: str = "") -> None:
    """Print a plan."""
    cap = plan.cap.queries
    expected, most, smallest = plan.expected, plan.most, plan.smallest_cap
    likely = plan.rounds_expected >= plan.rounds_planned
    verdict = "yes" if plan.sufficient else "probably" if likely else "no"
    output.heading(f"{plan.name}: {plural(plan.clients, 'client')}, {plan.vocab_size} candidates")
    facts = {
        "training queries": f"{plan.training_queries} at most"
        f"{'' if cap is None else f', cap {cap}'} ({plan.queries_per_round} per round)",
        "cap suffices": f"{verdict}: pays about {plan.rounds_expected} of "
        f"{plural(plan.rounds_planned, 'round')}, {plan.rounds_affordable} at worst",
        "evaluation queries": f"{plan.evaluation_queries}",
        "proposals": f"{plan.proposals} at most" if plan.proposals else "",
        **{
            name: f"about {cost_text(cost, priced=plan.priced)}"
            for name, cost in (("proposer", plan.proposer), ("judge", plan.judge))
            if cost is not None
        },
        "requests": f"about {expected.requests} ({plan.distinct_share:.0%} of the training's rows "
        f"are new), {most.requests} at most",
        "prompt tokens": f"about {expected.prompt_tokens} ({plan.per_query.prompt_tokens} per "
        f"query), {most.prompt_tokens} at most",
        "completion tokens": f"about {expected.completion_tokens}, "
        f"{most.completion_tokens} at most",
        "money": f"about USD {expected.usd:.4f}, {most.usd:.4f} at most"
        if plan.priced
        else "unknown: name the model's price in backend.prices",
        "prices": (plan.prices or "") if expected.usd else "",
        "time": time_taken,
        "smallest useful cap": f"{smallest.queries} queries, {smallest.requests} requests, "
        f"{smallest.prompt_tokens + smallest.completion_tokens} tokens, "
        f"USD {money(smallest, priced=plan.priced)}",
    }
    output.facts({name: text for name, text in facts.items() if text})
    for warning in plan.warnings:
        output.console.print(f"  warning: {warning}")


def _time(plan: RunPlan, *, local: bool, probe: bool) -> str:
    duration = plan.duration
    if duration is None and local:
        return "not known: the probe failed" if probe else "not measured (--no-probe)"
    if duration is None:
        return "no rate limit is set"
    if duration.basis == "rate_limits":
        return f"{duration.seconds:.0f} s at least, by the rate limits"
    return (
        f"about {duration.seconds:.0f} s on this machine (from a probe of "
        f"{duration.probe_queries} queries, {duration.probe_s:.1f} s)"
    )
