from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedone_sdk.algorithms import ClassLosses
from fedone_sdk.algorithms.calibration import BiasGrid
from fedone_sdk.algorithms.draws import Draws
from fedone_sdk.algorithms.evaluator import Estimates, Evaluator, updated
from fedone_sdk.algorithms.gaussian_process import PRIOR, Features, Hyperparameters
from fedone_sdk.algorithms.observations import Observations
from fedone_sdk.algorithms.space import Space
from tests.benchmarks.attacks import ATTACKS

BIASES = tuple((0.0, float(offset)) for offset in range(-4, 5))
GRID = BiasGrid(BIASES)
OFFSETS = GRID.biases[:, 1]
TWELVE = Features(Space.of([(1, 12, None)]))


def plain(losses: np.ndarray, count: int = 1) -> ClassLosses:
    means = np.array(losses, dtype=float)[:, None, None]
    return ClassLosses(means=means, counts=np.full(1, count))


class Client:
    """Examples with log-odds of a difficulty of their own; a prompt shifts and sharpens them."""

    def __init__(self, rng: np.random.Generator, *, positive: float, size: int = 32) -> None:
        self.labels = (rng.random(size) < positive).astype(int)
        self.odds = np.where(self.labels == 1, 1.0, -1.0) * rng.normal(
            1.0 + 0.3 * rng.normal(), 1.0, size
        )

    def losses(self, shifts: np.ndarray, scales: np.ndarray) -> ClassLosses:
        odds = self.odds * scales[:, None] + shifts.reshape(len(scales), -1)
        sign = np.where(self.labels == 1, -1.0, 1.0)
        losses = np.logaddexp(0.0, sign[:, None] * (odds[:, :, None] + OFFSETS))
        counts = np.bincount(self.labels, minlength=2)
        means = np.stack(
            [losses[:, self.labels == c].sum(axis=1) / max(counts[c], 1) for c in range(2)],
            axis=1,
        )
        return ClassLosses(means=means, counts=counts)


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
    observed, values, met = Observations.empty(1, 2, 9), PRIOR, []
    lies = np.arange(60) % 5 == 2 if lie else np.zeros(60, dtype=bool)
    for number, client in enumerate(everybody):
        tokens = np.array([[0], [1 + (2 * number) % 11], [1 + (2 * number + 1) % 11]])
        after = client.losses(shifts[tokens[:, 0]], scales[tokens[:, 0]])
        if lies[number]:
            after = replace(after, means=ATTACKS[str(lie)](after.means, rng))
        observed = observed.with_batch(tokens, after)
        evaluator, values = updated(observed, TWELVE, GRID, values)
        observed = evaluator.observed
        met.append(client.losses(shifts, scales))
    # What each is worth at its best bias on a fleet of equally frequent classes.
    by_class = [
        np.average([one.means[:, c] for one in met], axis=0, weights=[o.counts[c] for o in met])
        for c in range(2)
    ]
    curves = np.mean(by_class, axis=0)
    order = observed.prompts[:, 0]
    truth = GRID.lowest(curves)[0][order]
    estimates = evaluator.estimates()
    assert np.corrcoef(estimates.value, truth)[0, 1] > 0.85
    # What is not known is about as much as it says.
    error = estimates.value - truth
    assert 0.2 < np.median(np.abs(error - np.median(error)) / estimates.spread) < 1.5
    best = GRID.bests(curves)[order, 1]
    assert np.abs(observed.biases[:, 1] - best).mean() < 0.4
    assert np.median(observed.trust[~lies]) > 0.9
    if lie is not None:
        assert np.median(observed.trust[lies]) < 0.4


def test_one_client_alone_makes_no_incumbent() -> None:
    space = Features(Space.of([(1, 4, 0)]))
    observed, values = Observations.empty(1), PRIOR
    for _ in range(8):
        observed = observed.with_batch(np.array([[0], [1]]), plain(np.array([1.0, 0.5])))
        evaluator, values = updated(observed, space, None, values)
        observed = evaluator.observed
    observed = observed.with_batch(np.array([[0], [2]]), plain(np.array([1.0, -3.0])))
    evaluator = Evaluator.of(observed, space, None, values)
    assert observed.prompts[evaluator.incumbent(evaluator.estimates())].tolist() == [1]


def test_draws_have_the_posterior_as_their_mean_and_spread() -> None:
    space = Space.of([(1, 3, 0), (1, 3, None), (2, 4, 0)])
    features, rng = Features(space), np.random.default_rng(0)
    observed = Observations.empty(4)
    for _ in range(8):
        prompts = np.unique(space.compact(space.random(5, rng)), axis=0)
        losses = prompts[:, 0] + 0.3 * rng.normal(size=len(prompts))
        observed = observed.with_batch(prompts, plain(losses))
    evaluator = Evaluator.of(observed, features, None, Hyperparameters(1.0, 0.0, 0.0, 0.0, 0.0))
    draws = Draws.of(evaluator, 20_000, rng)
    posterior = evaluator.classes[0]
    assert posterior is not None
    spread = np.sqrt(posterior.noise * np.diagonal(posterior.unit))
    error = (draws.observed.mean(axis=0) - posterior.mean) / spread
    assert np.abs(error).max() < 0.05
    assert draws.observed.std(axis=0) == pytest.approx(spread, rel=0.03)
    found = np.cov(draws.observed.T)
    assert np.abs(found - posterior.noise * posterior.unit).max() < 0.05 * spread.max() ** 2
    # The lowest prompts of draws are prompts, and mostly have the first candidate.
    lowest = draws.lowest(space.random(2, rng), None, rng)
    assert space.holds(lowest)
    assert np.array_equal(space.compact(lowest), lowest)
    assert (lowest[:, 0] == 0).mean() > 0.9


def test_the_lowest_prompt_is_that_of_all() -> None:
    space = Space.of([(1, 3, 0), (1, 4, None), (1, 3, None)])
    rng = np.random.default_rng(0)
    every = np.array(np.meshgrid(*map(np.arange, space.sizes), indexing="ij")).reshape(3, -1).T
    observed = Observations.empty(3)
    for _ in range(4):
        prompts = np.unique(space.random(6, rng), axis=0)
        observed = observed.with_batch(prompts, plain(rng.normal(size=len(prompts))))
    values = Hyperparameters(2.0, 2.0, -12.0, 0.0, 0.0)
    draws = Draws.of(Evaluator.of(observed, Features(space), None, values), 50, rng)
    found = draws.lowest(every[:1], None, rng)
    columns = Features(space).present(every).astype(float)
    worth = draws.single @ columns.T
    worth += 0.5 * np.einsum("pf,dfg,pg->dp", columns, draws.pairs, columns)
    places = np.ravel_multi_index(tuple(found.T), space.sizes)
    lost = worth[np.arange(50), places] - worth.min(axis=1)
    assert (lost < 0.3 * worth.std()).mean() > 0.9


@pytest.mark.parametrize("mixed", [2, 3])
def test_candidates_for_the_incumbent(mixed: int) -> None:
    """No prompt always may; another needs three mini-batches with each class, or two of text."""
    features = Features(Space.repeated(1, 3, blank=0))
    observed = Observations.empty(1, 2)
    prompts = np.array([[0], [1], [2]])
    one = ClassLosses(means=np.zeros((3, 2, 1)), counts=np.array([0, 8]))
    both = ClassLosses(means=np.zeros((2, 2, 1)), counts=np.array([6, 2]))
    for _ in range(3):
        observed = observed.with_batch(prompts, one)
    for _ in range(mixed):
        observed = observed.with_batch(prompts[1:], both)
    evaluator = Evaluator.of(observed, features, None, PRIOR)

    def incumbent(*pessimistic: float, labelled: bool = True) -> int:
        values = np.array(pessimistic)
        return evaluator.incumbent(Estimates(values, np.zeros(3), values), labelled=labelled)

    assert incumbent(0.0, 3.0, 3.0) == 0
    assert incumbent(0.0, -1.0, 3.0) == (1 if mixed == 3 else 0)
    assert incumbent(0.0, -1.0, 3.0, labelled=False) == 1
