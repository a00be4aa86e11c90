"""Figures as SVG: panels with lines, error bars and bands; and the curves of a run."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from fedone_sdk.evaluation.outcomes import Which, curve_rows
from fedone_sdk.evaluation.verdict import measured, no_prompt_biased

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedone_sdk.reports.source import ReportedRun

_SMOOTHING = 0.1
"""Weight of the newest round in the smoothed loss."""

_INK, _BLUE, _GREY, _GREEN = "#1c2430", "#2563a8", "#6b7280", "#1b7f5c"

_DARK = {_INK: "#e6e9ee", _BLUE: "#7db2ea", _GREY: "#a5aebb", _GREEN: "#5fcf9f"}
"""Colours in dark mode."""

_STYLE: Any = {
    "font.size": 11.0,
    "savefig.transparent": True,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK
    ),
    "grid.color": _GREY,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of points.

    Attributes:
        error: Lengths of the error bars below and above the points.
        band: Whether the errors are drawn as a band instead of bars.
        label: Name in the legend; empty for no entry.
        style: Marker and line, a format string of matplotlib.
        color: A colour of matplotlib; None for the next colour of its cycle.
        faint: Whether the line is thin and transparent.
    """

    x: Sequence[float]
    y: Sequence[float]
    error: tuple[Sequence[float], Sequence[float]] | None = None
    band: bool = False
    label: str = ""
    style: str = "-"
    color: str | None = None
    faint: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A pair of axes with the labels `x` and `y`.

    Attributes:
        level: Height of a dotted horizontal line; None for no line.
        level_label: Name of this line in the legend; empty for no entry.
        ticks: Labels of the horizontal axis by position; None for matplotlib's choice.
        log: The axes with a logarithmic scale: ``x``, ``y`` or ``xy``.
    """

    lines: Sequence[Line]
    x: str = "training queries"
    y: str = ""
    title: str = ""
    level: float | None = None
    level_label: str = ""
    ticks: Mapping[float, str] | None = None
    log: str = ""


def svg_of(
    panels: Sequence[Panel],
    *,
    columns: int | None = None,
    size: tuple[float, float] = (4.5, 4.0),
    shared_legend: bool = False,
    style: Mapping[str, Any] | None = None,
) -> str:
    """Return the SVG of panels; the same panels give the same bytes.

    Args:
        panels: The panels, row by row.
        columns: Panels per row; None for one row.
        size: Width and height of a panel, inches.
        shared_legend: Whether all panels share one legend, below them.
        style: Settings of matplotlib.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    width = columns or len(panels)
    rows = -(-len(panels) // width)
    # Text is kept as text, which is smaller and accessible to screen readers.
    settings: Any = {"svg.hashsalt": "fedone", "svg.fonttype": "none", **(style or {})}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(size[0] * width, size[1] * rows), layout="constrained")
        FigureCanvasSVG(figure)
        grid = figure.subplots(rows, width, squeeze=False).flat
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        for axes, panel in zip(grid, panels, strict=False):
            _draw(axes, panel)
            if not shared_legend and axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize="small", frameon=False)
        handles, labels = grid[len(panels) - 1].get_legend_handles_labels()
        if shared_legend and handles:
            figure.legend(
                handles,
                labels,
                loc="outside lower center",
                ncols=min(2 if len(panels) == 1 else 4, len(labels)),
                frameon=False,
                fontsize="small",
            )
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


def _draw(axes: Axes, panel: Panel) -> None:
    for line in panel.lines:
        options: dict[str, Any] = {"label": line.label or None}
        if line.color:
            options["color"] = line.color
        if line.faint:
            options |= {"alpha": 0.3, "linewidth": 0.8}
        if line.error is not None and not line.band:
            axes.errorbar(line.x, line.y, line.error, fmt=line.style, capsize=2, **options)
            continue
        (curve,) = axes.plot(line.x, line.y, line.style, markersize=4, **options)
        if line.error is not None:
            low = [value - error for value, error in zip(line.y, line.error[0], strict=True)]
            high = [value + error for value, error in zip(line.y, line.error[1], strict=True)]
            axes.fill_between(line.x, low, high, color=curve.get_color(), alpha=0.2, lw=0)
    if panel.level is not None:
        axes.axhline(panel.level, color=_GREY, linestyle=":", label=panel.level_label or None)
    axes.set(xlabel=panel.x, ylabel=panel.y)
    # XML does not allow all characters that the name of a metric may contain.
    title = "".join(char if char.isprintable() else " " for char in panel.title)
    axes.set_title(title, parse_math=False)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if "x" in panel.log:
        axes.set_xscale("log")
    if "y" in panel.log:
        axes.set_yscale("log")
    if panel.ticks is not None:
        axes.set_xticks(list(panel.ticks), list(panel.ticks.values()))
        axes.set_xticks([], minor=True)


def curves_svg(run: ReportedRun) -> tuple[str, str]:
    """Return the SVGs of metric and loss over training queries, in light and dark mode."""
    losses = [entry.mean_loss for entry in run.result.history]
    smooth = list(accumulate(losses, lambda mean, loss: mean + _SMOOTHING * (loss - mean)))
    rounds = Panel(
        title="mean loss of a round's prompts",
        lines=[
            Line(x=run.queries, y=losses, color=_GREY, faint=True, label="of each round"),
            Line(x=run.queries, y=smooth, color=_BLUE, label="smoothed"),
        ],
    )
    metric, loss = (
        _both_modes(svg_of([panel], size=(4.6, 3.2), shared_legend=True, style=_STYLE))
        for panel in (_metric_panel(run), rounds)
    )
    return metric, loss


def _both_modes(text: str) -> str:
    # These rules override the colours that matplotlib writes on each element.
    rules = (
        f'[style*="{kind}: {light}"]{{{kind}:{dark} !important}}'
        for light, dark in _DARK.items()
        for kind in ("fill", "stroke")
    )
    dark = f"@media (prefers-color-scheme: dark){{{''.join(rules)}}}"
    return text.replace("</style>", f"{dark}</style>", 1)


def _metric_panel(run: ReportedRun) -> Panel:
    """Return the panel of the metric; all values are for the rows that the run measures."""
    metric, queries = run.result.metric, run.queries
    points = {
        spent: entry.metric
        for spent, entry in zip(queries, run.result.history, strict=True)
        if entry.metric is not None
    }
    after = run.outcomes.get("after")
    count = 0 if after is None else len(after.targets or after.losses)
    rows = curve_rows(run.spec, count)
    lines = []
    if points:
        lines.append(
            Line(x=[*points], y=[*points.values()], style=".-", color=_BLUE, label="during the run")
        )
    end = queries[-1] if queries else 0
    ends_of_curve: tuple[tuple[Which, float, str, str], ...] = (
        ("before", 0, _GREY, "untrained"),
        ("after", end, _GREEN, "tuned, with 95 % interval"),
    )
    for which, x, color, label in ends_of_curve:
        value, ends = _on_rows(run, which, rows, getattr(metric, which))
        if value is None:
            continue
        error = ([value - ends[0]], [ends[1] - value]) if ends and which == "after" else None
        lines.append(Line(x=[x], y=[value], error=error, style="o", color=color, label=label))
    biased = metric.baseline is not None and metric.baseline == metric.no_prompt_biased
    if run.result.verdict is not None and run.result.verdict.against is not None:
        biased = run.result.verdict.against == "no_prompt_biased"
    level, _ = _on_rows(run, "no_prompt", rows, metric.baseline, biased=biased)
    part = f" ({len(rows)} of {count:,} rows)" if len(rows) < count else ""
    name = "label bias alone" if biased else "no prompt"
    return Panel(lines=lines, title=f"{metric.name} on dev{part}", level=level, level_label=name)


def _on_rows(
    run: ReportedRun,
    which: Which,
    rows: Sequence[int],
    default: float | None,
    *,
    biased: bool = False,
) -> tuple[float | None, tuple[float, float] | None]:
    """Return a prompt's metric on some rows, and its interval; without outcomes, `default`."""
    outcomes, task, verdict = run.outcomes.get(which), run.spec.task, run.result.verdict
    if outcomes is not None and biased:
        plain = no_prompt_biased(task, outcomes, None if verdict is None else verdict.bias)
        outcomes = plain and plain.outcomes
    if outcomes is None or not rows or default is None or ":" in task.metric:
        return default, None
    return measured(task, outcomes.on(rows))
