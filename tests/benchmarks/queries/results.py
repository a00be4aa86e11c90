"""Results of the bench of queries: medians, queries to targets, differences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedone_sdk.experiments.experiment import Result
from tests.benchmarks.queries.bootstrap import (
    Difference,
    Interval,
    median_bootstrap,
    paired_difference,
)
from tests.benchmarks.queries.contestants import BARS, CONTESTANTS
from tests.benchmarks.queries.variants import Variant

__all__ = [
    "BARE",
    "BenchResults",
    "COSTS",
    "HELD_TO",
    "Passage",
    "Runs",
    "VariantResults",
    "WORTHWHILE",
]

BARE: Mapping[str, str] = {
    "plain": "No prompt",
    "calibrated": "No prompt, calibrated by labels",
    "balanced": "No prompt, calibrated by labels, classes alike",
    "contextual": "No prompt, contextual calibration",
    "batch": "No prompt, batch calibration",
}
"""Baselines without a prompt, and their labels."""

HELD_TO = ("calibrated", "balanced")
"""Baselines that a method must not be worse than."""

COSTS = ("queries", "requests", "example_requests", "tokens")
"""What is counted of a run."""

WORTHWHILE = 0.02
"""Least gain of an oracle, nats; shares of a smaller gain are omitted."""

Point = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """One method on one variant.

    Attributes:
        label: Display name.
        by_seed: Results of `run_contest`.
    """

    label: str
    by_seed: Mapping[int, Result]

    def at(self, seed: int, mark: int) -> Point:
        """Return the state of a run at a mark."""
        point: Point = next(one for one in self.by_seed[seed]["curve"] if one["mark"] == mark)
        return point

    def last(self, seed: int) -> Point:
        """Return the state of a run at the cap."""
        point: Point = self.by_seed[seed]["curve"][-1]
        return point

    def values(self, mark: int, name: str) -> list[float]:
        """Return a number of all seeds at a mark."""
        return [float(self.at(seed, mark)[name]) for seed in self.by_seed]

    def median(self, mark: int, name: str) -> Interval:
        """Its median."""
        return median_bootstrap(self.values(mark, name))

    def reached(self, seed: int, target: float, *, for_good: bool = False) -> Point | None:
        """The first mark at which a run's deployable prompt was as good as a target.

        Args:
            seed: Of the run.
            target: Loss on the dev split, nats.
            for_good: Whether it must be so at all later marks too.
        """
        found: Point | None = None
        # What is untrained costs nothing, and is no achievement.
        curve = [one for one in self.by_seed[seed]["curve"] if one["queries"]]
        for point in reversed(curve):
            if point["loss"] <= target:
                found = point
            elif for_good:
                break
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """What a method needs for the loss that another one has at the cap.

    Attributes:
        target: The other's median loss at the cap, nats.
        median_queries: At the first mark where the method's median loss is as good; infinite
            where it never is.
        queries: Of the method to the other's loss of the same seed: the median.
        queries_for_good: The same where it must stay there.
        bar_queries: After how many the other was for good as good as at the cap: the median.
        reached: Share of the seeds that reached it.
        ratios: How many times more the other has spent at the cap, by what is counted: medians
            over the seeds, 0 where a seed never reached it.
        seeds: Pairs.
    """

    target: float
    median_queries: float
    queries: Interval
    queries_for_good: Interval
    bar_queries: Interval
    reached: float
    ratios: Mapping[str, Interval]
    seeds: int

    @classmethod
    def of(cls, own: Runs, bar: Runs, marks: Sequence[int]) -> Passage | None:
        """Compares two methods by the seeds that both have; None where there is none."""
        seeds = sorted(own.by_seed.keys() & bar.by_seed.keys())
        if not seeds:
            return None
        target = median_bootstrap([bar.last(seed)["loss"] for seed in seeds]).value
        trained = (mark for mark in marks if own.median(mark, "queries").value)
        good = (mark for mark in trained if own.median(mark, "loss").value <= target)
        first = next(good, None)
        points = {seed: own.reached(seed, bar.last(seed)["loss"]) for seed in seeds}
        lasting = [own.reached(seed, bar.last(seed)["loss"], for_good=True) for seed in seeds]
        bars = [bar.reached(seed, bar.last(seed)["loss"], for_good=True) for seed in seeds]

        def ratio(seed: int, cost: str) -> float:
            point = points[seed]
            if point is None:
                return 0.0
            return float(bar.last(seed)[cost]) / float(point[cost])

        return cls(
            target=target,
            median_queries=math.inf if first is None else own.median(first, "queries").value,
            queries=median_bootstrap([_queries(points[seed]) for seed in seeds]),
            queries_for_good=median_bootstrap([_queries(point) for point in lasting]),
            bar_queries=median_bootstrap([_queries(point) for point in bars]),
            reached=sum(point is not None for point in points.values()) / len(seeds),
            ratios={
                cost: median_bootstrap([ratio(seed, cost) for seed in seeds]) for cost in COSTS
            },
            seeds=len(seeds),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantResults:
    """All methods on one variant.

    Attributes:
        variant: The variant.
        runs: By method name.
        no_prompt: Results of `run_no_prompt` by seed.
        oracle: Result of `run_oracle`, if it was run.
    """

    variant: Variant
    runs: Mapping[str, Runs]
    no_prompt: Mapping[int, Result]
    oracle: Result | None

    def against_no_prompt(self, name: str, mark: int, kind: str) -> Difference | None:
        """Return the loss of a method minus that of the bare model, paired by seed.

        Args:
            name: The method.
            mark: Training queries.
            kind: How the bare model is calibrated, of `BARE`.
        """
        found = self.runs.get(name)
        seeds = sorted(found.by_seed.keys() & self.no_prompt.keys()) if found else []
        if found is None or not seeds:
            return None
        return paired_difference(
            [found.at(seed, mark)["loss"] for seed in seeds],
            [self.no_prompt[seed][kind]["loss"] for seed in seeds],
        )

    @property
    def gap(self) -> float | None:
        """Return the oracle's gain over the calibrated bare model, nats: the median over seeds."""
        if self.oracle is None or not self.no_prompt:
            return None
        oracle = self.oracle["loss"]
        gaps = [found["calibrated"]["loss"] - oracle for found in self.no_prompt.values()]
        return median_bootstrap(gaps).value

    def closed(self, name: str, mark: int) -> Interval | None:
        """Return the share of the gap that a method closes; None if the gap is too small."""
        found, gap = self.runs.get(name), self.gap
        if found is None or gap is None or gap <= WORTHWHILE:
            return None
        # In units of the gap of all seeds, because that of one may be near 0.
        shares = [
            (self.no_prompt[seed]["calibrated"]["loss"] - found.at(seed, mark)["loss"]) / gap
            for seed in sorted(found.by_seed.keys() & self.no_prompt.keys())
        ]
        return median_bootstrap(shares) if shares else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResults:
    """The results of the bench.

    Attributes:
        marks: Training queries at which runs are measured; the last is the cap.
        default: The method that the goals are about.
        variants: Those with results.
        skipped: Bare models that are not above chance, by the variants' names.
    """

    marks: tuple[int, ...]
    default: str
    variants: Sequence[VariantResults]
    skipped: Mapping[str, Result]

    def twin(self, found: VariantResults) -> VariantResults | None:
        """The same variant with one client per round and no attack; None if it was not run."""
        name = found.variant.twin
        return next((one for one in self.variants if one.variant.name == name), None)

    def passage(self, found: VariantResults, name: str, bar: str) -> Passage | None:
        """What a method needs for a bar: that of the variant's twin, so that K* can be compared."""
        twin, own = self.twin(found), found.runs.get(name)
        other = None if twin is None else twin.runs.get(bar)
        if own is None or other is None or name == bar:
            return None
        return Passage.of(own, other, self.marks)

    def cost_of_lies(self, found: VariantResults, name: str) -> Difference | None:
        """Return accuracy with attackers minus without, at the cap, in points, paired by seed."""
        twin, lied = self.twin(found), found.runs.get(name)
        honest = None if twin is None else twin.runs.get(name)
        if found.variant.attack is None or lied is None or honest is None:
            return None
        seeds = sorted(lied.by_seed.keys() & honest.by_seed.keys())
        if not seeds:
            return None
        return paired_difference(
            [100.0 * lied.last(seed)["accuracy"] for seed in seeds],
            [100.0 * honest.last(seed)["accuracy"] for seed in seeds],
        )

    def data(self) -> dict[str, Any]:
        """The same numbers as JSON holds them: null is never (infinite), or not known."""
        return {
            "default": self.default,
            "marks": list(self.marks),
            "variants": {found.variant.name: self._variant(found) for found in self.variants},
            "not_above_chance": {
                name: {"accuracy": look["calibrated"]["accuracy"], "majority": look["majority"]}
                for name, look in self.skipped.items()
            },
        }

    def _variant(self, found: VariantResults) -> dict[str, Any]:
        bare = found.no_prompt
        return {
            "title": found.variant.title,
            "task": found.variant.task_document(),
            "no_prompt": {
                kind: _finite(median_bootstrap([one[kind]["loss"] for one in bare.values()]))
                for kind in BARE
                if bare
            },
            "oracle": found.oracle,
            "gap": found.gap,
            "methods": {name: self._method(found, name) for name in found.runs},
        }

    def _method(self, found: VariantResults, name: str) -> dict[str, Any]:
        runs = found.runs[name]
        last = self.marks[-1]
        return {
            "label": CONTESTANTS[name].label,
            "seeds": list(runs.by_seed),
            "curve": {
                str(mark): {
                    name: _finite(runs.median(mark, name))
                    for name in (*COSTS, "loss", "metric", "accuracy")
                }
                for mark in (0, *self.marks)
            },
            "losses": {str(seed): runs.last(seed)["loss"] for seed in runs.by_seed},
            "refit_loss": _refit(runs),
            "targets": {
                bar: _passage(passage)
                for bar in BARS
                if (passage := self.passage(found, name, bar)) is not None
            },
            "against_no_prompt": {
                kind: _finite(found.against_no_prompt(name, last, kind)) for kind in HELD_TO
            },
            "gap_closed": {
                str(mark): _finite(share)
                for mark in self.marks
                if (share := found.closed(name, mark)) is not None
            },
            "cost_of_lies_points": _finite(self.cost_of_lies(found, name)),
        }


def _queries(point: Point | None) -> float:
    return math.inf if point is None else float(point["queries"])


def _refit(runs: Runs) -> Any:
    found = [run["refit"]["loss"] for run in runs.by_seed.values() if run["refit"] is not None]
    return _finite(median_bootstrap(found)) if found else None


def _passage(passage: Passage) -> dict[str, Any]:
    return {
        "target": passage.target,
        "median_queries": _number(passage.median_queries),
        "queries": _finite(passage.queries),
        "queries_for_good": _finite(passage.queries_for_good),
        "bar_queries": _finite(passage.bar_queries),
        "reached": passage.reached,
        "ratios": {cost: _finite(ratio) for cost, ratio in passage.ratios.items()},
        "seeds": passage.seeds,
    }


def _finite(found: Interval | Difference | None) -> dict[str, Any] | None:
    return None if found is None else {k: _number(v) for k, v in found._asdict().items()}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
