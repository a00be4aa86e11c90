"""Tables of results in Markdown, next to what the paper prints (`paper.yaml`)."""

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
    """``78.3 ± 1.2``; only the mean where there is one value, ``-`` where there is none.

    Args:
        values: For example shares.
        scale: What they are multiplied by; 100 makes per cent of shares.
        digits: After the point.
    """
    found = [value * scale for value in values]
    if not found:
        return "-"
    numbers = [fmean(found), stdev(found)] if len(found) > 1 else found
    return " ± ".join(f"{value:.{digits}f}" for value in numbers)


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
    return _markdown(list(columns), cells)


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    alignment = ["---", *["---:"] * (len(header) - 1)]
    lines = (
        " | ".join(cell.replace("|", "\\|") for cell in cells)
        for cells in (header, alignment, *rows)
    )
    return "".join(f"| {line} |\n" for line in lines)


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


def printed(name: str) -> Mapping[str, Any]:
    """Return the printed numbers of a study, or of ``setup`` or ``datasets``.

    They have a ``place`` and, for a table, ``setting``, ``columns`` and ``rows``; a cell is a
    number, or a mean and its spread.
    """
    found: Mapping[str, Any] = declared("paper")[name]
    return found


def about(name: str) -> str:
    """Return the place of the numbers in the paper, and their setting."""
    found = printed(name)
    says = f" It says: {found['says']}." if "says" in found else ""
    return f"The paper: {found['place']}; {found['setting']}.{says}"


def paper_row(name: str, row: str, columns: Sequence[object]) -> list[str]:
    """Return a method's cells in some columns, ``-`` where the paper has none."""
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
    """Return a table of methods and tasks, without `quick` with the paper's row below ours.

    It has no mean over tasks, which would weigh those at chance as much as the others. Scores are
    metrics over seeds, by method and task.
    """
    tasks = list(next(iter(scores.values()), {}))
    rows = []
    for method, row in scores.items():
        rows.append([titles[method], *map(mean_sd_text, row.values())])
        if method in printed(name)["rows"] and not quick:
            rows.append(["the paper", *paper_row(name, method, tasks)])
    return _markdown(["Method", *(TASK_COLUMNS[task] for task in tasks)], rows)
