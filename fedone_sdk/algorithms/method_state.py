"""The immutable state of a method, and its conversion to and from bytes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Memory: TypeAlias = Mapping[str, NDArray[Any]]

_ALPHA = "alpha"
_DIGEST_SIZE = hashlib.sha256().digest_size
_MEMORY_PREFIX = "memory/"
_MEMORY_DTYPES = tuple(np.dtype(code) for code in ("<f4", "<f8", "<i8"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class State:
    """What a method has learned so far, as read-only copies of the given arrays.

    Attributes:
        alpha: A weight for each position and candidate: finite little-endian float32, (n, N).
        memory: The rest of the state (optimiser moments, a pool of prompts): float32, float64 or
            int64 arrays by name; empty for plain SGD.
    """

    alpha: NDArray[np.float32]
    memory: Memory = field(default_factory=dict)

    def __post_init__(self) -> None:
        alpha = _frozen_copy(self.alpha, np.dtype("<f4"))
        if alpha.ndim != 2 or alpha.size == 0:
            raise ValueError(f"alpha must be a matrix (n, N), not of shape {alpha.shape}")
        if not np.isfinite(alpha).all():
            raise ValueError("alpha must be finite")
        object.__setattr__(self, "alpha", alpha)
        object.__setattr__(self, "memory", _frozen_memory(self.memory))

    def evolve(self, **changes: Any) -> State:
        """Return a copy with some fields replaced."""
        return replace(self, **changes)

    # `memory` is a mapping proxy, which cannot be pickled.
    def __reduce__(self) -> tuple[Callable[[bytes], State], tuple[bytes]]:
        """Pickle as the bytes of `dump_state`."""
        return load_state, (dump_state(self),)


def alpha_sha256(alpha: ArrayLike) -> str:
    """Return the hex SHA-256 of alpha's C-order little-endian float32 bytes."""
    return hashlib.sha256(np.asarray(alpha, dtype="<f4").tobytes(order="C")).hexdigest()


def dump_state(state: State) -> bytes:
    """Return the state as bytes, from which `load_state` restores it bit for bit."""
    return _pack({_ALPHA: state.alpha, **_prefixed(state.memory)})


def load_state(data: bytes) -> State:
    """Return the state that `dump_state` wrote.

    Raises:
        ValueError: `data` is not a saved state.
    """
    arrays = _unpack(data, what="state")
    if _ALPHA not in arrays or arrays[_ALPHA].dtype != np.dtype("<f4"):
        raise ValueError("not a saved state: no float32 alpha")
    alpha = arrays.pop(_ALPHA)
    return State(alpha=alpha, memory=_unprefixed(arrays, what="state"))


def dump_memory(memory: Memory) -> bytes:
    """Return a memory as bytes, from which `load_memory` restores it."""
    return _pack(_prefixed(_frozen_memory(memory)))


def load_memory(data: bytes) -> Memory:
    """Return the memory that `dump_memory` wrote.

    Raises:
        ValueError: `data` is not a saved memory.
    """
    return _frozen_memory(_unprefixed(_unpack(data, what="memory"), what="memory"))


def _frozen_copy(value: ArrayLike, dtype: np.dtype[Any]) -> NDArray[Any]:
    try:
        result = np.array(value, dtype=dtype, order="C", copy=True)
    except (TypeError, ValueError) as exc:
        raise ValueError(f"not an array of {dtype.name}") from exc
    result.setflags(write=False)
    return result


def _frozen_memory(memory: Memory) -> Memory:
    copies = {}
    for key in sorted(memory):  # Sorted, so that equal memories give equal bytes.
        dtype = np.asarray(memory[key]).dtype.newbyteorder("<")
        if dtype not in _MEMORY_DTYPES:
            allowed = ", ".join(allowed.name for allowed in _MEMORY_DTYPES)
            raise ValueError(f"memory {key!r} must be one of {allowed}, not {dtype.name}")
        copies[key] = _frozen_copy(memory[key], dtype)
    return MappingProxyType(copies)


def _prefixed(memory: Memory) -> dict[str, NDArray[Any]]:
    return {_MEMORY_PREFIX + key: value for key, value in memory.items()}


def _unprefixed(arrays: Memory, *, what: str) -> dict[str, NDArray[Any]]:
    if not all(key.startswith(_MEMORY_PREFIX) for key in arrays):
        raise ValueError(f"not a saved {what}: unknown arrays")
    return {key.removeprefix(_MEMORY_PREFIX): value for key, value in arrays.items()}


def _pack(arrays: dict[str, NDArray[Any]]) -> bytes:
    """Return a digest, a line of JSON with the types and shapes, and the arrays' bytes."""
    forms = {name: (array.dtype.str, array.shape) for name, array in arrays.items()}
    content = (array.tobytes() for array in arrays.values())
    payload = b"".join([json.dumps(forms).encode(), b"\n", *content])
    return hashlib.sha256(payload).digest() + payload


def _unpack(data: bytes, *, what: str) -> dict[str, NDArray[Any]]:
    digest, payload = data[:_DIGEST_SIZE], data[_DIGEST_SIZE:]
    if hashlib.sha256(payload).digest() != digest:
        raise ValueError(f"not a saved {what}, or a damaged one")
    header, _, content = payload.partition(b"\n")
    arrays: dict[str, NDArray[Any]] = {}
    start = 0
    try:
        for name, (dtype, shape) in json.loads(header).items():
            array = np.frombuffer(content, dtype, math.prod(shape), start).reshape(shape)
            start += array.nbytes
            arrays[name] = array
    except (ArithmeticError, AttributeError, RecursionError, TypeError, ValueError) as exc:
        raise ValueError(f"not a saved {what}") from exc
    return arrays
