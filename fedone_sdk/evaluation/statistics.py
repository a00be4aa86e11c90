"""Paired differences of two entrants, with bootstrap intervals over seeds and examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedone_sdk.evaluation.intervals import metrics_of_tables

if TYPE_CHECKING:
    from fedone_sdk.evaluation.results import TrialRecord

_DRAWS = 4_000
_CHUNK = 2**22
"""Numbers drawn at a time."""

_NORMAL = 1.959964
_STUDENT = (
    *(12.70620, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157),
    *(2.228139, 2.200985, 2.178813, 2.160369, 2.144787, 2.131450, 2.119905, 2.109816, 2.100922),
)
"""The 0.975 quantiles of the normal distribution, and of Student's t by degrees of freedom."""

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]

RESAMPLED = ("accuracy", "f1", "matthews", "loss")
"""Metrics with an interval: functions of answer counts, or of losses."""


class Estimate(NamedTuple):
    """A mean difference of pairs."""

    mean: float
    low: float
    high: float
    pairs: int

    @property
    def verdict(self) -> Literal["more", "less", "open"]:
        """Whether the interval excludes 0, and on which side."""
        return "more" if self.low > 0 else "less" if self.high < 0 else "open"


class _Drawn(NamedTuple):
    """A mean difference and draws of it.

    Attributes:
        drawn: With drawn seeds and examples, shape (draws,).
        of_seeds: With the same seeds and all examples, shape (draws,).
    """

    mean: float
    drawn: _Floats
    of_seeds: _Floats


def difference(
    metric: str, first: Sequence[TrialRecord], second: Sequence[TrialRecord], num_labels: int = 0
) -> Estimate | None:
    """Return the metric of one entrant minus another's, on the same seeds and examples.

    Seeds and examples are resampled with replacement, independently of each other and with the same
    draws for both entrants (Owen 2007, "The pigeonhole bootstrap"). The interval covers other seeds
    and other examples of the same kind. The part of the spread that comes from the seeds is
    multiplied by ``sqrt(S / (S - 1)) t / z``, with the 0.975 quantiles of Student's t with S - 1
    degrees of freedom and of the normal distribution, because the interval of few repeats is too
    narrow otherwise (Hesterberg 2015, "expanded percentile interval"). With one seed, the interval
    is over the examples only.

    Returns:
        The difference; None without pairs, or without examples that both have answered.
    """
    pairs = list(zip(first, second, strict=True))
    if not pairs or metric not in RESAMPLED:
        return None
    if metric in ("loss", "accuracy"):
        found = _linear(np.array([_apart(metric, a, b) for a, b in pairs], dtype=np.float64))
    else:
        found = _of_tables(metric, first, second, num_labels)
    if found is None:
        return None
    mean, drawn, of_seeds = found
    more = _stretch(len(pairs)) - 1.0
    low, high = np.quantile(drawn + more * (of_seeds - mean), (0.025, 0.975))
    return Estimate(mean, float(low), float(high), len(pairs))


def _stretch(num_seeds: int) -> float:
    if num_seeds == 1:
        return 1.0
    freedom = num_seeds - 1
    # Beyond the table: the first terms of the expansion in 1 / freedom (Fisher and Cornish 1960).
    t = (
        _STUDENT[freedom - 1]
        if freedom <= len(_STUDENT)
        else _NORMAL + (_NORMAL**3 + _NORMAL) / (4 * freedom)
    )
    return math.sqrt(num_seeds / freedom) * t / _NORMAL


def _apart(metric: str, first: TrialRecord, second: TrialRecord) -> list[float]:
    if metric == "loss":
        return [_less(a, b) for a, b in zip(first.losses, second.losses, strict=True)]
    columns = zip(first.predicted, second.predicted, first.targets, strict=True)
    return [_less(_right(a, target), _right(b, target)) for a, b, target in columns]


def _right(predicted: int | None, target: int) -> float | None:
    return None if predicted is None else float(predicted == target)


def _less(first: float | None, second: float | None) -> float:
    return math.nan if first is None or second is None else first - second


def _linear(apart: _Floats) -> _Drawn | None:
    """Return the difference of a mean over examples; `apart` has shape (S, R)."""
    answered = ~np.isnan(apart).any(axis=0)
    if not answered.any():
        return None
    apart = apart[:, answered]
    return _collected(
        apart.mean(axis=1), len(apart.T), lambda drawn: drawn @ apart.T / len(apart.T)
    )


def _collected(once: _Floats, num_examples: int, by_seed: Callable[[_Ints], _Floats]) -> _Drawn:
    count = len(once)
    parts = [
        ((seeds * by_seed(examples)).sum(axis=1) / count, seeds @ once / count)
        for seeds, examples in _draws(count, num_examples)
    ]
    drawn, of_seeds = (np.concatenate(part) for part in zip(*parts, strict=True))
    return _Drawn(float(once.mean()), drawn, of_seeds)


def _of_tables(
    metric: str, first: Sequence[TrialRecord], second: Sequence[TrialRecord], num_labels: int
) -> _Drawn | None:
    """Return the difference of a function of the confusion table."""
    rows = [record.predicted for record in (*first, *second)]
    answered = [place for place, column in enumerate(zip(*rows, strict=True)) if None not in column]
    if not answered:
        return None
    targets = np.array([first[0].targets[place] for place in answered])
    width = num_labels + 1  # The last column, index -1, is "no label".
    cells = []
    for row in rows:
        predicted = np.array([row[place] for place in answered])
        into = np.zeros((len(answered), num_labels * width))
        into[np.arange(len(answered)), targets * width + predicted % width] = 1.0
        cells.append(into)

    def by_seed(examples: _Ints) -> _Floats:
        """Return the difference with each seed, shape (draws, S)."""
        values = [
            metrics_of_tables(metric, (examples @ into).reshape(-1, num_labels, width))
            for into in cells
        ]
        return np.stack(values[: len(first)], 1) - np.stack(values[len(first) :], 1)

    once = by_seed(np.ones((1, len(answered)), dtype=np.int64))[0]
    return _collected(once, len(answered), by_seed)


def _draws(num_seeds: int, num_examples: int) -> Iterator[tuple[_Ints, _Ints]]:
    """Yield draws with a fixed seed, so that reports are reproducible.

    A draw is the multiplicity of each seed, shape (draws, S), and of each example, (draws, R).
    """
    rng = np.random.Generator(np.random.Philox(0))
    size = max(1, _CHUNK // num_examples)
    for at in range(0, _DRAWS, size):
        count = min(size, _DRAWS - at)
        seeds, examples = (
            rng.multinomial(many, np.full(many, 1 / many), size=count)
            for many in (num_seeds, num_examples)
        )
        yield seeds, examples
