from __future__ import annotations

import hashlib
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedone_sdk.algorithms import (
    Candidates,
    State,
    alpha_sha256,
    dump_memory,
    dump_state,
    load_memory,
    load_state,
)


def example() -> State:
    rng = np.random.default_rng(3)
    return State(
        alpha=rng.random((3, 4), dtype=np.float32),
        memory={
            "t": np.array(7),
            "m": rng.normal(size=(3, 4)),
            "file": np.array([np.nan, -0.0, np.inf], dtype=np.float32),
            "allow_pickle": np.empty((0, 3), dtype=np.int64),
        },
    )


def same(one: State, other: State) -> bool:
    return (
        one.alpha.tobytes() == other.alpha.tobytes()
        and one.memory.keys() == other.memory.keys()
        and all(
            value.tobytes() == other.memory[key].tobytes()
            and (value.dtype, value.shape) == (other.memory[key].dtype, other.memory[key].shape)
            for key, value in one.memory.items()
        )
    )


def test_round_trip_bit_for_bit() -> None:
    state = example()
    assert same(load_state(dump_state(state)), state)
    assert same(State(alpha=state.alpha, memory=load_memory(dump_memory(state.memory))), state)
    assert load_memory(dump_memory({})) == {}


def test_equal_states_have_equal_bytes() -> None:
    state = example()
    reordered = State(
        alpha=np.asfortranarray(state.alpha).astype(">f4"),
        memory={key: state.memory[key] for key in reversed(state.memory)},
    )
    assert dump_state(reordered) == dump_state(state)


def test_owns_its_arrays() -> None:
    alpha, moment = np.ones((2, 3), dtype=np.float32), np.zeros(2)
    memory = {"m": moment}
    state = State(alpha=alpha, memory=memory)
    alpha[:], moment[:], memory["x"] = 9.0, 9.0, moment
    assert state.alpha.max() == 1.0
    assert state.memory["m"].max() == 0.0
    assert "x" not in state.memory
    with pytest.raises(TypeError):
        state.memory["m"] = moment  # type: ignore[index]


def test_evolve_keeps_the_rest() -> None:
    state = example()
    moved = state.evolve(alpha=state.alpha + 1)
    assert moved.alpha[0, 0] == state.alpha[0, 0] + 1
    assert dump_memory(moved.memory) == dump_memory(state.memory)


def test_alpha_sha256_hashes_c_order_little_endian_float32() -> None:
    alpha = np.arange(6, dtype=np.float32).reshape(2, 3)
    expected = hashlib.sha256(
        b"".join(np.float32(x).astype("<f4").tobytes() for x in range(6))
    ).hexdigest()
    for form in (alpha, np.asfortranarray(alpha), alpha.astype(">f4"), alpha.astype(np.float64)):
        assert alpha_sha256(form) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"alpha": np.ones(3)}, "matrix"), ({"alpha": np.ones((0, 3))}, "matrix"),
     ({"alpha": [[np.nan]]}, "finite"), ({"alpha": [["a"]]}, "float32"),
     ({"alpha": [[1.0]], "memory": {"m": np.array(["x"])}}, "memory 'm'"),
     ({"alpha": [[1.0]], "memory": {"m": np.array([None])}}, "memory 'm'"),
     ({"alpha": [[1.0]], "memory": {"m": np.array([1], dtype=np.int32)}}, "memory 'm'")],
)  # fmt: skip
def test_bad_states(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        State(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("load", [load_state, load_memory])
@pytest.mark.parametrize(
    "data", [b"", b"PK", b"\x93NUMPY", pickle.dumps({"alpha": 1}), dump_state(example())[:-30]]
)
def test_bad_bytes(load: object, data: bytes) -> None:
    with pytest.raises(ValueError, match="not a saved"):
        load(data)  # type: ignore[operator]


def test_a_state_is_not_a_memory() -> None:
    with pytest.raises(ValueError, match="not a saved memory"):
        load_memory(dump_state(example()))
    with pytest.raises(ValueError, match="not a saved state"):
        load_state(dump_memory(example().memory))


@given(st.integers(0, len(dump_state(example())) - 1), st.integers(1, 255))
def test_a_damaged_byte_is_refused(position: int, flip: int) -> None:
    data = bytearray(dump_state(example()))
    data[position] ^= flip
    with pytest.raises(ValueError, match="not a saved state"):
        load_state(bytes(data))


@pytest.mark.parametrize(
    "payload",
    [b"", b"PK", b"\x93NUMPY\x01\x00", pickle.dumps({}), b"[" * 100_000,
     b'{"alpha": ["<f4", [4611686018427387904, 4]]}'],
)  # fmt: skip
def test_a_well_signed_other_thing_is_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match="not a saved state"):
        load_state(hashlib.sha256(payload).digest() + payload)


@pytest.mark.parametrize(
    ("indices", "probabilities"),
    [([[0, 3]], np.full((2, 3), 1 / 3)), ([[0, -1]], np.full((2, 3), 1 / 3)),
     ([[0, 1, 2]], np.full((2, 3), 1 / 3)), ([0, 1], np.full((2, 3), 1 / 3)),
     ([[0.0, 1.0]], np.full((2, 3), 1 / 3))],
)  # fmt: skip
def test_bad_candidates(indices: object, probabilities: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"prompts|probabilities"):
        Candidates(prompts=indices, probabilities=probabilities)  # type: ignore[arg-type]
