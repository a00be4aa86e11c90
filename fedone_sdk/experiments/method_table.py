"""Methods x tasks x seeds: what the table of the paper and its FedAvg supplement share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from fedone_sdk.errors import SpecError
from fedone_sdk.experiments.experiment import Report, Result, Results, Trial
from fedone_sdk.experiments.federated import CURVE_EXAMPLES
from fedone_sdk.experiments.paper import about, paper_row, printed
from fedone_sdk.experiments.rows import METHODS, Method, Scale, missing
from fedone_sdk.experiments.settings import Settings
from fedone_sdk.experiments.study import Study
from fedone_sdk.experiments.summary import markdown_table, mean_curve, mean_sd, mean_sd_text
from fedone_sdk.glue import glue_task

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["HELD_OUT", "MethodTable", "PILOT_HOME", "PILOT_SEED", "best_rate"]

PILOT_SEED = 10_007
"""Of the runs that search a learning rate; none of those that are reported."""

PILOT_HOME = "table1"
"""The experiment that keeps the searches: those of its FedAvg supplement are the very same."""

HELD_OUT = 8
"""Every so many-th training row is what learning rates are compared on."""

_TASKS = {
    "mnli": "MNLI",
    "qqp": "QQP",
    "sst2": "SST-2",
    "mrpc": "MRPC",
    "cola": "CoLA",
    "qnli": "QNLI",
    "rte": "RTE",
}
_METRICS = {"accuracy": "acc", "f1": "F1", "matthews": "Matthews"}


@dataclass(frozen=True, slots=True)
class _Cell:
    """One method on one task: the trials' results by seed (None: the seed is of no interest)."""

    results: Mapping[int | None, Result]

    @property
    def values(self) -> list[float]:
        return [result["metric"]["after"] for result in self.results.values()]

    def document(self) -> dict[str, Any]:
        mean, deviation = mean_sd(self.values) if self.results else (None, None)
        return {
            "values": {
                "all" if seed is None else str(seed): result["metric"]["after"]
                for seed, result in self.results.items()
            },
            "mean": mean,
            "sd": deviation,
        }


class MethodTable(Study):
    """A table with one row per method and one column per task.

    Learning rates are searched first: one run per rate with a seed of its own, compared by the
    task's metric on training rows that were taken away from its clients. The dev split is only
    reported.

    Attributes:
        framework: What the rows of federated methods are called after.
        rows: The methods that it knows.
    """

    framework: ClassVar[str]
    rows: ClassVar[tuple[Method, ...]] = tuple(METHODS.values())
    options: ClassVar[tuple[str, ...]] = ("methods",)
    takes: ClassVar[tuple[str, ...]] = ("tasks",)

    def scale(self, settings: Settings) -> Scale:
        """How large it is run."""
        return Scale(tasks=tuple(self.grid(settings)["task"]), **self.run(settings))

    def trials(self, settings: Settings, results: Results) -> Sequence[Trial]:
        """The searches and what needs none; then the runs at the rates that were found."""
        scale = self.scale(settings)
        rows = [row for row in self._rows(settings) if missing(row, settings) is None]
        found: list[Trial] = []
        for task in scale.tasks:
            for row in rows:
                if row.federated:
                    found += _federated_trials(row, task, settings, scale, results)
                else:
                    found += _seeded_trials(row, task, settings, scale, None)
        return found

    def report(self, settings: Settings, results: Results) -> Report:
        """The table, the rates, what the runs cost, and the curves."""
        scale = self.scale(settings)
        rows = self._rows(settings)
        titles = {
            row.name: f"{self.framework}-{row.title}" if row.federated else row.title
            for row in rows
        }
        absent = {titles[row.name]: why for row in rows if (why := missing(row, settings))}
        rows = [row for row in rows if titles[row.name] not in absent]
        federated = [row for row in rows if row.federated]
        cells = {
            row.name: {task: _cell(row, task, settings, results) for task in scale.tasks}
            for row in rows
        }
        rates = {
            row.name: {task: _rate(row, task, scale, results) for task in scale.tasks}
            for row in federated
        }
        name = f"{self.name}-curves"
        return Report(
            markdown="\n".join(
                [
                    _table(self.name, titles, cells, scale),
                    _legend(settings, scale),
                    f"{about(self.name)}\n",
                    *_cautions(cells, titles, absent),
                    *_rates_section(titles, rates, scale),
                    *_cost_section(titles, cells, rates),
                    f"![The deployable prompt's metric against training queries]({name}.svg)\n",
                ]
            ),
            data={
                "scale": {key: getattr(scale, key) for key in Scale.__slots__},
                "seeds": settings.seeds,
                "rows": {
                    key: {
                        "title": titles[key],
                        "tasks": {task: cell.document() for task, cell in row.items()},
                    }
                    for key, row in cells.items()
                },
                "rates": rates,
                "left_out": absent,
                "paper": printed(self.name),
            },
            figures={name: lambda figure: _draw(figure, titles, cells, scale)},
        )

    def _rows(self, settings: Settings) -> list[Method]:
        """The rows that the user wants."""
        if "methods" not in settings.options:
            return [row for row in self.rows if row.usual]
        wanted = settings.options["methods"].split(",")
        known = [row.name for row in self.rows]
        for name in wanted:
            if name not in known:
                raise SpecError(
                    f"--set: methods: there is no {name!r}; {', '.join(known)}", source="arguments"
                )
        return [row for row in self.rows if row.name in wanted]


def best_rate(pilots: Mapping[float, Result]) -> float | None:
    """The learning rate whose run did best on held-out rows; the larger of equals.

    Args:
        pilots: The runs by their rates.
    """
    return max(pilots, key=lambda rate: (pilots[rate]["metric"]["after"], rate), default=None)


def _federated_trials(
    row: Method, task: str, settings: Settings, scale: Scale, results: Results
) -> list[Trial]:
    found = []
    if scale.searches and row.rates:
        # With one client per round whatever K* is: ten times the cost would buy little here.
        found += [
            replace(
                row.trial(
                    _pilot_key(task, row, rate),
                    settings,
                    scale,
                    task,
                    PILOT_SEED,
                    rate,
                    held_out=HELD_OUT,
                    every=0,
                    clients_per_round=1,
                ),
                home=PILOT_HOME,
            )
            for rate in row.rates
        ]
        # Its choice counts when the search is over, with what did not fail of it.
        if not results:
            return found
    rate = _rate(row, task, scale, results)
    if rate is None and row.rates:
        return found
    return found + _seeded_trials(row, task, settings, scale, rate)


def _seeded_trials(
    row: Method, task: str, settings: Settings, scale: Scale, rate: float | None
) -> list[Trial]:
    return [
        row.trial(_key(task, row, seed), settings, scale, task, seed or 0, rate)
        for seed in _seeds(row, settings)
    ]


def _seeds(row: Method, settings: Settings) -> Sequence[int | None]:
    """None where the seed has no part in the result."""
    return range(settings.seeds) if row.seeded else (None,)


def _rate(row: Method, task: str, scale: Scale, results: Results) -> float | None:
    if not scale.searches:
        return row.rates[0] if row.rates else None
    keys = {rate: _pilot_key(task, row, rate) for rate in row.rates}
    return best_rate({rate: results[key] for rate, key in keys.items() if key in results})


def _key(task: str, row: Method, seed: int | None) -> str:
    return f"{task}_{row.name}" if seed is None else f"{task}_{row.name}_s{seed}"


def _pilot_key(task: str, row: Method, rate: float) -> str:
    return f"pilot_{task}_{row.name}_{rate:g}"


def _cell(row: Method, task: str, settings: Settings, results: Results) -> _Cell:
    keys = {seed: _key(task, row, seed) for seed in _seeds(row, settings)}
    return _Cell({seed: results[key] for seed, key in keys.items() if key in results})


def _table(
    name: str, titles: Mapping[str, str], cells: Mapping[str, Mapping[str, _Cell]], scale: Scale
) -> str:
    """Ours, and below each row that of the paper."""
    header = ["Method"]
    header += [f"{_TASKS[task]} ({_METRICS[glue_task(task).metric]})" for task in scale.tasks]
    rows = []
    for method, row in cells.items():
        means = [mean_sd(cell.values)[0] for cell in row.values() if cell.results]
        average = mean_sd_text([mean_sd(means)[0]]) if len(means) == len(scale.tasks) else "-"
        rows.append(
            [titles[method], *(mean_sd_text(cell.values) for cell in row.values()), average]
        )
        if method in printed(name)["rows"]:
            rows.append(["the paper", *paper_row(name, method, scale.tasks, average=True)])
    return markdown_table([*header, "Average"], rows)


def _legend(settings: Settings, scale: Scale) -> str:
    spread = (
        f"mean ± sample standard deviation over {settings.seeds} seeds, one number where the seed "
        "has no part in it"
        if settings.seeds > 1
        else "one seed"
    )
    return (
        f"In per cent, on the whole dev split: {spread}. Federated runs: "
        f"{scale.num_clients} clients with {scale.shots} rows per class, {scale.clients_per_round} "
        f"per round, {scale.rounds} rounds, {scale.prompt_len} positions, {scale.vocab_size} "
        f"candidates, {scale.num_samples} prompts per step, mini-batches of {scale.batch_size}. "
        "What is measured is the deployable prompt after the last round, never the best of several "
        "looks at the dev split. The curves of the figure are measured during training, always on "
        f"the same {CURVE_EXAMPLES} dev rows; its dashed levels are the table's.\n"
    )


def _cautions(
    cells: Mapping[str, Mapping[str, _Cell]], titles: Mapping[str, str], absent: Mapping[str, str]
) -> list[str]:
    """What a reader must know of single cells."""
    lines = [f"- {title} is left out: {why}." for title, why in absent.items()]
    models: dict[str, list[str]] = {}
    for name, row in cells.items():
        for model in {
            str(result["model"])
            for cell in row.values()
            for result in cell.results.values()
            if "model" in result
        }:
            models.setdefault(model, []).append(titles[name])
    if len(models) > 1:
        lines += [
            f"- Run by `{model}`: {', '.join(users)}." for model, users in sorted(models.items())
        ]
    reused = {
        _TASKS[task]
        for row in cells.values()
        for task, cell in row.items()
        if any(result.get("reused_rows") for result in cell.results.values())
    }
    if reused:
        lines.append(
            f"- Clients share rows, drawn with replacement, in {', '.join(sorted(reused))}: there "
            "are too few for disjoint shards."
        )
    for name, row in cells.items():
        for task, cell in row.items():
            lines += [
                f"- {titles[name]} on {_TASKS[task]}, seed {seed}: ended as {result['status']}"
                f" after {result['rounds']} rounds."
                for seed, result in cell.results.items()
                if result.get("status", "completed") != "completed"
            ]
            fitted = [
                result["demonstrations"]
                for result in cell.results.values()
                if "demonstrations" in result
            ]
            if fitted:
                least, most = min(fitted), max(fitted)
                number = f"{least}" if least == most else f"{least} to {most}"
                lines.append(f"- {titles[name]} on {_TASKS[task]}: {number} fit before an input.")
    return ["\n".join(lines) + "\n"] if lines else []


def _rates_section(
    titles: Mapping[str, str], rates: Mapping[str, Mapping[str, float | None]], scale: Scale
) -> list[str]:
    if not rates:
        return []
    table = markdown_table(
        ["Method", *(_TASKS[task] for task in scale.tasks)],
        (
            [titles[name], *("-" if rate is None else f"{rate:g}" for rate in row.values())]
            for name, row in rates.items()
        ),
    )
    how = (
        f"The best of a run each with seed {PILOT_SEED} and one client per round, by the task's "
        f"metric on every {HELD_OUT}th training row, which its clients did not have."
        if scale.searches
        else "Not searched: the first of each search."
    )
    return ["## Learning rates\n", table, f"{how}\n"]


def _cost_section(
    titles: Mapping[str, str],
    cells: Mapping[str, Mapping[str, _Cell]],
    federated: Mapping[str, object],
) -> list[str]:
    rows = []
    for name in federated:
        runs = [result for cell in cells[name].values() for result in cell.results.values()]
        sent = [
            result["communication"]["upload_bytes"] + result["communication"]["download_bytes"]
            for result in runs
        ]
        rows.append(
            [
                titles[name],
                mean_sd_text([result["spent"]["queries"] for result in runs], scale=1, digits=0),
                mean_sd_text([result["cache"]["hits"] for result in runs], scale=1, digits=0),
                mean_sd_text(sent, scale=2**-20, digits=2),
                mean_sd_text(
                    [result["wall_s"] for result in runs if not result.get("resumed")],
                    scale=1,
                    digits=0,
                ),
            ]
        )
    header = [
        "Method",
        "Training queries",
        "Answers from memory",
        "MB (2^20 bytes) on the wire",
        "Seconds of training",
    ]
    return ["## Cost of one run\n", markdown_table(header, rows)] if rows else []


def _draw(
    figure: Figure,
    titles: Mapping[str, str],
    cells: Mapping[str, Mapping[str, _Cell]],
    scale: Scale,
) -> None:
    """One panel per task: the curves of federated methods, the others as levels."""
    columns = min(len(scale.tasks), 4)
    rows = -(-len(scale.tasks) // columns)
    figure.set_size_inches(3.0 * columns, 2.6 * rows + 0.8)
    panels = figure.subplots(rows, columns, squeeze=False)
    for panel in panels.flat[len(scale.tasks) :]:
        panel.set_axis_off()
    for task, panel in zip(scale.tasks, panels.flat, strict=False):
        panel.set_title(f"{_TASKS[task]} ({_METRICS[glue_task(task).metric]})", fontsize=9)
        for number, (name, row) in enumerate(cells.items()):
            _draw_method(panel, titles[name], row[task], f"C{number}")
        panel.tick_params(labelsize=7)
    figure.supxlabel("training queries", fontsize=9)
    handles, labels = panels.flat[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=7)


def _draw_method(panel: Axes, title: str, cell: _Cell, colour: str) -> None:
    if not cell.results:
        return
    runs = [result for result in cell.results.values() if "curve" in result]
    if not any(point["queries"] for result in runs for point in result["curve"]):
        mean, _ = mean_sd(cell.values)  # nothing was asked
        panel.axhline(100 * mean, color=colour, linewidth=0.8, linestyle="--", label=title)
        return
    points = mean_curve(runs, scale=100)
    panel.plot(
        [queries for queries, _, _ in points],
        [mean for _, mean, _ in points],
        color=colour,
        marker=".",
        label=title,
    )
