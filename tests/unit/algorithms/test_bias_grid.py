from __future__ import annotations

import itertools

import numpy as np
import pytest

from fedone_sdk.algorithms.calibration import BiasGrid

TWO = [(0.0, float(offset)) for offset in range(-4, 5)]
THREE = [(0.0, *offsets) for offsets in itertools.product((-3.0, -1.5, 0.0, 1.5, 3.0), repeat=2)]


def cross_entropy(log_probs: np.ndarray, labels: np.ndarray, biases: np.ndarray) -> np.ndarray:
    logits = log_probs[None] + biases[:, None]
    total = np.log(np.exp(logits).sum(axis=-1))
    return (total - logits[:, np.arange(len(labels)), labels]).mean(axis=1)


@pytest.mark.parametrize(("biases", "classes"), [(TWO, 2), (THREE, 3)])
def test_finds_the_least_cross_entropy_between_the_points(
    biases: list[tuple[float, ...]], classes: int
) -> None:
    rng = np.random.default_rng(0)
    grid = BiasGrid(biases)
    for _ in range(20):
        labels = rng.integers(classes, size=300)
        logits = rng.normal(size=(300, classes)) + 1.5 * np.eye(classes)[labels]
        logits -= rng.uniform(-1.2, 1.2, classes)  # what the bias has to undo
        curve = cross_entropy(logits, labels, grid.biases)
        found = grid.best(curve)
        fine = np.array(
            [(0.0, *b) for b in itertools.product(np.linspace(-4, 4, 81), repeat=classes - 1)]
        )
        least = cross_entropy(logits, labels, fine).min()
        assert cross_entropy(logits, labels, found[None])[0] < least + 0.004
        value, place = grid.lowest(curve[None])
        assert value[0] == pytest.approx(least, abs=0.02)
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
