from __future__ import annotations

import builtins
from typing import Any

import numpy as np
import pytest

from fedone_sdk.algorithms import TPE, State, stream
from fedone_sdk.algorithms.space import Space
from fedone_sdk.errors import MissingExtraError

SPACE = Space.of([(1, 4, 0), (1, 3, None)])


def method(**options: Any) -> TPE:
    sizes = {"prompt_len": 2, "vocab_size": 4, "num_samples": 4, "space": SPACE}
    return TPE(**(sizes | {"elite": 4, "pool_size": 256} | options))


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
    assert SPACE.holds(late)
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
