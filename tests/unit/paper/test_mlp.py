from __future__ import annotations

import numpy as np
import pytest

from fedone_paper.mlp import Mlp

SMALL = Mlp(num_inputs=4, num_hidden=6, num_classes=3, dropout=0.5)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_the_size_is_that_of_the_paper() -> None:
    assert Mlp(num_inputs=784).size == 784 * 512 + 512 + 512 * 10 + 10


def test_parameters_start_within_the_bound_of_their_layer(rng: np.random.Generator) -> None:
    parameters = Mlp(num_inputs=64).init(rng)
    hidden, output = np.split(parameters, [65 * 512])
    assert parameters.dtype == np.float32
    # Uniform draws this many come close to their bounds.
    assert 0.99 / 8 < np.abs(hidden).max() <= 1 / 8
    assert 0.99 / 512**0.5 < np.abs(output).max() <= 1 / 512**0.5


def test_the_gradient_is_that_of_finite_differences(rng: np.random.Generator) -> None:
    parameters = SMALL.init(rng).astype(np.float64)
    images, labels = rng.random((5, 4)), np.array([0, 1, 2, 1, 1])
    mask = SMALL.draw_mask(5, rng).astype(np.float64)
    assert 0 < np.count_nonzero(mask) < mask.size
    _, gradient = SMALL.loss_and_gradient(parameters, images, labels, mask)
    step = 1e-6

    def loss(change: np.ndarray) -> float:
        return SMALL.loss_and_gradient(parameters + change, images, labels, mask)[0]

    numeric = [(loss(row) - loss(-row)) / (2 * step) for row in step * np.eye(SMALL.size)]
    np.testing.assert_allclose(gradient, numeric, atol=1e-8)


def test_the_loss_of_zero_parameters_is_that_of_a_guess(rng: np.random.Generator) -> None:
    zeros, images = np.zeros(SMALL.size), rng.random((2, 4))
    loss, _ = SMALL.loss_and_gradient(zeros, images, np.array([0, 2]), np.ones((2, 6)))
    assert loss == pytest.approx(np.log(3))


def test_large_scores_do_not_overflow(rng: np.random.Generator) -> None:
    huge = 1e4 * np.abs(SMALL.init(rng))
    loss, gradient = SMALL.loss_and_gradient(
        huge, np.full((1, 4), 100.0, np.float32), np.array([0]), np.ones((1, 6), np.float32)
    )
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()


def test_a_mask_keeps_the_mean(rng: np.random.Generator) -> None:
    network = Mlp(num_inputs=4)
    mask = network.draw_mask(2000, rng)
    assert set(np.unique(mask).tolist()) == {0.0, 1.25}
    assert mask.mean() == pytest.approx(1.0, abs=0.005)  # 10 standard errors


def test_descent_learns_and_prediction_drops_nothing(rng: np.random.Generator) -> None:
    images = np.eye(4, dtype=np.float32)[:3]
    labels = np.arange(3)
    parameters = SMALL.init(rng)
    before = parameters.copy()
    trained = parameters
    for _ in range(300):
        mask = SMALL.draw_mask(3, rng)
        trained = trained - 0.5 * SMALL.loss_and_gradient(trained, images, labels, mask)[1]
    assert SMALL.predict(trained, images).tolist() == [0, 1, 2]
    assert trained.dtype == np.float32
    np.testing.assert_array_equal(parameters, before)
