"""`fedone retune`: migration of a prompt to another model."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedone_sdk.cli._failures import naming
from fedone_sdk.cli._options import JsonFile, Seed, Transport, TransportName
from fedone_sdk.cli._output import Output, check_target, money, note, write_file
from fedone_sdk.cli._process import quiet_logs
from fedone_sdk.cli._report import exit_code
from fedone_sdk.cli._run_file import RunFile
from fedone_sdk.cli._state import KnownRun, RunState
from fedone_sdk.cli._tuning import KeptRun, abortable, next_steps, run_here
from fedone_sdk.cli.report import check_page
from fedone_sdk.data import load_examples
from fedone_sdk.errors import ArgumentError, SpecError
from fedone_sdk.spec import load_backend

if TYPE_CHECKING:
    from fedone_sdk.local.retune import RetunePlan, Retuning
    from fedone_sdk.messages import RunResult
    from fedone_sdk.reports.retune_page import RetunePage
    from fedone_sdk.reports.retuned import Retuned


def retune(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PROMPT.json",
            help="A prompt artefact, written by `fedone runs export --as prompt`.",
        ),
    ],
    backend_path: Annotated[
        Path,
        typer.Option(
            "--backend",
            metavar="NEW.yaml",
            help="The new model: a file with the `backend` section of a RUN.yaml. Its paths start "
            "at its folder.",
        ),
    ],
    run_path: Annotated[
        Path | None,
        typer.Option(
            "--run",
            metavar="RUN.yaml",
            help="Use its task, data, method, vocabulary and caps, but not its model.",
        ),
    ] = None,
    train: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="TRAIN",
            help="Without --run: labelled examples to tune on, or hf:NAME.",
        ),
    ] = None,
    dev: Annotated[
        str | None,
        typer.Option(metavar="DEV", help="Without --run: labelled examples to compare prompts on."),
    ] = None,
    queries: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Cap on training queries; by default RUN.yaml's cap, or 200."
        ),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Estimate the cost without sending requests.")
    ] = False,
    target: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The new prompt; by default RUN_ID.prompt.json next to the old one.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace another prompt in --output.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write the page as HTML, too.")
    ] = None,
    seed: Seed = None,
    transport: Transport = TransportName.http,
    store: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keep the run in this SQLite file instead of .fedone/RUN_ID.db next to "
            "PROMPT.json.",
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Remove the kept run and start over. Paid answers stay.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Move a prompt to another model: measure it there, tune it under a cap, compare.

    The comparison on the new model and the dev split has no prompt, the old prompt with its old
    label bias and with a new one, and the new prompt. The run is kept in .fedone next to
    PROMPT.json, so that the same command continues after a stop or a crash.
    """
    from fedone_sdk.local.retune import Retuning, retune_name, retune_spec
    from fedone_sdk.reports import read_artefact
    from fedone_sdk.reports.retune_page import retune_page

    output = Output(json_file)
    quiet_logs()
    _check_data(run_path, train, dev)
    artefact = read_artefact(path)
    backend = load_backend(backend_path)
    name = retune_name(artefact, backend_path.stem)
    target = target or path.with_name(f"{name}.prompt.json")
    _check_targets(target, html, store, name, overwrite=overwrite)
    num_examples = 0 if train is None else len([*load_examples(train)])
    with naming(str(run_path or path)):
        spec = retune_spec(
            artefact,
            backend,
            name=name,
            run=None if run_path is None else RunFile.load(run_path).spec,
            train=train,
            dev=dev,
            num_examples=num_examples,
            queries=queries,
            seed=seed,
        )
    run = RunFile(path=run_path or Path("arguments"), spec=spec)
    move = Retuning(artefact=artefact, federation=run.federation())
    model = RunFile(path=backend_path, spec=spec)
    estimate = asyncio.run(_plan(model, move))
    if plan:
        output.write_json(estimate)
        output.heading(f"{name}: estimated cost")
        output.console.print(f"  {_cost(estimate)}")
        for warning in estimate.run.warnings:
            output.console.print(f"  warning: {warning}")
        return
    state = RunState.of(path, name, store)
    kept = KeptRun(state.store)
    with abortable(state):
        known, result, found = asyncio.run(
            _retune(model, move, estimate, state, kept, transport, fresh)
        )
    page = retune_page(artefact, found, estimate, result)
    final = exit_code(result) == 0
    document = {
        **found.model_dump(mode="json"),
        "verdict": page.verdict,
        "plan": estimate,
        "run": result,
        "output": str(target) if final else None,
    }
    # These results are paid for, so a failure to write one must not prevent the others.
    with ExitStack() as last_first:
        last_first.callback(_print, output, page)
        if html is not None:
            last_first.callback(_write_html, html, page)
        if final:
            last_first.callback(_write_prompt, kept, result.run_id, target)
        last_first.callback(output.write_json, document)
    if final:
        note(f"{target}: the new prompt")
    for line in next_steps(spec, result, state, known):
        note(line)
    raise typer.Exit(exit_code(result))


def _check_data(run_path: Path | None, train: str | None, dev: str | None) -> None:
    given = {"--data": train, "--dev": dev}
    for option, value in given.items():
        if run_path is not None and value is not None:
            raise ArgumentError(f"{option}: does not go with --run")
        if run_path is None and value is None:
            raise ArgumentError(f"{option}: is required without --run")


def _check_targets(
    target: Path, html: Path | None, store: Path | None, name: str, *, overwrite: bool
) -> None:
    check_target("--output", target)
    if html is not None:
        check_page("--html", html)
    if store is not None:
        check_target("--store", store)
    if target.is_file() and not overwrite and not _is_of(target, name):
        raise ArgumentError(
            f"--output: {target} exists and is not of run {name!r}; --overwrite replaces it"
        )


def _is_of(target: Path, name: str) -> bool:
    """Whether an earlier start of the same command wrote the file."""
    from fedone_sdk.reports import read_artefact

    try:
        return read_artefact(target).run_id == name
    except SpecError:
        return False


async def _plan(model: RunFile, move: Retuning) -> RetunePlan:
    """Return the plan, by a separate backend without a cache, so that paid answers count too."""
    backend = model.spec.backend.model_copy(update={"cache": None, "record": None})
    spec = model.spec.model_copy(update={"backend": backend})
    async with RunFile(path=model.path, spec=spec).backend() as opened:
        with naming(str(model.path)):
            return await move.plan(opened)


async def _retune(
    model: RunFile,
    move: Retuning,
    estimate: RetunePlan,
    state: RunState,
    kept: KeptRun,
    transport: TransportName,
    fresh: bool,
) -> tuple[KnownRun | None, RunResult, Retuned]:
    from fedone_sdk.reports.retuned import measure_retuned

    federation = move.federation
    state.make()
    async with model.backend(cache=state.answers) as backend:
        with naming(str(model.path)):
            known = await state.find(
                federation.spec,
                federation.vocabulary,
                fresh=fresh,
                model=backend.fingerprint,
            )
        # The estimate is printed before any request.
        note(f"{federation.spec.name}: {_cost(estimate)}")
        result = await run_here(
            federation,
            source=model.path,
            backend=backend,
            transport=transport.value,
            store=kept.store,
            state_dir=state.clients,
            first=partial(move.find_biases, backend),
        )
        found = await measure_retuned(
            backend,
            move.artefact,
            federation,
            result.prompt,
            move.biases,
            finished=exit_code(result) == 0,
            bare=move.bare,
        )
    return known, result, found


def _cost(plan: RetunePlan) -> str:
    expected, most = (money(one, priced=plan.run.priced) for one in (plan.expected, plan.most))
    return (
        f"up to {plan.training_queries} training and {plan.evaluation_queries} evaluation queries, "
        f"about {plan.expected.requests} requests, {plan.expected.prompt_tokens} prompt tokens and "
        f"USD {expected}, {most} at most"
    )


def _print(output: Output, page: RetunePage) -> None:
    output.heading(page.title)
    output.facts(dict(page.facts))
    output.console.print()
    output.table([page.metric, "value", "95 % interval", "label bias"], page.measured)
    output.console.print()
    if page.gains:
        output.table(["difference (positive is better)", "value", "95 % interval"], page.gains)
        output.console.print()
    output.table(["cost", "expected", "at most", "spent"], page.costs)
    output.console.print()
    for sentence in page.verdict:
        output.console.print(sentence)


def _write_html(target: Path, page: RetunePage) -> None:
    from fedone_sdk.reports.retune_page import retune_html

    write_file("--html", target, retune_html(page))


def _write_prompt(kept: KeptRun, run_id: str, target: Path) -> None:
    from fedone_sdk.reports import artefact_of

    write_file("--output", target, artefact_of(kept.run(run_id)).dump())
