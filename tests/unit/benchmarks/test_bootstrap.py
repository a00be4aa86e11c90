from __future__ import annotations

import math

import numpy as np
import pytest

from tests.benchmarks.bootstrap import paired_difference


class TestDifference:
    def test_pairing_removes_the_variance_between_seeds(self) -> None:
        rng = np.random.default_rng(2)
        seeds = rng.normal(0.0, 10.0, 20)
        found = paired_difference(
            (seeds + rng.normal(-1.0, 0.2, 20)).tolist(), seeds.tolist()
        )  # fmt: skip
        assert found.low < -1.0 < found.high < -0.8

    def test_covers_the_true_mean_of_few_pairs(self) -> None:
        rng = np.random.default_rng(3)
        held = 0
        for _ in range(200):
            found = paired_difference(rng.normal(0.5, 1.0, 20).tolist(), [0.0] * 20)
            held += found.low <= 0.5 <= found.high
        assert 0.90 <= held / 200 <= 0.99

    def test_one_pair_has_no_bounds(self) -> None:
        found = paired_difference([2.0], [1.5])
        assert found == (0.5, -math.inf, math.inf)

    def test_rejects_other_lengths_infinity_and_no_pairs(self) -> None:
        with pytest.raises(ValueError, match="zip"):
            paired_difference([1.0], [1.0, 2.0])
        with pytest.raises(ValueError, match="finite"):
            paired_difference([math.inf], [1.0])
        with pytest.raises(ValueError, match="at least one"):
            paired_difference([], [])
