"""table-clients and figure-prompt-length: GS-BDPL along one attribute of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedone_paper.figures import Line, Panel, drawing
from fedone_paper.paper import about, paper_row, printed
from fedone_paper.settings import Settings
from fedone_paper.statistics import compared
from fedone_paper.study import Report, Results, Runs, Study
from fedone_paper.summary import Column, mean_sd, mean_sd_text, table
from fedone_sdk.evaluation.engine import Result


class Sweep(Study):
    """The metric of the tuned prompt along the last axis, a table and a panel per task."""

    def report(self, settings: Settings, results: Results) -> Report:
        """One table, one comparison and one panel per task."""
        run = self.run(settings)
        tasks = {
            task: runs
            for task in self.grid(settings)["task"]
            if (runs := self.runs(settings, results, task=task))
        }
        rate = run["method"]["learning_rate"]
        head = self.text("head", rounds=run["rounds"], learning_rate=rate, about=about(self.name))
        return Report(
            markdown="\n".join(
                [
                    f"![{self.title}]({self.name}.svg)\n",
                    f"{head}\n",
                    *(self._section(task, runs) for task, runs in tasks.items()),
                ]
            ),
            figures={
                self.name: drawing(
                    [self._panel(task, runs) for task, runs in tasks.items()], size=(4.0, 3.8)
                )
            },
        )

    def _section(self, task: str, runs: Runs) -> str:
        columns: dict[str, Column] = {
            "no prompt": lambda _, found: mean_sd_text(_metrics(found, "no_prompt")),
            "untrained": lambda _, found: mean_sd_text(_metrics(found, "before")),
            "tuned": lambda _, found: mean_sd_text(_metrics(found, "after")),
        }
        if "rows" in printed(self.name):
            columns["the paper"] = lambda value, _: paper_row(self.name, "gs-bdpl", [value])[0]
        columns["clients share rows"] = lambda _, found: _shared(found)
        columns["seeds"] = lambda _, found: str(len(found))
        rows = table(self.said["axis"], runs, columns)
        return f"## {task} ({_any(runs)['name']})\n\n{rows}\n{self._verdict(runs)}\n"

    def _verdict(self, runs: Runs) -> str:
        """Each value against the usual one, over the seeds that both have."""
        usual = self.said["usual"] if self.said["usual"] in runs else next(iter(runs))
        parts = []
        for value, found in runs.items():
            if value == usual:
                continue
            seeds = sorted(found.keys() & runs[usual].keys())
            one, other = (
                [each[seed]["metric"]["after"] for seed in seeds] for each in (runs[usual], found)
            )
            against = compared(one, other)
            differences = [100 * (b - a) for a, b in zip(one, other, strict=True)]
            parts.append(
                f"{value:,} against {usual:,}: {mean_sd_text(differences, scale=1)} points, better "
                f"in {against.fewer} and worse in {against.more} of {len(seeds)} seeds (sign test "
                f"p = {against.p_value:.2g})"
            )
        text = (
            f"{str(self.said['axis']).capitalize()}, by seed: {'; '.join(parts)}. " if parts else ""
        )
        each = [run["metric"] for found in runs.values() for run in found.values()]
        improved = sum(metric["after"] > metric["before"] for metric in each)
        return f"{text}Tuning improved on the untrained prompt in {improved} of {len(each)} runs."

    def _panel(self, task: str, runs: Runs) -> Panel:
        lines = []
        for name, label in ("after", "tuned"), ("before", "untrained"):
            sums = [mean_sd(_metrics(each, name)) for each in runs.values()]
            means, deviations = zip(*sums, strict=True)
            spread = [deviation or 0.0 for deviation in deviations]
            error = (spread, spread)
            lines.append(Line(x=list(runs), y=means, error=error, label=label, style="o-"))
        return Panel(
            lines=lines,
            level=float(_any(runs)["no_prompt"]),
            level_label="no prompt",
            x=self.said["axis"],
            y=str(_any(runs)["name"]),
            title=task,
            ticks={value: f"{value:,}" for value in runs},
            log=self.said["log"],
        )


def _any(runs: Runs) -> Mapping[str, Any]:
    """Return the metric's name and the value without a prompt, which all runs share."""
    found: Mapping[str, Any] = next(iter(next(iter(runs.values())).values()))["metric"]
    return found


def _metrics(runs: Mapping[int, Result], name: str) -> list[float]:
    return [run["metric"][name] for run in runs.values()]


def _shared(runs: Mapping[int, Result]) -> str:
    """Whether clients hold the same rows, because there are too few for disjoint shards."""
    shared = {run["reused_rows"] for run in runs.values()}
    return "some" if len(shared) > 1 else "yes" if True in shared else "no"
