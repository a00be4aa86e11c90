"""`fedone report`: results and cost of a run, as one page."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedone_sdk.cli._failures import naming
from fedone_sdk.cli._options import OptionalServer, OptionalToken, RunStore
from fedone_sdk.cli._output import check_target, plural, write_file
from fedone_sdk.cli._run_file import RunFile
from fedone_sdk.cli._state import default_store
from fedone_sdk.cli.export import load_own, stored_run
from fedone_sdk.errors import ArgumentError, MissingExtraError

if TYPE_CHECKING:
    from fedone_sdk.reports import ReportedRun


def report(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="An export (`fedone runs export`) or result file (--json); or the id of a run "
            "in --store, --server or this folder's .fedone.",
        ),
    ],
    target: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="RUN.html by default; FILE.md is Markdown."
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Write Markdown, with the figure as a separate file.")
    ] = False,
    run_path: Annotated[
        Path | None,
        typer.Option(
            "--run",
            metavar="RUN.yaml",
            help="The run of a result file, which does not contain the task, and of a run with a "
            "method of your own.",
        ),
    ] = None,
    store: RunStore = None,
    server: OptionalServer = None,
    token: OptionalToken = None,
) -> None:
    """Write the results and cost of a run as one page that needs no network.

    The page has the metric with intervals, curves, the prompt before and after, confusion, cost,
    clients, and programs that use the prompt. It contains neither texts of examples nor keys.
    """
    if store is None and server is None and not os.path.exists(source):
        store = str(default_store(source)) if os.path.isfile(default_store(source)) else None
    stored = store is not None or server is not None
    load_own(run_path)
    name = source if stored else Path(source).stem
    suffix = ".md" if markdown else ".html"
    target = target or Path(f"{name}{suffix}")
    if markdown and target.suffix != ".md":
        raise ArgumentError(f"--output: {target} must end in .md")
    check_report("--output", target)
    if stored:
        run = stored_run(source, server=server, token=token, store=store)
    else:
        run = _of_file(Path(source), run_path)
    for file in write_report("--output", target, run):
        typer.echo(f"{file}: run {run.result.run_id}, {plural(run.result.rounds, 'round')}")


def _of_file(source: Path, run_path: Path | None) -> ReportedRun:
    from fedone_sdk.reports import read_run

    spec = None if run_path is None else RunFile.load(run_path).spec
    with naming(str(run_path)):
        return read_run(source, spec)


def check_report(option: str, target: Path) -> None:
    """Check, before the work, that a report can be written.

    Raises:
        MissingExtraError: The extra ``report`` is not installed.
        SpecError: The suffix is not supported, or the file cannot be written.
    """
    if target.suffix not in (".html", ".md"):
        raise ArgumentError(f"{option}: {target} must end in .html or .md")
    check_target(option, target)
    if any(find_spec(name) is None for name in ("jinja2", "matplotlib")):
        raise MissingExtraError("a report", extra="report")


def check_page(option: str, target: Path) -> None:
    """`check_report` for pages that exist only as HTML."""
    if target.suffix != ".html":
        raise ArgumentError(f"{option}: {target} must end in .html")
    check_report(option, target)


def write_report(option: str, target: Path, run: ReportedRun) -> list[Path]:
    """Write a report.

    Returns:
        The files that were written.
    """
    from fedone_sdk.reports.render import html_report, markdown_report

    if target.suffix == ".html":
        write_file(option, target, html_report(run))
        return [target]
    figure = target.with_suffix(".svg")
    text, svg = markdown_report(run, figure.name)
    write_file(option, target, text)
    if svg is None:
        return [target]
    write_file(option, figure, svg)
    return [target, figure]
