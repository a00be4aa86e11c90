from __future__ import annotations

import math

import numpy as np
import pytest

from tests.benchmarks.queries.bootstrap import median_bootstrap, paired_difference


class TestMedian:
    def test_lies_in_its_interval_and_covers_the_true_one(self) -> None:
        rng = np.random.default_rng(1)
        hits = 0
        for _ in range(200):
            found = median_bootstrap(rng.normal(3.0, 1.0, 21).tolist())
            assert found.low <= found.value <= found.high
            hits += found.low <= 3.0 <= found.high
        assert 0.90 <= hits / 200 <= 0.99  # 95 %, and what 200 repeats leave open

    def test_is_the_lower_one_and_knows_infinity(self) -> None:
        found = median_bootstrap([1.0, 2.0, math.inf, math.inf])
        assert found.value == 2.0
        assert (found.low, found.high) == (1.0, math.inf)
        assert median_bootstrap([5.0]) == (5.0, 5.0, 5.0)

    @pytest.mark.parametrize("values", [[], [1.0, math.nan]])
    def test_refuses_what_is_no_number(self, values: list[float]) -> None:
        with pytest.raises(ValueError, match="must be numbers"):
            median_bootstrap(values)


class TestDifference:
    def test_pairs_take_out_what_seeds_share(self) -> None:
        rng = np.random.default_rng(2)
        seeds = rng.normal(0.0, 10.0, 20)
        found = paired_difference(
            (seeds + rng.normal(-1.0, 0.2, 20)).tolist(), seeds.tolist()
        )  # fmt: skip
        assert found.low < -1.0 < found.high < -0.8
        assert found.mean < found.most < found.high  # one-sided lies within two-sided
        assert found.pairs == 20

    def test_covers_the_true_mean_of_few_pairs(self) -> None:
        rng = np.random.default_rng(3)
        two_sided = bounded = 0
        for _ in range(200):
            found = paired_difference(rng.normal(0.5, 1.0, 20).tolist(), [0.0] * 20)
            two_sided += found.low <= 0.5 <= found.high
            bounded += found.most >= 0.5
        assert 0.90 <= two_sided / 200 <= 0.99
        assert 0.90 <= bounded / 200 <= 0.99

    def test_one_pair_bounds_nothing(self) -> None:
        found = paired_difference([2.0], [1.5])
        assert (found.mean, found.low, found.most) == (0.5, -math.inf, math.inf)

    def test_refuses_other_lengths_and_infinity(self) -> None:
        with pytest.raises(ValueError, match="zip"):
            paired_difference([1.0], [1.0, 2.0])
        with pytest.raises(ValueError, match="finite"):
            paired_difference([math.inf], [1.0])
