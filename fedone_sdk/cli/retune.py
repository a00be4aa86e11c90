"""`fedone retune`: migration of a prompt to another model."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedone_sdk.cli._options import Cap, JsonFile, Seed
from fedone_sdk.cli._output import Output, check_target, exit_code, money, note, write_file
from fedone_sdk.cli._process import naming, quiet_logs
from fedone_sdk.cli._run_file import KnownRun, RunFile, RunState
from fedone_sdk.cli._tuning import abortable, next_steps, run_here
from fedone_sdk.cli.report import check_report, stored_run
from fedone_sdk.cli.tune import print_plan
from fedone_sdk.spec import load_backend

if TYPE_CHECKING:
    from fedone_sdk.local import RunPlan
    from fedone_sdk.local.retune import Retuning
    from fedone_sdk.messages import RunResult
    from fedone_sdk.reports import ReportedRun
    from fedone_sdk.stores import Store


def retune(
    path: Path,
    backend_path: Annotated[Path, typer.Option("--backend")],
    run_path: Annotated[Path, typer.Option("--run")],
    cap: Cap = None,
    only_plan: Annotated[bool, typer.Option("--plan")] = False,
    target: Annotated[Path | None, typer.Option("--output", "-o")] = None,
    html: Path | None = None,
    seed: Seed = None,
    fresh: bool = False,
    json_file: JsonFile = None,
) -> None:
    """Move a prompt to another model: tune it there under a cap, and recommend the best of four.

    Compared on the new model and the dev split are no prompt, the old prompt with its old label
    bias and with a new one, and the new prompt. The run is kept in .fedone next to PROMPT.json, so
    that the same command continues after a stop or a crash.

    Example: fedone retune sst2.prompt.json --backend new.yaml --run run.yaml --cap 200

    Args:
        path (PROMPT.json): The artefact of the old prompt.
        backend_path (NEW.yaml): The new model: a file with the `backend` section of a RUN.yaml. Its
            paths start at its folder.
        run_path (RUN.yaml): Use its task, data, method, vocabulary and caps, but not its model.
        only_plan: Estimate the cost without sending requests.
        target (FILE): The recommended prompt; by default RUN_ID.prompt.json next to the old one.
        html (FILE.html): Write the report of the run.
        fresh: Remove the kept run and start over. Paid answers stay.
    """
    from fedone_sdk.local.retune import Retuning, retune_name, retune_spec
    from fedone_sdk.reports import load_prompt
    from fedone_sdk.stores import SqlStore

    output = Output(json_file)
    quiet_logs()
    artefact = load_prompt(path)
    backend = load_backend(backend_path)
    name = retune_name(artefact, backend_path.stem)
    target = target or path.with_name(f"{name}.prompt.json")
    check_target("--output", target)
    if html is not None:
        check_report("--html", html)
    given = RunFile.load(run_path, seed=seed, cap=cap)
    with naming(str(run_path)):
        spec = retune_spec(artefact, backend, given.spec, name=name)
    run = RunFile(path=run_path, spec=spec)
    move = Retuning(artefact=artefact, federation=run.federation())
    model = RunFile(path=backend_path, spec=spec)
    estimate = asyncio.run(_plan(model, move))
    if only_plan:
        output.write_json(estimate)
        print_plan(output, estimate)
        return
    state = RunState.next_to(path, name)
    store = SqlStore.sqlite(state.store)
    with abortable(state):
        known, result = asyncio.run(_retune(model, move, estimate, state, store, fresh))
    _report(
        output, move, stored_run(name, store=store), (estimate, result), target, html, backend_path
    )
    for line in next_steps(spec, result, state, known):
        note(line)
    raise typer.Exit(exit_code(result))


def _report(
    output: Output,
    move: Retuning,
    run: ReportedRun,
    done: tuple[RunPlan, RunResult],
    target: Path,
    html: Path | None,
    backend: Path,
) -> None:
    from fedone_sdk.reports import retuned, retuned_artefact
    from fedone_sdk.reports.pages import html_report

    plan, result = done
    finished = exit_code(result) == 0
    moved = retuned(
        move.artefact, run, move.biases, finished=finished, measure=move.federation.measure
    )
    chosen = None if moved.recommended is None else target
    document = {
        **moved.model_dump(mode="json"),
        "plan": plan,
        "run": result,
        "output": None if chosen is None else str(chosen),
    }
    # These results are paid for, so a failure to write one must not prevent the others.
    with ExitStack() as last_first:
        if html is not None:
            last_first.callback(
                lambda: write_file("--html", html, html_report(run, moved, chosen, backend))
            )
        if chosen is not None:
            text = retuned_artefact(run, moved).dump()
            last_first.callback(write_file, "--output", chosen, text)
        last_first.callback(output.write_json, document)
    output.heading(f"{move.artefact.name}: from {moved.old_model} to {moved.new_model}")
    output.table(moved.header, moved.rows)
    output.console.print()
    for sentence in moved.text:
        output.console.print(sentence)
    if chosen is not None:
        note(f"{chosen}: the recommended prompt")


async def _plan(model: RunFile, move: Retuning) -> RunPlan:
    """Return the plan, by a separate backend without a cache, so that paid answers count too."""
    backend = model.spec.backend.model_copy(update={"cache": None})
    spec = model.spec.model_copy(update={"backend": backend})
    async with RunFile(path=model.path, spec=spec).backend() as opened:
        with naming(str(model.path)):
            return await move.plan(opened)


async def _retune(
    model: RunFile, move: Retuning, estimate: RunPlan, state: RunState, store: Store, fresh: bool
) -> tuple[KnownRun | None, RunResult]:
    federation = move.federation
    state.make()
    async with model.backend(cache=state.answers) as backend:
        with naming(str(model.path)):
            known = await state.find(
                federation.spec, federation.vocabulary, fresh=fresh, model=backend.fingerprint
            )
        # The estimate is printed before any request.
        expected, most = estimate.expected, estimate.most
        note(
            f"{federation.spec.name}: up to {estimate.training_queries} training and "
            f"{estimate.evaluation_queries} evaluation queries, about {expected.requests} requests "
            f"and USD {money(expected, priced=estimate.priced)}, "
            f"{money(most, priced=estimate.priced)} at most"
        )
        result = await run_here(
            federation,
            source=model.path,
            backend=backend,
            store=store,
            state_dir=state.clients,
            first=partial(move.find_biases, backend),
        )
    return known, result
