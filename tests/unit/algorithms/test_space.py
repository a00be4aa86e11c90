"""Positions with their own candidates: the mask of alpha, in every method over tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from fedone_sdk.algorithms import State, make_method, stream
from fedone_sdk.algorithms.space import Space, is_warm_started, project_to_simplex, warm_start

SPACE = Space.of([(1, 3, 0), (2, 5, None), (1, 2, 1)])


def method_of(name: str, space: Space = SPACE, **options: Any) -> Any:
    return make_method(name, space=space, num_samples=6, seed=1, **options)


def test_a_space_lists_its_positions() -> None:
    assert SPACE.sizes == (3, 5, 5, 2)
    assert SPACE.blanks == (0, None, None, 1)
    assert list(SPACE.groups()) == [([0], 3, 0), ([1, 2], 5, None), ([3], 2, 1)]
    assert SPACE.mask.sum(axis=1).tolist() == [3, 5, 5, 2]
    assert np.allclose(SPACE.uniform.sum(axis=1), 1.0)
    assert SPACE.reference is not None
    assert SPACE.reference.tolist() == [0, 0, 0, 1]


def test_one_slot_draws_as_a_plain_vocabulary_does() -> None:
    space = Space.repeated(4, 200)
    plain = stream(7).integers(200, size=(5, 4))
    assert np.array_equal(space.random(5, stream(7)), plain)


@pytest.mark.parametrize(
    ("slots", "width", "message"),
    [
        ([], None, "each slot needs a position"),
        ([(1, 2, None), (0, 2, None)], None, "each slot needs a position"),
        ([(1, 1, None), (1, 1, None)], None, "one position needs two"),
        ([(1, 2, 2)], None, "blank must lie"),
        ([(1, 4, None)], 3, "width must be"),
    ],
)
def test_impossible_spaces(slots: Any, width: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Space.of(slots, width)


def test_compact_moves_blanks_within_their_slot() -> None:
    space = Space.of([(2, 3, 0), (2, 3, 2)])
    compact = space.compact(np.array([[0, 1, 2, 1], [1, 0, 0, 2]]))
    assert compact.tolist() == [[1, 0, 1, 2], [1, 0, 0, 2]]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", ["gs-bdpl", "bdpl"])
def test_gradients_stay_on_the_mask(name: str, optimizer: str) -> None:
    rate = 1e-3 if optimizer == "sgd" else 0.05
    method = method_of(name, optimizer=optimizer, learning_rate=rate)
    state = method.init()
    for step in range(30):
        asked = method.ask(state, stream(step))
        assert SPACE.holds(asked.prompts)
        losses = (asked.prompts[:, 1] != 3) + 0.5 * (asked.prompts[:, 3] == 0)
        state = method.tell(state, asked, losses.astype(float))
        assert not state.alpha[~SPACE.mask].any()
        assert (state.alpha[SPACE.mask] > 0).all()
        if name == "bdpl":
            assert np.allclose(state.alpha.sum(axis=1), 1.0, atol=1e-6)
    assert method.prompt(state)[1] == 3
    assert SPACE.holds(method.prompt(state)[None])


@pytest.mark.parametrize("name", ["gs-bdpl", "bdpl", "random", "thompson"])
def test_an_alpha_off_the_mask_is_refused(name: str) -> None:
    method = method_of(name)
    alpha = method.init().alpha.copy()
    alpha[0, 4] = 0.1
    with pytest.raises(ValueError, match="0 for candidates that a position does not have"):
        method.check(method.init().evolve(alpha=alpha))


def test_a_wide_space_admits_new_candidates() -> None:
    before = Space.of([(1, 2, None), (1, 3, None)], 5)
    after = Space.of([(1, 4, None), (1, 3, None)], 5)
    old, new = method_of("bdpl", before), method_of("bdpl", after)
    state = old.init()
    for step in range(10):
        asked = old.ask(state, stream(step))
        state = old.tell(state, asked, asked.prompts[:, 0].astype(float))
    alpha = new.project(after.admitted(state.alpha))
    new.check(state.evolve(alpha=alpha))
    assert np.array_equal(alpha[1], state.alpha[1])
    assert alpha[0, 2] == alpha[0, 3]
    assert alpha[0, 0] > alpha[0, 2] > alpha[0, 1]
    drawn = new.ask(state.evolve(alpha=alpha), stream(99), 200).prompts
    assert set(drawn[:, 0].tolist()) == {0, 1, 2, 3}


ROWS = arrays(
    np.float64, array_shapes(min_dims=2, max_dims=2, max_side=8), elements=st.floats(-50, 50)
)


@given(ROWS, st.floats(0.0, 0.9))
def test_meets_the_kkt_conditions(rows: np.ndarray, share: float) -> None:
    """The unique projection: feasible, and above the floor it is the row minus one threshold."""
    floor = share / rows.shape[1]
    for row, projected in zip(rows, project_to_simplex(rows, floor=floor), strict=True):
        assert projected.sum() == pytest.approx(1.0, abs=1e-9)
        assert projected.min() >= floor
        free = projected > floor
        thresholds = (row - projected)[free]
        assert np.ptp(thresholds) < 1e-9
        assert np.all(row[~free] - floor <= thresholds.max() + 1e-9)


def test_huge_entries_lose_nothing() -> None:
    np.testing.assert_allclose(project_to_simplex([[1e9, 1e9 + 0.5, -1e12]]), [[0.25, 0.75, 0.0]])


@pytest.mark.parametrize(
    ("rows", "floor"),
    [([[np.nan, 1]], 0.0), (1.0, 0.0), ([], 0.0), ([[1.0, 2.0]], 0.5), ([[1.0, 2.0]], -0.1)],
)
def test_bad_input(rows: object, floor: float) -> None:
    with pytest.raises(ValueError, match=r"rows|floor"):
        project_to_simplex(rows, floor=floor)  # type: ignore[arg-type]


PLAIN = Space.repeated(3, 6)
SIZES: dict[str, Any] = {"num_samples": 8, "seed": 5}
START = (((4, 0.5),), ((0, 0.5),), ((0, 0.25), (2, 0.75)))
TOKENS = ("bdpl", "gs-bdpl")
POOLS = ("random", "thompson")


class TestBegun:
    def test_shares_and_what_they_leave(self) -> None:
        found = warm_start(PLAIN, START)
        assert found.sum(axis=1) == pytest.approx([1, 1, 1])
        assert found[0] == pytest.approx([1 / 12] * 4 + [0.5 + 1 / 12, 1 / 12])
        assert found[2] == pytest.approx([0.25, 0, 0.75, 0, 0, 0])
        assert (warm_start(PLAIN, None) == 1 / 6).all()

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
            warm_start(PLAIN, start)


@pytest.mark.parametrize("name", [*TOKENS, *POOLS])
def test_the_untrained_prompt_is_the_initial_one(name: str) -> None:
    method = make_method(name, space=PLAIN, **SIZES, start=START)
    state = method.init()
    assert is_warm_started(state.alpha)
    assert method.prompt(state).tolist() == [4, 0, 2]
    method.check(state)
    assert (method.project(state.alpha) == state.alpha).all()
    assert state.alpha == pytest.approx(warm_start(PLAIN, START), abs=0.1)


@pytest.mark.parametrize("name", POOLS)
def test_a_search_evaluates_it_first(name: str) -> None:
    space = Space.repeated(3, 6, blank=0)
    method = make_method(name, space=space, **SIZES, start=START)
    asked = method.ask(method.init(), stream(1)).prompts.tolist()
    assert asked[0] == [0, 0, 0]  # no prompt
    assert [4, 2, 0] in asked  # blanks at the end
    # What is not known of the method is in alpha: a device begins alike.
    device = make_method(name, space=space, **SIZES)
    assert device.ask(State(alpha=method.init().alpha), stream(1)).prompts.tolist() == asked
