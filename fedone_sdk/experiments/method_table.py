"""table1 and table-fedavg: methods on the seven tasks, one and ten clients per round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from fedone_sdk.experiments.experiment import Report, Result, Results, Trial
from fedone_sdk.experiments.federated import CURVE_EXAMPLES
from fedone_sdk.experiments.figures import Line, Panel, drawing
from fedone_sdk.experiments.methods import METHODS, Method, missing, wanted
from fedone_sdk.experiments.paper import (
    TASK_COLUMNS,
    TASK_NAMES,
    about,
    printed,
    score_table,
)
from fedone_sdk.experiments.settings import Settings
from fedone_sdk.experiments.study import Design, Study
from fedone_sdk.experiments.summary import (
    mean_curve,
    mean_sd,
    mean_sd_text,
    number,
    table,
)
from fedone_sdk.glue import GLUE_TASKS

PILOT_SEED = 10_007
"""Of the runs that search a learning rate; none of those that are reported."""

HELD_OUT = 8
"""Learning rates are compared on every eighth training row."""

_Cell = Mapping[int | None, Result]
"""One method on one task: results by seed; None where they do not depend on it."""

_Cells = Mapping[str, Mapping[str, _Cell]]
"""By the method's title and the task."""

_RUN: Mapping[str, Any] = {
    "num_clients": 100,
    "shots": 16,
    "prompt_len": 20,
    "vocab_size": 200,
    "num_samples": 20,
    "batch_size": 32,
    "rounds": 100,
    "clients_per_round": 1,
    "every": 10,
    "searches": True,
}
_SIZES = ("num_clients", "shots", "num_samples", "batch_size", "rounds", "every")
"""Settings of the runs that the user may give."""

_SMALL: Mapping[str, Any] = {
    "num_clients": 10,
    "shots": 8,
    "prompt_len": 5,
    "vocab_size": 50,
    "num_samples": 5,
    "batch_size": 16,
    "rounds": 6,
    "every": 3,
    "searches": False,
}


class MethodTable(Study):
    """A table with one row per method and one column per task.

    Learning rates are searched first: one run per rate with a seed that is not reported, compared
    by the task's metric on training rows that its clients do not hold. The dev split is only
    reported.

    Attributes:
        framework: Precedes the names of federated methods.
        rows: The methods of the table.
    """

    framework: ClassVar[str]
    rows: ClassVar[tuple[Method, ...]] = tuple(METHODS.values())
    options: ClassVar[tuple[str, ...]] = ("methods", "learning_rate", *_SIZES)
    takes: ClassVar[tuple[str, ...]] = ("tasks",)

    def trials(self, settings: Settings, results: Results) -> Sequence[Trial]:
        """The searches for rates and the rows without one; then the runs at the best rates.

        Searches come first, then whole rows seed by seed.
        """
        rows = [row for row in self._rows(settings) if missing(row, settings) is None]
        searches: list[Trial] = []
        found: list[tuple[int, Trial]] = []
        for task in self.grid(settings)["task"]:
            run = {**self.run(settings), "task": task}
            for row in rows:
                rate = self._rate(row, task, settings, results)
                if self._pilots(row, settings):
                    # At K* = 1 for any K*: ten times the cost would buy little here.
                    pilot = {
                        **run,
                        "seed": PILOT_SEED,
                        "held_out": HELD_OUT,
                        "every": 0,
                        "clients_per_round": 1,
                    }
                    for each in row.rates:
                        trial = row.trial(_pilot_key(task, row, each), settings, pilot, each)
                        searches.append(replace(trial, home=Table1.name))
                    # The choice counts when the search is over, with the pilots that did not fail.
                    if not results or rate is None:
                        continue
                for seed in _seeds(row, settings):
                    one = {**run, "seed": seed or 0}
                    found.append((seed or 0, row.trial(_key(task, row, seed), settings, one, rate)))
        return [*searches, *(trial for _, trial in sorted(found, key=lambda each: each[0]))]

    def report(self, settings: Settings, results: Results) -> Report:
        """The table, the rates, what the runs cost, and the curves."""
        run, tasks = self.run(settings), self.grid(settings)["task"]
        titles = {
            # The default has slots; it is no method of the paper's framework.
            row.name: f"{self.framework}-{row.title}"
            if row.federated and not row.slots
            else row.title
            for row in self._rows(settings)
        }
        absent = {titles[name]: why for name in titles if (why := missing(METHODS[name], settings))}
        rows = [METHODS[name] for name, title in titles.items() if title not in absent]
        cells = {
            row.name: {task: _cell(row, task, settings, results) for task in tasks} for row in rows
        }
        titled = {titles[name]: row for name, row in cells.items()}
        federated = {titles[row.name]: titled[titles[row.name]] for row in rows if row.federated}
        rates = {
            row.name: {task: self._rate(row, task, settings, results) for task in tasks}
            for row in rows
            if row.federated
        }
        name = f"{self.name}-curves"
        return Report(
            markdown="\n".join(
                [
                    score_table(
                        self.name,
                        titles,
                        {
                            name: {task: _values(cell) for task, cell in row.items()}
                            for name, row in cells.items()
                        },
                    ),
                    _legend(settings, run),
                    f"{about(self.name)}\n",
                    *_cautions(titled, absent),
                    *_rates_section(
                        {titles[row]: each for row, each in rates.items()},
                        searched=any(self._pilots(row, settings) for row in rows),
                    ),
                    *_cost_section(federated),
                    f"![The deployable prompt's metric against training queries]({name}.svg)\n",
                ]
            ),
            data={
                "scale": {"tasks": tasks, **run},
                "seeds": settings.seeds,
                "rows": {
                    key: {
                        "title": titles[key],
                        "tasks": {task: _document(cell) for task, cell in row.items()},
                    }
                    for key, row in cells.items()
                },
                "rates": rates,
                "left_out": absent,
                "paper": printed(self.name),
            },
            figures={
                name: drawing(
                    [_panel(titled, task) for task in tasks],
                    columns=min(len(tasks), 4),
                    size=(3.0, 2.6),
                    shared_legend=True,
                )
            },
        )

    def _rows(self, settings: Settings) -> list[Method]:
        """The rows that the user wants."""
        names = wanted(settings, (row.name for row in self.rows))
        return [row for row in self.rows if (row.usual if names is None else row.name in names)]

    def _pilots(self, row: Method, settings: Settings) -> bool:
        """Whether pilots choose the method's learning rate."""
        given = "learning_rate" in settings.options
        return bool(row.rates) and self.run(settings)["searches"] and not given

    def _rate(self, row: Method, task: str, settings: Settings, results: Results) -> float | None:
        if not self._pilots(row, settings):
            asked = number(settings.options, "learning_rate", None)
            return (asked or row.rates[0]) if row.rates else None
        keys = {rate: _pilot_key(task, row, rate) for rate in row.rates}
        return best_rate({rate: results[key] for rate, key in keys.items() if key in results})


class Table1(MethodTable):
    """All methods on GLUE, K* = 1."""

    name = "table1"
    title = "All methods on the seven tasks, one client per round"
    framework = "FedOne"
    design = Design(
        base=_RUN, small=_SMALL, axes={"task": GLUE_TASKS}, small_axes={"task": ("sst2", "mrpc")}
    )


class TableFedavg(MethodTable):
    """The federated methods on GLUE, K* = 10; its searches are those of `Table1`."""

    name = "table-fedavg"
    title = "The federated methods on the seven tasks, ten clients per round"
    framework = "FedAvg"
    rows = tuple(row for row in METHODS.values() if row.federated)
    design = Design(
        base={**_RUN, "clients_per_round": 10},
        small={**_SMALL, "clients_per_round": 3, "rounds": 3, "every": 1},
        axes={"task": GLUE_TASKS},
        small_axes={"task": ("sst2",)},
    )


def best_rate(pilots: Mapping[float, Result]) -> float | None:
    """The learning rate whose run did best on held-out rows; the larger of equals.

    Args:
        pilots: The runs by their rates.
    """
    return max(pilots, key=lambda rate: (pilots[rate]["metric"]["after"], rate), default=None)


def _seeds(row: Method, settings: Settings) -> Sequence[int | None]:
    return range(settings.seeds) if row.seeded else (None,)


def _key(task: str, row: Method, seed: int | None) -> str:
    return f"{task}_{row.name}" if seed is None else f"{task}_{row.name}_s{seed}"


def _pilot_key(task: str, row: Method, rate: float) -> str:
    return f"pilot_{task}_{row.name}_{rate:g}"


def _cell(row: Method, task: str, settings: Settings, results: Results) -> _Cell:
    keys = {seed: _key(task, row, seed) for seed in _seeds(row, settings)}
    return {seed: results[key] for seed, key in keys.items() if key in results}


def _values(cell: _Cell) -> list[float]:
    return [result["metric"]["after"] for result in cell.values()]


def _document(cell: _Cell) -> dict[str, Any]:
    values = {
        "all" if seed is None else str(seed): each["metric"]["after"] for seed, each in cell.items()
    }
    mean, deviation = mean_sd(values.values()) if values else (None, None)
    return {"values": values, "mean": mean, "sd": deviation}


def _legend(settings: Settings, run: Mapping[str, Any]) -> str:
    spread = (
        f"mean ± sample standard deviation over {settings.seeds} seeds, one number where the "
        "result does not depend on the seed"
        if settings.seeds > 1
        else "one seed"
    )
    return (
        f"In per cent, on the whole dev split: {spread}. Federated runs: {run['num_clients']} "
        f"clients with {run['shots']} rows per class, {run['clients_per_round']} per round, "
        f"{run['rounds']} rounds, {run['prompt_len']} positions, {run['vocab_size']} candidates, "
        f"{run['num_samples']} prompts per step, mini-batches of {run['batch_size']}. The metric "
        "is that of the deployable prompt after the last round, never the best of several "
        "measurements. The curves are measured during training, always on the same "
        f"{CURVE_EXAMPLES} dev rows; their dashed levels are the table's.\n"
    )


def _cautions(cells: _Cells, absent: Mapping[str, str]) -> list[str]:
    """Notes on single cells."""
    lines = [f"- {title} is left out: {why}." for title, why in absent.items()]
    each = [
        (title, task, seed, result)
        for title, row in cells.items()
        for task, cell in row.items()
        for seed, result in cell.items()
    ]
    models: dict[str, dict[str, None]] = {}
    for title, _, _, result in each:
        if "model" in result:
            models.setdefault(str(result["model"]), {})[title] = None
    if len(models) > 1:
        lines += [f"- Run by `{model}`: {', '.join(models[model])}." for model in sorted(models)]
    reused = {TASK_NAMES[task] for _, task, _, result in each if result.get("reused_rows")}
    if reused:
        lines.append(
            f"- Clients share rows, drawn with replacement, in {', '.join(sorted(reused))}: there "
            "are too few for disjoint shards."
        )
    lines += [
        f"- {title} on {TASK_NAMES[task]}, seed {seed}: ended as {result['status']} after "
        f"{result['rounds']} rounds."
        for title, task, seed, result in each
        if result.get("status", "completed") != "completed"
    ]
    for title, row in cells.items():
        for task, cell in row.items():
            fitted = [one["demonstrations"] for one in cell.values() if "demonstrations" in one]
            if fitted:
                number = " to ".join(f"{n}" for n in sorted({min(fitted), max(fitted)}))
                lines.append(f"- {title} on {TASK_NAMES[task]}: {number} fit before an input.")
    return ["\n".join(lines) + "\n"] if lines else []


def _rates_section(rates: Mapping[str, Mapping[str, float | None]], *, searched: bool) -> list[str]:
    if not rates:
        return []
    tasks = next(iter(rates.values()))
    columns = {
        TASK_NAMES[task]: lambda _, row, task=task: "-" if row[task] is None else f"{row[task]:g}"
        for task in tasks
    }
    how = (
        f"The best of a run each with seed {PILOT_SEED} and one client per round, by the task's "
        f"metric on every {HELD_OUT}th training row, which its clients did not have."
        if searched
        else "Not searched: given, or the first of each search."
    )
    return ["## Learning rates\n", table("Method", rates, columns), f"{how}\n"]


def _cost_section(cells: _Cells) -> list[str]:
    if not cells:
        return []
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
    return ["## Cost of one run\n", table("Method", rows, columns)]


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
