from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedone_sdk.algorithms import ClassLosses
from fedone_sdk.algorithms.evaluator import Estimates, Evaluator, updated
from fedone_sdk.algorithms.gaussian_process import PRIOR, Features, Hyperparameters
from fedone_sdk.algorithms.label_bias import fitted_bias
from fedone_sdk.algorithms.method import Holder
from fedone_sdk.algorithms.observations import Observations
from fedone_sdk.algorithms.space import Space
from tests.benchmarks.attacks import ATTACKS

TWELVE = Features(Space.of([(1, 12, None)]))


class Client:
    """Examples with log-odds of a difficulty of their own; a prompt shifts and sharpens them."""

    def __init__(self, rng: np.random.Generator, *, positive: float, size: int = 32) -> None:
        self.labels = (rng.random(size) < positive).astype(int)
        self.odds = np.where(self.labels == 1, 1.0, -1.0) * rng.normal(
            1.0 + 0.3 * rng.normal(), 1.0, size
        )

    def odds_of(self, shifts: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Log-probabilities up to a constant, shape (I, b, 2)."""
        odds = self.odds * scales[:, None] + shifts[:, None]
        return np.stack([np.zeros_like(odds), odds], axis=-1)

    def losses(self, shifts: np.ndarray, scales: np.ndarray, biases: np.ndarray) -> ClassLosses:
        moved = self.odds_of(shifts, scales) + biases[:, None]
        log_probs = moved - np.logaddexp.reduce(moved, axis=-1, keepdims=True)
        losses = -log_probs[:, np.arange(len(self.labels)), self.labels]
        traces = 1.0 - np.exp(2.0 * log_probs).sum(axis=-1)
        terms = np.concatenate([losses[..., None], traces[..., None], np.exp(log_probs)], axis=-1)
        counts = np.bincount(self.labels, minlength=2)
        means = np.stack(
            [terms[:, self.labels == c].sum(axis=1) / max(counts[c], 1) for c in range(2)], axis=1
        )
        return ClassLosses(means=means, counts=counts, targets=np.eye(2), biases=biases)


def clients(kind: str, rng: np.random.Generator, count: int) -> list[Client]:
    shares = np.full(count, 0.5) if kind == "iid" else rng.dirichlet([0.1, 0.1], count)[:, 1]
    return [Client(rng, positive=share) for share in shares]


@pytest.mark.parametrize("lie", [None, *ATTACKS])
@pytest.mark.parametrize("kind", ["iid", "dirichlet"])
def test_prompts_are_ranked_as_if_all_had_met_all_clients(kind: str, lie: str | None) -> None:
    """12 prompts, three at a time and one of them always, each on 10 clients of 60.

    Also where every fifth client lies.
    """
    rng = np.random.default_rng(4)
    shifts, scales = rng.normal(0.0, 0.7, 12), np.linspace(0.2, 1.8, 12)
    everybody = clients(kind, rng, 60)
    observed, values = Observations.empty(1, 2, 2), PRIOR
    lies = np.arange(60) % 5 == 2 if lie else np.zeros(60, dtype=bool)
    for number, client in enumerate(everybody):
        tokens = np.array([[0], [1 + (2 * number) % 11], [1 + (2 * number + 1) % 11]])
        at = tokens[:, 0]
        after = client.losses(shifts[at], scales[at], observed.biases_for(tokens))
        if lies[number]:
            after = replace(after, means=ATTACKS[str(lie)](after.means, rng))
        observed = observed.with_batch(tokens, after)
        evaluator, values = updated(observed, TWELVE, values)
        observed = evaluator.observed
    # What each is worth at its best bias on a fleet of equally frequent classes.
    order = observed.prompts[:, 0]
    labels = np.concatenate([one.labels for one in everybody])
    rows = np.concatenate([one.odds_of(shifts, scales) for one in everybody], axis=1)[order]
    weights = 1.0 / np.bincount(labels)[labels]
    best = np.array([fitted_bias(one, labels, weights) for one in rows])
    moved = rows + best[:, None]
    losses = np.logaddexp.reduce(moved, axis=-1) - moved[:, np.arange(len(labels)), labels]
    truth = np.average(losses, axis=1, weights=weights)
    estimates = evaluator.estimates
    assert np.corrcoef(estimates.value, truth)[0, 1] > 0.85
    # What is not known is about as much as it says.
    error = estimates.value - truth
    assert 0.2 < np.median(np.abs(error - np.median(error)) / estimates.spread) < 1.5
    assert np.abs(observed.biases - best)[:, 1].mean() < 0.4
    assert np.median(observed.trust[~lies]) > 0.9
    if lie is not None:
        assert np.median(observed.trust[lies]) < 0.4


def test_one_client_alone_makes_no_incumbent() -> None:
    space = Features(Space.of([(1, 4, 0)]))
    observed, values = Observations.empty(1), PRIOR
    for _ in range(8):
        observed = observed.with_batch(
            np.array([[0], [1]]), ClassLosses.plain(np.array([1.0, 0.5]))
        )
        evaluator, values = updated(observed, space, values)
        observed = evaluator.observed
    observed = observed.with_batch(np.array([[0], [2]]), ClassLosses.plain(np.array([1.0, -3.0])))
    evaluator = Evaluator.of(observed, space, values)
    assert observed.prompts[evaluator.incumbent(evaluator.estimates)].tolist() == [1]


def test_the_same_rows_again_confirm_nothing() -> None:
    """A client that holds one mini-batch confirms once, however often it is visited."""
    space = Features(Space.of([(1, 4, 0)]))
    observed = Observations.empty(1)
    for number, client in enumerate((5, 5, 5, 5, 6)):
        losses = ClassLosses.plain(np.array([1.0, 0.5]))
        observed = observed.with_batch(np.array([[0], [1]]), losses, Holder(client, all_rows=True))
        evaluator, _ = updated(observed, space, PRIOR)
        observed = evaluator.observed
        best = observed.prompts[evaluator.incumbent(evaluator.estimates)]
        assert best.tolist() == [int(number == 4)]
    assert observed.trusted_evaluations.max() <= 2.0


def test_draws_have_the_posterior_as_their_mean_and_spread() -> None:
    space = Space.of([(1, 3, 0), (1, 3, None), (2, 4, 0)])
    features, rng = Features(space), np.random.default_rng(0)
    observed = Observations.empty(4)
    for _ in range(8):
        prompts = np.unique(space.compact(space.random(5, rng)), axis=0)
        losses = prompts[:, 0] + 0.3 * rng.normal(size=len(prompts))
        observed = observed.with_batch(prompts, ClassLosses.plain(losses))
    evaluator = Evaluator.of(observed, features, Hyperparameters(1.0, 0.0, 0.0, 0.0, 0.0))
    size = len(observed.prompts)
    new = np.array([[first, 2, 3, 3] for first in range(3)])
    drawn = evaluator.draws(new, 20_000, rng)
    posterior, kernel = evaluator.classes[0], evaluator.parts.kernel
    assert posterior is not None
    # The textbook form: conditions on all losses, with intercepts of a huge variance.
    prior = kernel.matrix(features.present(np.concatenate([observed.prompts, new])))
    prior[range(size, size + 3), range(size, size + 3)] -= kernel.nugget
    gain = prior[size:, :size] @ evaluator.parts.inverse
    mean = np.append(posterior.mean, gain @ posterior.mean)
    known = np.concatenate([np.eye(size), gain])
    covariance = prior - known @ (prior[:size, :size] - posterior.unit) @ known.T
    covariance *= posterior.noise
    spread = np.sqrt(np.diagonal(covariance))
    assert np.abs((drawn.mean(axis=0) - mean) / spread).max() < 0.05
    assert np.abs(np.cov(drawn.T) - covariance).max() < 0.05 * spread.max() ** 2
    # The first candidates are the best, of prompts that were not observed too.
    assert drawn.mean(axis=0)[size:].argmin() == 0


@pytest.mark.parametrize("mixed", [1, 2])
def test_candidates_for_the_incumbent(mixed: int) -> None:
    """No prompt always may; another prompt needs two mini-batches with each class."""
    features = Features(Space.repeated(1, 3, blank=0))
    observed = Observations.empty(1, 2, 2)
    prompts = np.array([[0], [1], [2]])

    def told(prompts: int, *counts: int) -> ClassLosses:
        means, biases = np.full((prompts, 2, 4), 0.5), np.zeros((prompts, 2))
        return ClassLosses(means=means, counts=np.array(counts), targets=np.eye(2), biases=biases)

    one, both = told(3, 0, 8), told(2, 6, 2)
    for _ in range(3):
        observed = observed.with_batch(prompts, one)
    for _ in range(mixed):
        observed = observed.with_batch(prompts[1:], both)
    evaluator = Evaluator.of(observed, features, PRIOR)

    def incumbent(*pessimistic: float) -> int:
        values = np.array(pessimistic)
        return evaluator.incumbent(Estimates(values, np.zeros(3), values))

    assert incumbent(0.0, 3.0, 3.0) == 0
    assert incumbent(0.0, -1.0, 3.0) == (1 if mixed == 2 else 0)
