"""A comparison as one HTML file, with curves of metric and loss against training queries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from fedone_sdk.evaluation.results import Results, header_of, row_of
from fedone_sdk.reports.figures import Line, Panel, svg_of
from fedone_sdk.reports.render import html_page

_COLOURS = ("#2563a8", "#c2571a", "#1b7f5c", "#8a3ffc", "#b0245b", "#6b7280", "#8a6d00", "#0f7c90")
_MARKERS = "osD^vPX*"


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
    names = {"metric": results.task.metric, "loss": "mean loss"}
    measures: list[Literal["metric", "loss"]] = ["metric", "loss"]
    if results.task.metric == "loss":
        measures = ["loss"]
    panels = [
        Panel(lines=[*_lines(results, measure)], title=f"{names[measure]} on dev")
        for measure in measures
    ]
    return svg_of(panels, size=(4.6, 3.8), shared_legend=True)


def _lines(results: Results, measure: Literal["metric", "loss"]) -> Iterator[Line]:
    trials = [trial for one in results.standings for trial in one.trials.values()]
    last = max((point.queries for trial in trials for point in trial.curve), default=1)
    for place, standing in enumerate(results.standings):
        colour, label = _COLOURS[place % len(_COLOURS)], standing.entrant.label
        curves = [
            (
                [point.queries for point in trial.curve],
                [getattr(point, measure) for point in trial.curve],
            )
            for trial in standing.trials.values()
        ]
        if not curves:
            continue
        if standing.entrant.kind == "baseline":
            mean = standing.metric if measure == "metric" else standing.loss
            assert mean is not None
            yield Line(x=[0, last], y=[mean] * 2, style=":", color=colour, label=label)
            continue
        for x, y in curves:
            yield Line(x=x, y=y, color=colour, faint=True)
        # Each seed is interpolated linearly, over the range that all seeds cover.
        end = min(x[-1] for x, _ in curves)
        grid = sorted({at for x, _ in curves for at in x if at <= end})
        means = np.mean([np.interp(grid, x, y) for x, y in curves], axis=0).tolist()
        style = f"{_MARKERS[place % len(_MARKERS)]}-"
        yield Line(x=grid, y=means, style=style, color=colour, label=label)
