from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest

from fedone_sdk import soft_prompt
from fedone_sdk.soft_prompt import SoftPrompt


def test_bytes_are_little_endian_floats_row_by_row() -> None:
    soft = SoftPrompt.of("embeddings", [[1, 2.5], [-3, 0.1]])
    assert soft.shape == (2, 2)
    assert soft.data == struct.pack("<4f", 1, 2.5, -3, 0.1)
    assert soft == SoftPrompt("embeddings", (2, 2), soft.data)
    assert hash(soft) == hash(SoftPrompt("embeddings", (2, 2), soft.data))


@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_comes_back(order: Any) -> None:
    matrix = np.asarray(np.random.default_rng(0).normal(size=(6, 5)), order=order)
    found = SoftPrompt.of("key_values", matrix).array()
    np.testing.assert_array_equal(found, matrix.astype(np.float32))
    assert found.dtype == np.float32
    found[0, 0] = 7  # It is a copy.


def test_kind_shape_and_numbers_tell_them_apart() -> None:
    numbers = np.arange(8.0)
    prompts = {
        SoftPrompt.of("embeddings", numbers.reshape(2, 4)),
        SoftPrompt.of("key_values", numbers.reshape(2, 4)),
        SoftPrompt.of("embeddings", numbers.reshape(4, 2)),
        SoftPrompt.of("embeddings", numbers.reshape(2, 4) + 1),
    }
    assert len(prompts) == 4


def test_its_numbers_are_not_shown() -> None:
    assert len(repr(SoftPrompt.of("embeddings", np.ones((20, 1024))))) < 100


@pytest.mark.parametrize(
    ("kind", "shape", "num_bytes", "wrong"),
    [
        ("words", (1, 1), 4, "embeddings or key_values"),
        ("embeddings", (1,), 4, "rows and columns"),
        ("embeddings", (0, 4), 0, "rows and columns"),
        ("embeddings", (2, 2), 15, "15 bytes"),
        ("embeddings", (2, 2), 20, "20 bytes"),
        ("key_values", (3, 1), 12, "as many keys as values"),
        ("embeddings", (2**20, 2**20), 4, "at most"),
    ],
)
def test_what_does_not_fit_is_refused(kind: Any, shape: Any, num_bytes: int, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        SoftPrompt(kind, shape, bytes(num_bytes))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e300])
def test_numbers_are_finite(number: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        SoftPrompt.of("embeddings", [[0.0, number]])
    with pytest.raises(ValueError, match="matrix"):
        SoftPrompt.of("embeddings", [1.0])


def test_the_largest_prompt_of_the_paper_fits() -> None:
    """Keys and values of RoBERTa-large at n = 20: 983,040 numbers."""
    assert 2 * 24 * 20 * 1024 == 983_040 < soft_prompt.MAX_ELEMENTS
