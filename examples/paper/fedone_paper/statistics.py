"""Exact, distribution-free intervals for few repeats, some of which are censored (infinite)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scipy.stats import binomtest, quantile_test, trim_mean


class Median(NamedTuple):
    """The median of repeats, and an interval for the true one.

    Attributes:
        value: The lower median; infinite if fewer than half of the repeats end. With one censoring
            point for all it is the Kaplan-Meier median.
        low: Lower end of the interval; 0 with too few repeats for one.
        high: Its upper end; infinite where the data does not bound it.
    """

    value: float
    low: float
    high: float


class TrimmedMean(NamedTuple):
    """A mean without the extremes.

    Attributes:
        value: The mean; with `bounded`, of the caps in place of censored repeats.
        bounded: Whether censored repeats are left in it: it is then a lower bound.
        dropped: Repeats left out at each end.
    """

    value: float
    bounded: bool
    dropped: int


class Ratio(NamedTuple):
    """A median ratio of numbers that may be censored.

    Attributes:
        least: Lower bound of the median.
        most: Its upper bound; infinite if censored numbers allow any.
        low: Lower end of its interval.
        high: Upper end.
    """

    least: float
    most: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Repeats of two settings, paired by their seeds.

    Attributes:
        fewer: Pairs of which the first needed less.
        more: Pairs of which it needed more.
        ties: Pairs with equal numbers, or both censored.
        share: How often the first needs less where they differ: share, and 95 % interval.
        p_value: Two-sided exact sign test.
        ratio: Median over the pairs of second / first; a censored number is at least the cap.
    """

    fewer: int
    more: int
    ties: int
    share: tuple[float, float, float] | None
    p_value: float
    ratio: Ratio | None


def median_interval(values: Sequence[float], *, confidence: float = 0.95) -> Median:
    """Return the lower median and its interval between order statistics (SciPy `quantile_test`).

    Args:
        values: One per repeat; infinite where it was censored.
        confidence: The least coverage, in (0, 1), for any distribution.

    Raises:
        ValueError: There are no values, or one is not a number.
    """
    ordered = _ordered(values)
    ends = quantile_test(ordered, p=0.5).confidence_interval(confidence)
    return Median(
        value=ordered[(len(ordered) - 1) // 2],
        low=0.0 if math.isnan(ends.low) else float(ends.low),
        high=math.inf if math.isnan(ends.high) else float(ends.high),
    )


def trimmed_mean(values: Sequence[float], *, share: float, cap: float) -> TrimmedMean:
    """Return the mean without the least and the greatest `share` of the values.

    Args:
        values: One per repeat; infinite where it was censored.
        share: Of the values, dropped at each end, rounded down; in [0, 0.5).
        cap: What censored values are at least.

    Raises:
        ValueError: There are no values, one is not a number, or the share is out of range.
    """
    if not 0.0 <= share < 0.5:
        raise ValueError(f"share must lie in [0, 0.5), not {share}")
    ordered = _ordered(values)
    drop = int(share * len(ordered))  # as `trim_mean` has it
    mean = float(trim_mean([min(value, cap) for value in ordered], share))
    return TrimmedMean(mean, math.isinf(ordered[len(ordered) - drop - 1]), drop)


def proportion_interval(hits: int, count: int) -> tuple[float, float, float]:
    """Return a share and its exact 95 % interval (Clopper and Pearson 1934).

    Raises:
        ValueError: There are fewer tries than hits, or none.
    """
    if not 0 <= hits <= count or count < 1:
        raise ValueError(f"{hits} hits of {count} is no share")
    found = binomtest(hits, count).proportion_ci(0.95, method="exact")
    return hits / count, float(found.low), float(found.high)


def compared(
    first: Sequence[float], second: Sequence[float], *, cap: float = math.inf
) -> Comparison:
    """Compare two settings whose repeats had the same seeds.

    Args:
        first: One number per seed; infinite where it was censored.
        second: Of the same seeds.
        cap: What censored numbers are at least.

    Raises:
        ValueError: The lengths differ, or a value is not a number.
    """
    pairs = list(zip(first, second, strict=True))
    if any(math.isnan(value) for pair in pairs for value in pair):
        raise ValueError("a repeat is not a number")
    fewer, more = sum(a < b for a, b in pairs), sum(a > b for a, b in pairs)
    differing = fewer + more
    ratio = None
    if pairs:
        least = median_interval([_ratio(a, min(b, cap)) if a < math.inf else 0.0 for a, b in pairs])
        most = median_interval([_ratio(min(a, cap), b) if b < math.inf else b for a, b in pairs])
        ratio = Ratio(least.value, most.value, least.low, most.high)
    return Comparison(
        fewer=fewer,
        more=more,
        ties=len(pairs) - differing,
        share=proportion_interval(fewer, differing) if differing else None,
        p_value=float(binomtest(fewer, differing).pvalue) if differing else 1.0,
        ratio=ratio,
    )


def _ordered(values: Sequence[float]) -> list[float]:
    ordered = sorted(map(float, values))
    if not ordered or any(map(math.isnan, ordered)):
        raise ValueError("repeats must be numbers, at least one of them")
    return ordered


def _ratio(a: float, b: float) -> float:
    """Return the quotient b / a, where both may be 0: a target that was met at the start."""
    return b / a if a else 1.0 if b == 0.0 else math.inf
