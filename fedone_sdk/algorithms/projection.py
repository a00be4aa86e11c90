"""The soft prompt of a BBT vector: bounded, then projected to embeddings."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _checks
from .sampling import stream, stream_seed

__all__ = ["bounded", "check_size", "projected", "reach"]

_MAX_ELEMENTS = 2**29
"""The largest projection that a run may require of a device (2 GiB)."""


def bounded(vectors: ArrayLike, bound: float) -> NDArray[np.float32]:
    """Return the vectors with every number mapped into [-bound, bound].

    This is the boundary transform of Hansen's `cma` 3, which the authors of BBT used. It is the
    identity up to `bound - a`, then a parabola that reaches the bound at `bound + a` with slope 0,
    then that curve mirrored; a = (1 + bound) / 20, or bound if that is less. CMA-ES searches the
    numbers before the transform. Clipping would push them back from the bound at every step, and
    the step size would grow without limit when the optimum is at the bound.

    Args:
        vectors: Finite, of any shape.
        bound: Above 0.
    """
    margin = _margin(bound)
    top = bound + margin
    values = np.array(vectors, dtype=np.float64)
    mirrored = top - np.abs(np.mod(values + top, 4.0 * top) - 2.0 * top)
    size = np.abs(mirrored)
    bent = np.copysign(bound - (top - size) ** 2 / (4.0 * margin), mirrored)
    result: NDArray[np.float32] = np.where(size <= bound - margin, mirrored, bent).astype(
        np.float32
    )
    return result


def reach(bound: float) -> float:
    """Return the number that `bounded` maps to the bound."""
    return bound + _margin(bound)


def projected(
    vector: ArrayLike, *, prompt_len: int, size: int, scale: float, bound: float, seed: int
) -> NDArray[np.float32]:
    """Return the soft prompt A bounded(z), shape (prompt_len, size).

    The entries of A are normal with mean 0 and standard deviation scale / sqrt(d) (Sun et al.
    2022, section 3.2, and their code). They are drawn from the seed, row by row in float32, and
    never sent: every scorer derives the same ones. A longer prompt starts with the rows of a
    shorter one. The product is computed in float32, one vector at a time: its last bits depend
    on the machine, but not on which vectors are projected together.

    Args:
        vector: z, shape (d,), finite.
        prompt_len: n.
        size: H, the width of the model's embeddings.
        scale: Standard deviation of the soft prompt's entries for z ~ N(0, I). With
            std / sigma, a first draw of CMA-ES looks like embeddings of standard deviation std.
        bound: See `bounded`.
        seed: Of the projection.

    Raises:
        ValueError: The arguments do not fit, or the projection exceeds 2 GiB.
    """
    z = np.array(vector, dtype=np.float32)
    if z.ndim != 1 or z.size == 0 or not np.isfinite(z).all():
        raise ValueError("a vector to project must be finite and of one dimension")
    rows = check_size(prompt_len=prompt_len, size=size, dimension=len(z))
    _checks.number("scale", scale)
    result: NDArray[np.float32] = _normals(seed, rows, len(z)) @ bounded(z, bound)
    result *= np.float32(scale / math.sqrt(len(z)))
    return result.reshape(prompt_len, size)


def check_size(*, prompt_len: int, size: int, dimension: int) -> int:
    """Return the rows of a projection, n x H.

    Args:
        prompt_len: n.
        size: H.
        dimension: d.

    Raises:
        ValueError: It exceeds 2 GiB.
    """
    rows = _checks.integer("prompt_len", prompt_len, minimum=1)
    rows *= _checks.integer("size", size, minimum=1)
    if rows * dimension > _MAX_ELEMENTS:
        raise ValueError(f"a projection of {rows} x {dimension} numbers is too large")
    return rows


def _margin(bound: float) -> float:
    return min(_checks.number("bound", bound), (1.0 + bound) / 20.0)


# 41 MB for n = 20, H = 1024, d = 500. Two entries, so that two runs of a process both stay cached.
@lru_cache(maxsize=2)
def _normals(seed: int, rows: int, columns: int) -> NDArray[np.float32]:
    rng = stream(stream_seed(seed, "projection", 0))
    normals = rng.standard_normal((rows, columns), dtype=np.float32)
    normals.setflags(write=False)
    return normals
