"""figure-theory: the paper's Q(K*) and the measured queries."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedone_sdk.algorithms.theory import optimal_clients_per_round, queries_to_epsilon
from fedone_sdk.errors import SpecError
from fedone_sdk.experiments.experiment import Report, Results, Trial
from fedone_sdk.experiments.paper import about
from fedone_sdk.experiments.queries_report import Repeats, interval_text, queries_text
from fedone_sdk.experiments.settings import Settings
from fedone_sdk.experiments.statistics import Median
from fedone_sdk.experiments.study import Point
from fedone_sdk.experiments.summary import markdown_table
from fedone_sdk.experiments.table_queries import CONTENDERS, TableQueries

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["FigureTheory", "fitted"]

_C1, _C2 = 3.0, 2.0
"""c1 : c2 = (E + 2) : (E + 1) with E = 1, the limit of the printed constants for large variances.

sigma_alpha^2 = 8 G^2 N / (tau^2 nu^2) is past 1e9 for any G of a cross-entropy, so that 4 G has no
part in c1.
"""


class FigureTheory(TableQueries):
    """The query analysis against the runs of table-queries."""

    name = "figure-theory"
    title = "Queries to a target over K*: the formula and the measurement"
    default_seeds = 5

    def grid(self, settings: Settings) -> dict[str, Sequence[Any]]:
        """The contenders whose alpha has an expected loss, which the formula is about.

        Raises:
            SpecError: None of them has, or an option does not do.
        """
        grid = super().grid(settings)
        names = [name for name in grid["contender"] if "expected_loss" in CONTENDERS[name].gains]
        if not names:
            raise SpecError(
                "--set methods: the formula is of methods that draw prompts from alpha, and none "
                "of these does",
                source="arguments",
            )
        return {**grid, "contender": names}

    def trial(self, settings: Settings, key: str, point: Point, seed: int) -> Trial:
        """That of table-queries, which in one output folder is not run again."""
        found = super().trial(settings, key, point, seed)
        return dataclasses.replace(found, home=TableQueries.name)

    def report(self, settings: Settings, results: Results) -> Report:
        """The measured medians, the curve through the one of K*=1, and the fit."""
        panels = {
            name: _Panel(repeats)
            for name in self.grid(settings)["contender"]
            if (repeats := self.repeats(settings, name, results)).present
        }

        def draw(figure: Figure) -> None:
            figure.set_size_inches(1.0 + 4.5 * len(panels), 4)
            places = figure.subplots(1, len(panels), squeeze=False)[0]
            for axes, panel in zip(places, panels.values(), strict=True):
                panel.draw(axes)

        sections = [panel.markdown() for panel in panels.values()]
        figure = [f"![{self.title}]({self.name}.svg)\n"] if panels else []
        return Report(
            markdown="\n".join([*figure, _METHOD, f"{about(self.name)}\n", *sections]),
            data={name: panel.data() for name, panel in panels.items()},
            figures={self.name: draw} if panels else {},
        )


_METHOD = (
    "The curve is Q(K*) = c (c1 sqrt(K*) + c2 / sqrt(K*))^2 (Corollary 3.6, eq. 14). The printed "
    "constants leave c2 / c1 below (E + 1) / (E + 2), here 2/3, and at the printed "
    "sigma_alpha^2 = 8 G^2 N / (tau^2 nu^2) they come within 1e-6 of it; so 2/3 is taken. epsilon "
    "cannot be measured: the curve goes through the measured median of K*=1, and only its shape is "
    "a prediction.\n\n"
    "The fit is of sqrt(T(K*)) = c1 + c2 / K* (eq. 44) to the medians that were reached, by least "
    "squares with c1, c2 >= 0.\n"
)


def fitted(rounds: Mapping[int, float]) -> tuple[float, float] | None:
    """Fits sqrt(T(K*)) = c1 + c2 / K* with c1, c2 >= 0, by least squares.

    Args:
        rounds: T by K*.

    Returns:
        c1 and c2; None with fewer than two finite T.
    """
    import numpy as np
    from scipy.optimize import nnls

    points = {k: t for k, t in rounds.items() if math.isfinite(t)}
    if len(points) < 2:
        return None
    columns = np.array([[1.0, 1.0 / k] for k in points])
    (c1, c2), _ = nnls(columns, np.sqrt(list(points.values())))
    return float(c1), float(c2)


class _Panel:
    """The measurement, the curve and the fit for one method."""

    def __init__(self, repeats: Repeats) -> None:
        self._repeats = repeats
        self._medians = {k: repeats.median(k, repeats.target) for k in repeats.present}
        # Each client of a round asks as much as every other one.
        self._per_client = {k: _per_round(repeats, k) / k for k in repeats.present}
        self._fit = fitted(
            {k: m.value / (self._per_client[k] * k) for k, m in self._medians.items()}
        )

    def markdown(self) -> str:
        """The table and what it says."""
        repeats = self._repeats
        table = markdown_table(
            ["K*", "measured median", "95 % interval", "formula", "fit"],
            [
                [
                    str(k),
                    queries_text(median.value, repeats.cap),
                    interval_text(median, repeats.cap),
                    _number(self._formula(k)),
                    _number(self._fit_queries(k)),
                ]
                for k, median in self._medians.items()
            ],
        )
        gain = repeats.gains[repeats.target]
        return (
            f"## {repeats.label}\n\nQueries until the expected loss was {gain:g} nats below the "
            f"start, {repeats.setting}.\n\n{table}\n{self._fit_text()} {self._verdict()}\n"
        )

    def data(self) -> dict[str, Any]:
        """The same numbers, as JSON holds them: null is never (infinite)."""
        repeats = self._repeats
        return {
            "target": {repeats.target: repeats.gains[repeats.target]},
            "measured": {
                str(k): {
                    name: value if math.isfinite(value) else None
                    for name, value in dataclasses.asdict(median).items()
                }
                for k, median in self._medians.items()
            },
            "predicted": {str(k): self._formula(k) for k in self._medians},
            "fit": self._fit
            and {
                "c1": self._fit[0],
                "c2": self._fit[1],
                "queries": {str(k): self._fit_queries(k) for k in self._medians},
            },
        }

    def draw(self, axes: Axes) -> None:
        """Draws Q over K*."""
        medians, cap = self._medians, float(self._repeats.cap)
        reached = {k: median for k, median in medians.items() if math.isfinite(median.value)}
        axes.errorbar(
            list(reached),
            [median.value for median in reached.values()],
            [
                [median.value - median.low for median in reached.values()],
                [min(median.high, cap) - median.value for median in reached.values()],
            ],
            fmt="ks",
            capsize=3,
            label="measured median",
        )
        if never := [k for k in medians if k not in reached]:
            axes.plot(never, [cap] * len(never), "k^", fillstyle="none", label="more than the cap")
        most = max(medians)
        grid = [most ** (step / 60) for step in range(61)]
        for style, label, curve in (
            ("-", "formula", [self._formula(k) for k in grid]),
            ("--", "fit", [self._fit_queries(k) for k in grid]),
        ):
            values = [value for value in curve if value is not None]
            if values:  # all of it or nothing
                axes.plot(grid, values, style, label=label)
        axes.axhline(cap, color="grey", linestyle=":", linewidth=1)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(list(medians), [str(clients) for clients in medians])
        axes.set_xticks([], minor=True)
        axes.set(
            xlabel="clients per round, K*",
            ylabel="queries to the target",
            title=self._repeats.label,
        )
        axes.legend()

    def _formula(self, clients: float) -> float | None:
        """The curve through the measured median of K*=1; None where that was censored."""
        one = self._medians.get(1)
        if one is None or not math.isfinite(one.value):
            return None

        def shape(k: float) -> float:
            return queries_to_epsilon(c=1.0, c1=_C1, c2=_C2, clients_per_round=k)

        return one.value * shape(clients) / shape(1.0)

    def _fit_queries(self, clients: float) -> float | None:
        if self._fit is None:
            return None
        c1, c2 = self._fit
        return next(iter(self._per_client.values())) * clients * (c1 + c2 / clients) ** 2

    def _fit_text(self) -> str:
        if self._fit is None:
            return "Fewer than two K* reached the target in half of their repeats: there is no fit."
        c1, c2 = self._fit
        if c2 == 0.0:
            return "The fit has c2 = 0: more clients saved no rounds, and Q grows like K*."
        if c1 == 0.0:
            return "The fit has c1 = 0: rounds fell like 1 / K*^2, and Q falls with K*."
        return f"The fit has c2 / c1 = {optimal_clients_per_round(c1=c1, c2=c2):.3g}."

    def _verdict(self) -> str:
        least = min(median.value for median in self._medians.values())
        if not math.isfinite(least):
            return "No K* reached the target in half of its repeats."
        best = [k for k, median in self._medians.items() if median.value == least]
        text = f"The least measured median is that of K*={' and '.join(map(str, best))}"
        # An interval that anything lies in says nothing.
        others = {k: m for k, m in self._medians.items() if k != 1 and m.coverage < 1.0}
        if self._formula(1) is not None and others:
            inside = [k for k, median in others.items() if self._inside(k, median)]
            text += f"; the curve is inside the interval for {len(inside)} of {len(others)} other "
            text += f"K* ({', '.join(f'K*={k}' for k in inside)})" if inside else "K*"
        return text + "."

    def _inside(self, clients: int, median: Median) -> bool:
        found = self._formula(clients)
        # Of a median that is censored no more is known than that it is past the cap.
        low = min(median.low, self._repeats.cap)
        return found is not None and low <= found <= median.high


def _per_round(repeats: Repeats, clients: int) -> float:
    """Queries of a round."""
    runs = repeats.runs[clients].values()
    return max(float(queries) for run in runs for queries in run["queries_per_round"])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
