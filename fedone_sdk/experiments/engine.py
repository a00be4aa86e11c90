"""Runs an experiment: known results are kept, and a failed trial does not stop the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from fedone_sdk.errors import MissingExtraError
from fedone_sdk.experiments.experiment import Experiment, Report, Result, Trial
from fedone_sdk.experiments.on_ray import run_on_ray
from fedone_sdk.experiments.pool import Failure, Job, run_in_processes
from fedone_sdk.experiments.records import Record, Records
from fedone_sdk.experiments.report import write_report
from fedone_sdk.experiments.settings import Settings

Engine = Literal["local", "ray"]
"""Where trials run: in processes of this machine, or on a Ray cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of an experiment.

    Attributes:
        total: Known trials.
        kept: Trials whose results existed before.
        done: Trials with a result, kept or new.
        failed: Trials that failed.
        last: The trial that has just ended; None at the beginning of a stage.
        failure: Why it failed, one line; None if it did not.
        note: Its note for the user.
    """

    total: int
    kept: int
    done: int
    failed: int
    last: str | None = None
    failure: str | None = None
    note: str | None = None


Watch = Callable[[Progress], None]


@dataclass(slots=True, kw_only=True)
class _Ledger:
    """The trials so far."""

    records: dict[str, Record] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)
    total: int = 0
    kept: int = 0

    @property
    def results(self) -> dict[str, Result]:
        return {key: record.result for key, record in self.records.items()}

    def progress(self, last: str | None = None) -> Progress:
        failure, record = self.failures.get(last or ""), self.records.get(last or "")
        return Progress(
            total=self.total,
            kept=self.kept,
            done=len(self.records),
            failed=len(self.failures),
            last=last,
            failure=None if failure is None else failure.message,
            note=None if record is None else record.result.get("note"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A finished experiment.

    Attributes:
        document: The results as JSON holds them; None without any result.
        report: For people; None as above.
        files: The written files, the Markdown first.
        failures: Why trials failed, by their keys, one line each.
        kept: How many results existed before.
    """

    document: dict[str, object] | None
    report: Report | None
    files: tuple[Path, ...]
    failures: dict[str, str]
    kept: int


def run_experiment(
    experiment: Experiment,
    settings: Settings,
    *,
    out: Path,
    workers: int,
    engine: Engine = "local",
    command: str | None = None,
    watch: Watch | None = None,
    run_missing: bool = True,
) -> Finished:
    """Runs the missing trials of an experiment, and writes its report.

    Args:
        experiment: What to run.
        settings: What the user asked for.
        out: The results go to a folder of the experiment's name in it.
        workers: Trials at once.
        engine: Where they run.
        command: The command in the report that makes it again.
        watch: Called when a trial ends.
        run_missing: Whether trials without a result are run; else existing results are reported.

    Raises:
        MissingExtraError: Ray or matplotlib is not installed; raised before the work.
        SpecError: The settings are wrong.
    """
    if find_spec("matplotlib") is None:
        raise MissingExtraError("drawing figures", extra="reproduce")
    folder = out / experiment.name
    records = Records(out, experiment.name)
    ledger = _run_trials(experiment, settings, records, workers, engine, watch, run_missing)
    failures = {key: failure.message for key, failure in ledger.failures.items()}
    if not ledger.records:
        return Finished(document=None, report=None, files=(), failures=failures, kept=0)
    report = experiment.report(settings, ledger.results)
    document, files = write_report(
        experiment, settings, report, ledger.records, failures, folder, command=command
    )
    return Finished(
        document=document, report=report, files=files, failures=failures, kept=ledger.kept
    )


def _run_trials(
    experiment: Experiment,
    settings: Settings,
    records: Records,
    workers: int,
    engine: Engine = "local",
    watch: Watch | None = None,
    run_missing: bool = True,
) -> _Ledger:
    """Runs the trials of an experiment, stage by stage."""
    ledger = _Ledger()
    seen: set[str] = set()
    while new := _new(experiment.trials(settings, ledger.results), seen):
        seen.update(trial.key for trial in new)
        ledger.total += len(new)
        missing = []
        for trial in new:
            record = records.find(trial)
            if record is None:
                missing.append(trial)
            else:
                ledger.records[trial.key] = record
                ledger.kept += 1
        if watch is not None:
            watch(ledger.progress())
        if missing and run_missing:
            _run(missing, ledger, records, workers, engine, watch)
    return ledger


def _new(trials: Sequence[Trial], seen: set[str]) -> list[Trial]:
    found = {trial.key: trial for trial in trials if trial.key not in seen}
    if len({trial.key for trial in trials}) < len(trials):
        raise ValueError("two trials of one stage share a key")
    return list(found.values())


def _run(
    trials: Sequence[Trial],
    ledger: _Ledger,
    records: Records,
    workers: int,
    engine: Engine,
    watch: Watch | None,
) -> None:
    jobs = [
        Job(
            number=number,
            run=trial.run,
            options=trial.options,
            workspace=records.workspace(trial),
        )
        for number, trial in enumerate(trials)
    ]
    run = run_in_processes if engine == "local" else run_on_ray
    # Closed also by Ctrl-C: finished trials are on the disk, running ones are stopped.
    with closing(run(jobs, workers)) as outcomes:
        for outcome in outcomes:
            trial, found = trials[outcome.number], outcome.found
            if not isinstance(found, Failure):
                try:
                    ledger.records[trial.key] = records.keep(trial, found, outcome.wall_s)
                except (TypeError, ValueError) as exc:
                    text = f"its result is not what JSON holds: {exc}"
                    found = Failure(text, f"{text}\n{found!r}\n")
            if isinstance(found, Failure):
                ledger.failures[trial.key] = found
                records.keep_failure(trial, found.details)
            if watch is not None:
                watch(ledger.progress(trial.key))
