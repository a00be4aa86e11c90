from __future__ import annotations

import numpy as np
import pytest

from fedone_sdk.algorithms import Candidates, Evolution, State, stream

COSTS = np.random.default_rng(3).normal(size=(6, 12))


def cost(indices: np.ndarray) -> np.ndarray:
    return COSTS[np.arange(6), indices].sum(axis=-1)


def method(**options: object) -> Evolution:
    sizes = {"prompt_len": 6, "vocab_size": 12, "num_samples": 8, "elite": 4, "pool_size": 256}
    return Evolution(**(sizes | options))  # type: ignore[arg-type]


def after_tell(
    evolution: Evolution, state: State, prompts: list[list[int]], losses: list[float]
) -> State:
    p = np.full((6, 12), 1 / 12)
    return evolution.tell(state, Candidates(prompts=np.array(prompts), probabilities=p), losses)


def test_finds_good_prompts_across_clients_that_differ_much() -> None:
    """A client's effect (sd 10) dwarfs the prompts' (sd 2.4); noise has sd 0.5."""
    rng = np.random.default_rng(0)
    evolution = method()
    state = evolution.init()
    for step in range(80):
        candidates = evolution.ask(state, stream(step))
        noise = 10.0 * rng.normal() + 0.5 * rng.normal(size=8)
        state = evolution.tell(state, candidates, cost(candidates.prompts) + noise)
    assert cost(evolution.prompt(state)) < 0.75 * COSTS.min(axis=1).sum()


def test_one_lucky_batch_makes_no_leader() -> None:
    evolution = method()
    proven, lucky, poor = ([index] * 6 for index in range(3))
    state = evolution.init()
    for _ in range(5):
        state = after_tell(evolution, state, [proven, poor], [-1.0, 1.0])
    state = after_tell(evolution, state, [proven, poor, lucky], [-1.0, 1.0, -1.5])
    assert evolution.prompt(state).tolist() == proven


def test_known_prompts_are_evaluated_again() -> None:
    evolution = method()
    state = after_tell(evolution, evolution.init(), [[0] * 6, [1] * 6, [2] * 6], [0.0, 1.0, 2.0])
    again = evolution.ask(state, stream(0)).prompts[:2].tolist()
    assert again == [[0] * 6, [1] * 6]


def test_pool_is_bounded() -> None:
    evolution = method(pool_size=10)
    state = evolution.init()
    for step in range(20):
        candidates = evolution.ask(state, stream(step))
        state = evolution.tell(state, candidates, cost(candidates.prompts))
        assert len(state.memory["prompts"]) <= 10
        prompts = state.memory["prompts"]
        assert len(np.unique(prompts, axis=0)) == len(prompts)


def test_alpha_is_how_often_candidates_are_in_the_best_prompt_of_a_draw() -> None:
    evolution = method()
    state = evolution.init()
    rng = np.random.default_rng(1)
    for _ in range(12):
        prompts = rng.permuted(np.tile(np.arange(12), (8, 1)), axis=1)[:, :6]
        state = after_tell(evolution, state, prompts.tolist(), (prompts >= 6).sum(axis=1).tolist())
    np.testing.assert_allclose(state.alpha.sum(axis=1), 1.0, atol=1e-6)
    assert state.alpha[:, :6].sum() > 0.8 * 6
    assert state.alpha.min() == pytest.approx(1 / 12 / 17)


def test_blank_puts_no_prompt_in_the_search() -> None:
    evolution = method(blank=11)
    assert evolution.ask(evolution.init(), stream(0)).prompts[0].tolist() == [11] * 6
    state = evolution.init()
    for step in range(60):  # fewer tokens are better
        candidates = evolution.ask(state, stream(step))
        keep = (candidates.prompts != 11).sum(axis=1) + 3.0 * (candidates.prompts[:, 0] == 11)
        state = evolution.tell(state, candidates, keep)
    assert evolution.prompt(state)[1:].tolist() == [11] * 5
    assert evolution.prompt(state)[0] != 11


def test_a_pool_of_other_sizes_is_refused() -> None:
    state = after_tell(method(), method().init(), [[10] * 6, [11] * 6], [0.0, 1.0])
    with pytest.raises(ValueError, match="fit"):
        method(prompt_len=5).prompt(state)
    with pytest.raises(ValueError, match="tokens"):
        method(vocab_size=11).prompt(state)
