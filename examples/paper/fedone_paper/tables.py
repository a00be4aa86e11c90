"""Tables of results in Markdown, next to the paper's numbers (`paper.yaml`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, TypeVar

from fedone_paper.settings import declared
from fedone_sdk.errors import ArgumentError

Number = TypeVar("Number", int, float, float | None)

Column = Callable[[Any, Any], str]
"""Formats a cell, given a key and its result."""

TASK_NAMES: Mapping[str, str] = declared()["task_names"]
TASK_COLUMNS: Mapping[str, str] = declared()["task_columns"]


def mean_sd_text(values: Iterable[float], *, scale: float = 100.0, digits: int = 1) -> str:
    """Return ``78.3 ± 1.2``; only the mean for one value, ``-`` without values.

    Args:
        values: The values, for example shares.
        scale: Factor of the values; 100 turns shares into per cent.
        digits: Digits after the decimal point.
    """
    found = [value * scale for value in values]
    if not found:
        return "-"
    numbers = [fmean(found), stdev(found)] if len(found) > 1 else found
    return " ± ".join(f"{value:.{digits}f}" for value in numbers)


def mean_curve(
    curves: Sequence[Sequence[tuple[float, float]]], grid: Sequence[float] | None = None
) -> tuple[list[float], list[float], list[float]]:
    """Return the mean of interpolated curves, and the sample standard deviation.

    The result ends where the shortest curve ends, because later means would have fewer runs.

    Args:
        curves: At least one curve, each with its points in the order of x.
        grid: The x values of the mean; None for the x values of the shortest curve.

    Returns:
        The x values, means and deviations (0 for a single curve).
    """
    import numpy as np

    if grid is None:
        grid = [x for x, _ in min(curves, key=lambda curve: curve[-1][0])]
    values = np.array([np.interp(grid, *np.transpose(curve)) for curve in curves])
    spread = values.std(axis=0, ddof=len(curves) > 1)
    return [*grid], values.mean(axis=0).tolist(), spread.tolist()


def table(first: str | None, rows: Mapping[Any, Any], columns: Mapping[str, Column]) -> str:
    """Return a Markdown table of results.

    Args:
        first: Name of the first column, which has the keys; None for no such column.
        rows: The results by key.
        columns: Functions that format cells, by the name of the column.
    """
    if first is not None:
        columns = {first: lambda k, _: f"{k:,}" if isinstance(k, int) else str(k), **columns}
    cells = ([cell(key, value) for cell in columns.values()] for key, value in rows.items())
    return _markdown(list(columns), cells)


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    alignment = ["---", *["---:"] * (len(header) - 1)]
    lines = (
        " | ".join(cell.replace("|", "\\|") for cell in cells)
        for cells in (header, alignment, *rows)
    )
    return "".join(f"| {line} |\n" for line in lines)


def number(options: Mapping[str, str], name: str, default: Number) -> Number:
    """Return a positive number of ``--set``, or the default; whole if the default is whole.

    Raises:
        SpecError: The option is not such a number.
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


def printed(name: str) -> Mapping[str, Any]:
    """Return the numbers that the paper prints for a study, or for ``setup`` or ``datasets``.

    ``place`` is the place in the paper. A table has ``setting``, ``columns`` and ``rows``. A cell
    is a number, or a mean and its spread.
    """
    found: Mapping[str, Any] = declared("paper")[name]
    return found


def about(name: str) -> str:
    """Return a sentence: where the paper prints the numbers, and in which setting."""
    found = printed(name)
    says = f" It says: {found['says']}." if "says" in found else ""
    return f"The paper: {found['place']}; {found['setting']}.{says}"


def paper_row(name: str, row: str, columns: Sequence[object]) -> list[str]:
    """Return a method's cells in the paper for some columns; ``-`` if the paper has no number."""
    found = printed(name)
    cells = dict(zip(found["columns"], found["rows"].get(row, ()), strict=False))
    digits = found.get("digits", 1)
    return [
        " ± ".join(f"{number:.{digits}f}" for number in cells[column]) if column in cells else "-"
        for column in columns
    ]


def score_table(
    name: str,
    titles: Mapping[str, str],
    scores: Mapping[str, Mapping[str, Sequence[float]]],
    *,
    quick: bool,
) -> str:
    """Return a table of methods and tasks. If not `quick`, the paper's row is below ours.

    Scores are metrics over seeds, by method and task. The table has no mean over tasks, because on
    some tasks all methods are near chance.
    """
    tasks = list(next(iter(scores.values()), {}))
    rows = []
    for method, row in scores.items():
        rows.append([titles[method], *map(mean_sd_text, row.values())])
        if method in printed(name)["rows"] and not quick:
            rows.append(["the paper", *paper_row(name, method, tasks)])
    return _markdown(["Method", *(TASK_COLUMNS[task] for task in tasks)], rows)
