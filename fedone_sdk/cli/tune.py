"""`fedone tune` and `fedone quickstart`, which tune in this process, and `fedone plan`."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer

from fedone_sdk import aggregator, assets, local, reports, stores
from fedone_sdk.backends.build import proposer_of
from fedone_sdk.backends.local_models import is_present, local_model
from fedone_sdk.cli import _options, _output
from fedone_sdk.cli._options import Cap, JsonFile, Raised, RunPath, Seed, Trackers
from fedone_sdk.cli._output import Output, cost_text, note, plural
from fedone_sdk.cli._process import errors_in, quiet_logs
from fedone_sdk.cli._run_file import RunFile, RunState
from fedone_sdk.cli._tuning import abortable, next_steps, run_here
from fedone_sdk.cli.report import check_report, stored_run
from fedone_sdk.errors import ArgumentError, MissingExtraError, SpecError
from fedone_sdk.messages import RunResult
from fedone_sdk.task import Example
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

    The run is stored in .fedone next to RUN.yaml. After a stop, a crash or a pause the same command
    continues the run. Paths in RUN.yaml are relative to its folder.

    Example: fedone tune run.yaml --cap 500 --report run.html

    Args:
        store (FILE): Store the run in this SQLite file. Default: .fedone/NAME.db next to RUN.yaml.
            Clients' state is stored in FILE.fedone-clients. Unless RUN.yaml names a cache, the
            model's answers are stored in FILE.fedone-answers.
        no_store: Do not store the run. It then cannot continue after a stop.
        fresh: Remove the stored run and start over. Paid answers are kept and reused.
        artefact (FILE): Write the tuned prompt and its provenance, for `fedone prompt use`.
        report (FILE): Write a report as one HTML page.
    """
    output = Output(json_file)
    quiet_logs()
    for option, value in {"--store": store, "--fresh": fresh, "--raise": raised}.items():
        if value and no_store:
            raise ArgumentError(f"{option}: cannot be combined with --no-store")
    _output.check_target("--store", store)
    _output.check_target("--artefact", artefact)
    check_report("--report", report)
    tracking = _options.tracking_of(trackers)
    run = RunFile.load(run_path, seed=seed, cap=cap, raised=_options.caps_of("--raise", raised))
    federation = run.federation()
    state = known = None
    if not no_store:
        state = RunState.of(run.path, run.spec.name, store)
        with errors_in(str(run.path)):
            known = asyncio.run(state.find(run.spec, federation.vocabulary, fresh=fresh))
    if known is not None and known.raised:
        note(f"raising {', '.join(known.raised)} after round {known.round}")
    store_of_run = stores.MemoryStore() if state is None else stores.SqlStore.sqlite(state.store)
    with tracking, abortable(state):
        result = asyncio.run(_tune(run, federation, state, store_of_run, tracking))
    # The run has cost money: if one output fails, the others are still written.
    with ExitStack() as last_first:
        last_first.callback(
            _output.print_result, output, result, num_clients=len(federation.shards)
        )
        if artefact is not None or report is not None:
            last_first.callback(_write, store_of_run, result.run_id, artefact, report)
        last_first.callback(output.write_json, result)
    for line in next_steps(run.spec, result, state, known, run.path, report):
        note(line)
    raise typer.Exit(_output.exit_code(result))


def _write(store: stores.Store, run_id: str, artefact: Path | None, report: Path | None) -> None:
    run = stored_run(run_id, store=store)
    if artefact is not None:
        _output.write_file("--artefact", artefact, reports.artefact_of(run).dump())
    if report is not None:
        _output.write_file("--report", report, reports.html_report(run))


async def _tune(
    run: RunFile,
    federation: local.Federation,
    state: RunState | None,
    store: stores.Store,
    tracking: Tracking,
) -> RunResult:
    if state is not None:
        state.make()
    async with AsyncExitStack() as stack:
        backend = await stack.enter_async_context(
            run.backend(cache=None if state is None else state.answers)
        )
        with errors_in(str(run.path)):
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

    The command sends no paid request to a hosted model.

    Example: fedone plan run.yaml

    Args:
        probe: Load a local model, and time it for about 3 seconds.
    """
    output = Output(json_file)
    quiet_logs()
    estimate, local = asyncio.run(_plan(RunFile.load(run_path, seed=seed, cap=cap), probe))
    output.write_json(estimate)
    print_plan(output, estimate, _time(estimate, local=local, probe=probe))


async def _plan(run: RunFile, probe: bool) -> tuple[local.RunPlan, bool]:
    federation, keyless = run.federation(), run
    key = run.spec.backend.api_key_env
    key_is_missing = key is not None and not os.environ.get(key, "").strip()
    if key_is_missing:  # Tokens and prices are known without the key.
        model = run.spec.backend.model_copy(update={"api_key_env": None})
        keyless = replace(run, spec=run.spec.model_copy(update={"backend": model}))
    async with AsyncExitStack() as stack:
        backend = await stack.enter_async_context(keyless.backend())
        with errors_in(str(run.path)):
            proposer = await stack.enter_async_context(proposer_of(run.spec, run.folder, backend))
            estimate = await local.plan_run(
                federation,
                backend=backend,
                proposer=proposer,
                probe=probe,
                # The processor time for loading modules and data.
                startup_s=time.process_time(),
            )
        if key_is_missing:
            problem = f"backend.api_key_env: the environment variable {key} is not set"
            warnings = (f"{problem}; `fedone tune` needs the key", *estimate.warnings)
            estimate = estimate.model_copy(update={"warnings": warnings})
        return estimate, backend.local


def print_plan(output: Output, plan: local.RunPlan, time_taken: str = "") -> None:
    """Print a plan."""
    cap = plan.cap.queries
    expected, most, smallest = plan.expected, plan.most, plan.smallest_cap
    likely = plan.rounds_expected >= plan.rounds_planned
    verdict = "yes" if plan.sufficient else "probably" if likely else "no"
    fewer = plan.rounds_planned < plan.rounds
    reduced = f" (the cap on queries pays for no more of the {plan.rounds})" if fewer else ""
    output.heading(f"{plan.name}: {plural(plan.clients, 'client')}, {plan.vocab_size} candidates")
    facts = {
        "training queries": f"{plan.training_queries} at most"
        f"{'' if cap is None else f', cap {cap}'} ({plan.queries_per_round} per round)",
        "cap suffices": f"{verdict}: at expected cost for {plan.rounds_expected} of "
        f"{plural(plan.rounds_planned, 'round')}{reduced}, at worst-case cost for "
        f"{plan.rounds_affordable}",
        "evaluation queries": f"{plan.evaluation_queries}",
        "proposer calls": f"{plan.proposals} at most" if plan.proposals else "",
        **{
            name: f"about {cost_text(cost, priced=plan.priced)}"
            for name, cost in (("proposer", plan.proposer), ("judge", plan.judge))
            if cost is not None
        },
        "requests": f"about {expected.requests} ({1 - plan.distinct_share:.0%} of the training is "
        f"answered from the cache), {most.requests} at most",
        "prompt tokens": f"about {expected.prompt_tokens} ({plan.per_query.prompt_tokens} per "
        f"query), {most.prompt_tokens} at most",
        "completion tokens": f"about {expected.completion_tokens}, "
        f"{most.completion_tokens} at most",
        "money": f"about USD {expected.usd:.4f}, {most.usd:.4f} at most"
        if plan.priced
        else "unknown: set the model's price in backend.prices",
        "prices": (plan.prices or "") if expected.usd else "",
        "time": time_taken,
        "smallest useful cap": f"{smallest.queries} queries, {smallest.requests} requests, "
        f"{smallest.prompt_tokens + smallest.completion_tokens} tokens, "
        f"USD {_output.money(smallest, priced=plan.priced)}",
    }
    output.facts({name: text for name, text in facts.items() if text})
    for warning in plan.warnings:
        output.console.print(f"  warning: {warning}")


def _time(plan: local.RunPlan, *, local: bool, probe: bool) -> str:
    duration = plan.duration
    if duration is None and local:
        return "not known: the probe failed" if probe else "not measured (--no-probe)"
    if duration is None:
        return "unknown, because backend.limits is not set"
    if duration.basis == "rate_limits":
        return f"{duration.seconds:.0f} s at least, by the rate limits"
    return (
        f"about {duration.seconds:.0f} s on this machine (from a probe of "
        f"{duration.probe_queries} queries, {duration.probe_s:.1f} s)"
    )


_RUN_FILES = {"smollm2-135m-instruct": "quickstart.yaml", "roberta-mini": "quickstart-mini.yaml"}
_SHOWN_CHANGES = 3
_REPORT = Path("quickstart.html")


def quickstart(
    model: Literal["smollm2-135m-instruct", "roberta-mini"] = "smollm2-135m-instruct",
    seed: Seed = None,
    cap: Cap = None,
    json_file: JsonFile = None,
) -> None:
    """Tune a prompt for a small language model on feedback sentences that come with the SDK.

    A real aggregator and edge clients work in this process, under a hard cap on queries. A report
    is written to quickstart.html.

    Example: fedone quickstart --json result.json

    Args:
        model: `smollm2-135m-instruct` is an instruct model of 135 million parameters (98 MB,
            fetched once). `roberta-mini` is the embedded masked model (10 seconds, no network).
    """
    output = Output(json_file)
    quiet_logs()
    run = RunFile.load(assets.path(_RUN_FILES[_available(model)]), seed=seed, cap=cap)
    federation = run.federation()
    result, changes, exported = asyncio.run(_run_quickstart(run, federation))
    output.write_json(result)
    _output.print_result(output, result, num_clients=len(federation.shards))
    if changes is not None:
        _print_changes(output, run, changes)
        output.console.print(
            f"Spent {result.spent.queries} of {result.cap.queries} training queries. "
            "Next, a run of your own: fedone init TABLE.csv"
        )
    try:
        check_report("report", _REPORT)
        page = reports.html_report(reports.read_export(exported))
        _output.write_file("report", _REPORT, page)
        output.console.print(f"A report, for a browser: {_REPORT.resolve()}")
    except (ArgumentError, MissingExtraError) as exc:  # The command succeeds without a report.
        note(f"no report: {exc}")
    raise typer.Exit(_output.exit_code(result))


def _available(model: str) -> str:
    """Fetch a model, and return its name; return ``roberta-mini`` if it cannot be fetched."""
    from fedone_sdk.cli.models import fetch

    try:
        if not is_present(local_model(model)):
            fetch(model)
    except SpecError as exc:
        note(f"{exc}; using the embedded model roberta-mini")
        return "roberta-mini"
    return model


class _Change(NamedTuple):
    """An example, its predicted labels without and with the tuned prompt, and its true label."""

    example: Example
    before: int
    after: int
    target: int


async def _run_quickstart(
    run: RunFile, federation: local.Federation
) -> tuple[RunResult, list[_Change] | None, bytes]:
    """Return the result, the changed answers (None if the run failed), and the run's export."""
    from fedone_sdk.evaluation.outcomes import OUTCOMES, newest_outcomes
    from fedone_sdk.evaluation.verdict import no_prompt_biased

    async with run.backend() as backend:
        store = stores.MemoryStore()
        result = await run_here(federation, source=run.path, backend=backend, store=store)
    changes = None
    if not _output.exit_code(result):
        outcomes = newest_outcomes(await store.log(result.run_id, OUTCOMES))
        bias = None if result.verdict is None else result.verdict.bias
        biased = no_prompt_biased(run.spec.task, outcomes["no_prompt"], bias)
        bare = outcomes["no_prompt"] if biased is None else biased.outcomes
        tuned = outcomes["after"]
        rows = zip(federation.dev, bare.predicted, tuned.predicted, tuned.targets, strict=True)
        changes = [
            _Change(example, before, after, target)
            for example, before, after, target in rows
            if before is not None and after is not None and before != after
        ]
    return result, changes, await aggregator.exported_run(store, result.run_id)


def _print_changes(output: Output, run: RunFile, changes: Sequence[_Change]) -> None:
    task = run.spec.task
    words = {index: word.strip() for index, word in enumerate(task.label_words)}
    right = sum(change.after == change.target for change in changes)
    output.console.print()
    if changes:
        output.heading(f"The prompt changes {len(changes)} answers, {right} for the better:")
    for example, before, after, target in changes[:_SHOWN_CHANGES]:
        text = " ".join(_output.printable(str(example[name])) for name in task.fields)
        verdict = "right" if after == target else "wrong"
        labels = [words.get(label, "no label") for label in (before, after)]
        output.console.print(f"  {text!r}: {' -> '.join(labels)} ({verdict})")
    output.console.print()
