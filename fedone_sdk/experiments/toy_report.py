"""What toy federations show: curves over queries, queries to targets, and which K* needs fewest."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import bootstrap

from fedone_sdk.algorithms import stream, stream_seed
from fedone_sdk.experiments.experiment import Result
from fedone_sdk.experiments.figures import Line, Panel
from fedone_sdk.experiments.summary import Column, mean_sd_text, table

__all__ = ["Comparison", "Condition", "TARGETS", "compare", "reached"]

TARGETS = (0.7, 0.8, 0.9)
"""Test accuracies that queries are counted to: constants, so that no curve chooses them."""

_MIN_SEEDS = 5
"""With fewer, even seeds that all agree could do so by chance (1 in 32 at five)."""

_POINTS = 200


def reached(result: Result, target: float) -> int | None:
    """Queries until the test accuracy first reached a target; None where it never did."""
    points = zip(result["queries"], result["accuracy"], strict=True)
    return next((queries for queries, accuracy in points if accuracy >= target), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How many times as many queries as K*=1 another K* needs to a target.

    Attributes:
        clients_per_round: The other K*.
        ratio: Of the two medians over seeds.
        low: Of the 95 % bootstrap interval.
        high: Of the 95 % bootstrap interval.
        bound: Whether some run of the other K* was censored, so that all three are lower bounds.
        seeds: How many both have.
    """

    clients_per_round: int
    ratio: float
    low: float
    high: float
    bound: bool
    seeds: int


def compare(
    one: Sequence[int | None],
    other: Sequence[int | None],
    *,
    clients_per_round: int,
    max_queries: int,
) -> Comparison:
    """Compares the queries of K*=1 with those of another K*, seed by seed.

    Percentile bootstrap over seeds: both kinds of run share a seed's data, start and split, so they
    are drawn together. A censored run of the other K* counts as `max_queries`, a censored one of
    K*=1 as endless: both can only make K*=1 look worse.

    Args:
        one: Of K*=1, per seed; None is censored.
        other: Of the other K*, for the same seeds.
        clients_per_round: The other K*.
        max_queries: Where runs were cut off.
    """
    ones = np.array([math.inf if queries is None else queries for queries in one])
    others = np.array([max_queries if queries is None else queries for queries in other])

    def ratio(a: NDArray[np.float64], b: NDArray[np.float64], axis: int = -1) -> Any:
        return np.median(b, axis=axis) / np.median(a, axis=axis)

    low = high = float(ratio(ones, others))
    if len(one) > 1:
        rng = stream(stream_seed(0, "bootstrap", clients_per_round))
        found = bootstrap((ones, others), ratio, paired=True, method="percentile", rng=rng)
        low, high = map(float, found.confidence_interval)
    return Comparison(
        clients_per_round=clients_per_round,
        ratio=float(ratio(ones, others)),
        low=low,
        high=high,
        bound=None in other,
        seeds=len(one),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """All runs on one kind of split.

    Attributes:
        label: Its name in reports.
        runs: By K* and seed.
        max_queries: Where runs were cut off.
    """

    label: str
    runs: Mapping[int, Mapping[int, Result]]
    max_queries: int

    def comparisons(self, target: float) -> list[Comparison]:
        """K*=1 against each other K*, over the seeds that both have."""
        base = self.runs.get(1, {})
        found = []
        for clients_per_round, runs in self.runs.items():
            seeds = sorted(base.keys() & runs.keys())
            if clients_per_round == 1 or not seeds:
                continue
            found.append(
                compare(
                    [reached(base[seed], target) for seed in seeds],
                    [reached(runs[seed], target) for seed in seeds],
                    clients_per_round=clients_per_round,
                    max_queries=self.max_queries,
                )
            )
        return found

    def data(self) -> dict[str, Any]:
        """All that the tables and sentences are made of, as JSON holds it."""
        return {
            "label": self.label,
            "queries_to": {
                str(target): {
                    str(clients): [reached(run, target) for run in runs.values()]
                    for clients, runs in self.runs.items()
                }
                for target in TARGETS
            },
            "ratio_to_one": {
                str(target): {
                    str(found.clients_per_round): {
                        "ratio": found.ratio,
                        "low": found.low,
                        "high": found.high,
                        "lower_bound": found.bound,
                    }
                    for found in self.comparisons(target)
                }
                for target in TARGETS
            },
            "final_accuracy": {
                str(clients): [run["accuracy"][-1] for run in runs.values()]
                for clients, runs in self.runs.items()
            },
        }

    def markdown(self) -> str:
        """The table of queries to targets, and the sentences about it."""
        columns: dict[str, Column] = {
            f"to {target:.0%}": partial(self._cell, target) for target in TARGETS
        }
        columns["accuracy at the end"] = lambda _, runs: mean_sd_text(
            run["accuracy"][-1] for run in runs.values()
        )
        sentences = "\n".join(f"- {self.verdict(target)}" for target in TARGETS)
        return "\n".join([table("K*", self.runs, columns), f"{sentences}\n"])

    def verdict(self, target: float) -> str:
        """Whether K*=1 needs the fewest queries to a target, as far as the runs show it."""
        start, found = f"To {target:.0%}: ", self.comparisons(target)
        base = [reached(run, target) for run in self.runs.get(1, {}).values()]
        if not found:
            return f"{start}there is nothing to compare K*=1 with."
        if (seeds := min(one.seeds for one in found)) < _MIN_SEEDS:
            return f"{start}nothing is concluded from {seeds} of at least {_MIN_SEEDS} seeds."
        if None in base:
            missed = base.count(None)
            return (
                f"{start}not shown: {missed} of {len(base)} runs of K*=1 did not reach it within "
                f"{self.max_queries:,} queries."
            )
        # A lower bound does not show that any setting needs less.
        worse = [one for one in found if one.high < 1 and not one.bound]
        nearest = min(worse or found, key=lambda one: one.low)
        ratio = f"{_times(nearest)} the queries of K*=1"
        interval = f"95 % bootstrap interval {nearest.low:.2f} to {nearest.high:.2f}"
        detail = f"K*={nearest.clients_per_round} takes {ratio} ({interval})"
        if nearest.low > 1:
            return f"{start}K*=1 needs the fewest queries; of the others {detail}."
        if worse:
            return f"{start}K*=1 does not need the fewest queries: {detail}."
        return f"{start}not shown that K*=1 needs the fewest queries: {detail}."

    def panel(self) -> Panel:
        """The mean test accuracy over queries of each K*, in a band of one standard deviation."""
        started = min(run["queries"][1] for runs in self.runs.values() for run in runs.values())
        grid = np.geomspace(started, self.max_queries, _POINTS).tolist()
        lines = []
        for clients, runs in self.runs.items():
            curves = np.array([_at(run, grid) for run in runs.values()])
            spread = curves.std(axis=0, ddof=len(curves) > 1).tolist()
            y, label = curves.mean(axis=0).tolist(), f"K*={clients}"
            lines.append(Line(x=grid, y=y, error=(spread, spread), band=True, label=label))
        return Panel(
            lines=lines,
            log="x",
            x="queries (mini-batch forward passes)",
            y="test accuracy",
            title=self.label,
        )

    def _cell(self, target: float, _: int, runs: Mapping[int, Result]) -> str:
        """The median over seeds, and how many runs did not get there."""
        found = [reached(run, target) for run in runs.values()]
        middle = statistics.median(math.inf if queries is None else queries for queries in found)
        text = f"{middle:,.0f}" if math.isfinite(middle) else f"> {self.max_queries:,}"
        missed = found.count(None)
        return f"{text} ({missed} of {len(found)} never)" if missed else text


def _times(found: Comparison) -> str:
    return f"{'at least ' if found.bound else ''}{found.ratio:.2f} times"


def _at(result: Result, grid: Iterable[float]) -> list[float]:
    """The last accuracy that was measured by then."""
    return [result["accuracy"][bisect_right(result["queries"], queries) - 1] for queries in grid]
