"""A comparison as one HTML file, with curves of metric and loss against training queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedone_sdk.evaluation.results import Results, Standing, TrialRecord, header_of, row_of
from fedone_sdk.reports.figures import printable, svg_of
from fedone_sdk.reports.render import html_page

_COLOURS = ("#2563a8", "#c2571a", "#1b7f5c", "#8a3ffc", "#b0245b", "#6b7280", "#8a6d00", "#0f7c90")
_MARKERS = "osD^vPX*"


def comparison_html(results: Results, command: str | None = None) -> str:
    """Return one page without external resources or scripts."""
    return html_page(
        "comparison.html.j2",
        comparison_svg(results) if any(one.trials for one in results.standings) else None,
        results=results,
        header=header_of(results),
        rows=[row_of(results, standing) for standing in results.standings],
        command=command,
    )


def comparison_svg(results: Results) -> str:
    """Plot the mean over seeds, and each seed as a thin line; equal results give equal bytes."""
    measures: list[Literal["metric", "loss"]] = ["metric", "loss"]
    if results.task.metric == "loss":
        measures = ["loss"]

    def draw(figure: Figure) -> None:
        places = figure.subplots(1, len(measures), squeeze=False)[0]
        for axes, measure in zip(places, measures, strict=True):
            for place, standing in enumerate(results.standings):
                _draw(axes, standing, measure, place)
            name = results.task.metric if measure == "metric" else "mean loss"
            axes.set_title(f"{printable(name)} on dev", parse_math=False)
        handles, labels = places[-1].get_legend_handles_labels()
        if handles:
            figure.legend(
                handles,
                labels,
                loc="outside lower center",
                ncols=min(4, len(labels)),
                frameon=False,
                fontsize="small",
            )

    return svg_of(draw, size=(4.6 * len(measures), 3.8), style={})


def _draw(axes: Axes, standing: Standing, measure: Literal["metric", "loss"], place: int) -> None:
    trials = list(standing.trials.values())
    if not trials:
        return
    colour = _COLOURS[place % len(_COLOURS)]
    if standing.entrant.kind == "baseline":
        mean = standing.metric if measure == "metric" else standing.loss
        assert mean is not None
        axes.axhline(mean, color=colour, linestyle=":", label=standing.entrant.label)
        return
    for trial in trials:
        axes.plot(*_curve(trial, measure), color=colour, alpha=0.25, linewidth=0.8)
    axes.plot(
        *_mean_curve(trials, measure),
        color=colour,
        marker=_MARKERS[place % len(_MARKERS)],
        markersize=4,
        label=standing.entrant.label,
    )


def _curve(trial: TrialRecord, measure: Literal["metric", "loss"]) -> tuple[list[int], list[float]]:
    return (
        [point.queries for point in trial.curve],
        [getattr(point, measure) for point in trial.curve],
    )


def _mean_curve(
    trials: Sequence[TrialRecord], measure: Literal["metric", "loss"]
) -> tuple[list[int], list[float]]:
    """Interpolate each seed linearly, over the range that all seeds cover."""
    curves = [_curve(trial, measure) for trial in trials]
    end = min(queries[-1] for queries, _ in curves)
    grid = sorted({point for queries, _ in curves for point in queries if point <= end})
    values = np.mean([np.interp(grid, *curve) for curve in curves], axis=0)
    return grid, values.tolist()
