from __future__ import annotations

import builtins
from typing import Any

import numpy as np
import pytest

from fedone_sdk.algorithms import State, stream
from fedone_sdk.algorithms.gaussian_process import (
    PRIOR,
    Comparisons,
    Features,
    Kernel,
    Likelihood,
    MiniBatches,
    RemlNoise,
    inverted,
    posterior,
    typical_length,
    unit_covariance,
)
from fedone_sdk.algorithms.search_methods import TPE
from fedone_sdk.algorithms.space import Space
from fedone_sdk.errors import MissingExtraError

SPACE = Space.of([(1, 3, 0), (1, 4, None), (3, 5, 4)])
ROWS = np.array([0, 1, 2, 0, 3, 4, 5, 1, 5, 0, 4])
BATCHES = np.array([0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3])
WEIGHTS = np.array([3.0, 1.5, 2.0, 0.7])


def prompts() -> np.ndarray:
    found = SPACE.random(200, np.random.default_rng(1))
    return np.unique(SPACE.compact(found), axis=0)[::20][:6]


def dense(covariance: np.ndarray, part: float, losses: np.ndarray) -> tuple[np.ndarray, ...]:
    """The posterior of all losses at once, with intercepts of a huge variance; and its -2 log."""
    own = unit_covariance(covariance)[np.ix_(ROWS, ROWS)]
    together = BATCHES[:, None] == BATCHES
    noise = np.where(together, part * own, 0.0) + (1.0 - part) * np.eye(len(ROWS))
    noise = noise / WEIGHTS[BATCHES]
    total = covariance[np.ix_(ROWS, ROWS)] + noise + 1e7 * together
    gain = np.linalg.solve(total, covariance[ROWS]).T
    return gain @ losses, covariance - gain @ covariance[ROWS], total


@pytest.mark.parametrize("part", [0.0, 0.6])
def test_the_posterior_is_that_of_all_losses_with_random_intercepts(part: float) -> None:
    rng = np.random.default_rng(0)
    losses = rng.normal(size=len(ROWS))
    present = Features(SPACE).present(prompts())
    covariance = Kernel(0.7, 0.3, 0.2, 4.0).matrix(present)
    batches = MiniBatches.of(ROWS, BATCHES, 6)
    reml = RemlNoise.of(batches, unit_covariance(covariance), part)
    updated = Comparisons(batches, reml, batches.padded(losses), WEIGHTS)
    found = posterior(updated, inverted(covariance))
    mean, unit, total = dense(covariance, part, losses)
    np.testing.assert_allclose(found.mean, mean, atol=1e-5)
    np.testing.assert_allclose(found.unit, unit, atol=1e-5)
    # The noise variance is that of the largest restricted likelihood.
    square = losses @ np.linalg.solve(total, losses)
    assert found.noise == pytest.approx(square / (len(ROWS) - 4), rel=1e-4)


def test_a_constant_on_a_mini_batch_changes_nothing() -> None:
    losses = np.random.default_rng(0).normal(size=len(ROWS))
    batches = MiniBatches.of(ROWS, BATCHES, 6)
    reml = RemlNoise.of(batches, np.eye(6), 0.3)
    found = []
    for constant in (0.0, np.array([5.0, -3.0, 40.0, 0.0])[BATCHES]):
        updated = Comparisons(batches, reml, batches.padded(losses + constant), WEIGHTS)
        found.append(posterior(updated, np.eye(6)))
    np.testing.assert_allclose(found[0].mean, found[1].mean, atol=1e-10)
    assert found[0].noise == pytest.approx(found[1].noise)


def test_the_likelihood_is_that_of_all_losses() -> None:
    """Differences of -2 log are those of the dense form, with the noise variance profiled out."""
    losses = np.random.default_rng(0).normal(size=len(ROWS))
    present = Features(SPACE).present(prompts())
    batches = MiniBatches.of(ROWS, BATCHES, 6)
    likelihood = Likelihood(
        batches=batches,
        present=present,
        losses=batches.padded(losses)[:, :, None],
        unbiased=None,
        weights=WEIGHTS[:, None],
        examples=1.0,
    )

    def whole(values: object) -> float:
        kernel = values.kernel(1.0, typical_length(present))  # type: ignore[attr-defined]
        covariance = kernel.matrix(present)
        total = dense(covariance, values.part, losses)[2]  # type: ignore[attr-defined]
        square = losses @ np.linalg.solve(total, losses)
        degrees = len(ROWS) - 4
        return float(degrees * np.log(square) + np.linalg.slogdet(total)[1])

    other = PRIOR._replace(additive=1.0, pairs=-1.0, shared_noise=1.0)
    far = sum(((a - b) / 1.5) ** 2 for a, b in zip(other, PRIOR, strict=True))
    found = likelihood.loss(other) - likelihood.loss(PRIOR) - far
    assert found == pytest.approx(whole(other) - whole(PRIOR), abs=1e-4)
    assert likelihood.loss(likelihood.improved(PRIOR)) < likelihood.loss(PRIOR)


def test_features_are_shared_wherever_they_stand_in_a_slot() -> None:
    features = Features(SPACE)
    one, two = np.array([[0, 1, 2, 3, 4], [0, 2, 3, 2, 4]])
    present = features.present(np.array([one, two]))
    assert (present @ present.T).tolist() == [[4.0, 3.0], [3.0, 4.0]]
    # A blank of a repeated slot is none; repetitions are one.
    assert features.present(np.array([[0, 1, 2, 2, 4]])).sum() == 3
    matrix = Kernel(1.0, 2.0, 0.5, 5.0).matrix(present)
    assert matrix[0, 1] == pytest.approx(3 / 5 + 16 / 25 + 2 * 3 / 10)
    assert matrix[0, 0] == pytest.approx(4 / 5 + 16 / 25 + 2 * 6 / 10 + 0.5)


SPACE_OF_TWO = Space.of([(1, 4, 0), (1, 3, None)])


def method(**options: Any) -> TPE:
    sizes = {"num_samples": 4, "space": SPACE_OF_TWO}
    return TPE(**(sizes | options))


def play(tpe: TPE, asks: int, *, noise: float = 0.0) -> tuple[State, list[np.ndarray]]:
    rng = np.random.default_rng(0)
    state, asked = tpe.init(), []
    for step in range(asks):
        candidates = tpe.ask(state, stream(step), tpe.wanted(state))
        losses = (candidates.prompts != [2, 1]).sum(axis=1) + noise * rng.normal(size=1)
        state = tpe.tell(state, candidates, losses)
        asked.append(candidates.prompts)
    return state, asked


def test_finds_the_best_prompt_and_asks_for_similar_ones() -> None:
    tpe = method()
    state, asked = play(tpe, 30)
    assert tpe.prompt(state).tolist() == [2, 1]
    late = np.concatenate(asked[15:])
    assert SPACE_OF_TWO.holds(late)
    assert (late == [2, 1]).mean() > 0.35  # 0.29 at random; an ask has no prompt twice


def test_plain_tpe_deploys_the_lowest_loss_and_a_race_what_is_certain() -> None:
    plain, halved = method(), method(search=10, halving=3)
    for tpe, expected in ((plain, [3, 0]), (halved, [0, 0])):
        state = tpe.init()
        for step, best in enumerate(([1, 1], [3, 0])):
            candidates = tpe.ask(state, stream(step))
            prompts = np.array([[0, 0], [1, 0], best])
            updated = type(candidates)(prompts=prompts, probabilities=candidates.probabilities)
            state = tpe.tell(state, updated, [0.0, 1.0, -1.0 - step])
        assert tpe.prompt(state).tolist() == expected


def test_without_optuna_a_run_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name == "optuna":
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"pip install .*optuna"):
        method()
