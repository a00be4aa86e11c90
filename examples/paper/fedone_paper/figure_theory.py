"""figure-theory: the paper's Q(K*) and the measured queries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedone_paper.figures import Line, Panel, drawing
from fedone_paper.methods import method_of
from fedone_paper.paper import about
from fedone_paper.queries_report import Repeats, interval_text, queries_text
from fedone_paper.settings import Settings
from fedone_paper.study import Report, Results
from fedone_paper.summary import table
from fedone_paper.table_queries import TableQueries
from fedone_paper.theory import optimal_clients_per_round, queries_to_epsilon
from fedone_sdk.errors import ArgumentError

_C1, _C2 = 3.0, 2.0
"""c1 : c2 = (E + 2) : (E + 1) with E = 1, the limit of the printed constants for large variances.

sigma_alpha^2 = 8 G^2 N / (tau^2 nu^2) is past 1e9 for any G of a cross-entropy, so that 4 G has no
part in c1.
"""


class FigureTheory(TableQueries):
    """The query analysis next to the stored runs of table-queries."""

    def grid(self, settings: Settings) -> dict[str, Sequence[Any]]:
        """Return the contenders whose alpha has an expected loss, which the formula is about.

        Raises:
            SpecError: None of them has, or an option is wrong.
        """
        grid = super().grid(settings)
        names = [
            name
            for name in grid["contender"]
            if "expected_loss" in method_of("table-queries", name).gains
        ]
        if not names:
            raise ArgumentError(
                "--set methods: the formula is of methods that draw prompts from alpha, and none "
                "of these does"
            )
        return {**grid, "contender": names}

    def measured(self, settings: Settings, results: Results) -> dict[str, Measured]:
        """Return the measurement, the curve and the fit of each method."""
        return {name: Measured(each) for name, each in self.repeats(settings, results).items()}

    def report(self, settings: Settings, results: Results) -> Report:
        """Return the measured medians, the curve through the one of K*=1, and the fit."""
        found = self.measured(settings, results)
        figure = [f"![{self.title}]({self.name}.svg)\n"] if found else []
        sections = [each.markdown() for each in found.values()]
        panels = [each.panel() for each in found.values()]
        return Report(
            markdown="\n".join([*figure, self.text("method"), f"{about(self.name)}\n", *sections]),
            figures={self.name: drawing(panels)} if found else {},
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


class Measured:
    """The measurement, the curve and the fit (c1 and c2, if there is one) for one method."""

    def __init__(self, repeats: Repeats) -> None:
        self.repeats = repeats
        self.medians = {k: repeats.median(k, repeats.target) for k in repeats.present}
        k, runs = next(iter(repeats.runs.items()))
        # Queries of one client in a round.
        self.per_client: float = max(max(run["queries_per_round"]) for run in runs.values()) / k
        rounds = {k: median.value / (self.per_client * k) for k, median in self.medians.items()}
        self.fit = fitted(rounds)

    def formula(self, clients: float) -> float | None:
        """Return the curve through the measured median of K*=1; None where it is censored."""
        one = self.medians.get(1)
        if one is None or not math.isfinite(one.value):
            return None
        here, there = (
            queries_to_epsilon(c=1.0, c1=_C1, c2=_C2, clients_per_round=k) for k in (clients, 1.0)
        )
        return one.value * here / there

    def fit_queries(self, clients: float) -> float | None:
        """Return the fit, as queries."""
        if self.fit is None:
            return None
        c1, c2 = self.fit
        return self.per_client * clients * (c1 + c2 / clients) ** 2

    def markdown(self) -> str:
        """Return the table and a sentence on the fit."""
        repeats = self.repeats
        rows = table(
            "K*",
            self.medians,
            {
                "measured median": lambda _, median: queries_text(median.value, repeats.cap),
                "95 % interval": lambda _, median: interval_text(median, repeats.cap),
                "formula": lambda k, _: _number(self.formula(k)),
                "fit": lambda k, _: _number(self.fit_queries(k)),
            },
        )
        return (
            f"## {repeats.label}\n\nQueries until the expected loss was "
            f"{repeats.gains[repeats.target]:g} nats below the start, {repeats.setting}.\n\n"
            f"{rows}\n{self._fit_text()}\n"
        )

    def panel(self) -> Panel:
        """Q over K*."""
        cap = float(self.repeats.cap)
        reached = {k: m for k, m in self.medians.items() if math.isfinite(m.value)}
        below = [m.value - m.low for m in reached.values()]
        above = [min(m.high, cap) - m.value for m in reached.values()]
        middle = [m.value for m in reached.values()]
        label = "measured median"
        lines = [Line(x=list(reached), y=middle, error=(below, above), style="ks", label=label)]
        if never := [k for k in self.medians if k not in reached]:
            y = [cap] * len(never)
            lines.append(Line(x=never, y=y, style="k^", label="more than the cap"))
        grid = [max(self.medians) ** (step / 60) for step in range(61)]
        for style, label, curve in (
            ("-", "formula", [self.formula(k) for k in grid]),
            ("--", "fit", [self.fit_queries(k) for k in grid]),
        ):
            if known := [value for value in curve if value is not None]:  # all of it or nothing
                lines.append(Line(x=grid, y=known, style=style, label=label))
        return Panel(
            lines=lines,
            level=cap,
            ticks={k: str(k) for k in self.medians},
            log="xy",
            x="clients per round, K*",
            y="queries to the target",
            title=self.repeats.label,
        )

    def _fit_text(self) -> str:
        if self.fit is None:
            return "Fewer than two K* reached the target in half of their repeats: there is no fit."
        c1, c2 = self.fit
        if c2 == 0.0:
            return "The fit has c2 = 0: more clients saved no rounds, and Q grows like K*."
        if c1 == 0.0:
            return "The fit has c1 = 0: rounds fell like 1 / K*^2, and Q falls with K*."
        return f"The fit has c2 / c1 = {optimal_clients_per_round(c1=c1, c2=c2):.3g}."


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
