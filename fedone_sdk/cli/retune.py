"""`fedone retune`: moving a prompt to another model."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedone_sdk import local, reports, stores
from fedone_sdk.cli import _output, _tuning
from fedone_sdk.cli._options import Cap, JsonFile, Seed
from fedone_sdk.cli._process import errors_in, quiet_logs
from fedone_sdk.cli._run_file import KnownRun, RunFile, RunState
from fedone_sdk.cli.report import check_report, stored_run
from fedone_sdk.cli.tune import print_plan
from fedone_sdk.messages import RunResult
from fedone_sdk.spec import load_backend

if TYPE_CHECKING:
    from fedone_sdk.local.retune import RetuneReport, Retuning


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
    """Move a prompt to another model: tune it there under a cap, and compare four prompts.

    The four prompts are the empty prompt, the old prompt with its old label bias, the old prompt
    with a new label bias, and the new prompt. The best of them on the dev split is recommended. The
    run is stored in .fedone next to PROMPT.json. After a stop or crash the same command continues.

    Example: fedone retune sst2.prompt.json --backend new.yaml --run run.yaml --cap 200

    Args:
        path (PROMPT.json): The artefact of the old prompt.
        backend_path (NEW.yaml): The new model: a file with the `backend` section of a RUN.yaml. Its
            paths are relative to its folder.
        run_path (RUN.yaml): The run whose task, data, method, vocabulary and caps are used. Its
            model is not used.
        only_plan: Estimate the cost, and send no paid requests.
        target (FILE): Write the recommended prompt. Default: OLD-on-NEW.prompt.json next to
            PROMPT.json. OLD is the name in the old artefact, and NEW the name of NEW.yaml.
        html (FILE.html): Write the report of the run.
        fresh: Remove the stored run and start over. Paid answers are kept and reused.
    """
    from fedone_sdk.local.retune import Retuning, retune_name, retune_report, retune_spec

    output = _output.Output(json_file)
    quiet_logs()
    artefact = reports.load_prompt(path)
    backend = load_backend(backend_path)
    name = retune_name(artefact, backend_path.stem)
    target = target or path.with_name(f"{name}.prompt.json")
    _output.check_target("--output", target)
    check_report("--html", html)
    old_run = RunFile.load(run_path, seed=seed, cap=cap)
    with errors_in(str(run_path)):
        spec = retune_spec(artefact, backend, old_run.spec, name=name)
    federation = RunFile(path=run_path, spec=spec).federation()
    retuning = Retuning(artefact=artefact, federation=federation)
    model = RunFile(path=backend_path, spec=spec)
    both = f"{run_path} with {backend_path}"
    plan = asyncio.run(_plan(model, retuning, both))
    if only_plan:
        output.write_json(plan)
        print_plan(output, plan)
        return
    state = RunState.of(path, name)
    with _tuning.abortable(state):
        known, result = asyncio.run(_retune(model, retuning, plan, state, fresh, both))
    finished = _output.exit_code(result) == 0
    run = stored_run(name, store=str(state.store))
    report = retune_report(
        artefact, run, retuning.biases, finished=finished, measure=federation.measure
    )
    recommended = None if report.recommended is None else target
    document = {
        **report.model_dump(mode="json"),
        "plan": plan,
        "run": result,
        "output": None if recommended is None else str(recommended),
    }
    # The run has cost money: if one output fails, the others are still written.
    with ExitStack() as last_first:
        if html is not None:
            page = partial(reports.html_report, run, report, recommended, backend_path)
            last_first.callback(lambda: _output.write_file("--html", html, page()))
        if recommended is not None:
            artefact_text = report.artefact(run).dump()
            last_first.callback(_output.write_file, "--output", recommended, artefact_text)
        last_first.callback(output.write_json, document)
    _print(output, artefact.name, report)
    if recommended is not None:
        _output.note(f"{recommended}: the recommended prompt")
    for line in _tuning.next_steps(spec, result, state, known, run_path, html, raising="--cap N"):
        _output.note(line)
    raise typer.Exit(_output.exit_code(result))


def _print(output: _output.Output, name: str, report: RetuneReport) -> None:
    output.heading(f"{name}: from {report.old_model} to {report.new_model}")
    output.table(report.header, report.rows)
    output.console.print()
    for sentence in report.text:
        output.console.print(sentence)


async def _plan(model: RunFile, retuning: Retuning, source: str) -> local.RunPlan:
    """Return the plan of the whole run; queries with answers in the cache are counted, too."""
    backend = model.spec.backend.model_copy(update={"cache": None})
    spec = model.spec.model_copy(update={"backend": backend})
    async with RunFile(path=model.path, spec=spec).backend() as opened:
        with errors_in(source):
            return await retuning.plan(opened)


async def _retune(
    model: RunFile,
    retuning: Retuning,
    plan: local.RunPlan,
    state: RunState,
    fresh: bool,
    source: str,
) -> tuple[KnownRun | None, RunResult]:
    federation = retuning.federation
    state.make()
    async with model.backend(cache=state.answers) as backend:
        with errors_in(str(model.path)):
            known = await state.find(
                federation.spec, federation.vocabulary, fresh=fresh, model=backend.fingerprint
            )
        # The estimate is printed before any paid request.
        expected, most = (
            _output.money(usage, priced=plan.priced) for usage in (plan.expected, plan.most)
        )
        _output.note(
            f"{federation.spec.name}: up to {plan.training_queries} training and "
            f"{plan.evaluation_queries} evaluation queries, about {plan.expected.requests} "
            f"requests and USD {expected} ({most} at most)"
        )
        result = await _tuning.run_here(
            federation,
            source=source,
            backend=backend,
            store=stores.SqlStore.sqlite(state.store),
            state_dir=state.clients,
            first=partial(retuning.find_biases, backend),
        )
    return known, result
