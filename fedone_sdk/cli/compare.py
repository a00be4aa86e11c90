"""`fedone compare`: methods x seeds on the user's task and model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedone_sdk import __version__
from fedone_sdk.cli._options import Cap, JsonFile, RunPath, Seed
from fedone_sdk.cli._output import Output, money, note, write_file
from fedone_sdk.cli._process import naming, quiet_logs, stopping
from fedone_sdk.cli._run_file import RunFile, RunState
from fedone_sdk.cli._tuning import same_command, trial_progress
from fedone_sdk.cli.report import check_page
from fedone_sdk.errors import ArgumentError, FedOneError

if TYPE_CHECKING:
    from fedone_sdk.backends import LLMBackend
    from fedone_sdk.comparison import (
        Comparison,
        Costs,
        Results,
        TotalGuard,
        Trial,
        TrialFile,
        TrialRecord,
    )

_SEEDS = 5

_Records = dict[tuple[str, int], "TrialRecord"]


def compare(
    run_path: RunPath,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,C",
            help="What is compared, the first with each of the others: names of methods as in "
            "RUN.yaml, and no-prompt, no-prompt-bias, which tune nothing. RUN.yaml's own method, "
            "random, gs-bdpl and these two by default.",
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(metavar="N", min=1, max=1000, help="Repeats, from RUN.yaml's seed on.")
    ] = _SEEDS,
    seed: Seed = None,
    cap: Cap = None,
    queries: Annotated[
        int | None,
        typer.Option(
            metavar="TOTAL",
            min=1,
            help="Training queries of all trials that are kept. A seed starts only if all "
            "its trials fit.",
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            metavar="TOTAL",
            min=1,
            help="Requests of all trials, measurements and restarts included.",
        ),
    ] = None,
    usd: Annotated[
        float | None, typer.Option(metavar="TOTAL", min=0, help="US dollars, as --requests.")
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Report after how many queries each method reaches this metric; by default the "
            "final value of the first method.",
        ),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Start although the model may cost money.")
    ] = False,
    only_report: Annotated[
        bool, typer.Option("--only-report", help="Report the kept trials without running any.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with table and curves.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Compare methods on your own task and model, in pairs of the same seed.

    Trials are kept in .fedone/NAME.compare next to RUN.yaml, and answers in
    .fedone/answers.sqlite. The same command continues after a stop or a crash, and pays for no
    answer twice.
    """
    output = Output(json_file)
    quiet_logs()
    if html is not None:
        check_page("--html", html)
    run = RunFile.load(run_path, seed=seed, cap=cap)
    place = _Place(RunState.next_to(run.path, run.spec.name))
    comparison = _comparison(run, methods, seeds)
    with naming(str(run.path)):
        trials = comparison.trials()
    if only_report:
        records = comparison.known(trials, place.file)
    else:
        caps = _Caps(queries=queries, requests=requests, usd=usd)
        with place.locked():
            records = asyncio.run(_run(run, comparison, trials, place, caps, yes=yes))
    if not records:
        raise ArgumentError(f"there is nothing to report in {place.folder}")
    results = comparison.results(trials, records, target=target)
    if html is not None:
        from fedone_sdk.comparison.page import comparison_html

        write_file("--html", html, comparison_html(results, same_command()))
    output.write_json({"version": __version__, "run": str(run.path), **results.document()})
    _print(output, results, place)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Caps:
    """Caps on all trials together."""

    queries: int | None
    requests: int | None
    usd: float | None


@dataclass(frozen=True, slots=True)
class _Place:
    """The files of a comparison, next to those of its run."""

    state: RunState

    @property
    def folder(self) -> Path:
        """The folder of trials, ledger and lock."""
        return self.state.store.with_suffix(".compare")

    @property
    def file(self) -> TrialFile:
        """The file of all trials."""
        from fedone_sdk.comparison import TrialFile

        return TrialFile(self.folder / "trials.jsonl")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create and lock the folder.

        Raises:
            SpecError: Another process runs the comparison, or the folder cannot be created.
        """
        from filelock import FileLock, Timeout

        self.state.make()
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as exc:
            raise ArgumentError(f"{self.folder}: cannot be created: {exc.strerror}") from exc
        try:
            lock = FileLock(self.folder / "lock").acquire(timeout=0)
        except Timeout:
            raise ArgumentError(f"{self.folder}: another process runs this comparison") from None
        with lock:
            yield


def _comparison(run: RunFile, methods: str | None, seeds: int) -> Comparison:
    from fedone_sdk.comparison import Comparison, default_names, entrants_of
    from fedone_sdk.spec import load_yaml

    names = default_names(run.spec) if methods is None else tuple(methods.split(","))
    entrants = entrants_of(load_yaml(run.path), run.spec, names)
    first = run.spec.seed
    return Comparison(
        name=run.spec.name,
        folder=run.folder,
        entrants=tuple(entrants),
        seeds=tuple(range(first, first + seeds)),
    )


async def _run(
    run: RunFile,
    comparison: Comparison,
    trials: list[Trial],
    place: _Place,
    caps: _Caps,
    *,
    yes: bool,
) -> _Records:
    """Run the missing trials that the caps allow, and return all records."""
    from fedone_sdk.backends.label_words import check_label_words
    from fedone_sdk.comparison import affordable, costs_of, is_free
    from fedone_sdk.task import form_of

    guard = _guard(place, caps)
    async with AsyncExitStack() as stack:
        backend = await stack.enter_async_context(
            run.backend(cache=place.state.answers, guard=guard)
        )
        with naming(str(run.path)):
            await check_label_words(backend, run.spec.task.label_words, form_of(run.spec.task))
            if caps.usd is not None and "usd" not in backend.bounds:
                raise ArgumentError(
                    "--usd: the price of this model is not known; backend.prices names it"
                )
            records = comparison.known(trials, place.file, backend.fingerprint)
            missing = [one for one in trials if (one.entrant.name, one.seed) not in records]
            spent = sum(record.queries for record in place.file.read())
            ahead = affordable(trials, records, caps.queries, spent)
            costs = await costs_of(ahead, backend) if ahead else None
        if costs is None:
            if missing:
                text = (
                    f"--queries {caps.queries}: pays for none of the {len(missing)} missing trials"
                )
                if not records:
                    raise ArgumentError(text)
                note(text)
            return records
        for line in _cost_lines(costs, len(trials), len(missing), caps):
            note(line)
        if not yes and not is_free(backend, run.spec.method.batch_size):
            raise ArgumentError("--yes: is required to begin, because this model may cost money")
        try:
            await _run_trials(ahead, backend, place, records, total=len(trials))
        except FedOneError:
            if guard is None or guard.refusal is None:
                raise
            text = f"--requests, --usd: {guard.refusal}"
            if not records:
                raise ArgumentError(text) from None
            note(text)
        return records


async def _run_trials(
    ahead: list[Trial], backend: LLMBackend, place: _Place, records: _Records, *, total: int
) -> None:
    """Run trials, and append their records."""
    from fedone_sdk.comparison import run_trials
    from fedone_sdk.evaluation.engine import Progress

    task = asyncio.current_task()
    assert task is not None
    kept = len(records)
    with stopping(task.cancel), trial_progress("compare") as watch:
        watch(Progress(total=total, kept=kept, done=kept, failed=0))
        try:
            async for trial, record in run_trials(ahead, backend, place.file):
                records[trial.entrant.name, trial.seed] = record
                watch(Progress(total=total, kept=kept, done=len(records), failed=0, last=trial.key))
        except asyncio.CancelledError:
            note(
                f"stopped; {len(records)} of {total} trials are kept in {place.folder}, and the "
                "same command continues from there"
            )
            raise typer.Exit(130) from None
        except FedOneError:
            note(f"{len(records)} of {total} trials are kept in {place.folder}")
            raise


def _guard(place: _Place, caps: _Caps) -> TotalGuard | None:
    """Return the guard of the caps on all trials, which survives a crash."""
    from fedone_sdk.budget import Budget, SqliteLedger
    from fedone_sdk.comparison import TotalGuard

    if caps.requests is None and caps.usd is None:
        return None
    budget = Budget(
        requests=caps.requests, usd=None if caps.usd is None else Decimal(str(caps.usd))
    )
    ledger = SqliteLedger(place.folder / "ledger.sqlite", program="fedone compare")
    return TotalGuard(budget, ledger=ledger)


def _cost_lines(costs: Costs, total: int, missing: int, caps: _Caps) -> Iterator[str]:
    """Yield the lines with the estimated cost of all trials."""
    kept, beyond = total - missing, missing - costs.trials
    yield (
        f"{costs.trials} of {total} trials to run"
        f"{f', {kept} are there already' if kept else ''}"
        f"{f', {beyond} are beyond --queries {caps.queries}' if beyond else ''}"
    )
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


def _print(output: Output, results: Results, place: _Place) -> None:
    from fedone_sdk.comparison.table import header_of, row_of

    output.heading(f"{results.name}: {results.task.metric} of the tuned prompt on dev")
    output.table(header_of(results), (row_of(results, standing) for standing in results.standings))
    for standing in results.standings:
        if standing.entrant.notes:
            notes = "; ".join(standing.entrant.notes)
            output.console.print(f"  {standing.entrant.name}: other than in RUN.yaml: {notes}")
    output.console.print(f"  target: {results.target_text}")
    if results.missing:
        output.console.print(f"  {len(results.missing)} trials are not there yet")
    output.console.print()
    output.console.print(results.conclusion)
    note(f"kept in {place.folder}")
