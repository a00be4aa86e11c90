"""Dense arrays on the wire: dtype, shape and little-endian base64. No NumPy needed."""

from __future__ import annotations

import array
import base64
import binascii
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedone_sdk.messages.base import Message

__all__ = ["Array", "MAX_ELEMENTS", "SharedMemory"]

MAX_ELEMENTS = 1 << 22
"""The largest array that a message may carry (16 MiB of float32)."""

_TYPECODES = {"float32": "f", "float64": "d", "int64": "q", "uint8": "B", "uint16": "H"}

DType = Literal["float32", "float64", "int64", "uint8", "uint16"]


class Array(Message):
    """A dense array.

    Attributes:
        dtype: Element type.
        shape: Sizes, outermost first (C order).
        data: The elements, little-endian, standard base64 with padding.
    """

    dtype: DType
    shape: Annotated[tuple[Annotated[int, Field(ge=0, le=MAX_ELEMENTS)], ...], Field(max_length=4)]
    data: Annotated[str, Field(max_length=MAX_ELEMENTS * 6)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        count = math.prod(self.shape)
        if count > MAX_ELEMENTS:
            raise ValueError(f"shape {list(self.shape)} holds more than {MAX_ELEMENTS} elements")
        try:
            size = len(base64.b64decode(self.data, validate=True))
        except binascii.Error as exc:
            raise ValueError(f"data is not base64: {exc}") from None
        expected = count * array.array(_TYPECODES[self.dtype]).itemsize
        if size != expected:
            raise ValueError(
                f"data holds {size} bytes, {self.dtype} {list(self.shape)} takes {expected}"
            )
        if self.dtype.startswith("float") and not all(map(math.isfinite, self.values())):
            raise ValueError("data holds NaN or infinity")
        return self

    @classmethod
    def pack(cls, values: Iterable[float], shape: Sequence[int], dtype: DType) -> Self:
        """Builds an array from a flat iterable of numbers in C order."""
        elements = array.array(_TYPECODES[dtype], values)
        if sys.byteorder == "big":
            elements.byteswap()
        return cls.from_bytes(elements.tobytes(), shape, dtype)

    @classmethod
    def from_bytes(cls, raw: bytes, shape: Sequence[int], dtype: str) -> Self:
        """Builds an array from little-endian bytes in C order."""
        data = base64.b64encode(raw).decode("ascii")
        return cls.model_validate({"dtype": dtype, "shape": tuple(shape), "data": data})

    @classmethod
    def of_indices(cls, values: Iterable[int], shape: Sequence[int], vocab_size: int) -> Self:
        """Packs candidate indices into the smallest type that holds them."""
        return cls.pack(values, shape, "uint8" if vocab_size <= 256 else "uint16")

    def to_bytes(self) -> bytes:
        """The elements as little-endian bytes in C order (``numpy.frombuffer`` reads them)."""
        return base64.b64decode(self.data)

    def values(self) -> array.array[float]:
        """The elements, flat, in C order."""
        elements: array.array[float] = array.array(_TYPECODES[self.dtype])
        elements.frombytes(self.to_bytes())
        if sys.byteorder == "big":
            elements.byteswap()
        return elements

    def rows(self) -> list[list[float]]:
        """The elements of a 2-dimensional array as nested lists."""
        height, width = self.shape
        flat = self.values().tolist()
        return [flat[row * width : (row + 1) * width] for row in range(height)]


SharedMemory = Annotated[
    dict[Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")], Array], Field(max_length=8)
]
"""Arrays by name: what a method such as evolution remembers beside alpha."""
