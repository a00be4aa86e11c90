"""Runs an experiment: known results are kept, and a failed trial does not stop the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from fedone_paper.experiment import Experiment, Report, Result, Trial
from fedone_paper.on_ray import run_on_ray
from fedone_paper.pool import Failure, Job, Outcome, run_in_processes
from fedone_paper.records import Record, Records
from fedone_paper.report import write_report
from fedone_paper.settings import Settings
from fedone_sdk.errors import MissingExtraError
from fedone_sdk.evaluation.engine import Progress

Watch = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A finished experiment.

    Attributes:
        document: The results as JSON holds them; None without any result, as the report.
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
    ray: str | None = None,
    command: str | None = None,
    watch: Watch | None = None,
    run_missing: bool = True,
) -> Finished:
    """Run the missing trials of an experiment, and write its report.

    Args:
        experiment: What to run.
        settings: What the user asked for.
        out: The results go to a folder of the experiment's name in it.
        workers: Trials at once.
        ray: Address of the Ray cluster that runs them, ``local`` starts one; None uses processes.
        command: The command in the report that makes it again.
        watch: Called when a trial ends.
        run_missing: Whether trials without a result are run; else existing results are reported.

    Raises:
        MissingExtraError: Ray or matplotlib is not installed; raised before the work.
        SpecError: The settings are wrong.
    """
    if find_spec("matplotlib") is None:
        raise MissingExtraError("drawing figures", extra="reproduce")
    session = _Session(Records(out, experiment.name), workers, ray, watch)
    while new := session.new(experiment.trials(settings, session.results)):
        missing = session.known(new)
        if missing and run_missing:
            session.run(missing)
    document: dict[str, object] | None = None
    report, files = None, tuple[Path, ...]()
    if session.found:
        report = experiment.report(settings, session.results)
        folder = out / experiment.name
        document, files = write_report(
            experiment, settings, report, session.found, session.failures, folder, command=command
        )
    return Finished(
        document=document,
        report=report,
        files=files,
        failures=session.failures,
        kept=session.kept,
    )


class _Session:
    """The trials of an experiment so far: records of results, and failures, by their keys."""

    def __init__(
        self, records: Records, workers: int, ray: str | None, watch: Watch | None
    ) -> None:
        self.found: dict[str, Record] = {}
        self.failures: dict[str, str] = {}
        self.kept = 0
        self._seen: set[str] = set()
        self._records, self._workers, self._watch = records, workers, watch
        self._engine = run_in_processes if ray is None else partial(run_on_ray, address=ray)
        self._began = time.monotonic()

    @property
    def results(self) -> dict[str, Result]:
        return {key: record.result for key, record in self.found.items()}

    def new(self, trials: Sequence[Trial]) -> list[Trial]:
        """Return the trials that no earlier stage had."""
        if len({trial.key for trial in trials}) < len(trials):
            raise ValueError("two trials of one stage share a key")
        new = [trial for trial in trials if trial.key not in self._seen]
        self._seen.update(trial.key for trial in new)
        return new

    def known(self, trials: Sequence[Trial]) -> list[Trial]:
        """Find the existing results; returns the other trials."""
        missing = []
        for trial in trials:
            if (record := self._records.find(trial)) is None:
                missing.append(trial)
            else:
                self.found[trial.key] = record
                self.kept += 1
        self._tell(None)
        return missing

    def run(self, trials: Sequence[Trial]) -> None:
        """Run trials, and keep their results."""
        by_key = {trial.key: trial for trial in trials}
        jobs = [
            Job(each.key, each.run, each.options, self._records.workspace(each)) for each in trials
        ]
        # Closed also by Ctrl-C: finished trials are on the disk, running ones are stopped.
        with closing(self._engine(jobs, self._workers)) as outcomes:
            for outcome in outcomes:
                self._keep(by_key[outcome.key], outcome)
                self._tell(outcome.key)

    def _keep(self, trial: Trial, outcome: Outcome) -> None:
        found = outcome.found
        if not isinstance(found, Failure):
            try:
                self.found[trial.key] = self._records.keep(trial, found, outcome.wall_s)
                return
            except (TypeError, ValueError) as exc:
                text = f"its result is not what JSON holds: {exc}"
                found = Failure(text, f"{text}\n{found!r}\n")
        self.failures[trial.key] = found.message
        self._records.keep_failure(trial, found.details)

    def _tell(self, last: str | None) -> None:
        if self._watch is None:
            return
        record = self.found.get(last or "")
        new = len(self.found) - self.kept + len(self.failures)
        ended = len(self.found) + len(self.failures)
        seconds = time.monotonic() - self._began
        self._watch(
            Progress(
                total=len(self._seen),
                kept=self.kept,
                done=len(self.found),
                failed=len(self.failures),
                last=last,
                failure=self.failures.get(last or ""),
                left_s=seconds * (len(self._seen) - ended) / new if new else None,
                note=None if record is None else record.result.get("note"),
            )
        )
