"""Bootstrap intervals of a metric over examples and seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

_DRAWS = 10_000
_CHUNK = 2**22
"""Largest number of values that are computed at once."""

_NORMAL = 1.959964
_STUDENT = (
    *(12.70620, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157),
    *(2.228139, 2.200985, 2.178813, 2.160369, 2.144787, 2.131450, 2.119905, 2.109816, 2.100922),
)
"""0.975 quantiles of the normal distribution, and of Student's t for 1 to 18 degrees of freedom."""

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]

RESAMPLED = ("accuracy", "f1", "matthews", "loss")
"""Metrics with an interval."""


class Measured(Protocol):
    """The results of one prompt on each example, as in `Outcomes`."""

    @property
    def predicted(self) -> Sequence[int | None]:
        """Index of the predicted label, -1 for no label; None if the model failed."""

    @property
    def targets(self) -> Sequence[int]:
        """Index of the true label."""

    @property
    def losses(self) -> Sequence[float | None]:
        """The task's loss; None if the model failed."""


class Interval(NamedTuple):
    """A value and the bounds of its 95 % interval.

    Attributes:
        pairs: The number of seeds, each of which gives one pair of measurements.
        error: The standard error of the value.
        above: The probability that the value is above 0.
    """

    value: float
    low: float
    high: float
    pairs: int
    error: float
    above: float

    @property
    def verdict(self) -> Literal["more", "less", "open"]:
        """Whether the interval excludes 0, and on which side."""
        return "more" if self.low > 0 else "less" if self.high < 0 else "open"


def interval(metric: str, measured: Measured, num_labels: int) -> Interval | None:
    """Return the percentile bootstrap interval of a prompt's metric over examples.

    Examples are resampled with replacement (Efron and Tibshirani 1993, chapter 13) with a fixed
    seed. The interval covers the choice of examples, not the variation between runs.

    For the accuracy, one right and one wrong answer are added to the resampled examples (Agresti
    and Coull 1998), because 20 right answers of 20 do not show that the accuracy is exactly 1. For
    f1 and matthews, these are one right and one wrong answer for each label. For the loss, the
    lowest and the highest loss are added: 0 and 1 if no other loss occurs.

    Returns:
        The interval; None if nothing was scored, or for a metric that is a user's function.
    """
    return _interval(metric, [measured], [], num_labels)


def difference(
    metric: str, first: Sequence[Measured], second: Sequence[Measured], num_labels: int
) -> Interval | None:
    """Return the metric of `first` minus that of `second`, paired by seed and by example.

    `first` and `second` have one measurement per seed, for the same seeds.

    Seeds and examples are resampled with replacement, independently of each other and with the same
    draws for both sides (Owen 2007, "The pigeonhole bootstrap").

    With few seeds, the interval would be too narrow, so the spread that comes from the seeds is
    multiplied by a factor (`_stretch`; Hesterberg 2015, "expanded percentile interval").

    For the accuracy, two examples are added: one that only `first` answers correctly, with every
    seed, and one that only `second` does. The result of one seed is then close to the exact test of
    McNemar (1947). For the loss, the added differences are m and -m with ``m = sum d^2 / sum |d|``
    over the examples' mean differences d. Without them, few examples would give a narrow interval.

    Returns:
        The interval; None if there are no seeds, if the dev splits differ, or where `interval`
        returns None.
    """
    for a, b in zip(first, second, strict=True):
        if a.targets != b.targets or (metric == "loss" and len(a.losses) != len(b.losses)):
            return None
    return _interval(metric, first, second, num_labels)


def confusion(outcomes: Measured, num_labels: int) -> list[list[int]]:
    """Return the confusion matrix: rows are true labels; the last column is "no label"."""
    counts = [[0] * (num_labels + 1) for _ in range(num_labels)]
    for target, predicted in zip(outcomes.targets, outcomes.predicted, strict=True):
        if predicted is not None:
            counts[target][predicted] += 1
    return counts


def _interval(
    metric: str, first: Sequence[Measured], second: Sequence[Measured], num_labels: int
) -> Interval | None:
    if metric not in RESAMPLED or not first:
        return None
    measured, seeds = [*first, *second], len(first)
    if metric == "loss":
        columns = [each.losses for each in measured]
    else:
        columns = [first[0].targets, *(each.predicted for each in measured)]
    table = np.array(columns, dtype=np.float64)
    table = table[:, ~np.isnan(table).any(axis=0)]  # Only examples without a failed answer.
    if not table.size:
        return None
    # A metric depends only on the count of each combination of answers (a cell).
    cells, counts = np.unique(table, axis=1, return_counts=True)
    weights = counts
    if metric in ("accuracy", "loss") or not second:
        # For the accuracy, they have class 0: label 0 is right, and no label (-1) is wrong.
        added = {"accuracy": [[0, 0], *[[0, -1]] * seeds, *[[-1, 0]] * seeds]}
        others = added.get(metric, [[0, 0, 1, 1], [0, 1, 0, 1]])
        more = _added_losses(cells, counts, seeds) if metric == "loss" else others
        cells = np.concatenate([cells, np.array(more[: len(cells)])], axis=1)
        added_count = len(more[0])  # They are drawn with the others, but not in the estimate.
        counts, weights = np.append(counts, [0] * added_count), np.append(counts, [1] * added_count)

    def by_seed(drawn: _Ints) -> _Floats:
        """Return the metric per seed, shape (draws, S), from counts of the cells."""
        values: _Floats = (
            drawn @ cells.T / counts.sum()
            if metric == "loss"
            else _of_answers(metric, cells.astype(np.int64), drawn, num_labels)
        )
        return values[:, :seeds] - values[:, seeds:] if second else values

    once = by_seed(counts[np.newaxis])[0]
    rng = np.random.Generator(np.random.Philox(0))  # Fixed, so that reports are reproducible.
    size = max(1, _CHUNK // len(counts))
    stretch, ends = _stretch(seeds) - 1.0, []
    for at in range(0, _DRAWS, size):
        count = min(size, _DRAWS - at)
        # Draw how many times each seed and each cell occurs in a resample.
        chosen = rng.multinomial(seeds, np.full(seeds, 1 / seeds), size=count)
        examples = rng.multinomial(counts.sum(), weights / weights.sum(), size=count)
        drawn = (chosen * by_seed(examples)).sum(axis=1) / seeds
        ends.append(drawn + stretch * (chosen @ once / seeds - once.mean()))
    every = np.concatenate(ends)
    low, high = np.quantile(every, (0.025, 0.975))
    above = (every > 0.0).mean() + (every == 0.0).mean() / 2.0
    return Interval(
        float(once.mean()), float(low), float(high), seeds, float(every.std()), float(above)
    )


def _added_losses(cells: _Floats, counts: _Ints, seeds: int) -> list[list[float]]:
    """Return the losses of the two added examples (see `interval` and `difference`)."""
    first, second = cells[:seeds], cells[seeds:]
    if len(second):
        apart = np.abs((first - second).mean(axis=0))
        typical = float(_quotient(counts @ apart**2, counts @ apart))
        return [[typical, 0.0]] * seeds + [[0.0, typical]] * seeds
    return [[0.0, 1.0]] if {*first[0]} <= {0.0, 1.0} else [[first.min(), first.max()]]


def _of_answers(metric: str, cells: _Ints, drawn: _Ints, num_labels: int) -> _Floats:
    """Return a metric per draw and prompt. `cells` has a row of targets, then one per prompt."""
    targets, *predictions = cells
    width = num_labels + 1  # The last column, index -1, is "no label".
    values = []
    for predicted in predictions:
        into = np.zeros((len(targets), num_labels * width))
        into[np.arange(len(targets)), targets * width + predicted % width] = 1.0
        tables = (drawn @ into).reshape(-1, num_labels, width)
        values.append(metrics_of_tables(metric, tables))
    return np.stack(values, axis=1)


def _stretch(num_seeds: int) -> float:
    """Return sqrt(S / (S - 1)) t / z, with the quantiles t and z of `_STUDENT` and `_NORMAL`."""
    if num_seeds == 1:
        return 1.0
    freedom = num_seeds - 1
    # Beyond the table, t is approximated by an expansion in 1 / freedom (Fisher and Cornish 1960).
    t = (
        _STUDENT[freedom - 1]
        if freedom <= len(_STUDENT)
        else _NORMAL + (_NORMAL**3 + _NORMAL) / (4 * freedom)
    )
    return math.sqrt(num_seeds / freedom) * t / _NORMAL


def metrics_of_tables(name: str, tables: _Floats) -> _Floats:
    """Return a metric of `fedone_sdk.metrics` for many confusion tables.

    Args:
        name: ``accuracy``, ``f1`` or ``matthews``.
        tables: Counts by true and predicted label, shape (tables, C, C + 1); the last column is
            "no label".
    """
    labels = tables.shape[1]
    total = tables.sum(axis=(1, 2))
    right = np.trace(tables[:, :, :labels], axis1=1, axis2=2)
    if name == "accuracy":
        return _quotient(right, total)
    true, predicted = tables.sum(axis=2), tables.sum(axis=1)
    if name == "f1":
        return _quotient(2 * tables[:, 1, 1], true[:, 1] + predicted[:, 1])
    covariance = right * total - (true * predicted[:, :labels]).sum(axis=1)
    spread = (total**2 - (predicted**2).sum(axis=1)) * (total**2 - (true**2).sum(axis=1))
    return _quotient(covariance, np.sqrt(spread))


def _quotient(above: _Floats, below: _Floats) -> _Floats:
    return np.divide(above, below, out=np.zeros_like(above, dtype=np.float64), where=below > 0)
