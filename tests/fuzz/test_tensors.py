"""Damaged files of tensors: refused in one way, or read like the library does."""

from __future__ import annotations

import base64
import json
import random
import struct
import tracemalloc
from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from fedone_sdk import messages
from fedone_sdk.aggregator.http.requests import check_json
from fedone_sdk.messages import ASSIGNMENT, JSON, TENSORS, UPDATE, Parse, decode, encode
from fedone_sdk.messages.tensors import dump_tensors, load_tensors
from tests.fuzz.mutate import EVIL_TOKENS, damaged_bytes, damaged_file, joined, split
from tests.wire_vectors import vectors

safetensors = pytest.importorskip("safetensors", reason="safetensors is not installed")

FILES = [(vector["type"], base64.b64decode(vector["file"])) for vector in vectors("tensors.json")]
PARSERS: dict[str, Parse[Any]] = {
    name: TypeAdapter(getattr(messages, name)).validate_json for name, _ in FILES
}
PARSERS |= dict.fromkeys(("AlphaAssignment", "LossesAssignment"), ASSIGNMENT.validate_json)
PARSERS["AlphaUpdate"] = UPDATE.validate_json
SEEDS = st.integers(min_value=0, max_value=2**64 - 1)
DTYPES = {"F32": "float32", "F64": "float64", "I64": "int64", "U8": "uint8", "U16": "uint16"}


def check(name: str, file: bytes) -> bool:
    """Refused with a ValueError, or what the library reads, and it comes back."""
    try:
        tensors, texts = load_tensors(file)
    except ValueError:
        return False
    # Whatever is a file here is one for everybody: the library is at most less strict.
    theirs = dict(safetensors.deserialize(file))
    assert {
        key: (DTYPES[entry["dtype"]], tuple(entry["shape"]), bytes(entry["data"]))
        for key, entry in theirs.items()
    } == {key: tuple(tensor) for key, tensor in tensors.items()}
    assert load_tensors(dump_tensors(tensors, texts)) == (tensors, texts)
    try:
        message = decode(PARSERS[name], file, TENSORS, check=check_json)
    except ValueError:
        return False
    for accept in (JSON, TENSORS):
        content_type, content = encode(message, accept)[:2]
        assert decode(PARSERS[name], content, content_type, check=check_json) == message
    return True


def test_damaged_files() -> None:
    rng, seen = random.Random(11), Counter[bool]()
    for _ in range(1500):
        name, file = rng.choice(FILES)
        seen[check(name, damaged_file(rng, file))] += 1
    assert seen[True] > 10
    assert seen[False] > 1000


@settings(max_examples=200)
@given(seed=SEEDS)
def test_any_damage(seed: int) -> None:
    rng = random.Random(seed)
    name, file = rng.choice(FILES)
    file = damaged_file(rng, file)
    for _ in range(rng.choice((0, 0, 1, 4))):
        file = damaged_bytes(rng, file)
    check(name, file)


@pytest.mark.parametrize("token", EVIL_TOKENS, ids=lambda token: repr(token[:12]))
def test_no_value_breaks_the_reader(token: bytes) -> None:
    header, data = split(FILES[1][1])
    document = json.loads(header)
    places = [("__metadata__",), ("__metadata__", "message"), ("alpha",), ("memory.count",)]
    places += [("alpha", key) for key in document["alpha"]]
    for *path, last in places:
        changed = json.loads(header)
        held = changed
        for step in path:
            held = held[step]
        held[last] = "\x01"
        text = json.dumps(changed).encode().replace(b'"\\u0001"', token)
        check(FILES[1][0], joined(text, data))


@settings(max_examples=200)
@given(content=st.binary(max_size=200), length=st.integers(0, 2**64 - 1) | st.integers(0, 200))
@example(content=b"", length=2**64 - 1)
@example(content=b"{}", length=2)
@example(content=b"{}  ", length=4)
@example(content=b"  {}", length=4)
def test_noise(content: bytes, length: int) -> None:
    check("AlphaUpdate", content)
    check("AlphaUpdate", struct.pack("<Q", length) + content)


def test_tensors_on_top_of_each_other_are_not_copied() -> None:
    size = 1 << 20
    lie = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    header = json.dumps({str(n): lie for n in range(60)}).encode()
    file = joined(header, bytes(size))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="overlap"):
            load_tensors(file)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < size


def test_a_small_file_takes_little_memory() -> None:
    """What a header promises is not taken before it is there."""
    lies: tuple[dict[str, Any], ...] = (
        {"dtype": "F64", "shape": [1 << 40], "data_offsets": [0, 1 << 43]},
        {"dtype": "F64", "shape": [1 << 22] * 8, "data_offsets": [0, 8]},
        {"dtype": "U8", "shape": [10**4000], "data_offsets": [0, 10**4000]},
        {"dtype": "U8", "shape": [0] + [1 << 40] * 7, "data_offsets": [0, 0]},
    )
    for lie in lies:
        header = json.dumps({"__metadata__": {"message": "{}"}, "alpha": lie}).encode()
        tracemalloc.start()
        try:
            check("AlphaUpdate", joined(header, b""))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 1 << 20
