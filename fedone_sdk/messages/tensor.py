"""Dense arrays on the wire: dtype, shape and little-endian base64. NumPy is optional."""

from __future__ import annotations

import array
import base64
import binascii
import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema, model_validator

from fedone_sdk.messages.base import Message

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_ELEMENTS = 1 << 22
"""Maximal number of elements of an array (16 MiB of float32)."""

_MAX_TEXT = MAX_ELEMENTS * 6
_MAX_BYTES = _MAX_TEXT // 4 * 3
_TYPECODES = {"float32": "f", "uint8": "B", "uint16": "H"}

DType = Literal["float32", "uint8", "uint16"]


def _from_base64(given: object) -> object:
    if not isinstance(given, str):
        return given
    if len(given) > _MAX_TEXT:
        raise ValueError(f"is longer than {_MAX_TEXT} characters")
    try:
        return base64.b64decode(given, validate=True)
    except ValueError as exc:  # Includes binascii.Error and non-ASCII text.
        raise ValueError(f"is not base64: {exc}") from None


_Data = Annotated[
    bytes,
    Field(max_length=_MAX_BYTES, repr=False),
    BeforeValidator(_from_base64),
    PlainSerializer(lambda data: binascii.b2a_base64(data, newline=False).decode("ascii")),
    WithJsonSchema({"type": "string", "maxLength": _MAX_TEXT}),
]


class Tensor(Message):
    """A dense array.

    Attributes:
        shape: Sizes, outermost first (C order).
        data: The elements, little-endian, standard base64 with padding.
    """

    dtype: DType
    shape: Annotated[tuple[Annotated[int, Field(ge=0, le=MAX_ELEMENTS)], ...], Field(max_length=4)]
    data: _Data

    @model_validator(mode="after")
    def _check(self) -> Self:
        count = math.prod(self.shape)
        if count > MAX_ELEMENTS:
            raise ValueError(f"shape {list(self.shape)} holds more than {MAX_ELEMENTS} elements")
        expected = count * array.array(_TYPECODES[self.dtype]).itemsize
        if len(self.data) != expected:
            raise ValueError(
                f"data holds {len(self.data)} bytes, but {self.dtype} {list(self.shape)} "
                f"takes {expected}"
            )
        if self.dtype.startswith("float") and not self._is_finite():
            raise ValueError("data holds NaN or infinity")
        return self

    def _is_finite(self) -> bool:
        # The highest byte is 7F or FF only for NaN, infinity and huge numbers. Without such a byte
        # the slow check of each number is not needed.
        size = array.array(_TYPECODES[self.dtype]).itemsize
        high = self.data[size - 1 :: size]
        return (0x7F not in high and 0xFF not in high) or all(map(math.isfinite, self.values()))

    @classmethod
    def pack(cls, values: Iterable[float], shape: Sequence[int], dtype: DType) -> Self:
        """Build an array from a flat iterable of numbers in C order."""
        elements = array.array(_TYPECODES[dtype], values)
        if sys.byteorder == "big":
            elements.byteswap()
        return cls.from_bytes(elements.tobytes(), shape, dtype)

    @classmethod
    def from_bytes(cls, raw: bytes, shape: Sequence[int], dtype: str) -> Self:
        """Build an array from little-endian bytes in C order."""
        return cls.model_validate({"dtype": dtype, "shape": tuple(shape), "data": raw})

    @classmethod
    def of_indices(cls, values: Iterable[int], shape: Sequence[int], vocab_size: int) -> Self:
        """Pack candidate indices into the smallest sufficient type."""
        return cls.pack(values, shape, "uint8" if vocab_size <= 256 else "uint16")

    def part(self, rows: range) -> Self:
        """Return consecutive rows of a matrix, as a matrix."""
        size = len(self.data) // self.shape[0]
        raw = self.data[rows.start * size : rows.stop * size]
        return self.from_bytes(raw, (len(rows), *self.shape[1:]), self.dtype)

    def values(self) -> array.array[float]:
        """Return the elements, flat, in C order."""
        elements: array.array[float] = array.array(_TYPECODES[self.dtype])
        elements.frombytes(self.data)
        if sys.byteorder == "big":
            elements.byteswap()
        return elements

    def rows(self) -> list[Any]:
        """Return the elements as nested lists of the array's shape."""
        nested: list[Any] = self.values().tolist()
        for size in reversed(self.shape[1:]):
            nested = [nested[at : at + size] for at in range(0, len(nested), size)] if size else []
        return nested


def to_wire(values: NDArray[Any]) -> Tensor:
    """Return a NumPy array as a message; its dtype must be a `DType`."""
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return Tensor.from_bytes(little.tobytes(), values.shape, values.dtype.name)


def from_wire(message: Tensor) -> NDArray[Any]:
    """Return a message as a NumPy array, read-only."""
    import numpy as np

    dtype = np.dtype(message.dtype).newbyteorder("<")
    return np.frombuffer(message.data, dtype).reshape(message.shape)


def prompts_to_wire(prompts: NDArray[Any], vocab_size: int) -> Tensor:
    """Return prompts of candidate indices as a message."""
    return Tensor.of_indices(prompts.ravel().tolist(), prompts.shape, vocab_size)
