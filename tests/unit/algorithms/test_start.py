from __future__ import annotations

from typing import Any

import pytest

from fedone_sdk.algorithms import State, make_method, stream
from fedone_sdk.algorithms.space import is_warm_started, warm_start

SIZES: dict[str, Any] = {"prompt_len": 3, "vocab_size": 6, "num_samples": 8, "seed": 5}
START = (((4, 0.5),), ((0, 0.5),), ((0, 0.25), (2, 0.75)))
TOKENS = ("bdpl", "gs-bdpl")
POOLS = ("random", "thompson")


class TestBegun:
    def test_shares_and_what_they_leave(self) -> None:
        found = warm_start((3, 6), START)
        assert found.sum(axis=1) == pytest.approx([1, 1, 1])
        assert found[0] == pytest.approx([1 / 12] * 4 + [0.5 + 1 / 12, 1 / 12])
        assert found[2] == pytest.approx([0.25, 0, 0.75, 0, 0, 0])
        assert (warm_start((3, 6), None) == 1 / 6).all()

    @pytest.mark.parametrize(
        ("start", "line"),
        [
            (START[:2], "start must have 3 positions, not 2"),
            (((((6, 0.5)),), *START[1:]), r"tokens must lie in \[0, 6\), not 6"),
            ((((4, 0.0),), *START[1:]), r"a share must lie in \(0, 1\], not 0.0"),
            ((((4, float("nan")),), *START[1:]), "a share must lie in"),
            ((((4, 0.7), (3, 0.5)), *START[1:]), "must sum to at most 1"),
        ],
    )
    def test_what_is_none(self, start: Any, line: str) -> None:
        with pytest.raises(ValueError, match=line):
            warm_start((3, 6), start)


@pytest.mark.parametrize("name", [*TOKENS, *POOLS])
def test_the_untrained_prompt_is_the_initial_one(name: str) -> None:
    method = make_method(name, **SIZES, start=START)
    state = method.init()
    assert is_warm_started(state.alpha)
    assert method.prompt(state).tolist() == [4, 0, 2]
    method.check(state)
    assert (method.project(state.alpha) == state.alpha).all()
    assert state.alpha == pytest.approx(warm_start((3, 6), START), abs=0.1)


@pytest.mark.parametrize("name", POOLS)
def test_a_search_evaluates_it_first(name: str) -> None:
    method = make_method(name, **SIZES, blank=0, start=START)
    asked = method.ask(method.init(), stream(1)).prompts.tolist()
    assert asked[0] == [0, 0, 0]  # no prompt
    assert [4, 2, 0] in asked  # blanks at the end
    # What is not known of the method is in alpha: a device begins alike.
    device = make_method(name, **SIZES, blank=0)
    assert device.ask(State(alpha=method.init().alpha), stream(1)).prompts.tolist() == asked
