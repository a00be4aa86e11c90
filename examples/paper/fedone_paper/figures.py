"""The one writer of figures: panels of lines, error bars, bands and levels."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedone_paper.study import Draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Points of one kind.

    Attributes:
        error: How far their error bars reach, below and above.
        band: Whether the errors are a band instead of bars.
        label: In the legend; empty leaves the line out of it.
        style: Marker and line, as matplotlib writes them.
        color: As matplotlib names it; None is the next one.
    """

    x: Sequence[float]
    y: Sequence[float]
    error: tuple[Sequence[float], Sequence[float]] | None = None
    band: bool = False
    label: str = ""
    style: str = "-"
    color: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A pair of axes with their names `x` and `y`.

    Attributes:
        level: Height of a dotted horizontal line; None draws none.
        level_label: Its name in the legend; empty leaves it out.
        ticks: Labels of the horizontal axis by their places; None leaves them to matplotlib.
        log: The axes with a logarithmic scale, of ``xy``.
    """

    lines: Sequence[Line]
    x: str
    y: str
    title: str = ""
    level: float | None = None
    level_label: str = ""
    ticks: Mapping[float, str] | None = None
    log: str = ""


def drawing(
    panels: Sequence[Panel],
    *,
    columns: int | None = None,
    size: tuple[float, float] = (4.5, 4.0),
    shared_legend: bool = False,
) -> Draw:
    """Return what draws the panels.

    Args:
        panels: Row by row.
        columns: Panels of a row; None puts all of them in one.
        size: Width and height of a panel, inches.
        shared_legend: Whether all panels have one legend, above them.
    """

    def draw(figure: Figure) -> None:
        width = columns or len(panels)
        rows = -(-len(panels) // width)
        figure.set_size_inches(1.0 + size[0] * width, size[1] * rows + 0.8 * shared_legend)
        places = figure.subplots(rows, width, squeeze=False).flat
        for axes in places[len(panels) :]:
            axes.set_axis_off()
        for panel, axes in zip(panels, places, strict=False):
            _draw(axes, panel)
            if shared_legend:  # many small panels
                axes.tick_params(labelsize=7)
            if not shared_legend and axes.get_legend_handles_labels()[0]:
                axes.legend()
        handles, labels = places[0].get_legend_handles_labels()
        if shared_legend and handles:
            figure.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=7)

    return draw


def _draw(axes: Axes, panel: Panel) -> None:
    for line in panel.lines:
        look: dict[str, Any] = {
            "label": line.label or None,
            **({"color": line.color} if line.color else {}),
        }
        if line.error is None or line.band:
            (drawn,) = axes.plot(line.x, line.y, line.style, **look)
        else:
            axes.errorbar(line.x, line.y, line.error, fmt=line.style, capsize=2, **look)
        if line.error is not None and line.band:
            low = [value - error for value, error in zip(line.y, line.error[0], strict=True)]
            high = [value + error for value, error in zip(line.y, line.error[1], strict=True)]
            axes.fill_between(line.x, low, high, color=drawn.get_color(), alpha=0.2, lw=0)
    if panel.level is not None:
        label = panel.level_label or None
        axes.axhline(panel.level, color="grey", linestyle=":", lw=1, label=label)
    axes.set(xlabel=panel.x, ylabel=panel.y, title=panel.title)
    if "x" in panel.log:
        axes.set_xscale("log")
    if "y" in panel.log:
        axes.set_yscale("log")
    if panel.ticks is not None:
        axes.set_xticks(list(panel.ticks), list(panel.ticks.values()))
        axes.set_xticks([], minor=True)


def images_of(draw: Draw) -> Iterator[tuple[str, bytes]]:
    """Yield a figure's bytes by kind of file; the same figure gives the same bytes."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "fedone"}):
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        metadata: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "png": {}}
        for kind, facts in metadata.items():
            stream = io.BytesIO()
            figure.savefig(stream, format=kind, dpi=150, metadata=facts)
            yield kind, stream.getvalue()
