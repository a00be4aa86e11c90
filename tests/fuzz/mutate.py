"""Bad input, made from valid input: by bytes, by structure and by hand."""

from __future__ import annotations

import base64
import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_VECTORS = Path(__file__).parents[1] / "vectors"

EVIL_TOKENS: tuple[bytes, ...] = (
    # JSON, or nearly, in the place of a value
    b"NaN",
    b"-Infinity",
    b"Infinity",
    b"1e400",
    b"-1e400",
    b"1e-400",
    b"-0",
    b"-0.0",
    b"0.1e1",
    b"1E+2",
    b"9" * 100_000,
    b"-" + b"9" * 5_000,
    b"0." + b"3" * 100_000,
    b"1e999999999999",
    b"9007199254740993",
    b"18446744073709551616",
    b"9223372036854775808",
    b"2147483648",
    b"00",
    b"01",
    b"0x10",
    b"1_000",
    b"+1",
    b".5",
    b"5.",
    b"true",
    b"null",
    b'""',
    b"[]",
    b"{}",
    b"[null]",
    b"[[]]",
    b'{"":""}',
    b'"1"',
    b'"1E+999999"',
    b'"\\ud800"',
    b'"\\udfff\\ud800"',
    b'"\\u0000"',
    b'"\xff\xfe"',
    b'"\xc0\xaf"',
    b'"\xed\xa0\x80"',
    b'"\xf4\x90\x80\x80"',
    b'"' + b"A" * 100_000 + b'"',
    b"[" * 100_000,
    b"[" * 100_000 + b"]" * 100_000,
    b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    b"[" + b"0," * 5_000 + b"0]",
    b'"\x00"',
    b'"\n"',
    b"'x'",
    b"undefined",
    b"/* */1",
    b"",
)

EVIL_TEXTS: tuple[str, ...] = (
    "",
    " ",
    "\x00",
    "\ud800",
    "\uffff",
    "\U0010ffff",
    "‮",
    "%s%n{0}{prompt}",
    "../../../../etc/passwd",
    "' OR 1=1 --",
    "<script>alert(1)</script>",
    "A" * 70_000,
    "\r\nSet-Cookie: a=b",
    "\U0001d7d9",
    "inf",
    "nan",
    "1e400",
    "1E+999999",
    "-0",
    "1" * 5000,
)

_NUMBERS: tuple[Any, ...] = (
    0,
    -1,
    1,
    2,
    3,
    255,
    256,
    65536,
    1 << 22,
    (1 << 22) + 1,
    1 << 31,
    1 << 53,
    1 << 63,
    1 << 64,
    10**400,
    -(10**400),
    0.5,
    -0.0,
    1e-320,
    1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
    True,
    False,
    None,
    [],
    {},
    "",
    "0",
    "1E+999999",
)


def vectors(*types: str) -> list[dict[str, Any]]:
    """The golden messages of these types, all without any: ``name``, ``type``, ``body`` ..."""
    document = json.loads((_VECTORS / "messages.json").read_text(encoding="utf-8"))
    return [entry for entry in document["messages"] if not types or entry["type"] in types]


def damaged(rng: random.Random, body: bytes) -> bytes:
    """A JSON body with something wrong with it; now and then it is still a good one."""
    ways: tuple[Callable[[random.Random, bytes], bytes], ...] = (
        damaged_bytes,
        _with_evil_value,
        _with_evil_value,
        _restructured,
        _restructured,
        _with_doubled_key,
    )
    try:
        return rng.choice(ways)(rng, body)
    except (ArithmeticError, AttributeError, RecursionError, TypeError, ValueError):
        return damaged_bytes(rng, body)  # It was damaged before, and beyond what we can read.


def damaged_bytes(rng: random.Random, body: bytes) -> bytes:
    """Bytes flipped, cut out, put in, doubled or swapped."""
    found = bytearray(body)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8, 40))):
        at = rng.randrange(len(found) + 1)
        match rng.randrange(7):
            case 0 if at < len(found):
                found[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(found):
                found[at] = rng.randrange(256)
            case 2:
                del found[at : at + rng.choice((1, 2, 5, 50))]
            case 3:
                found[at:at] = rng.randbytes(rng.choice((1, 2, 4, 8)))
            case 4:
                found[at:at] = found[: rng.choice((1, 5, 50))]
            case 5:
                del found[at:]
            case _:
                found[at:at] = rng.choice((b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"\0"))
    return bytes(found)


def split(file: bytes) -> tuple[bytes, bytes]:
    """Header and data of a file of tensors."""
    (length,) = struct.unpack_from("<Q", file)
    return file[8 : 8 + length], file[8 + length :]


def joined(header: bytes, data: bytes) -> bytes:
    """The file again."""
    return struct.pack("<Q", len(header)) + header + data


def damaged_file(rng: random.Random, file: bytes) -> bytes:
    """A file of tensors with something wrong with it; now and then it is still a good one."""
    header, data = split(file)
    match rng.randrange(5):
        case 0:
            return damaged_bytes(rng, file)
        case 1:
            return joined(damaged(rng, header), data)
        case 2:  # the text in the header, which is whole
            document = json.loads(header)
            text = damaged(rng, document["__metadata__"]["message"].encode())
            document["__metadata__"]["message"] = text.decode("utf-8", "replace")
            return joined(json.dumps(document).encode(), data)
        case 3:  # two tensors change places, or one gets another's type
            document = json.loads(header)
            names = [name for name in document if name != "__metadata__"]
            one, other, key = rng.choice(names), rng.choice(names), rng.choice(("dtype", "shape"))
            document[one][key] = rng.choice((document[other][key], "F16", "BOOL", [2, 2], []))
            document[one]["data_offsets"][rng.randrange(2)] += rng.choice((-4, 0, 0, 4, 1 << 62))
            return joined(json.dumps(document).encode(), data)
        case _:
            return file[: rng.randrange(len(file))] + rng.randbytes(rng.choice((0, 1, 4, 8)))


def _with_evil_value(rng: random.Random, body: bytes) -> bytes:
    """A value in the text replaced by a token that no encoder would write."""
    document = json.loads(body)
    places = [place for place in _places(document) if place]
    if not places:
        return rng.choice(EVIL_TOKENS)
    mark = "\x01evil\x01"
    changed = _put(document, rng.choice(places), mark)
    text = json.dumps(changed, separators=(",", ":")).encode()
    return text.replace(json.dumps(mark).encode(), rng.choice(EVIL_TOKENS))


def _restructured(rng: random.Random, body: bytes) -> bytes:
    """Values replaced, moved, dropped or wrapped."""
    document = json.loads(body)
    for _ in range(rng.choice((1, 1, 2, 4))):
        places = list(_places(document))
        place = rng.choice(places)
        value = _get(document, place)
        match rng.randrange(8):
            case 0 | 1:
                new: Any = rng.choice(_NUMBERS)
            case 2:
                new = rng.choice(EVIL_TEXTS)
            case 3:
                new = _get(document, rng.choice(places))
            case 4:
                new = [value]
            case 5 if isinstance(value, dict):
                new = {**value, rng.choice(EVIL_TEXTS): rng.choice(_NUMBERS)}
            case 6 if isinstance(value, dict) and value:
                gone = rng.choice(list(value))
                new = {key: held for key, held in value.items() if key != gone}
            case 7 if isinstance(value, dict) and {"dtype", "shape", "data"} <= value.keys():
                new = _damaged_array(rng, value)
            case _:
                new = _resized(rng, value)
        document = _put(document, place, new)
    return json.dumps(document).encode("utf-8", "surrogatepass")


def _damaged_array(rng: random.Random, array: dict[str, Any]) -> dict[str, Any]:
    """An array whose type, shape and data do not agree, or are not finite."""
    match rng.randrange(6):
        case 0:
            types = ["float16", "float32", "float64", "int64", "uint8", "uint16", "O", ">f4", ""]
            return {**array, "dtype": rng.choice(types)}
        case 1:
            sizes = (0, 1, -1, 2, 1 << 11, 1 << 22, 1 << 31, 1 << 62, 10**30, 0.5, "2", None)
            return {**array, "shape": [rng.choice(sizes) for _ in range(rng.randrange(7))]}
        case 2:
            specials = (
                b"\0\0\xc0\x7f",
                b"\0\0\x80\x7f",
                b"\0\0\x80\xff",
                b"\1\0\0\0",
                b"\0\0\0\x80",
            )
            raw = bytearray(base64.b64decode(array["data"]))
            at = 4 * rng.randrange(max(len(raw) // 4, 1))
            raw[at : at + 4] = rng.choice(specials)
            return {**array, "data": base64.b64encode(raw).decode()}
        case 3:
            data = array["data"]
            ends = (data[:-1], data + "=", data + "A", data.replace("A", "-"), data + "\n", "====")
            return {**array, "data": rng.choice(ends)}
        case 4:
            return {
                **array,
                "data": base64.b64encode(rng.randbytes(rng.choice((0, 1, 7, 64)))).decode(),
            }
        case _:
            return {**array, "shape": [*array["shape"], 0]}


def _resized(rng: random.Random, value: Any) -> Any:
    if isinstance(value, list):
        longer = (value * 1000)[:3000]
        return rng.choice((value[:-1], value + value[:9], value[::-1], [*value, None], longer))
    if isinstance(value, str):
        longer = (value * 1000)[:200_000]
        return rng.choice((value[:-1], value + value[:9], value.upper(), value + "\x00", longer))
    if isinstance(value, bool) or value is None:
        return rng.choice(_NUMBERS)
    if isinstance(value, (int, float)):
        return rng.choice((-value, value + 1, value * 1e300, value / 3, str(value), [value]))
    return rng.choice(_NUMBERS)


def _with_doubled_key(rng: random.Random, body: bytes) -> bytes:
    """A key that stands there twice, with two values."""
    document = json.loads(body)
    if not isinstance(document, dict) or not document:
        return damaged_bytes(rng, body)
    key = rng.choice(list(document))
    first = (
        json.dumps(key) + ":" + rng.choice(("null", "0", "[]", '"x"', json.dumps(document[key])))
    )
    return ("{" + first + "," + json.dumps(document)[1:]).encode()


def _places(document: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    if isinstance(document, dict):
        for key, value in document.items():
            yield from _places(value, (*at, key))
    elif isinstance(document, list):
        for number, value in enumerate(document[:50]):
            yield from _places(value, (*at, number))


def _get(document: Any, place: tuple[Any, ...]) -> Any:
    for step in place:
        document = document[step]
    return document


def _put(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    copy = dict(document) if isinstance(document, dict) else list(document)
    copy[place[0]] = _put(copy[place[0]], place[1:], value)
    return copy
