"""`fedone compare` compares methods on the user's task and model, each with several seeds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedone_sdk import __version__, reports
from fedone_sdk.backends.label_words import check_label_words
from fedone_sdk.budget import Budget
from fedone_sdk.cli._options import Cap, JsonFile, RunPath
from fedone_sdk.cli._output import Output, money, note, write_file
from fedone_sdk.cli._process import errors_in, interruptible, quiet_logs
from fedone_sdk.cli._run_file import RunFile, RunState
from fedone_sdk.cli._tuning import same_command, shown
from fedone_sdk.cli.report import check_report
from fedone_sdk.errors import ArgumentError, FedOneError, system_errors
from fedone_sdk.spec import load_yaml
from fedone_sdk.task import form_of

if TYPE_CHECKING:
    from fedone_sdk.evaluation.engine import Session, Trial
    from fedone_sdk.evaluation.results import Results, TrialRecord
    from fedone_sdk.local.comparison import Contest, Costs


def compare(
    run_path: RunPath,
    methods: str | None = None,
    seeds: Annotated[int, typer.Option(min=1, max=1000)] = 5,
    cap: Cap = None,
    requests: Annotated[int | None, typer.Option(min=1)] = None,
    usd: Annotated[float | None, typer.Option(min=0)] = None,
    yes: bool = False,
    only_report: bool = False,
    ray: str | None = None,
    html: Path | None = None,
    json_file: JsonFile = None,
) -> None:
    """Compare methods on your own task and model, each with several seeds.

    A trial is one method with one seed. Finished trials are stored in .fedone/NAME.compare next to
    RUN.yaml, and the model's answers in .fedone/answers.sqlite. After a stop or a crash the same
    command continues, and pays for no answer twice.

    Example: fedone compare run.yaml --seeds 5 --html compare.html

    Args:
        methods (A,B,C): Names of methods as in RUN.yaml, and the baselines no-prompt and
            no-prompt-bias, which tune nothing. The first method is compared with all others.
            Default: the method of RUN.yaml, random, gs-bdpl and the baselines.
        seeds (N): Number of seeds, counted up from the seed of RUN.yaml.
        cap (N): Spend no more than N training queries per trial.
        requests (TOTAL): Cap on the requests of all trials, including measurements.
        usd (TOTAL): Cap on the cost of all trials in US dollars, including measurements.
        yes: Allow requests to a model that may cost money.
        only_report: Report the finished trials, and run no others.
        ray (ADDRESS): Run the trials on this Ray cluster; `local` starts one on this machine.
        html (FILE): Write an HTML page with the table, curves and prompts.
    """
    from fedone_sdk.evaluation.results import results_of
    from fedone_sdk.local import comparison

    output = Output(json_file)
    quiet_logs()
    check_report("--html", html)
    run = RunFile.load(run_path, cap=cap)
    state = RunState.of(run.path, run.spec.name)
    folder = state.store.with_suffix(".compare")
    options: dict[str, Any] = {"cache": state.answers}
    caps = {"requests": requests, "usd": usd if usd is None else Decimal(str(usd))}
    if any(cap is not None for cap in caps.values()):
        options |= {"caps": Budget(**caps), "ledger": folder / "ledger.sqlite"}
    names = methods.replace(" ", "").split(",") if methods else comparison.default_names(run.spec)
    run_seeds = range(run.spec.seed, run.spec.seed + seeds)
    with errors_in(str(run.path)):
        entrants = comparison.entrants_of(load_yaml(run.path), run.spec, names)
        planned = [*comparison.contests(entrants, run_seeds, run.folder, **options)]
    with nullcontext() if only_report else _locked(state, folder):
        records = _run_trials(run, folder, planned, ray, only_report=only_report, yes=yes)
    results = results_of(
        name=run.spec.name,
        task=run.spec.task,
        entrants=entrants,
        seeds=run_seeds,
        records={(record.entrant, record.seed): record for record in records},
        num_examples=len(planned[0].federation.dev),
    )
    if html is not None:
        write_file("--html", html, reports.comparison_html(results, same_command()))
    output.write_json({"version": __version__, "run": str(run.path), **results.document()})
    _print(output, results)
    note(f"the finished trials are in {folder}")


@contextmanager
def _locked(state: RunState, folder: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout

    state.make()
    with system_errors(ArgumentError, f"{folder}: cannot be created"):
        folder.mkdir(mode=0o700, exist_ok=True)
    try:
        lock = FileLock(folder / "lock").acquire(timeout=0)
    except Timeout:
        raise ArgumentError(f"{folder}: another process is running this comparison") from None
    with lock:
        yield


def _run_trials(
    run: RunFile,
    folder: Path,
    planned: list[Contest],
    ray: str | None,
    *,
    only_report: bool,
    yes: bool,
) -> list[TrialRecord]:
    from fedone_sdk.evaluation.engine import Records, Session
    from fedone_sdk.evaluation.results import TrialRecord

    with shown("compare") as show:
        session = Session(
            Records(folder.parent, folder.name),
            workers=None if ray else 1,
            ray=ray,
            watch=lambda progress: show(progress.text, True),
        )
        to_run = asyncio.run(_approved(run, planned, session, only_report=only_report, yes=yes))
        if to_run:
            stopped = f"stopped; finished trials are in {folder}, and the same command continues"
            with interruptible(stopped):
                session.run(to_run, stop_at_failure=True)
    records = [TrialRecord.model_validate(result) for result in session.results.values()]
    for failure in session.failures.values():
        if not failure.startswith("budget of"):
            raise FedOneError(failure)
        if not records:
            raise ArgumentError(f"--requests, --usd: {failure}")
        note(f"--requests, --usd: {failure}")
    if not records:
        raise ArgumentError(f"there is nothing to report in {folder}")
    return records


async def _approved(
    run: RunFile, planned: list[Contest], session: Session, *, only_report: bool, yes: bool
) -> list[Trial]:
    """Print the cost of the trials that still have to run, and return these trials."""
    from fedone_sdk.local.comparison import costs_of, is_free

    caps = planned[0].caps
    async with run.backend(cache=None if only_report else planned[0].cache) as backend:
        with errors_in(str(run.path)):
            if not run.spec.task.slots:  # With slots, each trial checks its own label words.
                await check_label_words(backend, run.spec.task.label_words, form_of(run.spec.task))
            if caps is not None and caps.usd is not None and "usd" not in backend.bounds:
                raise ArgumentError(
                    "--usd: the price of this model is not known; set backend.prices"
                )
            trials = [contest.trial(backend.fingerprint) for contest in planned]
            to_run = session.find(trials)
            if only_report or not to_run:
                return []
            pairs = zip(planned, trials, strict=True)
            new = [contest for contest, trial in pairs if trial in to_run]
            costs = await costs_of(new, backend)
        for line in _cost_lines(costs, len(planned)):
            note(line)
        if not yes and not is_free(backend, run.spec.method.batch_size):
            raise ArgumentError("--yes: is required, because this model may cost money")
        return to_run


def _cost_lines(costs: Costs, total: int) -> Iterator[str]:
    kept = total - costs.trials
    yield f"{costs.trials} of {total} trials to run{f', {kept} are finished' if kept else ''}"
    yield (
        f"  at most {costs.training_queries:,} training queries, and {costs.evaluation_queries:,} "
        "on the dev split"
    )
    for word, usage in ("about", costs.expected), ("at most", costs.most):
        usd = money(usage, priced=costs.priced)
        yield (
            f"  {word} {usage.requests:,} requests, {usage.prompt_tokens:,} prompt tokens, "
            f"{usage.completion_tokens:,} completion tokens, USD {usd}"
        )
    for warning in costs.warnings:
        yield f"  warning: {warning}"


def _print(output: Output, results: Results) -> None:
    output.heading(f"{results.name}: {results.task.metric} of the tuned prompt on dev")
    header, *rows = results.table
    output.table(header, rows)
    for standing in results.standings:
        if standing.entrant.notes:
            notes = "; ".join(standing.entrant.notes)
            output.console.print(f"  {standing.entrant.name} differs from RUN.yaml: {notes}")
    first = results.standings[0].entrant.name
    output.console.print(f"  queries to target: the target is {first}'s final metric, same seed")
    if results.missing:
        output.console.print(f"  {len(results.missing)} trials are missing")
    output.console.print()
    output.console.print(results.conclusion)
