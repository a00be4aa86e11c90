"""figure-toy and figure-heterogeneity: queries against accuracy for several K*, on digits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from fedone_paper.figures import Line, Panel, drawing
from fedone_paper.paper import about
from fedone_paper.queries_report import Repeats
from fedone_paper.settings import Settings
from fedone_paper.study import Point, Report, Results, Study
from fedone_paper.summary import Column, mean_curve, mean_sd_text, table
from fedone_paper.toy import Toy, run_toy
from fedone_sdk.evaluation.engine import Result, Trial

TARGETS = (0.7, 0.8, 0.9)
"""Test accuracies that queries are counted to: constants, so that no curve chooses them."""

_POINTS = 150
"""Of a curve."""

_SPLITS: Mapping[str, tuple[str, float | None]] = {
    "iid": ("IID", None),
    "dirichlet0.5": ("Dirichlet 0.5", 0.5),
    "dirichlet0.1": ("Dirichlet 0.1", 0.1),
}
"""How the digits are spread over the clients: a name for reports, and the concentration."""


class FigureToy(Study):
    """The paper's toy: one network, 100 clients, several K*; a panel per split."""

    def trial(self, settings: Settings, key: str, point: Point) -> Trial:
        """Return the trial of a toy; both figures have the IID runs."""
        return Trial(
            key=key,
            run=run_toy,
            options=asdict(self._toy(settings, point)),
            inputs={} if settings.data is None else {"data": settings.data},
            home="figure-toy" if point["split"] == "iid" else None,
        )

    def report(self, settings: Settings, results: Results) -> Report:
        """Curves, queries to targets, and whether K*=1 needs the fewest."""
        toy = self._toy(settings, {"split": "iid", "clients_per_round": 1, "seed": 0})
        found = [
            Repeats(label=_SPLITS[split][0], cap=toy.max_queries, runs=_to_targets(runs))
            for split in self.grid(settings)["split"]
            if (runs := self.runs(settings, results, split=split))
        ]
        tables = "\n".join(f"## {repeats.label}\n\n{_section(repeats)}" for repeats in found)
        caption = f"{self._caption(toy, results)} {about(self.name)}"
        return Report(
            markdown=f"![{self.title}]({self.name}.svg)\n\n{caption}\n\n{tables}",
            figures={self.name: drawing([_panel(repeats) for repeats in found])},
        )

    def _toy(self, settings: Settings, point: Point) -> Toy:
        run = self.run(settings)
        return Toy(
            clients_per_round=point["clients_per_round"],
            seed=point["seed"],
            dirichlet_alpha=_SPLITS[point["split"]][1],
            learning_rate=run["learning_rate"],
            max_queries=run["max_queries"],
            # MNIST's test split is large, and a visit there takes 38 queries.
            measure_every=20 if settings.data is None else 200,
        )

    def _caption(self, toy: Toy, results: Results) -> str:
        some = next(iter(results.values()))
        smallest = min(result["rows"][0] for result in results.values())
        largest = max(result["rows"][2] for result in results.values())
        held = f"{smallest} rows" if smallest == largest else f"{smallest} to {largest} rows"
        facts = {**asdict(toy), "data": some["data"], "pixels": some["pixels"], "held": held}
        bundled = " " + self.text("bundled", **facts) if some["pixels"] == 64 else ""
        return self.text("caption", **facts) + bundled


def reached(result: Result, target: float) -> int | None:
    """Return the queries until the test accuracy first reached a target; None for never."""
    points = zip(result["queries"], result["accuracy"], strict=True)
    return next((queries for queries, accuracy in points if accuracy >= target), None)


def _to_targets(runs: Mapping[int, Mapping[int, Result]]) -> dict[int, dict[int, Result]]:
    """Add to each result the queries to each target."""
    return {
        clients: {
            seed: {**run, "reached": {f"{target:.0%}": reached(run, target) for target in TARGETS}}
            for seed, run in found.items()
        }
        for clients, found in runs.items()
    }


def _section(repeats: Repeats) -> str:
    """Return the medians, and whether K*=1 needs the fewest queries to each target."""

    def cell(target: str, clients: int, _: Any) -> str:
        return repeats.median_text(clients, target)

    targets = [f"{target:.0%}" for target in TARGETS]
    columns: dict[str, Column] = {f"to {target}": partial(cell, target) for target in targets}
    columns["accuracy at the end"] = lambda _, runs: mean_sd_text(_at_the_end(runs))
    verdicts = "\n".join(f"- To {target}: {repeats.verdict(target)}" for target in targets)
    return "\n".join([table("K*", repeats.runs, columns), f"{verdicts}\n"])


def _at_the_end(runs: Mapping[int, Result]) -> list[float]:
    return [run["accuracy"][-1] for run in runs.values()]


def _panel(repeats: Repeats) -> Panel:
    """Return the mean test accuracy over queries of each K*, +/- one standard deviation."""
    lines = []
    for clients, runs in repeats.runs.items():
        # Without the start, which a logarithmic axis does not have.
        curves = [[*zip(run["queries"], run["accuracy"], strict=True)][1:] for run in runs.values()]
        start = max(curve[0][0] for curve in curves)
        grid = np.geomspace(start, max(start, curves[0][-1][0]), _POINTS).tolist()
        x, y, spread = mean_curve(curves, grid)
        label = f"K*={clients}"
        lines.append(Line(x=x, y=y, error=(spread, spread), band=True, label=label))
    return Panel(
        lines=lines,
        log="x",
        x="queries (mini-batch forward passes)",
        y="test accuracy",
        title=repeats.label,
    )
