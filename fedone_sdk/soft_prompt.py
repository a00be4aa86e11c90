"""A prompt of vectors instead of text: trained by white-box methods, searched by BBT."""

from __future__ import annotations

import math
import sys
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

__all__ = ["MAX_ELEMENTS", "SoftPrompt", "SoftPromptKind"]

SoftPromptKind = Literal["embeddings", "key_values"]
"""Where the vectors act: at the prompt's place in the input, or as keys and values before the
input's own in every layer's attention."""

MAX_ELEMENTS = 2**24
"""The largest number of elements of a soft prompt: 64 MiB."""

_ITEM_SIZE = 4


@dataclass(frozen=True, slots=True)
class SoftPrompt:
    """Vectors that a model takes as its prompt; hashable, for use in cache keys.

    Attributes:
        kind: Where they act.
        shape: ``(n, H)`` for ``embeddings``: n vectors of the model's width H. For ``key_values``
            ``(2 * L * n, H)``: the n keys of layer l are the rows from ``2 * l * n`` on, followed
            by its n values; a row holds all heads of a layer, one after another.
        data: The numbers: little-endian float32 in C order.

    Raises:
        ValueError: The shape is empty, too large or does not fit the data, or a number is not
            finite.
    """

    kind: SoftPromptKind
    shape: tuple[int, int]
    data: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if self.kind not in ("embeddings", "key_values"):
            raise ValueError(f"a soft prompt is embeddings or key_values, not {self.kind!r}")
        if len(self.shape) != 2 or min(self.shape) < 1:
            raise ValueError(f"a soft prompt has rows and columns, not shape {self.shape}")
        if self.kind == "key_values" and self.shape[0] % 2:
            raise ValueError(f"{self.shape[0]} rows are not as many keys as values")
        size = math.prod(self.shape)
        if size > MAX_ELEMENTS:
            raise ValueError(f"a soft prompt of {size} numbers; at most {MAX_ELEMENTS}")
        if len(self.data) != size * _ITEM_SIZE:
            raise ValueError(
                f"{len(self.data)} bytes for shape {self.shape}, which takes {size * _ITEM_SIZE}"
            )
        if not all(map(math.isfinite, _numbers(self.data))):
            raise ValueError("a soft prompt holds a number that is not finite")

    @classmethod
    def of(cls, kind: SoftPromptKind, vectors: ArrayLike) -> SoftPrompt:
        """Return the soft prompt of a matrix.

        Args:
            kind: Where the vectors act.
            vectors: Two-dimensional; rounded to float32.

        Raises:
            ValueError: As of the class, or it is not a matrix of numbers.
        """
        import numpy as np

        with np.errstate(over="ignore"):  # Infinity is refused below.
            matrix = np.ascontiguousarray(vectors, dtype="<f4")
        if matrix.ndim != 2:
            raise ValueError(f"a soft prompt is a matrix, not of shape {matrix.shape}")
        return cls(kind, (matrix.shape[0], matrix.shape[1]), matrix.tobytes())

    def array(self) -> NDArray[np.float32]:
        """Return the vectors as a new float32 matrix, in `shape`. Requires NumPy."""
        import numpy as np

        return np.frombuffer(self.data, dtype="<f4").reshape(self.shape).astype(np.float32)


def _numbers(data: bytes) -> array[float]:
    numbers = array("f")
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
