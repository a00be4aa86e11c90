"""Runs an study: known results are kept, and a failed trial does not stop the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from fedone_paper.report import write_report
from fedone_paper.settings import Settings
from fedone_paper.study import Report, Study
from fedone_sdk.errors import MissingExtraError
from fedone_sdk.evaluation.engine import Progress, Records, Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A finished study.

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


def run_study(
    study: Study,
    settings: Settings,
    *,
    out: Path,
    workers: int,
    ray: str | None = None,
    command: str | None = None,
    watch: Callable[[Progress], None] | None = None,
    run_missing: bool = True,
) -> Finished:
    """Run the missing trials of an study, and write its report.

    Args:
        study: What to run.
        settings: What the user asked for.
        out: The results go to a folder of the study's name in it.
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
    session = Session(Records(out, study.name), workers=workers, ray=ray, watch=watch)
    tried: set[str] = set()
    while new := [
        trial for trial in study.trials(settings, session.results) if trial.key not in tried
    ]:
        tried.update(trial.key for trial in new)
        missing = session.find(new)
        if run_missing:
            session.run(missing)
    document: dict[str, object] | None = None
    report, files = None, tuple[Path, ...]()
    if session.found:
        report = study.report(settings, session.results)
        folder = out / study.name
        document, files = write_report(
            study, settings, report, session.found, session.failures, folder, command=command
        )
    return Finished(
        document=document,
        report=report,
        files=files,
        failures=session.failures,
        kept=session.kept,
    )
