"""table1 and table-fedavg: methods on the seven tasks, one and ten clients per round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedone_paper.federated import CURVE_EXAMPLES
from fedone_paper.figures import Line, Panel, drawing
from fedone_paper.methods import METHODS, Method, missing, wanted
from fedone_paper.paper import TASK_COLUMNS, TASK_NAMES, about, score_table
from fedone_paper.settings import Settings
from fedone_paper.study import Point, Report, Results, Study
from fedone_paper.summary import mean_curve, mean_sd, mean_sd_text, number, table
from fedone_sdk.evaluation.engine import Result, Trial

HELD_OUT = 8
"""Learning rates are compared on every eighth training row."""

_Cells = Mapping[str, Mapping[str, Mapping[int | None, Result]]]
"""Results by the method's title, the task and the seed."""


class MethodTable(Study):
    """A table with one row per method and one column per task.

    Learning rates are compared by the task's metric on training rows that the pilots' clients do
    not hold. The dev split is only reported.
    """

    def grid(self, settings: Settings) -> dict[str, Sequence[Any]]:
        """With the methods that the user wants and that can run here."""
        rows = [row.name for row in self._rows(settings) if missing(row, settings) is None]
        return {**super().grid(settings), "row": rows}

    def seeds(self, settings: Settings, point: Point) -> Sequence[int | None]:
        """Return the seeds of a method; None where its result does not depend on it."""
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
        """Return a run at K* = 1 for any K*: ten times the cost would buy little here."""
        pilot = {**point, "held_out": HELD_OUT, "every": 0, "clients_per_round": 1}
        return replace(self.trial(settings, key, pilot), home="table1")

    def loss(self, settings: Settings, point: Point, pilots: Sequence[Result]) -> tuple[float, ...]:
        """Return the metric on held-out rows, negated."""
        return (-pilots[0]["metric"]["after"],)

    def rate(self, settings: Settings, point: Point, results: Results) -> float | None:
        """Return the learning rate that pilots chose; else the user's, or the method's first."""
        rates = METHODS[point["row"]].rates
        if self.rates(settings, point) or not rates:
            return super().rate(settings, point, results)
        return number(settings.options, "learning_rate", rates[0])

    def report(self, settings: Settings, results: Results) -> Report:
        """Return the table, the rates, what the runs cost, and the curves."""
        grid, all_rows = self.grid(settings), self._rows(settings)
        tasks, titles = grid["task"], {row.name: self._title(row) for row in all_rows}
        absent = {titles[r.name]: why for r in all_rows if (why := missing(r, settings))}
        by_task = {task: self.runs(settings, results, task=task) for task in tasks}
        cells = {
            name: {task: by_task[task].get(name, {}) for task in tasks} for name in grid["row"]
        }
        federated = [name for name in cells if METHODS[name].federated]
        rates = {
            name: {
                task: self.rate(settings, {"task": task, "row": name}, results) for task in tasks
            }
            for name in federated
        }
        scores = {
            name: {task: _values(cell) for task, cell in row.items()} for name, row in cells.items()
        }
        titled = {titles[name]: row for name, row in cells.items()}
        figure = f"{self.name}-curves"
        parts = [
            score_table(self.name, titles, scores),
            self._legend(settings),
            f"{about(self.name)}\n",
            *self._cautions(titled, absent),
        ]
        if federated:
            searched = any(self.rates(settings, {"row": name}) for name in cells)
            parts.append(
                self._rates_section({titles[name]: rates[name] for name in rates}, searched)
            )
            parts.append(_cost_section({titles[name]: cells[name] for name in federated}))
        parts.append(f"![The deployable prompt's metric against training queries]({figure}.svg)\n")
        return Report(
            markdown="\n".join(parts),
            figures={
                figure: drawing(
                    [_panel(titled, task) for task in tasks],
                    columns=min(len(tasks), 4),
                    size=(3.0, 2.6),
                    shared_legend=True,
                )
            },
        )

    def _rows(self, settings: Settings) -> list[Method]:
        """Return the rows that the user wants."""
        rows = [METHODS[name] for name in self.said["axes"]["row"]]
        names = wanted(settings, (row.name for row in rows))
        return [row for row in rows if (row.usual if names is None else row.name in names)]

    def _title(self, row: Method) -> str:
        # The default has slots; it is no method of the paper's framework.
        return (
            f"{self.said['framework']}-{row.title}"
            if row.federated and not row.slots
            else row.title
        )

    def _legend(self, settings: Settings) -> str:
        spread = (
            f"mean ± sample standard deviation over {settings.seeds} seeds, one number where the "
            "result does not depend on the seed"
            if settings.seeds > 1
            else "one seed"
        )
        values = {**self.run(settings), "curve_examples": CURVE_EXAMPLES}
        return self.text("legend", spread=spread, **values) + "\n"

    def _cautions(self, cells: _Cells, absent: Mapping[str, str]) -> list[str]:
        """Return the notes on single cells."""
        lines = [f"- {title} is left out: {why}." for title, why in absent.items()]
        each = [
            (title, TASK_NAMES[task], seed, result)
            for title, row in cells.items()
            for task, cell in row.items()
            for seed, result in cell.items()
        ]
        if reused := {task for _, task, _, result in each if result.get("reused_rows")}:
            lines.append(self.text("reused", tasks=", ".join(sorted(reused))))
        lines += [
            f"- {title} on {task}, seed {seed}: ended as {result['status']} after "
            f"{result['rounds']} rounds."
            for title, task, seed, result in each
            if result.get("status", "completed") != "completed"
        ]
        return ["\n".join(lines) + "\n"] if lines else []

    def _rates_section(
        self, rates: Mapping[str, Mapping[str, float | None]], searched: bool
    ) -> str:
        columns = {
            TASK_NAMES[task]: lambda _, row, task=task: (
                "-" if row[task] is None else f"{row[task]:g}"
            )
            for task in next(iter(rates.values()))
        }
        given = "Not searched: given, or the first of each search."
        seed = self.said["pilot_seeds"][0]
        how = self.text("searched", seed=seed, held_out=HELD_OUT) if searched else given
        return f"## Learning rates\n\n{table('Method', rates, columns)}\n{how}\n"


def _values(cell: Mapping[int | None, Result]) -> list[float]:
    return [result["metric"]["after"] for result in cell.values()]


def _cost_section(cells: _Cells) -> str:
    rows = {
        title: [run for cell in row.values() for run in cell.values()]
        for title, row in cells.items()
    }

    def sent(run: Result) -> int:
        return int(run["communication"]["upload_bytes"] + run["communication"]["download_bytes"])

    def whole(values: Sequence[float]) -> str:
        return mean_sd_text(values, scale=1, digits=0)

    columns = {
        "Training queries": lambda _, runs: whole([run["spent"]["queries"] for run in runs]),
        "Answers from memory": lambda _, runs: whole([run["cache"]["hits"] for run in runs]),
        "MB (2^20 bytes) on the wire": lambda _, runs: mean_sd_text(
            map(sent, runs), scale=2**-20, digits=2
        ),
        "Seconds of training": lambda _, runs: whole(
            [run["wall_s"] for run in runs if not run.get("resumed")]
        ),
    }
    return (
        f"## Cost of one run\n\n{table('Method', rows, columns)}\n"
        "Soft prompts are tuned in one process: their MB are the bytes of alpha.\n"
    )


def _panel(cells: _Cells, task: str) -> Panel:
    """Curves of methods that query, levels of the others."""
    lines, levels, last = [], [], 1.0
    for place, (title, row) in enumerate(cells.items()):
        runs, color = [run for run in row[task].values() if "curve" in run], f"C{place}"
        if any(point["queries"] for run in runs for point in run["curve"]):
            # Without the start, which is measured on other rows.
            curves = [
                [(at["queries"], 100 * at["metric"]) for at in run["curve"] if at["round"] >= 0]
                for run in runs
            ]
            x, y, _ = mean_curve([curve for curve in curves if curve])
            lines.append(Line(x=x, y=y, label=title, style=".-", color=color))
            last = max([last, *x])
        elif row[task]:
            levels.append((title, 100 * mean_sd(_values(row[task]))[0], color))
    lines += [
        Line(x=[0, last], y=[level] * 2, label=title, style="--", color=color)
        for title, level, color in levels
    ]
    return Panel(lines=lines, title=TASK_COLUMNS[task], x="training queries", y="")
