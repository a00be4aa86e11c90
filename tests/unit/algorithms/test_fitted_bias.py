"""Losses as functions of the label bias, and the bias that fits best."""

from __future__ import annotations

import numpy as np
import pytest

from fedone_sdk.algorithms import ClassLosses
from fedone_sdk.algorithms.evaluator import updated
from fedone_sdk.algorithms.gaussian_process import PRIOR, Features
from fedone_sdk.algorithms.label_bias import Expansions, fitted_bias, lowest
from fedone_sdk.algorithms.observations import Observations
from fedone_sdk.algorithms.space import Space


def cross_entropy(values: np.ndarray, targets: np.ndarray) -> float:
    total = np.logaddexp.reduce(values, axis=1)
    return float((total - values[np.arange(len(targets)), targets]).mean())


def reported(values: np.ndarray, targets: np.ndarray, bias: np.ndarray) -> Expansions:
    """The expansion of all rows together about a bias."""
    moved = values + bias
    rows = np.exp(moved - np.logaddexp.reduce(moved, axis=1, keepdims=True))
    means = [cross_entropy(moved, targets), (1 - (rows**2).sum(axis=1)).mean(), *rows.mean(axis=0)]
    shares = np.eye(values.shape[1])[targets].mean(axis=0)
    return Expansions.of(np.array(means), shares, bias)


def drawn(num_labels: int, size: int = 400) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(num_labels)
    targets = rng.integers(num_labels, size=size)
    values = rng.normal(size=(size, num_labels)) + np.linspace(0.0, 6.0, num_labels)
    return values + 2.0 * np.eye(num_labels)[targets], targets


@pytest.mark.parametrize("num_labels", [2, 3, 7, 64])
def test_an_expansion_has_value_gradient_and_trace_and_is_exact_for_one_row(
    num_labels: int,
) -> None:
    values, targets = drawn(num_labels)
    rng = np.random.default_rng(0)
    about = reported(values, targets, rng.normal(size=num_labels))

    def exact(bias: np.ndarray) -> float:
        return cross_entropy(values + bias, targets)

    for step in 1e-3 * rng.normal(size=(5, num_labels)):
        ahead = about.biases + step
        assert about.at(ahead).losses == pytest.approx(exact(ahead), abs=1e-6)
    traced = sum(
        exact(about.biases + step) + exact(about.biases - step) - 2 * exact(about.biases)
        for step in 1e-2 * np.eye(num_labels)
    )
    assert float(about.traces) == pytest.approx(traced / 1e-4, rel=1e-2)
    one = reported(values[:1], targets[:1], np.zeros(num_labels))
    far = 10.0 * rng.normal(size=num_labels)
    expected = cross_entropy(values[:1] + far, targets[:1])
    assert one.at(far).losses == pytest.approx(expected, abs=1e-6)
    # From there and back again.
    assert about.at(far).at(about.biases).losses == pytest.approx(about.losses)


@pytest.mark.parametrize("num_labels", [2, 3, 7, 64])
def test_newton_steps_on_reports_end_where_all_rows_are_fitted_best(num_labels: int) -> None:
    """Each report is about the last bias, as a run's rounds are."""
    values, targets = drawn(num_labels)
    bias = np.zeros(num_labels)
    for _ in range(5):
        about = Expansions(*(each[None, None] for each in reported(values, targets, bias)))
        bias = lowest(about, np.ones((1, 1)), np.array([1e-6]))[0]
    least = cross_entropy(values + fitted_bias(values, targets), targets)
    assert cross_entropy(values + bias, targets) - least < 1e-3
    assert cross_entropy(values, targets) - least > 0.2


@pytest.mark.parametrize("num_labels", [2, 3, 7])
def test_no_other_bias_is_better(num_labels: int) -> None:
    values, targets = drawn(num_labels, 4000)
    found = fitted_bias(values, targets)
    assert found[0] == 0.0
    least = cross_entropy(values + found, targets)
    for label in range(1, num_labels):
        for change in (-0.05, 0.05):
            other = found.copy()
            other[label] += change
            assert cross_entropy(values + other, targets) > least


def test_a_preference_is_made_up_for_however_strong() -> None:
    rng = np.random.default_rng(0)
    targets = rng.integers(2, size=2000)
    values = np.stack([-2.0 * targets, -2.0 * (1 - targets)], axis=1) + rng.normal(size=(2000, 2))
    shifted = values + np.array([0.0, 12.0])
    apart = fitted_bias(values, targets)[1] - fitted_bias(shifted, targets)[1]
    assert apart == pytest.approx(12.0, abs=0.1)


@pytest.mark.parametrize("targets", [[0, 0, 0], [1, 1, 1], [0, 1, 1]])
def test_few_examples_give_a_small_bias(targets: list[int]) -> None:
    values = np.array([[-0.1, -3.0], [-3.0, -0.1], [-1000.0, -0.1]])
    found = fitted_bias(values, np.array(targets))
    assert np.abs(found).max() < 25.0


def test_a_bias_is_fitted_before_every_label_was_seen() -> None:
    """The label that no client has gets the mean of the other two."""
    means = np.array([[0.5, 0.4, 0.7, 0.2, 0.1], [1.7, 0.4, 0.7, 0.2, 0.1], [0.0] * 5])
    losses = ClassLosses(
        means=np.stack([means] * 2),
        counts=np.array([8, 8, 0]),
        targets=np.eye(3),
        biases=np.zeros((2, 3)),
    )
    features = Features(Space.repeated(1, 2, blank=0))
    observed = Observations.empty(1, 3, 3).with_batch(np.array([[0], [1]]), losses)
    biases = updated(observed, features, PRIOR)[0].observed.biases
    assert (biases[:, 1] > 0.5).all()
    assert biases[:, 2] == pytest.approx(0.5 * biases[:, 1])


def test_noise_beyond_the_simplex_keeps_the_fit_finite() -> None:
    means = np.array([[[-0.7, 1.0, 1.9, -0.4, -0.2]]])
    about = Expansions.of(means, np.array([[-0.5, 1.2, 0.4]]), np.zeros(3))
    found = lowest(about, np.ones((1, 1)), np.array([0.1]))
    assert np.abs(found).max() < 10.0
    # Label 0 gets less, since its mean probability is above its share.
    assert found[0, 1] > 0.0
    assert found[0, 2] > 0.0
