"""Results of `fedone compare`: trials (runs of a method with a seed), table and conclusion."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from fedone_sdk._values import Frozen
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.evaluation.intervals import RESAMPLED, Interval, difference
from fedone_sdk.metrics import metric_text
from fedone_sdk.spec import RunSpec
from fedone_sdk.task import TaskSpec

BASELINES: Mapping[str, str] = {
    "no-prompt": "No prompt",
    "no-prompt-bias": "No prompt, fitted label bias",
}
"""Display names of the baselines, by name."""

_HEADER = (
    "method|trials|{metric}|minus {first} [95 % interval]|loss|minus {first} [95 % interval]"
    "|queries to target|queries|example calls|requests"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """A method or baseline of a comparison.

    Attributes:
        kind: A ``method`` is tuned; a ``baseline`` is only measured.
        spec: The run of RUN.yaml, with this method.
        notes: How the settings differ from RUN.yaml, apart from the method.
    """

    name: str
    kind: Literal["method", "baseline"]
    spec: RunSpec
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The display name."""
        return BASELINES.get(self.name, self.name)


class Point(Frozen):
    """The metric of the deployable prompt after some queries.

    Attributes:
        metric: Measured on the dev split, or on the part that ``evaluation.examples`` selects.
    """

    queries: int
    metric: float


class TrialRecord(Frozen):
    """Results of one entrant with one seed, without texts of examples.

    Attributes:
        status: How the run ended; ``measured`` for a baseline.
        example_calls: Training queries times the number of examples per query.
        evaluation_queries: Queries on the dev split.
        spent: Usage of the trial; cached answers cost nothing.
        loss: The task's mean loss on the dev split, with the label bias.
        predicted: As in `Outcomes`; so are `targets` and `losses`.
        curve: Points of the untrained prompt, of prompts during training, and of the final prompt.
    """

    entrant: str
    seed: int
    model: str
    status: str
    rounds: int = 0
    queries: int = 0
    example_calls: int = 0
    evaluation_queries: int
    spent: Usage
    prompt: str = ""
    bias: tuple[float, ...] | None = None
    metric: float
    loss: float
    predicted: tuple[int | None, ...] = ()
    targets: tuple[int, ...] = ()
    losses: tuple[float | None, ...]
    curve: tuple[Point, ...] = Field(min_length=1)
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One entrant's results.

    Attributes:
        difference: The entrant's metric minus the first entrant's metric, for the seeds that both
            have; None if there are no such seeds, or if the metric is a user's function.
        reached: By seed, how many training queries the entrant needed to reach the first entrant's
            final metric; None if the entrant did not reach it.
    """

    entrant: Entrant
    trials: Mapping[int, TrialRecord]
    difference: Interval | None
    loss_difference: Interval | None
    reached: Mapping[int, int | None]

    @property
    def queries_to_target(self) -> float | None:
        """The lower median of `reached`; infinite if most values are None; None without trials."""
        queries = sorted(math.inf if count is None else count for count in self.reached.values())
        return queries[(len(queries) - 1) // 2] if queries else None

    @property
    def spent(self) -> Usage:
        """Usage of all trials."""
        return sum((one.spent for one in self.trials.values()), NOTHING)

    def mean(self, name: str) -> float | None:
        """Return the mean of a number over the seeds; None without trials."""
        values = [float(getattr(one, name)) for one in self.trials.values()]
        return math.fsum(values) / len(values) if values else None

    def row(self) -> list[str]:
        """Return the entrant's row of the table."""
        median, count = self.queries_to_target, len(self.reached)
        reached = sum(queries is not None for queries in self.reached.values())
        text = "-" if median is None else f"{median:.0f}" if math.isfinite(median) else "never"
        if 0 < reached < count:
            text += f" ({reached} of {count})"
        return [
            self.entrant.name,
            str(len(self.trials)),
            metric_text(self.mean("metric"), 4),
            _estimate(self.difference),
            metric_text(self.mean("loss"), 4),
            _estimate(self.loss_difference),
            text,
            _count(self.mean("queries")),
            _count(self.mean("example_calls")),
            f"{self.spent.requests:,}",
        ]

    def document(self) -> dict[str, Any]:
        """Return the standing for JSON."""
        entrant, median = self.entrant, self.queries_to_target
        settings = entrant.spec.method.model_dump(mode="json") if entrant.kind == "method" else None
        means = ("metric", "loss", "queries", "example_calls", "evaluation_queries")
        hidden = {"entrant", "predicted", "targets", "losses"}
        return {
            "name": entrant.name,
            "label": entrant.label,
            "kind": entrant.kind,
            "settings": settings,
            "notes": list(entrant.notes),
            **{name: self.mean(name) for name in means},
            "difference": self.difference and self.difference._asdict(),
            "loss_difference": self.loss_difference and self.loss_difference._asdict(),
            "queries_to_target": None if median is None or math.isinf(median) else median,
            "spent": self.spent.model_dump(mode="json"),
            "trials": [
                {
                    **one.model_dump(mode="json", exclude=hidden),
                    "queries_to_target": self.reached.get(seed),
                }
                for seed, one in self.trials.items()
            ],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """The results of a comparison.

    Attributes:
        standings: In the order of the table; each standing is compared with the first.
        missing: Trials without a result.
    """

    name: str
    task: TaskSpec
    seeds: tuple[int, ...]
    standings: tuple[Standing, ...]
    models: tuple[str, ...]
    num_examples: int
    missing: tuple[str, ...]

    @property
    def spent(self) -> Usage:
        """Usage of all trials."""
        return sum((one.spent for one in self.standings), NOTHING)

    @property
    def table(self) -> list[list[str]]:
        """The header and the rows of the table; `docs/guides/compare.md` explains the columns."""
        metric, first = self.task.metric, self.standings[0].entrant.name
        rows = [_HEADER.format(metric=metric, first=first).split("|")]
        rows += (one.row() for one in self.standings)
        return [row[:4] + row[6:] for row in rows] if metric == "loss" else rows

    @property
    def judged(self) -> str:
        """The compared metric: the task's metric, or the loss if that metric has no interval."""
        return self.task.metric if self.task.metric in RESAMPLED else "loss"

    @property
    def conclusion(self) -> str:
        """Which entrants are better than the first, in one or two sentences."""
        first, *others = self.standings
        by_loss = self.judged == "loss"
        compared = [(one, one.loss_difference if by_loss else one.difference) for one in others]
        sides: dict[str, list[str]] = {"better": [], "worse": [], "open": []}
        for one, estimate in compared:
            if estimate is not None:
                sides[self._side(estimate)].append(one.entrant.name)
        pairs = max((estimate.pairs for _, estimate in compared if estimate), default=0)
        if not pairs:
            return (
                "Nothing is compared yet: no seed has trials of the first method and of another "
                "with the same measured dev rows."
            )
        words = ("worse", sides["better"]), ("better", sides["worse"])
        parts = [f"{word} than {_names(names)}" for word, names in words if names]
        basis = f"{self.judged}, 95 % intervals, {_counted(pairs, 'seed')}, "
        basis += _counted(self.num_examples, "dev example")
        name = first.entrant.name
        if not parts:
            text = f"No difference from {name} was seen for {_names(sides['open'])} ({basis})."
        else:
            text = f"{name} is {' and '.join(parts)} ({basis})."
            if sides["open"]:
                text += f" No difference from {_names(sides['open'])} was seen."
        if pairs == 1:
            text += " With one seed, intervals do not cover the variation between seeds."
        return text

    def document(self) -> dict[str, Any]:
        """Return the results for JSON."""
        return {
            "name": self.name,
            "metric": self.task.metric,
            "judged": self.judged,
            "models": list(self.models),
            "seeds": list(self.seeds),
            "examples": self.num_examples,
            "conclusion": self.conclusion,
            "methods": [one.document() for one in self.standings],
            "spent": self.spent.model_dump(mode="json"),
            "missing": list(self.missing),
        }

    def _side(self, estimate: Interval) -> str:
        if estimate.verdict == "open":
            return "open"
        more_is_better = self.judged != "loss"
        return "better" if (estimate.verdict == "more") is more_is_better else "worse"


def results_of(
    *,
    name: str,
    task: TaskSpec,
    entrants: Sequence[Entrant],
    seeds: Sequence[int],
    records: Mapping[tuple[str, int], TrialRecord],
    num_examples: int,
) -> Results:
    """Compute the results of trials."""
    names = [entrant.name for entrant in entrants]
    by_name = {
        name: {seed: records[name, seed] for seed in seeds if (name, seed) in records}
        for name in names
    }
    first, lower = by_name[names[0]], task.metric == "loss"
    standings = []
    for entrant in entrants:
        trials = by_name[entrant.name]
        common = [seed for seed in trials if seed in first] if trials is not first else []
        pair = [trials[seed] for seed in common], [first[seed] for seed in common]
        standings.append(
            Standing(
                entrant=entrant,
                trials=trials,
                difference=difference(task.metric, *pair, len(task.labels)),
                loss_difference=difference("loss", *pair, len(task.labels)),
                reached={
                    seed: _reached(record, first[seed].metric, lower=lower)
                    for seed, record in trials.items()
                    if seed in first
                },
            )
        )
    return Results(
        name=name,
        task=task,
        seeds=tuple(seeds),
        standings=tuple(standings),
        models=tuple(dict.fromkeys(record.model for record in records.values())),
        num_examples=num_examples,
        missing=tuple(
            f"{name}, seed {seed}" for seed in seeds for name in names if seed not in by_name[name]
        ),
    )


def _reached(record: TrialRecord, target: float, *, lower: bool) -> int | None:
    for point in record.curve:
        if (point.metric <= target) if lower else (point.metric >= target):
            return point.queries
    return None


def _names(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _estimate(one: Interval | None) -> str:
    return "-" if one is None else f"{one.value:+.4f} [{one.low:+.4f}, {one.high:+.4f}]"
