from __future__ import annotations

import itertools

import numpy as np
import pytest

from fedone_sdk.algorithms import BDPL, State, dump_state, load_state, stream
from fedone_sdk.algorithms.bdpl import ESTIMATORS, PROJECTIONS, score_function
from fedone_sdk.algorithms.estimator import drawn_advantage, variance_reduced_gradient
from fedone_sdk.algorithms.method import Candidates
from fedone_sdk.algorithms.sampling import draw_prompts

RNG = np.random.default_rng(0)


def method(**options: object) -> BDPL:
    sizes = {"prompt_len": 4, "vocab_size": 6, "num_samples": 5}
    settings = {"learning_rate": 3e-4, "optimizer": "adamw", "estimator": "negative"}
    kept = {"alpha_min": 1e-5, "projection": "simplex"}
    return BDPL(**(sizes | settings | kept | options))  # type: ignore[arg-type]


def random_state() -> State:
    return State(alpha=RNG.dirichlet(np.ones(6), size=4).astype(np.float32))


def test_scores_of_the_three_estimators() -> None:
    p = np.array([[0.5, 0.25, 0.25]])
    drawn = np.array([[1]])
    assert score_function(drawn, p, "negative").tolist() == [[[-2.0, 4.0, -4.0]]]
    assert score_function(drawn, p, "zero").tolist() == [[[0.0, 4.0, 0.0]]]
    np.testing.assert_allclose(score_function(drawn, p, "normalize"), [[[-2 / 3, 4.0, -4 / 3]]])
    with pytest.raises(ValueError, match="estimator"):
        score_function(drawn, p, "other")


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_tell_takes_the_estimators_step(estimator: str) -> None:
    bdpl = method(estimator=estimator, optimizer="sgd", learning_rate=1e-3)
    state = random_state()
    candidates, losses = bdpl.ask(state, stream(1)), RNG.normal(size=5)
    scores = score_function(candidates.prompts, candidates.probabilities, estimator)
    step = state.alpha - 1e-3 * variance_reduced_gradient(losses, scores)
    np.testing.assert_allclose(
        bdpl.tell(state, candidates, losses).alpha, bdpl.project(step), rtol=1e-6
    )


def test_zero_is_unbiased() -> None:
    """A z-test of d E[loss] / d p against enumeration: every |z| < 4.5.

    The baseline takes its mean off, which the projection on the simplex ignores as well.
    """
    n, vocab, samples, batches = 2, 3, 4, 20_000
    p = RNG.dirichlet(np.full(vocab, 3.0), size=n)
    loss_of = RNG.normal(size=(vocab, vocab)) + 5.0
    everything = np.array(list(itertools.product(range(vocab), repeat=n)))
    probability = p[0, everything[:, 0]] * p[1, everything[:, 1]]
    losses = loss_of[everything[:, 0], everything[:, 1]]
    centred = probability * (losses - probability @ losses)
    exact = np.tensordot(centred, score_function(everything, p, "zero"), axes=1)
    prompts = draw_prompts(p, samples * batches, np.random.default_rng(2))
    estimates = np.array(
        [
            drawn_advantage(Candidates(prompts=batch, probabilities=p), loss_of[tuple(batch.T)]) / p
            for batch in prompts.reshape(batches, samples, n)
        ]
    )
    z = (estimates.mean(axis=0) - exact) / (estimates.std(axis=0) / np.sqrt(batches))
    assert np.abs(z).max() < 4.5


def test_estimators_differ_by_a_factor_only() -> None:
    state = random_state()
    candidates, losses = method().ask(state, stream(1)), RNG.normal(size=5)
    gradients = {
        name: variance_reduced_gradient(
            losses, score_function(candidates.prompts, candidates.probabilities, name)
        )
        for name in ESTIMATORS
    }
    np.testing.assert_allclose(gradients["negative"], 2.0 * gradients["zero"], atol=1e-9)
    np.testing.assert_allclose(gradients["normalize"], 7 / 6 * gradients["zero"], atol=1e-9)


def test_alpha_stays_on_the_simplex_above_its_floor() -> None:
    bdpl = method(learning_rate=0.3, alpha_min=1e-3)
    state = bdpl.init()
    for step in range(30):
        candidates = bdpl.ask(state, stream(step))
        state = bdpl.tell(state, candidates, candidates.prompts.sum(axis=1))
        np.testing.assert_allclose(state.alpha.sum(axis=1), 1.0, atol=1e-6)
        assert state.alpha.min() >= bdpl.alpha_min
    assert state.alpha.min() == np.float32(1e-3)


def test_capped_rows_below_1_stay_and_are_drawn_from_in_proportion() -> None:
    bdpl = method(projection="capped", optimizer="sgd", learning_rate=1e-6)
    alpha = random_state().alpha * np.float32(0.5)
    assert bdpl.project(alpha).tobytes() == alpha.tobytes()
    assert method().project(alpha).sum(axis=1) == pytest.approx(1.0)
    state = State(alpha=alpha)
    candidates = bdpl.ask(state, stream(1))
    np.testing.assert_allclose(candidates.probabilities, 2.0 * alpha, rtol=1e-6)
    moved = bdpl.tell(state, candidates, RNG.normal(size=5)).alpha
    np.testing.assert_allclose(moved.sum(axis=1), 0.5, atol=1e-3)


def test_capped_follows_the_slope_of_the_drawn_prompts() -> None:
    """Against central differences of the log-probability in alpha, rows below 1 included."""
    bdpl = method(projection="capped", estimator="zero", optimizer="sgd", learning_rate=1e-4)
    alpha = random_state().alpha * np.array([[0.5], [0.9], [1.0], [0.25]], dtype=np.float32)
    state = State(alpha=bdpl.project(alpha))
    candidates, losses = bdpl.ask(state, stream(1)), RNG.normal(size=5)

    def surrogate(alpha: np.ndarray) -> float:
        p = alpha / alpha.sum(axis=1, keepdims=True)
        logs = np.log(p[np.arange(4), candidates.prompts]).sum(axis=1)
        return float((losses - losses.mean()) @ logs / 4)

    gradient, h = np.zeros((4, 6)), 1e-6
    for i, j in itertools.product(range(4), range(6)):
        step = np.zeros((4, 6))
        step[i, j] = h * state.alpha[i, j]
        difference = surrogate(state.alpha + step) - surrogate(state.alpha - step)
        gradient[i, j] = difference / (2 * step[i, j])
    expected = bdpl.project(state.alpha - 1e-4 * gradient)
    np.testing.assert_allclose(
        bdpl.tell(state, candidates, losses).alpha, expected, rtol=2e-6, atol=1e-9
    )


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_a_floor_of_1e_15_survives_float32(projection: str) -> None:
    bdpl = method(alpha_min=1e-15, learning_rate=0.3, projection=projection)
    state = bdpl.init()
    for step in range(30):
        candidates = bdpl.ask(state, stream(step))
        state = load_state(dump_state(bdpl.tell(state, candidates, candidates.prompts.sum(axis=1))))
        assert bdpl.project(state.alpha).tobytes() == state.alpha.tobytes()
    assert state.alpha.min() == np.float32(1e-15)
