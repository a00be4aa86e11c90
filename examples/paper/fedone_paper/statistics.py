"""Exact, distribution-free intervals for few repeats, some of which are censored (infinite)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from scipy.stats import binomtest, quantile_test


class Median(NamedTuple):
    """The median of repeats, with an interval for the true median.

    Attributes:
        value: The lower median; infinite if fewer than half of the repeats reach the target. If all
            repeats have the same cap, it is the Kaplan-Meier median.
        low: Lower end of the 95 % interval; 0 if there are too few repeats.
        high: Upper end of the interval; infinite if the data does not bound it.
    """

    value: float
    low: float
    high: float


class Ratio(NamedTuple):
    """A median ratio of numbers that may be censored.

    Attributes:
        least: Lower bound of the median.
        most: Upper bound of the median; infinite if censored numbers allow any value.
        low: Lower end of the median's interval.
        high: Upper end of the interval.
    """

    least: float
    most: float
    low: float
    high: float


class Comparison(NamedTuple):
    """Repeats of two settings, paired by their seeds.

    Attributes:
        fewer: Number of pairs whose first repeat needed fewer queries.
        more: Number of pairs whose first repeat needed more queries.
        ties: Number of pairs with equal numbers, or with two censored repeats.
        p_value: P-value of the two-sided exact sign test.
        ratio: Median over the pairs of second / first; a censored number is at least the cap.
    """

    fewer: int
    more: int
    ties: int
    p_value: float
    ratio: Ratio | None


def median_interval(values: Sequence[float]) -> Median:
    """Return the lower median and its interval between order statistics (SciPy `quantile_test`).

    The interval covers the true median with at least 95 % for any distribution.

    Args:
        values: One number per repeat; infinite if the repeat was censored.

    Raises:
        ValueError: There are no values, or one is not a number.
    """
    ordered = sorted(map(float, values))
    if not ordered or any(map(math.isnan, ordered)):
        raise ValueError("there must be at least one repeat, and all repeats must be numbers")
    ends = quantile_test(ordered, p=0.5).confidence_interval(0.95)
    return Median(
        value=ordered[(len(ordered) - 1) // 2],
        low=0.0 if math.isnan(ends.low) else float(ends.low),
        high=math.inf if math.isnan(ends.high) else float(ends.high),
    )


def compared(
    first: Sequence[float], second: Sequence[float], *, cap: float = math.inf
) -> Comparison:
    """Compare two settings whose repeats had the same seeds.

    Args:
        first: One number per seed; infinite if the repeat was censored.
        second: The other setting's numbers, for the same seeds.
        cap: Lower bound of censored numbers.

    Raises:
        ValueError: The lengths differ, or a value is not a number.
    """
    pairs = list(zip(first, second, strict=True))
    fewer, more = sum(a < b for a, b in pairs), sum(a > b for a, b in pairs)
    ratio = None
    if pairs:
        least = median_interval([_ratio(a, min(b, cap)) if a < math.inf else 0.0 for a, b in pairs])
        most = median_interval([_ratio(min(a, cap), b) if b < math.inf else b for a, b in pairs])
        ratio = Ratio(least.value, most.value, least.low, most.high)
    p_value = float(binomtest(fewer, fewer + more).pvalue) if fewer + more else 1.0
    return Comparison(fewer, more, len(pairs) - fewer - more, p_value, ratio)


def _ratio(a: float, b: float) -> float:
    """Return b / a. A number is 0 if a target was already reached at the start."""
    return b / a if a else 1.0 if b == 0.0 else math.inf
