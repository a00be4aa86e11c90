from __future__ import annotations

import itertools

import numpy as np

from fedone_sdk.algorithms import Space, State, stream
from fedone_sdk.algorithms.gradient import BDPL, drawn_advantage
from fedone_sdk.algorithms.method import Candidates
from fedone_sdk.algorithms.sampling import draw_prompts

RNG = np.random.default_rng(0)


def method(**options: object) -> BDPL:
    sizes = {"space": Space.repeated(4, 6), "num_samples": 5}
    settings = {"learning_rate": 3e-4, "optimizer": "adamw"}
    kept = {"alpha_min": 1e-5}
    return BDPL(**(sizes | settings | kept | options))  # type: ignore[arg-type]


def random_state() -> State:
    return State(alpha=RNG.dirichlet(np.ones(6), size=4).astype(np.float32))


def variance_reduced_gradient(losses: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """1/(I-1) sum_r (l_r - mean l) score_r, FedOne's eq. 6."""
    return np.tensordot(losses - losses.mean(), scores, axes=1) / (len(losses) - 1)


def score_function(indices: np.ndarray, p: np.ndarray) -> np.ndarray:
    """d log P / d p of each prompt, shape (I, n, N): 1/p at the token that was drawn, else 0."""
    return np.eye(p.shape[1])[indices] / p


def test_tell_takes_the_estimators_step() -> None:
    bdpl = method(optimizer="sgd", learning_rate=1e-3)
    state = random_state()
    candidates, losses = bdpl.ask(state, stream(1)), RNG.normal(size=5)
    scores = score_function(candidates.prompts, candidates.probabilities)
    step = state.alpha - 1e-3 * variance_reduced_gradient(losses, scores)
    np.testing.assert_allclose(
        bdpl.tell(state, candidates, losses).alpha, bdpl.project(step), rtol=1e-6
    )


def test_the_estimate_is_unbiased() -> None:
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
    exact = np.tensordot(centred, score_function(everything, p), axes=1)
    prompts = draw_prompts(p, samples * batches, np.random.default_rng(2))
    estimates = np.array(
        [
            drawn_advantage(Candidates(prompts=batch, probabilities=p), loss_of[tuple(batch.T)]) / p
            for batch in prompts.reshape(batches, samples, n)
        ]
    )
    z = (estimates.mean(axis=0) - exact) / (estimates.std(axis=0) / np.sqrt(batches))
    assert np.abs(z).max() < 4.5
