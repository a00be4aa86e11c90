"""Conversion between NumPy and wire arrays, separate from the messages, which need no NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedone_sdk.messages.array import Array


def to_wire(values: NDArray[Any]) -> Array:
    """Return an array as a message; its dtype must be a `DType`."""
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return Array.from_bytes(little.tobytes(), values.shape, values.dtype.name)


def from_wire(message: Array) -> NDArray[Any]:
    """Return the array of a message, read-only."""
    dtype = np.dtype(message.dtype).newbyteorder("<")
    return np.frombuffer(message.to_bytes(), dtype).reshape(message.shape)


def prompts_to_wire(prompts: NDArray[Any], vocab_size: int) -> Array:
    """Return prompts as a message: token indices in the smallest sufficient type."""
    return Array.of_indices(prompts.ravel().tolist(), prompts.shape, vocab_size)


def memory_to_wire(memory: Mapping[str, NDArray[Any]]) -> dict[str, Array]:
    """Return a method's memory as messages."""
    return {name: to_wire(values) for name, values in memory.items()}


def memory_from_wire(messages: Mapping[str, Array]) -> dict[str, NDArray[Any]]:
    """Return the method memory of messages."""
    return {name: from_wire(message) for name, message in messages.items()}
