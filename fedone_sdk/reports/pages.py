"""Reports as HTML files: of a run, and of a comparison of methods."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

import fedone_sdk
from fedone_sdk.evaluation.results import Results, header_of, row_of
from fedone_sdk.messages import COMPARED
from fedone_sdk.metrics import metric_text
from fedone_sdk.reports.contents import contents_of
from fedone_sdk.reports.figures import Line, Panel, curves_svg, svg_of
from fedone_sdk.reports.retuned import Retuned
from fedone_sdk.reports.source import ReportedRun

_COLOURS = ("#2563a8", "#c2571a", "#1b7f5c", "#8a3ffc", "#b0245b", "#6b7280", "#8a6d00", "#0f7c90")
_MARKERS = "osD^vPX*"


def html_page(template: str, figures: Sequence[str] = (), **values: object) -> str:
    """One self-contained page, without network and scripts; all values are escaped."""
    images = [
        f"data:image/svg+xml;base64,{base64.b64encode(figure.encode()).decode()}"
        for figure in figures
    ]
    return _environment().get_template(template).render(figures=images, **values)


def html_report(
    run: ReportedRun,
    moved: Retuned | None = None,
    artefact: Path | None = None,
    backend: Path | None = None,
) -> str:
    """Return the report as one HTML page."""
    return html_page(
        "report.html.j2",
        curves_svg(run) if run.result.history else (),
        run=run,
        report=contents_of(run),
        moved=moved,
        artefact=artefact and str(artefact),
        backend=backend and str(backend),
        names=COMPARED,
    )


def comparison_html(results: Results, command: str | None = None) -> str:
    """Return one page without external resources or scripts."""
    return html_page(
        "comparison.html.j2",
        [comparison_svg(results)] if any(one.trials for one in results.standings) else (),
        results=results,
        header=header_of(results),
        rows=[row_of(results, standing) for standing in results.standings],
        command=command,
    )


def comparison_svg(results: Results) -> str:
    """Plot the mean over seeds, and each seed as a thin line; equal results give equal bytes."""
    panel = Panel(lines=[*_lines(results)], title=f"{results.task.metric} on dev")
    return svg_of([panel], size=(6.4, 4.0), shared_legend=True)


def _lines(results: Results) -> Iterator[Line]:
    trials = [trial for one in results.standings for trial in one.trials.values()]
    last = max((point.queries for trial in trials for point in trial.curve), default=1)
    for place, standing in enumerate(results.standings):
        colour, label = _COLOURS[place % len(_COLOURS)], standing.entrant.label
        if standing.metric is None:
            continue
        if standing.entrant.kind == "baseline":
            yield Line(x=[0, last], y=[standing.metric] * 2, style=":", color=colour, label=label)
            continue
        curves = [
            ([point.queries for point in trial.curve], [point.metric for point in trial.curve])
            for trial in standing.trials.values()
        ]
        for x, y in curves:
            yield Line(x=x, y=y, color=colour, faint=True)
        # Each seed is interpolated linearly, over the range that all seeds cover.
        end = min(x[-1] for x, _ in curves)
        grid = sorted({at for x, _ in curves for at in x if at <= end})
        means = np.mean([np.interp(grid, x, y) for x, y in curves], axis=0).tolist()
        style = f"{_MARKERS[place % len(_MARKERS)]}-"
        yield Line(x=grid, y=means, style=style, color=colour, label=label)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("fedone_sdk.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": metric_text,
        "signed": "{:+.3f}".format,
        "capitalize_first": lambda text: text[:1].upper() + text[1:],
        "shell": shlex.quote,
    }
    environment.globals["version"] = fedone_sdk.__version__
    return environment
