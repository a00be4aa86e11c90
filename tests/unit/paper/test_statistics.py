from __future__ import annotations

import math
import random

import pytest

from fedone_paper.queries import trimmed_text
from fedone_paper.statistics import compared, median_interval

INF = math.inf


class TestMedian:
    def test_of_twenty_lies_between_the_6th_and_the_15th(self) -> None:
        # The classic table entry: P(Binomial(20, 1/2) < 6) = 0.0207 <= 0.025.
        found = median_interval([float(value) for value in range(20, 0, -1)])
        assert (found.value, found.low, found.high) == (10.0, 6.0, 15.0)

    def test_censored_repeats_are_the_greatest(self) -> None:
        found = median_interval([*map(float, range(1, 13)), *[INF] * 8])
        assert (found.value, found.low, found.high) == (10.0, 6.0, INF)
        assert median_interval([1.0, INF, INF]).value == INF

    def test_of_few_is_bounded_by_nothing(self) -> None:
        found = median_interval([5.0, 6.0, 7.0])
        assert found == (6.0, 0.0, INF)

    def test_holds_the_true_median_as_often_as_it_says(self) -> None:
        generator = random.Random(0)
        draws = [[generator.expovariate(1.0) for _ in range(9)] for _ in range(2000)]
        found = [median_interval(values) for values in draws]
        held = sum(interval.low <= math.log(2) <= interval.high for interval in found)
        # For continuous values the coverage is exact: 2 (1 + 9) / 512 are missed.
        assert held / 2000 == pytest.approx(1 - 20 / 512, abs=0.01)

    @pytest.mark.parametrize("values", [[], [1.0, math.nan]])
    def test_refuses_what_is_no_sample(self, values: list[float]) -> None:
        with pytest.raises(ValueError, match="repeats"):
            median_interval(values)


def test_the_trimmed_mean_leaves_out_a_tenth_at_each_end() -> None:
    values = [*map(float, range(1, 19)), INF, 10_000.0]
    assert trimmed_text(values, 5000) == f"{sum(range(3, 19)) / 16:.1f}"
    assert trimmed_text([1.0, 2.0, INF, INF], 100) == "at least 50.8"


class TestCompared:
    def test_counts_pairs(self) -> None:
        found = compared([100.0, 200.0, 300.0, INF, INF], [200.0, 200.0, INF, 100.0, INF])
        assert (found.fewer, found.more, found.ties) == (2, 1, 2)

    def test_sign_test_is_the_binomial_s(self) -> None:
        ones = [1.0] * 10
        assert compared(ones, [2.0] * 10).p_value == pytest.approx(2 / 2**10)
        assert compared(ones, [2.0] * 5 + [0.5] * 5).p_value == 1.0
        assert compared(ones, ones).p_value == 1.0

    def test_ratio_knows_what_it_does_not_know(self) -> None:
        assert compared([2.0] * 20, [6.0] * 20).ratio == (3.0, 3.0, 3.0, 3.0)
        # The second one was censored at 20: at least ten times as many.
        assert compared([2.0] * 20, [INF] * 20, cap=20).ratio == (10.0, INF, 10.0, INF)
        assert compared([INF] * 20, [2.0] * 20, cap=20).ratio == (0.0, 0.1, 0.0, 0.1)
        # Ten pairs in which both were censored could have any ratio.
        half = [INF] * 10
        assert compared([1.0] * 10 + half, [3.0] * 10 + half, cap=20).ratio == (0.0, 3.0, 0.0, INF)

    def test_a_target_that_was_met_at_the_start(self) -> None:
        assert compared([0.0] * 20, [0.0] * 20).ratio == (1.0,) * 4
        assert compared([0.0] * 20, [20.0] * 20).ratio == (INF,) * 4
        assert compared([20.0] * 20, [0.0] * 20).ratio == (0.0,) * 4

    def test_nothing_to_compare(self) -> None:
        found = compared([], [])
        assert (found.ratio, found.p_value) == (None, 1.0)
