"""What the paper prints and where (`paper.yaml`); every report prints it next to our numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from statistics import fmean
from typing import Any

from fedone_paper.summary import markdown_table, mean_sd_text
from fedone_sdk.glue import GLUE_TASKS, glue_task

TASK_NAMES = {**{task: task.upper() for task in GLUE_TASKS}, "sst2": "SST-2", "cola": "CoLA"}
_METRICS = {"accuracy": "acc", "f1": "F1", "matthews": "Matthews"}
TASK_COLUMNS = {
    task: f"{name} ({_METRICS[glue_task(task).metric]})" for task, name in TASK_NAMES.items()
}


@cache
def _all() -> Mapping[str, Any]:
    import yaml

    text = (files("fedone_paper") / "paper.yaml").read_text(encoding="utf-8")
    found: Mapping[str, Any] = yaml.safe_load(text)
    return found


def printed(name: str) -> Mapping[str, Any]:
    """Return the printed numbers of an experiment, or of ``setup`` or ``datasets``.

    They have a ``place`` and, for a table, ``setting``, ``columns`` and ``rows``; a cell is a
    number, or a mean and its spread.
    """
    found: Mapping[str, Any] = _all()[name]
    return found


def about(name: str) -> str:
    """Return the place of the numbers in the paper, and their setting."""
    found = printed(name)
    says = f" It says: {found['says']}." if "says" in found else ""
    return f"The paper: {found['place']}; {found['setting']}.{says}"


def paper_row(
    name: str, row: str, columns: Sequence[object], *, average: bool = False
) -> list[str]:
    """Return a method's cells in some columns, ``-`` where the paper has none.

    With `average`, the printed average of all columns comes last.
    """
    found = printed(name)
    cells = dict(zip(found["columns"], found["rows"].get(row, ()), strict=False))
    digits = found.get("digits", 1)

    def text(cell: Sequence[float] | None) -> str:
        return "-" if cell is None else " ± ".join(f"{number:.{digits}f}" for number in cell)

    texts = [text(cells.get(column)) for column in columns]
    if average:
        whole = row in found["rows"] and list(columns) == found["columns"]
        texts.append(f"{found['averages'][row]:.2f}" if whole else "-")
    return texts


def score_table(
    name: str, titles: Mapping[str, str], scores: Mapping[str, Mapping[str, Sequence[float]]]
) -> str:
    """Return a table of methods and tasks, with the paper's row below each of ours.

    The last column is the mean over tasks, where a method has results of all of them. Scores are
    metrics over seeds, by method and task.
    """
    tasks = list(next(iter(scores.values()), {}))
    rows = []
    for method, row in scores.items():
        means = [fmean(values) for values in row.values() if values]
        average = mean_sd_text([fmean(means)]) if len(means) == len(tasks) else "-"
        rows.append([titles[method], *map(mean_sd_text, row.values()), average])
        if method in printed(name)["rows"]:
            rows.append(["the paper", *paper_row(name, method, tasks, average=True)])
    return markdown_table(["Method", *(TASK_COLUMNS[task] for task in tasks), "Average"], rows)
