"""The curves of a run, as SVG."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from fedone_sdk.reports.source import ReportedRun

_SMOOTHING = 0.1
"""Weight of the newest round in the smoothed loss."""

_INK, _BLUE, _GREY, _GREEN = "#1c2430", "#2563a8", "#6b7280", "#1b7f5c"

_DARK = {_INK: "#e6e9ee", _BLUE: "#7db2ea", _GREY: "#a5aebb", _GREEN: "#5fcf9f"}
"""Replacements of colours in dark mode."""

_STYLE: Any = {
    "font.size": 11.0,
    "savefig.transparent": True,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK
    ),
    "grid.color": _GREY,
}


def curves_svg(run: ReportedRun) -> str:
    """Return the SVG of metric and loss over training queries; the same run gives the same figure.

    The two plots are stacked, fit the width of a phone, and support light and dark mode.
    """

    def draw(figure: Figure) -> None:
        upper, lower = figure.subplots(2, 1)
        _draw_metric(upper, run)
        _draw_loss(lower, run)

    text = svg_of(draw, size=(4.6, 5.8), style=_STYLE)
    return text.replace("</style>", f"{_in_the_dark()}</style>", 1)


def svg_of(
    draw: Callable[[Figure], None], *, size: tuple[float, float], style: Mapping[str, Any]
) -> str:
    """Return the SVG of axes over training queries; the same drawing gives the same bytes."""
    # Text is kept as text, which is smaller and accessible to screen readers.
    settings: Any = {"svg.hashsalt": "fedone", "svg.fonttype": "none", **style}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        for axes in figure.axes:
            axes.set_xlabel("training queries")
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


def printable(name: str) -> str:
    """Return a metric's name, which is arbitrary, without characters that XML does not allow."""
    return "".join(char if char.isprintable() else " " for char in name)


def _in_the_dark() -> str:
    rules = (
        f'[style*="{kind}: {light}"]{{{kind}:{dark} !important}}'
        for light, dark in _DARK.items()
        for kind in ("fill", "stroke")
    )
    return f"@media (prefers-color-scheme: dark){{{''.join(rules)}}}"


def _draw_metric(axes: Axes, run: ReportedRun) -> None:
    metric, queries = run.result.metric, run.queries
    points = [
        (spent, entry.metric)
        for spent, entry in zip(queries, run.result.history, strict=True)
        if entry.metric is not None
    ]
    if points:
        axes.plot(*zip(*points, strict=True), color=_BLUE, marker=".", label=_along(run))
    if metric.no_prompt is not None:
        axes.axhline(metric.no_prompt, color=_GREY, linestyle=":", label="no prompt")
    if metric.before is not None:
        axes.plot([0], [metric.before], color=_GREY, marker="o", ls="", label="untrained prompt")
    if metric.after is not None:
        end = queries[-1] if queries else 0
        axes.plot([end], [metric.after], color=_GREEN, marker="o", ls="", label="tuned prompt")
    axes.set_title(f"{printable(metric.name)} on dev", parse_math=False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small", frameon=False)


def _along(run: ReportedRun) -> str:
    after = run.outcomes.get("after")
    if after is None or run.spec is None:
        return "along the way"
    part = run.spec.evaluation.examples
    if part >= len(after.targets or after.losses):
        return "along the way"
    return f"along the way, on {part} examples"


def _draw_loss(axes: Axes, run: ReportedRun) -> None:
    losses = [entry.mean_loss for entry in run.result.history]
    smooth = list(accumulate(losses, lambda mean, loss: mean + _SMOOTHING * (loss - mean)))
    axes.plot(run.queries, losses, color=_GREY, alpha=0.4, linewidth=0.8)
    axes.plot(run.queries, smooth, color=_BLUE)
    axes.set_title("mean loss of a round's prompts")
