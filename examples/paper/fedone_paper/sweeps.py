"""table-clients and figure-prompt-length: methods for several values of one attribute."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from statistics import fmean, stdev
from typing import Any

from fedone_paper.methods import METHODS
from fedone_paper.settings import Settings
from fedone_paper.statistics import compared
from fedone_paper.study import Point, Report, Results, Runs, Study
from fedone_paper.tables import Column, about, mean_sd_text, paper_row, printed, table
from fedone_sdk.evaluation.engine import Result, Trial
from fedone_sdk.reports import Line, Panel, svg_of


class Sweep(Study):
    """The metric after training over the last axis: a table and a panel per task and method."""

    def trial(self, settings: Settings, key: str, point: Point) -> Trial:
        """Return the trial of a method's run."""
        return super().trial(settings, key, {**point, "method": {"name": point["method"]}})

    def report(self, settings: Settings, results: Results) -> Report:
        """Return a table, a comparison and a panel per method and task."""
        run, grid = self.run(settings), self.grid(settings)
        found = {
            (task, name): self.runs(settings, results, task=task, method=name)
            for task, name in product(grid["task"], grid["method"])
        }
        found = {place: runs for place, runs in found.items() if runs}
        rate = run["method"]["learning_rate"]
        head = self.text("head", rounds=run["rounds"], learning_rate=rate, about=about(self.name))
        sections = [self._section(settings, *place, runs) for place, runs in found.items()]
        panels = [self._panel(*place, runs) for place, runs in found.items()]
        return Report(
            markdown="\n".join([f"![{self.title}]({self.name}.svg)\n\n{head}\n", *sections]),
            figures={self.name: svg_of(panels, size=(4.0, 3.8))},
        )

    def _section(self, settings: Settings, task: str, method: str, runs: Runs) -> str:
        columns: dict[str, Column] = {
            "no prompt": lambda _, found: mean_sd_text(_metrics(found, "no_prompt")),
            "untrained": lambda _, found: mean_sd_text(_metrics(found, "before")),
            "tuned": lambda _, found: mean_sd_text(_metrics(found, "after")),
        }
        if "rows" in printed(self.name) and not settings.quick:
            columns["the paper"] = lambda value, _: paper_row(self.name, method, [value])[0]
        columns["runs whose clients share rows"] = lambda _, found: str(
            sum(run["reused_rows"] for run in found.values())
        )
        columns["seeds"] = lambda _, found: str(len(found))
        rows = table(self.said["axis"], runs, columns)
        head = f"## {METHODS[method].title}, {task} ({_any(runs)['name']})"
        return f"{head}\n\n{rows}\n{self._verdict(runs)}\n"

    def _verdict(self, runs: Runs) -> str:
        """Compare each value with the usual value, over the seeds that both have."""
        usual, texts = self.said["usual"], self.said["texts"]
        usual, parts = usual if usual in runs else next(iter(runs)), []
        for value in (each for each in runs if each != usual):
            seeds = sorted(runs[value].keys() & runs[usual].keys())
            one, other = (
                [runs[each][seed]["metric"]["after"] for seed in seeds] for each in (usual, value)
            )
            found = compared(one, other)
            change = mean_sd_text(b - a for a, b in zip(one, other, strict=True))
            facts = {"value": value, "usual": usual, "change": change, "seeds": len(seeds)}
            parts.append(texts["against"].format(**facts, **found._asdict()))
        each = [run["metric"] for found in runs.values() for run in found.values()]
        improved = sum(metric["after"] > metric["before"] for metric in each)
        return "".join([*parts, texts["tuned"].format(improved=improved, runs=len(each))])

    def _panel(self, task: str, method: str, runs: Runs) -> Panel:
        lines = []
        for name, label in ("after", "tuned"), ("before", "untrained"):
            held = [_metrics(each, name) for each in runs.values()]
            spread = [stdev(values) if len(values) > 1 else 0.0 for values in held]
            error, means = (spread, spread), [*map(fmean, held)]
            lines.append(Line(x=list(runs), y=means, error=error, label=label, style="o-"))
        return Panel(
            lines=lines,
            level=float(_any(runs)["no_prompt"]),
            level_label="no prompt",
            x=self.said["axis"],
            y=str(_any(runs)["name"]),
            title=f"{METHODS[method].title}, {task}",
            ticks={value: f"{value:,}" for value in runs},
            log=self.said["log"],
        )


def _any(runs: Runs) -> Mapping[str, Any]:
    """Return a result for what all runs share: the metric's name, its value without a prompt."""
    found: Mapping[str, Any] = next(iter(next(iter(runs.values())).values()))["metric"]
    return found


def _metrics(runs: Mapping[int, Result], name: str) -> list[float]:
    return [run["metric"][name] for run in runs.values()]
