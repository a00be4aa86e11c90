"""Means, deviations and Markdown tables of results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from fedone_sdk.errors import ArgumentError

Number = TypeVar("Number", int, float, float | None)

Column = Callable[[Any, Any], str]
"""Formats a cell, given a key and its result."""


def mean_sd(values: Iterable[float]) -> tuple[float, float | None]:
    """Return the mean and the sample standard deviation (None for a single value).

    Raises:
        ValueError: There are no values.
    """
    found = list(values)
    if not found:
        raise ValueError("no values")
    return math.fsum(found) / len(found), statistics.stdev(found) if len(found) > 1 else None


def mean_sd_text(values: Iterable[float], *, scale: float = 100.0, digits: int = 1) -> str:
    """``78.3 ± 1.2``; only the mean where there is one value, ``-`` where there is none.

    Args:
        values: For example shares.
        scale: What they are multiplied by; 100 makes per cent of shares.
        digits: After the point.
    """
    found = [value * scale for value in values]
    if not found:
        return "-"
    mean, deviation = mean_sd(found)
    text = f"{mean:.{digits}f}"
    return text if deviation is None else f"{text} ± {deviation:.{digits}f}"


def mean_curve(
    curves: Sequence[Sequence[tuple[float, float]]], grid: Sequence[float] | None = None
) -> tuple[list[float], list[float], list[float]]:
    """Return the mean of curves, which are interpolated, and the sample deviation.

    After the end of the shortest curve the mean would be of fewer runs.

    Args:
        curves: Points of each run, by their abscissae; at least one curve.
        grid: Abscissae of the mean; None takes those of the shortest curve.

    Returns:
        Abscissae, means, deviations (0 for a single curve).
    """
    import numpy as np

    if grid is None:
        grid = [x for x, _ in min(curves, key=lambda curve: curve[-1][0])]
    values = np.array([np.interp(grid, *np.transpose(curve)) for curve in curves])
    spread = values.std(axis=0, ddof=len(curves) > 1)
    return [*grid], values.mean(axis=0).tolist(), spread.tolist()


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table: the first column to the left, the others to the right."""
    alignment = ["---", *["---:"] * (len(header) - 1)]
    lines = (
        "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        for cells in (header, alignment, *rows)
    )
    return "".join(f"{line}\n" for line in lines)


def table(first: str | None, rows: Mapping[Any, Any], columns: Mapping[str, Column]) -> str:
    """Return a Markdown table of results.

    Args:
        first: Name of the first column, which holds the keys; None leaves it out.
        rows: The results by key.
        columns: By the name of the column.
    """
    if first is not None:
        columns = {first: lambda k, _: f"{k:,}" if isinstance(k, int) else str(k), **columns}
    cells = ([cell(key, value) for cell in columns.values()] for key, value in rows.items())
    return markdown_table(list(columns), cells)


def number(options: Mapping[str, str], name: str, default: Number) -> Number:
    """Return the positive number of ``--set``, whole if the default is; else the default.

    Raises:
        SpecError: It is no such number.
    """
    if name not in options:
        return default
    whole = isinstance(default, int)
    try:
        found: Any = (int if whole else float)(options[name])
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        what = "whole number" if whole else "number"
        raise ArgumentError(f"--set {name}: must be a positive {what}, not {options[name]!r}")
    return found  # type: ignore[no-any-return]
