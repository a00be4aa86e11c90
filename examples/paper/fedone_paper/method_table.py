"""table1 and table-fedavg: methods on the seven tasks, with one and ten clients per round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from fedone_paper.federated import CURVE_EXAMPLES
from fedone_paper.methods import METHODS, Method, missing, wanted
from fedone_paper.settings import Settings
from fedone_paper.study import Point, Report, Results, Study
from fedone_paper.tables import (
    TASK_COLUMNS,
    TASK_NAMES,
    Column,
    about,
    mean_curve,
    mean_sd_text,
    number,
    score_table,
    table,
)
from fedone_sdk.evaluation.engine import Result, Trial
from fedone_sdk.reports import Line, Panel, svg_of

HELD_OUT = 8
"""Learning rates are compared on every eighth training row."""

_Cells = Mapping[str, Mapping[str, Sequence[Result]]]
"""For each method and task, the results of all seeds."""


class MethodTable(Study):
    """A table with one row per method and one column per task.

    Learning rates are compared by the task's metric on training rows that no client of a pilot has.
    The dev split is not used for this.
    """

    def grid(self, settings: Settings) -> dict[str, Sequence[Any]]:
        """Return the grid, with the methods that the user wants and that can run here."""
        rows = [row.name for row in self._rows(settings) if missing(row, settings) is None]
        return {**super().grid(settings), "row": rows}

    def seeds(self, settings: Settings, point: Point) -> Sequence[int | None]:
        """Return the seeds of a method; None if its result does not depend on a seed."""
        return range(settings.seeds) if METHODS[point["row"]].seeded else (None,)

    def key(self, point: Point) -> str:
        """Return the task, the method and its seed."""
        name = f"{point['task']}_{point['row']}"
        return name if point["seed"] is None else f"{name}_s{point['seed']}"

    def trial(self, settings: Settings, key: str, point: Point) -> Trial:
        """Return the trial of a method."""
        run = {**self.run(settings), **point, "seed": point["seed"] or 0}
        return METHODS[point["row"]].trial(key, settings, run, point["rate"])

    def rates(self, settings: Settings, point: Point) -> Sequence[float]:
        """Return the learning rates of a method, unless the user gives one."""
        searched = self.run(settings)["searches"] and "learning_rate" not in settings.options
        return METHODS[point["row"]].rates if searched else ()

    def pilot(self, settings: Settings, key: str, point: Point) -> Trial:
        """Return a run with K* = 1, also for larger K*, because it costs less."""
        pilot = {**point, "held_out": HELD_OUT, "every": 0, "clients_per_round": 1}
        return replace(self.trial(settings, key, pilot), home="table1")

    def loss(self, settings: Settings, point: Point, pilots: Sequence[Result]) -> tuple[float, ...]:
        """Return the metric on held-out rows, negated."""
        return (-pilots[0]["metric"]["after"],)

    def rate(self, settings: Settings, point: Point, results: Results) -> float | None:
        """Return the rate that pilots chose; without pilots, the user's or the first rate."""
        rates = METHODS[point["row"]].rates
        if self.rates(settings, point) or not rates:
            return super().rate(settings, point, results)
        return number(settings.options, "learning_rate", rates[0])

    def report(self, settings: Settings, results: Results) -> Report:
        """Return the table, the rates, what the runs cost, and the curves."""
        grid = self.grid(settings)
        tasks, rows = grid["task"], self._rows(settings)
        titles = {row.name: self._title(row) for row in rows}
        by_task = {task: self.runs(settings, results, task=task) for task in tasks}
        cells = {
            name: {task: [*by_task[task].get(name, {}).values()] for task in tasks}
            for name in grid["row"]
        }
        scores = {
            name: {task: _values(runs) for task, runs in row.items()} for name, row in cells.items()
        }
        federated = {name: row for name, row in cells.items() if METHODS[name].standing is None}
        figure = f"{self.name}-curves"
        notes = [
            f"- {titles[row.name]} is left out: {why}.\n"
            for row in rows
            if (why := missing(row, settings))
        ]
        parts = [
            score_table(self.name, titles, scores, quick=settings.quick),
            self.text(
                "legend", seeds=settings.seeds, curve_examples=CURVE_EXAMPLES, **self.run(settings)
            ),
            about(self.name),
            "".join([*notes, *self._cautions(titles, cells)]),
            *(self._sections(settings, results, titles, federated) if federated else ()),
            f"![The deployable prompt's metric against training queries]({figure}.svg)",
        ]
        drawn = svg_of(
            [_panel(titles, cells, task) for task in tasks],
            columns=min(len(tasks), 4),
            size=(3.0, 2.6),
            shared_legend=True,
        )
        return Report(markdown="\n\n".join(filter(None, parts)), figures={figure: drawn})

    def _rows(self, settings: Settings) -> list[Method]:
        """Return the rows that the user wants."""
        rows = [METHODS[name] for name in self.said["axes"]["row"]]
        names = wanted(settings, (row.name for row in rows))
        return [row for row in rows if (row.usual if names is None else row.name in names)]

    def _title(self, row: Method) -> str:
        # The SDK's default method has slots, and does not belong to the paper's framework.
        own = row.standing is None and not row.slots
        return f"{self.said['framework']}-{row.title}" if own else row.title

    def _cautions(self, titles: Mapping[str, str], cells: _Cells) -> list[str]:
        """Return notes on cells whose runs had problems."""
        each = [
            (f"{titles[name]} on {TASK_NAMES[task]}", TASK_NAMES[task], run)
            for name, row in cells.items()
            for task, runs in row.items()
            for run in runs
        ]
        reused = sorted({task for _, task, run in each if run.get("reused_rows")})
        lines = [self.text("reused", tasks=", ".join(reused)) + "\n"] if reused else []
        return lines + [
            f"- {cell}: a run ended as {run['status']} after {run['rounds']} rounds.\n"
            for cell, _, run in each
            if run.get("status", "completed") != "completed"
        ]

    def _sections(
        self, settings: Settings, results: Results, titles: Mapping[str, str], cells: _Cells
    ) -> list[str]:
        """Return the learning rates, and the costs of a run."""
        rates = {
            titles[name]: {
                task: self.rate(settings, {"task": task, "row": name}, results) for task in row
            }
            for name, row in cells.items()
        }
        columns = {TASK_NAMES[task]: partial(_rate, task) for task in self.grid(settings)["task"]}
        searched = any(self.rates(settings, {"row": name}) for name in cells)
        how = self.text("searched" if searched else "given", held_out=HELD_OUT)
        costs: dict[str, Column] = {
            "Training queries": lambda _, runs: _costs(runs, "spent", "queries"),
            "Answers from memory": lambda _, runs: _costs(runs, "cache", "hits"),
            "MB sent": lambda _, runs: _costs(runs, "communication", "upload_bytes", 2**-20),
            "MB received": lambda _, runs: _costs(runs, "communication", "download_bytes", 2**-20),
            "Seconds of training": lambda _, runs: mean_sd_text(
                (run["wall_s"] for run in runs if not run.get("resumed")), scale=1, digits=0
            ),
        }
        held = {
            titles[name]: [one for runs in row.values() for one in runs]
            for name, row in cells.items()
        }
        return [
            f"## Learning rates\n\n{table('Method', rates, columns)}\n{how}",
            f"## Cost of one run\n\n{table('Method', held, costs)}\n{self.text('costs')}",
        ]


def _values(runs: Sequence[Result]) -> list[float]:
    return [run["metric"]["after"] for run in runs]


def _rate(task: str, _: str, row: Mapping[str, float | None]) -> str:
    return "-" if row[task] is None else f"{row[task]:g}"


def _costs(runs: Sequence[Result], part: str, name: str, scale: float = 1.0) -> str:
    return mean_sd_text((run[part][name] for run in runs), scale=scale, digits=2 * (scale < 1))


def _panel(titles: Mapping[str, str], cells: _Cells, task: str) -> Panel:
    """Return a panel with curves of methods that query, and levels of other methods."""
    lines, levels, last = [], [], 1.0
    for place, (name, row) in enumerate(cells.items()):
        runs: Sequence[Result] = row[task]
        look: dict[str, Any] = {"label": titles[name], "color": f"C{place}"}
        # Without the first point, which is measured on other rows.
        curves = [
            [(at["queries"], 100 * at["metric"]) for at in run["curve"] if at["round"] >= 0]
            for run in runs
            if "curve" in run
        ]
        if any(queries for curve in curves for queries, _ in curve):
            x, y, _ = mean_curve([curve for curve in curves if curve])
            lines.append(Line(x=x, y=y, style=".-", **look))
            last = max([last, *x])
        elif runs:
            levels.append((100 * fmean(_values(runs)), look))
    lines += [Line(x=[0, last], y=[level] * 2, style="--", **look) for level, look in levels]
    return Panel(lines=lines, title=TASK_COLUMNS[task])
