"""The curves of a comparison as SVG: metric and loss against training queries."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from fedone_sdk.comparison.records import TrialRecord
from fedone_sdk.comparison.results import Results, Standing

_COLOURS = ("#2563a8", "#c2571a", "#1b7f5c", "#8a3ffc", "#b0245b", "#6b7280", "#8a6d00", "#0f7c90")
_MARKERS = "osD^vPX*"


def comparison_svg(results: Results) -> str:
    """Plot the mean over seeds, and each seed as a thin line; equal results give equal bytes."""
    # Text is kept as text, which is smaller and readable by screen readers.
    with matplotlib.rc_context({"svg.hashsalt": "fedone", "svg.fonttype": "none"}):
        measures: list[Literal["metric", "loss"]] = ["metric", "loss"]
        if results.task.metric == "loss":
            measures = ["loss"]
        figure = Figure(figsize=(4.6 * len(measures), 3.8), layout="constrained")
        FigureCanvasSVG(figure)
        for axes, measure in zip(
            figure.subplots(1, len(measures), squeeze=False)[0], measures, strict=True
        ):
            for place, standing in enumerate(results.standings):
                _draw(axes, standing, measure, place)
            # A user's metric may have any name: no formulas, nothing unprintable.
            name = results.task.metric if measure == "metric" else "mean loss"
            name = "".join(char if char.isprintable() else " " for char in name)
            axes.set_title(f"{name} on dev", parse_math=False)
            axes.set_xlabel("training queries")
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
        handles, labels = axes.get_legend_handles_labels()
        if handles:
            figure.legend(
                handles,
                labels,
                loc="outside lower center",
                ncols=min(4, len(labels)),
                frameon=False,
                fontsize="small",
            )
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


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
