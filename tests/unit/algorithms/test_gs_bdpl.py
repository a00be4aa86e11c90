from __future__ import annotations

import hashlib
import itertools
import math
from typing import Any

import numpy as np
import pytest

from fedone_sdk.algorithms import (
    Space,
    State,
    alpha_sha256,
    dump_state,
    load_state,
    stream,
    stream_seed,
)
from fedone_sdk.algorithms.gradient import SGD, AdamW, GumbelSoftmaxBDPL, drawn_advantage
from fedone_sdk.algorithms.method import Candidates
from fedone_sdk.algorithms.sampling import draw_prompts
from tests.benchmarks.slot_runs import CONTESTANTS, TABLES, Federation, Table

RNG = np.random.default_rng(0)


def variance_reduced_gradient(losses: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """1/(I-1) sum_r (l_r - mean l) score_r, FedOne's eq. 6."""
    return np.tensordot(losses - losses.mean(), scores, axes=1) / (len(losses) - 1)


def score_function(
    indices: np.ndarray, probabilities: np.ndarray, alpha: np.ndarray, tau: float
) -> np.ndarray:
    """d log P(prompt) / d alpha at fixed Gumbel noise, FedOne's eq. 5, shape (I, n, N)."""
    drawn = np.eye(probabilities.shape[1])[indices]
    return (drawn - probabilities) / (tau * alpha.astype(np.float64))


def softmax(alpha: np.ndarray, gumbel: np.ndarray, tau: float) -> np.ndarray:
    weights = np.exp((np.log(alpha) + gumbel) / tau)
    return weights / weights.sum(axis=1, keepdims=True)


def method(**options: object) -> GumbelSoftmaxBDPL:
    sizes = {"space": Space.repeated(4, 6), "num_samples": 5}
    settings = {"tau": 0.1, "learning_rate": 3e-4, "optimizer": "adamw", "alpha_min": 1e-5}
    return GumbelSoftmaxBDPL(**(sizes | settings | options))  # type: ignore[arg-type]


def test_score_function_is_the_gradient_of_the_log_probability() -> None:
    """Against central differences: relative error below 1e-6."""
    n, vocab, tau, h = 3, 5, 0.7, 1e-6
    alpha, gumbel = RNG.uniform(0.1, 1.0, (n, vocab)), RNG.gumbel(size=(n, vocab))
    prompts = RNG.integers(vocab, size=(4, n))

    def log_probability(alpha: np.ndarray, prompt: np.ndarray) -> float:
        return float(np.log(softmax(alpha, gumbel, tau)[np.arange(n), prompt]).sum())

    scores = score_function(prompts, softmax(alpha, gumbel, tau), alpha, tau)
    for prompt, score in zip(prompts, scores, strict=True):
        for i, j in itertools.product(range(n), range(vocab)):
            step = np.zeros_like(alpha)
            step[i, j] = h
            difference = (
                log_probability(alpha + step, prompt) - log_probability(alpha - step, prompt)
            ) / (2 * h)
            assert score[i, j] == pytest.approx(difference, rel=1e-6, abs=1e-8)


def test_estimator_is_unbiased() -> None:
    """A z-test against the exact expectation over all 9 prompts: every |z| < 4.5."""
    n, vocab, tau, samples, batches = 2, 3, 0.8, 4, 20_000
    alpha, gumbel = RNG.uniform(0.2, 1.0, (n, vocab)), RNG.gumbel(size=(n, vocab))
    p = softmax(alpha, gumbel, tau)
    loss_of = RNG.normal(size=(vocab, vocab)) + 5.0

    everything = np.array(list(itertools.product(range(vocab), repeat=n)))
    probability = p[0, everything[:, 0]] * p[1, everything[:, 1]]
    weighted = probability * loss_of[everything[:, 0], everything[:, 1]]
    exact = np.tensordot(weighted, score_function(everything, p, alpha, tau), axes=1)

    prompts = draw_prompts(p, samples * batches, np.random.default_rng(2))
    estimates = np.array(
        [
            drawn_advantage(Candidates(prompts=batch, probabilities=p), loss_of[tuple(batch.T)])
            / (tau * alpha)
            for batch in prompts.reshape(batches, samples, n)
        ]
    )
    z = (estimates.mean(axis=0) - exact) / (estimates.std(axis=0) / np.sqrt(batches))
    assert np.abs(z).max() < 4.5


def test_tell_takes_the_papers_step() -> None:
    """The closed form equals the literal sum over samples, to float32."""
    gs = method(optimizer="sgd", learning_rate=1e-3, alpha_min=1e-3)
    state = State(alpha=RNG.uniform(0.1, 1.0, (4, 6)).astype(np.float32))
    candidates, losses = gs.ask(state, stream(3)), RNG.normal(size=5)
    scores = score_function(candidates.prompts, candidates.probabilities, state.alpha, gs.tau)
    expected = state.alpha - 1e-3 * variance_reduced_gradient(losses, scores)
    np.testing.assert_allclose(
        gs.tell(state, candidates, losses).alpha, np.maximum(expected, 1e-3), rtol=3e-7
    )


def test_one_gumbel_draw_per_ask_in_float64() -> None:
    gs = method(tau=0.3)
    state = State(alpha=RNG.uniform(0.1, 1.0, (4, 6)).astype(np.float32))
    gumbel = stream(11).gumbel(size=(4, 6))
    np.testing.assert_allclose(
        gs.ask(state, stream(11)).probabilities,
        softmax(state.alpha.astype(np.float64), gumbel, 0.3),
        rtol=1e-12,
    )


def test_probabilities_survive_a_tiny_tau() -> None:
    p = method(tau=1e-4).ask(method().init(), stream(0)).probabilities
    assert np.isfinite(p).all()
    np.testing.assert_allclose(p.sum(axis=1), 1.0)


def test_a_floor_of_1e_15_survives_float32() -> None:
    """The clamp of the paper's code."""
    gs = method(alpha_min=1e-15, learning_rate=0.3)
    state = gs.init()
    for step in range(30):
        candidates = gs.ask(state, stream(step))
        state = load_state(dump_state(gs.tell(state, candidates, candidates.prompts.sum(axis=1))))
        assert gs.project(state.alpha).tobytes() == state.alpha.tobytes()
    assert state.alpha.min() == np.float32(1e-15) == gs.alpha_min
    assert gs.prompt(state).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(("prompt_len", "distinct"), [(6, 4), (20, 11), (50, 19)])
def test_prompts_of_one_step_resemble_each_other(prompt_len: int, distinct: int) -> None:
    """At tau = 0.1 and N = 200, of 20 prompts about so many differ: mean of 60 asks, +- 2."""
    gs = method(space=Space.repeated(prompt_len, 200), num_samples=20, tau=0.1)
    asks = [gs.ask(gs.init(), stream(seed)).prompts for seed in range(60)]
    assert np.mean([len(np.unique(prompts, axis=0)) for prompts in asks]) == pytest.approx(
        distinct, abs=2
    )


class FixedUniforms(np.random.Generator):
    """Answers `random` with one number."""

    def __init__(self, value: float) -> None:
        super().__init__(np.random.Philox(0))
        self.value = value

    def random(self, size: object = None) -> np.ndarray:  # type: ignore[override]
        return np.full(size, self.value)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("scale", [1.0, 1.0 - 1e-9, 1e-300, 3.0])
@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (np.nextafter(1.0, 0.0), 2)])
def test_draws_never_hit_a_token_of_probability_0(scale: float, uniform: float, token: int) -> None:
    p = scale * np.array([[0.0, 0.3, 0.7, 0.0]])
    assert draw_prompts(p, 2, FixedUniforms(uniform)).tolist() == [[token], [token]]


def test_ties_go_to_a_seeded_draw_among_the_tied() -> None:
    alpha = np.array([[0.1, 0.4, 0.1, 0.4, 0.0, 0.0]] * 4, dtype=np.float32)
    prompts = [method(seed=seed).prompt(State(alpha=alpha)).tolist() for seed in range(20)]
    assert {token for prompt in prompts for token in prompt} == {1, 3}
    assert prompts[0] == method(seed=0).prompt(State(alpha=alpha)).tolist()


GOLDEN = {
    "thompson": ("73e53712f37434d6", None, [0, 1, 1, 3]),
    "thompson-no-halving": ("c0b17a13e200109f", None, [0, 1, 1, 3]),
    "thompson-told": ("933ebd19f39612f6", None, [2, 2, 1, 3]),
    "random": ("c217a01c9b46dd8e", None, [0, 1, 1, 3]),
    "tpe": ("67551a1f9c9c9b19", None, [3, 1, 1, 3]),
    "gs-bdpl-paper": ("eaf28adf744f07b6", "86fef5b048153bdb", [1, 0, 3, 2]),
    "gs-bdpl-best": ("213304468b217503", "0e309f3d7d026e3d", [0, 2, 1, 0]),
    "bdpl-paper": ("e02e23882d6072dd", "0e12ed127d366672", [0, 0, 3, 2]),
    "bdpl-best": ("21c5e809b7071a30", "7e8b447c982f4093", [3, 1, 1, 1]),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_asks_and_ends_as_pinned(name: str) -> None:
    if name.startswith("tpe"):
        pytest.importorskip("optuna")
    assert outcome(name) == GOLDEN[name]


def outcome(name: str) -> tuple[str, str | None, list[int]]:
    """Run a method, and return digests of its prompts and alpha, and the deployable prompt.

    The alpha of a search is a posterior, whose last bits depend on the threads of BLAS.
    """
    table = Table(TABLES / "gemma-sst2.npz")
    contestant, seed, asks = CONTESTANTS[name], 7, 30
    federation = Federation(table=table, clients=8, batch_size=16, liars=1, seed=seed)
    method: Any = contestant.method(table, asks, seed)
    state, asked = method.init(), hashlib.sha256()
    for step in range(asks):
        rng = stream(stream_seed(seed, "prompts", step))
        holder = federation.holder(federation.client(step))
        candidates = method.ask(state, rng, method.wanted(state), holder)
        asked.update(candidates.prompts.astype("<i8").tobytes())
        losses: Any = (
            federation.by_class(candidates, step)
            if contestant.calibrates
            else federation.plain(candidates.prompts, step, own_bias=contestant.own_bias)
        )
        state = method.tell(state, candidates, losses)
    prompt = np.array(method.prompt(state)).tolist()
    alpha = alpha_sha256(state.alpha)[:16] if "bdpl" in name else None
    return asked.hexdigest()[:16], alpha, prompt


def torch_adamw(
    theta: float, gradients: list[float], lr: float, b1: float, b2: float, eps: float, wd: float
) -> float:
    """One number through torch.optim.AdamW, written from its documentation."""
    m = v = 0.0
    for t, g in enumerate(gradients, start=1):
        theta -= lr * wd * theta
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        m_hat, v_hat = m / (1 - b1**t), v / (1 - b2**t)
        theta -= lr * m_hat / (math.sqrt(v_hat) + eps)
    return theta


def test_adamw_follows_torch() -> None:
    rng = np.random.default_rng(0)
    start, gradients = rng.normal(size=(2, 3)), rng.normal(size=(25, 2, 3)) * 100
    gradients[:, 1, 2] = 0.0
    optimizer = AdamW(0.02)
    params, memory = start, {}
    for gradient in gradients:
        params, memory = optimizer.update(params, gradient, memory)
    for at in np.ndindex(2, 3):
        expected = torch_adamw(
            start[at], gradients[(slice(None), *at)].tolist(), 0.02, 0.9, 0.999, 1e-8, 0.01
        )
        assert params[at] == pytest.approx(expected, rel=1e-12)
    assert memory["t"] == 25
    assert [memory[key].dtype.name for key in "mvt"] == ["float64", "float64", "int64"]


def test_sgd() -> None:
    params, memory = SGD(0.5).update(np.ones(2), np.array([1.0, -2.0]), {})
    assert params.tolist() == [0.5, 2.0]
    assert memory == {}


def test_a_memory_of_another_shape_is_refused() -> None:
    optimizer = AdamW(0.1)
    _, memory = optimizer.update(np.ones(3), np.ones(3), {})
    with pytest.raises(ValueError, match="shape"):
        optimizer.update(np.ones((2, 3)), np.ones((2, 3)), memory)
