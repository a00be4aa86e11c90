"""The formulas of FedOne's query analysis, and figure-theory: the formulas and measurements.

Wang et al., "FedOne: Query-Efficient Federated Learning for Black-box Discrete Prompt Learning",
ICML 2025 (arXiv:2506.14929). Equation numbers are the paper's.

Symbols: n positions, N tokens, tau the temperature, nu the floor of alpha, G a bound on the loss,
I prompts and B examples per step, E local steps, K* clients per round, T local steps in all,
eta the learning rate, sigma_psi^2 the variance over examples (eq. 9) and sigma_alpha^2 the variance
over prompts (eq. 22). docs/explanation/algorithm.md discusses the consequences and the limits of
these formulas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedone_paper.methods import method_of
from fedone_paper.queries import Repeats, TableQueries, interval_text, queries_text
from fedone_paper.settings import Settings, declared
from fedone_paper.study import Report, Results
from fedone_paper.tables import about, table
from fedone_sdk.errors import ArgumentError
from fedone_sdk.reports import Line, Panel, svg_of

_C1, _C2 = 3.0, 2.0
"""c1 and c2 up to a factor: E + 2 and E + 1 with E = 1, their limit for large variances.

sigma_alpha^2 = 8 G^2 N / (tau^2 nu^2) is above 1e9 for a cross-entropy, so that 4 G is negligible
in c1.
"""


def policy_gradient_variance(*, G: float, N: int, tau: float, nu: float) -> float:
    """Return sigma_alpha^2 = 8 G^2 N / (tau^2 nu^2) (Theorem 3.4, Lemma A.1, eq. 22)."""
    return 8.0 * G**2 * N / (tau**2 * nu**2)


def smoothness(*, n: int, G: float, N: int, tau: float, nu: float) -> float:
    """Return L = n G N (tau + 1) / (tau^2 nu^2) (Theorem 3.4, Lemma A.2, eq. 26)."""
    return n * G * N * (tau + 1.0) / (tau**2 * nu**2)


def convergence_bound(
    *,
    T: float,
    eta: float,
    clients_per_round: float,
    E: float,
    n: float,
    B: float,
    I: float,  # noqa: E741 - the paper's symbol
    G: float,
    psi_variance: float,
    alpha_variance: float,
) -> float:
    """Return the bound on the mean squared gradient norm over T steps (Theorem 3.4, eq. 12).

    4 G / (eta T) + (2 (E + 1) n sigma_psi^2 (1 + 1/K*) + 2 n sigma_psi^2) / B
                  + (2 (E + 1) n sigma_alpha^2 (1 + 1/K*) + 2 n sigma_alpha^2) / I^2

    The theorem requires eta < min(1 / (L lambda), 1 / L). Lambda bounds the diversity of the
    clients' gradients (eq. 11).
    """
    share = 2.0 * (E + 1.0) * n * (1.0 + 1.0 / clients_per_round) + 2.0 * n
    return 4.0 * G / (eta * T) + share * (psi_variance / B + alpha_variance / I**2)


def query_constants(
    *, epsilon: float, E: float, n: float, G: float, psi_variance: float, alpha_variance: float
) -> tuple[float, float]:
    """Return c1 and c2 (proof of Corollary 3.6, below eq. 45).

    c1 = 4 G / eps^2 + 2 (E + 2) n (sigma_psi^2 + sigma_alpha^2) / eps^2
    c2 = 2 (E + 1) n (sigma_psi^2 + sigma_alpha^2) / eps^2

    Args:
        epsilon: Target gradient norm; its square bounds the mean squared gradient norm (eq. 43).
        E: Local steps of a round.
        n: Positions of the prompt.
        G: Bound on the loss.
        psi_variance: sigma_psi^2.
        alpha_variance: sigma_alpha^2.
    """
    noise = 2.0 * n * (psi_variance + alpha_variance) / epsilon**2
    return 4.0 * G / epsilon**2 + (E + 2.0) * noise, (E + 1.0) * noise


def iterations_to_epsilon(*, c1: float, c2: float, clients_per_round: float) -> float:
    """Return T_eps(K*) = (c1 + c2 / K*)^2, local steps to an epsilon-solution (eq. 44)."""
    return (c1 + c2 / clients_per_round) ** 2


def queries_to_epsilon(*, c: float, c1: float, c2: float, clients_per_round: float) -> float:
    """Return Q_eps(K*) = c T_eps K* = c (c1 sqrt(K*) + c2 / sqrt(K*))^2 (eqs. 14 and 45).

    Args:
        c: Queries of a client's local step: I.
        c1: Constant from `query_constants`.
        c2: Constant from `query_constants`.
        clients_per_round: K*.
    """
    root = math.sqrt(clients_per_round)
    return c * (c1 * root + c2 / root) ** 2


def optimal_clients_per_round(*, c1: float, c2: float) -> float:
    """Return c2 / c1, the K* with the fewest queries (proof of Corollary 3.6).

    With the constants of `query_constants`, c2 / c1 < (E + 1) / (E + 2) < 1.
    """
    return c2 / c1


class FigureTheory(TableQueries):
    """The formula for queries next to the stored runs of table-queries."""

    def grid(self, settings: Settings) -> dict[str, Sequence[Any]]:
        """Return the grid with the methods whose alpha has an expected loss, as in the formula.

        Raises:
            SpecError: There is no such method, or an option is wrong.
        """
        grid = super().grid(settings)
        names = [
            name
            for name in grid["contender"]
            if "expected_loss" in method_of("table-queries", name).gains
        ]
        if not names:
            raise ArgumentError(f"--set methods: {declared()['no_formula']}")
        return {**grid, "contender": names}

    def measured(self, settings: Settings, results: Results) -> dict[str, Measured]:
        """Return, for each method, measured medians, the curve and the fit."""
        return {name: Measured(each) for name, each in self.repeats(settings, results).items()}

    def report(self, settings: Settings, results: Results) -> Report:
        """Return the measured medians, the curve through the median of K*=1, and the fit."""
        found = self.measured(settings, results)
        figure = [f"![{self.title}]({self.name}.svg)\n"] if found else []
        sections = [each.markdown() for each in found.values()]
        panels = [each.panel() for each in found.values()]
        return Report(
            markdown="\n".join([*figure, self.text("method"), f"{about(self.name)}\n", *sections]),
            figures={self.name: svg_of(panels)} if found else {},
        )


def fitted(rounds: Mapping[int, float]) -> tuple[float, float] | None:
    """Fit sqrt(T(K*)) = c1 + c2 / K* with c1, c2 >= 0, by least squares.

    Args:
        rounds: T by K*.

    Returns:
        c1 and c2; None if fewer than two T are finite.
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
    """One method: measured medians, the formula's curve, and the fit (c1 and c2, or None)."""

    def __init__(self, repeats: Repeats) -> None:
        self.repeats = repeats
        self.medians = {k: repeats.median(k, repeats.target) for k in repeats.runs}
        k, runs = next(iter(repeats.runs.items()))
        # Training queries of one client per round.
        self.per_client: float = max(max(run["queries_per_round"]) for run in runs.values()) / k
        rounds = {k: median.value / (self.per_client * k) for k, median in self.medians.items()}
        self.fit = fitted(rounds)

    def formula(self, clients: float) -> float:
        """Return the curve through the measured median of K*=1; NaN if this median is censored."""
        one = self.medians.get(1)
        if one is None or not math.isfinite(one.value):
            return math.nan
        here, there = (
            queries_to_epsilon(c=1.0, c1=_C1, c2=_C2, clients_per_round=k) for k in (clients, 1.0)
        )
        return one.value * here / there

    def fit_queries(self, clients: float) -> float:
        """Return the queries according to the fit; NaN without a fit."""
        c1, c2 = self.fit or (math.nan, math.nan)
        return queries_to_epsilon(c=self.per_client, c1=c1, c2=c2, clients_per_round=clients)

    def markdown(self) -> str:
        """Return the table and a sentence on the fit."""
        repeats = self.repeats
        columns = {
            "measured median": lambda _, median: queries_text(median.value, repeats.cap),
            "95 % interval": lambda _, median: interval_text(median, repeats.cap),
            "formula": lambda k, _: f"{self.formula(k):,.0f}".replace("nan", "-"),
            "fit": lambda k, _: f"{self.fit_queries(k):,.0f}".replace("nan", "-"),
        }
        c1, c2 = self.fit or (0.0, 0.0)
        ratio = c2 / c1 if c1 else math.inf
        fit = f"The fit has c2 / c1 = {ratio:.3g}." if self.fit else declared()["no_fit"]
        gain = repeats.gains[repeats.target]
        return (
            f"## {repeats.label}\n\nQueries until the expected loss was {gain:g} nats below the "
            f"start, {repeats.setting}.\n\n{table('K*', self.medians, columns)}\n{fit}\n"
        )

    def panel(self) -> Panel:
        """Return the panel of queries over K*."""
        cap = float(self.repeats.cap)
        reached = {k: m for k, m in self.medians.items() if math.isfinite(m.value)}
        below = [m.value - m.low for m in reached.values()]
        above = [min(m.high, cap) - m.value for m in reached.values()]
        middle = [m.value for m in reached.values()]
        lines = [Line(x=[*reached], y=middle, error=(below, above), style="ks", label="measured")]
        if never := [k for k in self.medians if k not in reached]:
            y = [cap] * len(never)
            lines.append(Line(x=never, y=y, style="k^", label="more than the cap"))
        grid = [max(self.medians) ** (step / 60) for step in range(61)]
        if math.isfinite(self.formula(1)):
            lines.append(Line(x=grid, y=[*map(self.formula, grid)], label="formula"))
        if self.fit:
            lines.append(Line(x=grid, y=[*map(self.fit_queries, grid)], style="--", label="fit"))
        return Panel(
            lines=lines,
            level=cap,
            ticks={k: str(k) for k in self.medians},
            log="xy",
            x="clients per round, K*",
            y="queries to the target",
            title=self.repeats.label,
        )
