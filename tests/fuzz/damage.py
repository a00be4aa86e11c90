"""Hypothesis strategies for damaged JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from tests.wire_vectors import vectors

ODD_TOKENS: tuple[bytes, ...] = (
    *(b"NaN", b"-Infinity", b"1e400", b"1e-400", b"-0.0", b"1E+999999", b"00", b"0x10", b".5"),
    *(b"2147483648", b"9007199254740993", b"18446744073709551616", b"9" * 5_000),
    *(b"true", b"null", b'""', b"[]", b"{}", b"[null]", b'{"":""}', b'"1E+999999"'),
    *(b'"\\ud800"', b'"\\u0000"', b'"\xff\xfe"', b'"\xe2\x80\xae"', b'"a\nb"', b'"a'),
    *(b"[" * 100_000, b'{"a":' * 5_000, b"1/2", b"undefined", b"'a'", b"\xef\xbb\xbf1"),
)
"""Values that are not JSON, or that parsers read in different ways."""

_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2**31, 2**53, 2**63, 2**64, 10**400, -(10**400)]),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["A" * 70_000, "../../../etc/passwd", "nan", "1e400", "{prompt}", "1" * 5000]),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=3),
)


def messages(*types: str) -> list[dict[str, Any]]:
    """Return the golden messages of some types, or of all without a type."""
    return [entry for entry in vectors("messages.json") if not types or entry["type"] in types]


@st.composite
def damaged(draw: st.DrawFn, body: bytes) -> bytes:
    """A JSON body with damaged bytes, a replaced, missing or duplicate key, or an odd token."""
    way = draw(st.sampled_from(["bytes", "value", "value", "key", "twice", "token", "token"]))
    if way == "bytes":
        return draw(damaged_bytes(body))
    document = json.loads(body)
    place = draw(st.sampled_from(list(_places(document))))
    if way == "value":
        document = _put(document, place, draw(_VALUES))
    elif way == "token":
        text = json.dumps(_put(document, place, "\x01")).encode()
        return text.replace(b'"\\u0001"', draw(st.sampled_from(ODD_TOKENS)))
    elif way == "key" and place:
        document = _put(document, (*place[:-1], "extra"), 1) if isinstance(place[-1], str) else []
    elif isinstance(document, dict) and document:
        key = draw(st.sampled_from(sorted(document)))
        return b"{" + json.dumps(key).encode() + b":null," + json.dumps(document).encode()[1:]
    return json.dumps(document).encode("utf-8", "surrogatepass")


@st.composite
def damaged_bytes(draw: st.DrawFn, body: bytes) -> bytes:
    """Bytes of which a part is replaced by up to eight others."""
    begin = draw(st.integers(0, len(body)))
    end = draw(st.integers(begin, min(begin + 50, len(body))) | st.just(len(body)))
    return body[:begin] + draw(st.binary(max_size=8)) + body[end:]


def _places(document: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    steps = document.items() if isinstance(document, dict) else enumerate(document[:50])
    for step, value in steps:
        if isinstance(value, dict | list):
            yield from _places(value, (*at, step))
        else:
            yield (*at, step)


def _put(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    copy = dict(document) if isinstance(document, dict) else list(document)
    step, rest = place[0], place[1:]
    copy[step] = _put(copy[step], rest, value) if rest else value
    return copy
