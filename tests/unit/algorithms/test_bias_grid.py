from __future__ import annotations

import numpy as np
import pytest

from fedone_sdk.algorithms.calibration import BiasGrid
from fedone_sdk.calibration import bias_grid

TWO, THREE, FOUR = (list(bias_grid(num_labels)) for num_labels in (2, 3, 4))


def cross_entropy(log_probs: np.ndarray, labels: np.ndarray, biases: np.ndarray) -> np.ndarray:
    logits = log_probs[None] + biases[:, None]
    total = np.log(np.exp(logits).sum(axis=-1))
    return (total - logits[:, np.arange(len(labels)), labels]).mean(axis=1)


def least_cross_entropy(log_probs: np.ndarray, labels: np.ndarray) -> float:
    """By Newton's method: it is convex in the bias."""
    classes = log_probs.shape[1]
    bias = np.zeros(classes)
    for _ in range(50):
        likely = np.exp(log_probs + bias)
        likely /= likely.sum(axis=1, keepdims=True)
        slope = likely.mean(axis=0) - np.bincount(labels, minlength=classes) / len(labels)
        bend = np.diag(likely.mean(axis=0)) - likely.T @ likely / len(labels)
        bias[1:] -= np.linalg.solve(bend[1:, 1:], slope[1:])
    return float(cross_entropy(log_probs, labels, bias[None])[0])


@pytest.mark.parametrize(("biases", "classes"), [(TWO, 2), (THREE, 3), (FOUR, 4)])
def test_finds_the_least_cross_entropy_between_the_points(
    biases: list[tuple[float, ...]], classes: int
) -> None:
    rng = np.random.default_rng(0)
    grid = BiasGrid(biases)
    for _ in range(20):
        labels = rng.integers(classes, size=300)
        logits = rng.normal(size=(300, classes)) + 1.5 * np.eye(classes)[labels]
        logits -= rng.uniform(-0.6, 0.6, classes)  # what the bias has to undo
        curve = cross_entropy(logits, labels, grid.biases)
        found = grid.best(curve)
        least = least_cross_entropy(logits, labels)
        assert cross_entropy(logits, labels, found[None])[0] < least + 0.006
        value, place = grid.lowest(curve[None])
        assert value[0] == pytest.approx(least, abs=0.015)
        assert curve[place[0]] == curve.min()
        assert found[0] == 0.0


def test_at_the_edge_the_point_counts() -> None:
    grid = BiasGrid(TWO)
    curve = np.arange(9.0)
    assert grid.best(curve).tolist() == [0.0, -4.0]
    assert grid.lowest(curve[None])[0].tolist() == [0.0]
    assert grid.best(np.ones(9)).tolist() == [0.0, -4.0]


@pytest.mark.parametrize(
    "wrong",
    [
        [(0.0,), (1.0,)],
        [(0.0, 0.0), (0.0, 1.0)],
        [(0.0, -1.0), (0.0, 0.0), (0.0, 3.0)],
        [(1.0, -1.0), (1.0, 0.0), (1.0, 1.0)],
        THREE[1:],
    ],
)
def test_what_is_no_grid(wrong: list[tuple[float, ...]]) -> None:
    with pytest.raises(ValueError, match="biases"):
        BiasGrid(wrong)
