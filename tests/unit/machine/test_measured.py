"""The prompt that a point of the curve measures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedone_sdk.aggregator.rounds import RoundMachine
from fedone_sdk.aggregator.rounds.prompts import evaluated_prompt
from fedone_sdk.algorithms import State
from tests.unit.machine.game import LENGTH, N, spec_of


def machine(prompt: str) -> RoundMachine:
    return RoundMachine("run", spec_of(evaluation={"prompt": prompt}), vocab_size=N)


def test_the_mode_is_what_would_be_deployed() -> None:
    rules = machine("mode")
    state = replace(rules.initial_state(), method=State(alpha=[[0.1, 0.8, 0.1], [0.7, 0.2, 0.1]]))
    assert evaluated_prompt(rules, state).tolist() == [1, 0]


def test_each_round_draws_its_sample_reproducibly() -> None:
    rules = machine("sample")
    states = [replace(rules.initial_state(), round=number) for number in range(200)]
    drawn = [tuple(evaluated_prompt(rules, state).tolist()) for state in states]
    assert drawn == [tuple(evaluated_prompt(rules, state).tolist()) for state in states]
    # An untrained alpha has all prompts alike; of 200 draws none of the 9 is missing.
    assert len(set(drawn)) == N**LENGTH
    sure = State(alpha=[[1e-5, 1.0, 1e-5], [1.0, 1e-5, 1e-5]])
    likely = [evaluated_prompt(rules, replace(state, method=sure)).tolist() for state in states]
    assert sum(prompt == [1, 0] for prompt in likely) > 190


def test_only_distributions_over_tokens_can_be_sampled() -> None:
    with pytest.raises(ValueError, match=r"evaluation.prompt: must be mode"):
        spec_of(name="evolution", evaluation={"prompt": "sample"})
