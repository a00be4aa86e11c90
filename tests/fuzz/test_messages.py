"""Damaged messages: refused in one way, or unchanged after a round trip."""

from __future__ import annotations

import base64
import json
import tracemalloc
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from fedone_sdk import messages
from fedone_sdk.messages import Tensor
from fedone_sdk.messages.tensor import from_wire
from tests.fuzz.damage import damaged
from tests.fuzz.damage import messages as golden

VECTORS = golden()
ADAPTERS: dict[str, TypeAdapter[Any]] = {
    name: TypeAdapter(getattr(messages, name)) for name in {entry["type"] for entry in VECTORS}
}


def strict_json(text: bytes) -> Any:
    """A document that every JSON parser reads: no NaN, no lone surrogate."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text.decode("utf-8"), parse_constant=refuse)


def check(adapter: TypeAdapter[Any], body: bytes) -> None:
    """Refused with a ValidationError, or the same message when it is written and read again."""
    try:
        message = adapter.validate_json(body)
    except ValidationError as exc:
        # What the service makes of it must not fail in its turn.
        exc.errors(include_url=False, include_input=False, include_context=False)
        return
    written = adapter.dump_json(message)
    strict_json(written)
    again = adapter.validate_json(written)
    assert again == message
    assert adapter.dump_json(again) == written
    repr(message)


@settings(max_examples=300)
@given(data=st.data())
def test_damaged_messages(data: st.DataObject) -> None:
    entry = data.draw(st.sampled_from(VECTORS))
    check(ADAPTERS[entry["type"]], data.draw(damaged(entry["body"].encode())))


@settings(max_examples=200)
@given(
    dtype=st.sampled_from(["float32", "float64", "uint8", "uint16", "object", ">f8"]),
    shape=st.lists(
        st.one_of(st.integers(-2, 5), st.sampled_from([2**11, 2**22, 2**31, 2**62, 10**30])),
        max_size=6,
    ),
    raw=st.binary(max_size=200),
    tail=st.sampled_from(["", "=", "==", "\n", "A", "-", "é"]),
)
@example(dtype="float32", shape=[2**22, 2**22, 2**22, 2**22], raw=b"", tail="")
@example(dtype="float32", shape=[2**22], raw=b"", tail="")
@example(dtype="uint8", shape=[0, 2**22], raw=b"", tail="")
@example(dtype="float32", shape=[1], raw=b"\0\0\xc0\x7f", tail="")
def test_arrays_are_what_they_say(dtype: str, shape: list[int], raw: bytes, tail: str) -> None:
    data = base64.b64encode(raw).decode() + tail
    body = json.dumps({"dtype": dtype, "shape": shape, "data": data}).encode()
    Tensor.model_rebuild()
    tracemalloc.start()
    try:
        try:
            message = Tensor.model_validate_json(body)
        except ValidationError:
            return
        finally:
            _, peak = tracemalloc.get_traced_memory()
            assert peak < 1 << 20, "the size of what was sent bounds what is taken"
    finally:
        tracemalloc.stop()
    values = from_wire(message)
    assert values.shape == tuple(shape)
    assert values.dtype.name == dtype
    assert values.tobytes() == raw
    assert not values.flags.writeable


@settings(max_examples=100)
@given(body=st.binary(max_size=300), name=st.sampled_from(sorted(ADAPTERS)))
def test_noise_is_refused(body: bytes, name: str) -> None:
    check(ADAPTERS[name], body)
