"""Safetensors files, and references to their tensors in a message's JSON.

Implemented without the library: files are untrusted, the metadata must be read too, and devices
then need neither the library nor NumPy.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

MAX_HEADER_BYTES = 1 << 20
"""Maximal size of a header."""

MAX_TENSORS = 64
"""Maximal number of tensors of a file."""

_METADATA = "__metadata__"
_CODES = {"float32": "F32", "float64": "F64", "int64": "I64", "uint8": "U8", "uint16": "U16"}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_SIZES = {"float32": 4, "float64": 8, "int64": 8, "uint8": 1, "uint16": 2}
_MAX_DIMS, _MAX_COUNT = 8, 1 << 48


class Tensor(NamedTuple):
    """A dense array of a file.

    Attributes:
        dtype: Element type: float32, float64, int64, uint8 or uint16.
        shape: Sizes, outermost first (C order).
        data: The elements, little-endian.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def dump_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a file; equal tensors and texts give equal bytes.

    They equal those of the safetensors library: large element types first, for alignment.
    """
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    end, parts = 0, []
    for name in sorted(tensors, key=lambda name: (-_SIZES[tensors[name].dtype], name)):
        dtype, shape, data = tensors[name]
        offsets = [end, end + len(data)]
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": offsets}
        end += len(data)
        parts.append(data)
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join((struct.pack("<Q", len(text)), text, *parts))


def load_tensors(content: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a file.

    Raises:
        ValueError: The file is invalid or not supported: other element types, a header that is too
            long, tensors that overlap or leave gaps, duplicate names.
    """
    if len(content) < 8:
        raise ValueError("tensors: the file is shorter than the length of its header")
    (length,) = struct.unpack_from("<Q", content)
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"tensors: the header is over {MAX_HEADER_BYTES} bytes")
    start = 8 + length
    if start > len(content):
        raise ValueError("tensors: the header ends after the file")
    header = _header(content[8:start])
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("tensors: __metadata__ must be an object of texts")
    if len(header) > MAX_TENSORS:
        raise ValueError(f"tensors: more than {MAX_TENSORS}")
    entries = {name: _entry(entry) for name, entry in header.items()}
    _check_places([(first, last) for _, _, first, last in entries.values()], len(content) - start)
    return {
        name: Tensor(dtype, shape, content[start + first : start + last])
        for name, (dtype, shape, first, last) in entries.items()
    }, metadata


def _check_places(places: list[tuple[int, int]], size: int) -> None:
    """Check that the tensors cover the file exactly once, before anything is copied."""
    end = 0
    for first, last in sorted(places):
        if last > size:
            raise ValueError("tensors: one ends after the file")
        if first != end:
            raise ValueError("tensors: they overlap or leave a gap")
        end = last
    if end != size:
        raise ValueError("tensors: there are bytes behind the last one")


def _header(text: bytes) -> dict[str, Any]:
    if not text.startswith(b"{"):
        raise ValueError("tensors: the header is not a JSON object")
    try:
        header: dict[str, Any] = json.loads(
            text.decode(), object_pairs_hook=_unique, parse_constant=_refused
        )
    except RecursionError:
        raise ValueError("tensors: the header nests too deep") from None
    except ValueError as exc:
        # Not the parser's message, which may contain input.
        reason = exc.args[0] if type(exc) is _HeaderError else "is not JSON"
        raise ValueError(f"tensors: the header {reason}") from None
    return header


class _HeaderError(ValueError):
    """The header is JSON but not valid as a header."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _HeaderError("has the same name twice")
    for text in (*found, *found.values()):
        if isinstance(text, str) and not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                raise _HeaderError("has half a character") from None
    return found


def _refused(word: str) -> float:
    raise _HeaderError(f"has {word} for a number")


def _entry(entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError("tensors: each has dtype, shape and data_offsets, and nothing else")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    dtype = _DTYPES.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise ValueError(f"tensors: dtype must be one of {', '.join(_DTYPES)}")
    if not _are_counts(shape) or len(shape) > _MAX_DIMS:
        raise ValueError(f"tensors: shape must be at most {_MAX_DIMS} sizes")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError("tensors: data_offsets must be two positions")
    first, last = offsets
    if last - first != math.prod(shape) * _SIZES[dtype]:
        raise ValueError("tensors: data_offsets do not fit dtype and shape")
    return dtype, tuple(shape), first, last


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value <= _MAX_COUNT for value in values
    )


class Apart:
    """The arrays of a message that are stored outside of its JSON.

    Used as pydantic's ``context`` for reading and writing that JSON, in which an array is an object
    with the one key ``tensor``: its name.

    Args:
        tensors: Tensors by name; for writing, in the order of the message.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self._names = iter(tensors)

    def next_reference(self) -> dict[str, str]:
        """Return the reference to the next array, for writing."""
        return {"tensor": next(self._names)}

    def take(self, reference: Any) -> Tensor:
        """Return the array of a reference; each can be taken once.

        Raises:
            ValueError: The reference is invalid.
        """
        named = isinstance(reference, dict) and reference.keys() == {"tensor"}
        name = reference["tensor"] if named else None
        if not isinstance(name, str):
            raise ValueError("must name a tensor, and nothing else")
        if name not in self._tensors:
            raise ValueError("names a tensor that is not there, or twice")
        return self._tensors.pop(name)

    def check_taken(self) -> None:
        """Check that all arrays were taken.

        Raises:
            ValueError: An array has no reference.
        """
        if self._tensors:
            raise ValueError("tensors: there are more than the message names")
