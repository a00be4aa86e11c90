"""Positions with their own candidates: the mask of alpha, in every method over tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedone_sdk.algorithms import make_method, stream
from fedone_sdk.algorithms.space import Space

SPACE = Space.of([(1, 3, 0), (2, 5, None), (1, 2, 1)])


def method_of(name: str, space: Space = SPACE, **options: Any) -> Any:
    rows, columns = space.shape
    return make_method(
        name, prompt_len=rows, vocab_size=columns, num_samples=6, seed=1, space=space, **options
    )


def test_a_space_lists_its_positions() -> None:
    assert SPACE.sizes == (3, 5, 5, 2)
    assert SPACE.blanks == (0, None, None, 1)
    assert SPACE.slots == (0, 1, 1, 2)
    assert list(SPACE.groups()) == [(0,), (1, 2), (3,)]
    assert SPACE.mask.sum(axis=1).tolist() == [3, 5, 5, 2]
    assert np.allclose(SPACE.uniform.sum(axis=1), 1.0)
    assert SPACE.reference is not None
    assert SPACE.reference.tolist() == [0, 0, 0, 1]


def test_one_slot_draws_as_a_plain_vocabulary_does() -> None:
    space = Space.repeated(4, 200)
    plain = stream(7).integers(200, size=(5, 4))
    assert np.array_equal(space.random(5, stream(7)), plain)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sizes": (), "blanks": (), "slots": ()}, "same positions"),
        ({"sizes": (2, 3), "blanks": (None,), "slots": (0, 1)}, "same positions"),
        ({"sizes": (1, 1), "blanks": (None, None), "slots": (0, 1)}, "2 in one"),
        ({"sizes": (2,), "blanks": (2,), "slots": (0,)}, "blank must lie"),
        ({"sizes": (2, 2), "blanks": (None, None), "slots": (1, 2)}, "numbered from 0"),
        ({"sizes": (2, 3), "blanks": (None, None), "slots": (0, 0)}, "same candidates"),
        ({"sizes": (4,), "blanks": (None,), "slots": (0,), "width": 3}, "width must be"),
    ],
)
def test_impossible_spaces(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Space(**fields)


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
    with pytest.raises(ValueError, match="0 where a position has no such candidate"):
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
