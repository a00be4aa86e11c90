"""Bootstrap intervals of a metric over the examples that it was measured on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedone_sdk.evaluation.outcomes import Outcomes
from fedone_sdk.metrics import METRICS

_DRAWS = 10_000
_CHUNK = 2**22
"""Maximal number of values per batch of draws."""

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]


class Interval(NamedTuple):
    """A value and the bounds of its 95 % interval."""

    value: float
    low: float
    high: float


def interval(metric: str, outcomes: Outcomes, num_labels: int) -> Interval | None:
    """Return the percentile bootstrap interval of a prompt's metric over examples.

    Examples are resampled with replacement (Efron and Tibshirani 1993, chapter 13) with a fixed
    seed, so that reports are reproducible. The interval covers the choice of examples, not the
    variation between runs.

    Returns:
        The interval; None if nothing was scored or the metric is a user function, which reports do
        not import.
    """
    if metric == "loss":
        losses = [value for value in outcomes.losses if value is not None]
        return (
            _percentile_interval(math.fsum(losses) / len(losses), _means(losses))
            if losses
            else None
        )
    pairs = _rows_with_answers(outcomes.targets, outcomes.predicted)
    if metric not in METRICS or not pairs:
        return None
    value, drawn = _resample(metric, np.array(pairs), num_labels, (1,))
    return _percentile_interval(float(value[0]), drawn[0])


def difference(metric: str, first: Outcomes, second: Outcomes, num_labels: int) -> Interval | None:
    """Return the paired bootstrap interval of the difference of two prompts' metrics.

    Returns:
        The interval of first minus second; None as for `interval`, or for different dev splits.
    """
    if metric == "loss":
        if len(first.losses) != len(second.losses):
            return None
        both = zip(first.losses, second.losses, strict=True)
        apart = [a - b for a, b in both if a is not None and b is not None]
        return _percentile_interval(math.fsum(apart) / len(apart), _means(apart)) if apart else None
    if metric not in METRICS or first.targets != second.targets:
        return None
    rows = _rows_with_answers(first.targets, first.predicted, second.predicted)
    if not rows:
        return None
    value, drawn = _resample(metric, np.array(rows), num_labels, (1, 2))
    return _percentile_interval(float(value[0] - value[1]), drawn[0] - drawn[1])


def confusion(outcomes: Outcomes, num_labels: int) -> list[list[int]]:
    """Return the confusion matrix: true labels in rows, predictions in columns, "none" last."""
    counts = [[0] * (num_labels + 1) for _ in range(num_labels)]
    for target, predicted in _rows_with_answers(outcomes.targets, outcomes.predicted):
        counts[target][predicted] += 1
    return counts


def _rows_with_answers(*columns: Sequence[int | None]) -> list[tuple[int, ...]]:
    rows = zip(*columns, strict=True)
    return [tuple(int(v) for v in row if v is not None) for row in rows if None not in row]


def _resample(
    metric: str, rows: _Ints, num_labels: int, columns: Sequence[int]
) -> tuple[_Floats, _Floats]:
    """Return each prompt's metric, shape (P,), and its bootstrap draws, shape (P, draws).

    Metrics depend only on the counts of each combination of answers, so the bootstrap draws these
    counts from a multinomial.
    """
    cells, counts = np.unique(rows, axis=0, return_counts=True)
    rng = np.random.Generator(np.random.Philox(0))
    draws = rng.multinomial(counts.sum(), counts / counts.sum(), size=_DRAWS)
    width = num_labels + 1  # The last column, index -1, is "no label".
    values, drawn = [], []
    for column in columns:
        place = cells[:, 0] * width + cells[:, column] % width
        into = np.zeros((len(cells), num_labels * width))
        into[np.arange(len(cells)), place] = 1.0
        shape = (-1, num_labels, width)
        values.append(metrics_of_tables(metric, (counts @ into).reshape(shape))[0])
        drawn.append(metrics_of_tables(metric, (draws @ into).reshape(shape)))
    return np.array(values), np.array(drawn)


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


def _means(values: Sequence[float]) -> _Floats:
    numbers = np.array(values, dtype=np.float64)
    rng = np.random.Generator(np.random.Philox(0))
    size = max(1, _CHUNK // len(numbers))
    chunks = [min(size, _DRAWS - at) for at in range(0, _DRAWS, size)]
    return np.concatenate(
        [
            numbers[rng.integers(len(numbers), size=(count, len(numbers)))].mean(axis=1)
            for count in chunks
        ]
    )


def _percentile_interval(value: float, drawn: _Floats) -> Interval:
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Interval(value, float(low), float(high))
