"""JSON bodies that are refused for any message."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedone_sdk.aggregator.http.requests import MAX_PARTS, load_json
from fedone_sdk.errors import ProblemError
from fedone_sdk.messages import UPDATE, LossesUpdate

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(VALUES, st.booleans(), st.sampled_from([None, 2]))
def test_what_a_writer_writes_is_let_through(
    value: Any, ensure_ascii: bool, indent: int | None
) -> None:
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
    if not any("\ud800" <= char <= "\udfff" for char in text):
        assert load_json(text.encode()) == value


@pytest.mark.parametrize(
    "body",
    [b"{}", b'{"a":"NaN, Infinity and ]}]}"}', b'{"a":{"b":1},"b":2,"c":[{"a":1},{"a":1}]}',
     b'{"a":"\\"a\\":1, \\"a\\":2"}', b'["a","a","a"]', b'{"a" : "b", "b" : "a"}',
     b"[" * 32 + b"]" * 32, b"[" + b"0," * (MAX_PARTS - 1) + b"0]"],
)  # fmt: skip
def test_valid_documents_are_read(body: bytes) -> None:
    assert load_json(body) == json.loads(body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"a":"\xff"}', "not UTF-8"), (b"\xff\xfe{\x00}\x00", "not UTF-8"),
        (b"[" * 100_000, "too deep"), (b'{"a":' * 100_000, "too deep"),
        (b'{"a":1,"a":2}', "same key twice"), (b"{{{", "Invalid JSON"),
        (b'{"a"', "Invalid JSON"), (b"9" * 5000, "Invalid JSON"),
        (b'{"a":1,"b":{"c":1,"c":1}}', "same key twice"), (b'{"a" \n:1,"a"\t:2}', "same key twice"),
        (b'{"a":1,"\\u0061":2}', "same key twice"),
        (b'[{"a":{"x":1},"b":[{"x":1}],"a":1}]', "same key twice"),
        (b'{"a":NaN}', "are not JSON numbers"), (b"[Infinity]", "are not JSON numbers"),
        (b"[-Infinity]", "are not JSON numbers"),
        (b"[" + b"0," * MAX_PARTS + b"0]", "more than 1000000 commas"),
        (b"[" + b"[]," * MAX_PARTS + b"0]", "more than 1000000 commas"),
    ],
)  # fmt: skip
def test_what_readers_understand_differently_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        load_json(body)


def test_the_longest_lists_of_messages_are_let_through() -> None:
    document = {
        "exchange": "losses",
        "num_examples": 5,
        "scored": {"scored": 2},
        "usage": {},
        "model": "m",
        "losses": [0.1 * (number % 7) for number in range(65_536)],
    }
    body = json.dumps(document).encode()
    update = UPDATE.validate_python(load_json(body))
    assert isinstance(update, LossesUpdate)
    assert len(update.losses) == 65_536


@given(st.binary(max_size=200))
def test_no_bytes_break_it(body: bytes) -> None:
    try:
        load_json(body)
    except ProblemError:
        return


@pytest.mark.parametrize(
    "body",
    [
        b'{"data":"' + b"A" * 30_000_000 + b'"}', b'{"data":"' + b"\\n" * 15_000_000 + b'"}',
        b"[" + b"0.125," * 5_000_000 + b"1]", b'"' * 1_000_001, b'{"a":"' + b"\\" * 10_000_001,
    ],
    ids=["base64", "escapes", "numbers", "quotes", "backslashes"],
)  # fmt: skip
def test_the_largest_bodies_are_looked_at_quickly(body: bytes) -> None:
    began = time.process_time()
    with contextlib.suppress(ProblemError):  # Either is right: time is what matters.
        load_json(body)
    # Generous: what must not happen is minutes, from going back and forth.
    assert time.process_time() - began < 10
