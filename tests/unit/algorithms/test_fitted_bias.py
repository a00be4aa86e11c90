"""The bias that fits label log-probabilities best."""

from __future__ import annotations

import numpy as np
import pytest

from fedone_sdk.algorithms.calibration import fitted_bias


def cross_entropy(values: np.ndarray, targets: np.ndarray) -> float:
    total = np.logaddexp.reduce(values, axis=1)
    return float((total - values[np.arange(len(targets)), targets]).mean())


@pytest.mark.parametrize("num_labels", [2, 3, 7])
def test_no_other_bias_is_better(num_labels: int) -> None:
    rng = np.random.default_rng(num_labels)
    values = rng.normal(size=(400, num_labels)) + np.linspace(0.0, 9.0, num_labels)
    targets = rng.integers(num_labels, size=400)
    found = fitted_bias(values, targets)
    assert found[0] == 0.0
    least = cross_entropy(values + found, targets)
    assert least < cross_entropy(values, targets)
    for label in range(1, num_labels):
        for change in (-0.05, 0.05):
            other = found.copy()
            other[label] += change
            assert cross_entropy(values + other, targets) > least


def test_a_preference_is_made_up_for_however_strong() -> None:
    """Beyond the grid of the losses by class."""
    rng = np.random.default_rng(0)
    targets = rng.integers(2, size=2000)
    values = np.stack([-2.0 * targets, -2.0 * (1 - targets)], axis=1) + rng.normal(size=(2000, 2))
    shifted = values + np.array([0.0, 12.0])
    apart = fitted_bias(values, targets)[1] - fitted_bias(shifted, targets)[1]
    assert apart == pytest.approx(12.0, abs=0.05)


@pytest.mark.parametrize("targets", [[0, 0, 0], [1, 1, 1], [0, 1, 1]])
def test_few_examples_give_a_finite_bias(targets: list[int]) -> None:
    values = np.array([[-0.1, -3.0], [-3.0, -0.1], [-1000.0, -0.1]])
    found = fitted_bias(values, np.array(targets))
    assert np.isfinite(found).all()
    assert abs(found[1]) < 1100.0
