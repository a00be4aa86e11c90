"""The mini-batch draw: the wire vectors (from a C program), and uniformity."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedone_sdk.data import SplitMix64, draw_minibatch

VECTORS = json.loads(
    (Path(__file__).parents[2] / "vectors" / "minibatch.json").read_text(encoding="utf-8")
)


def test_generator_vector() -> None:
    generator = SplitMix64(VECTORS["splitmix64"]["seed"])
    outputs = VECTORS["splitmix64"]["outputs"]
    assert [str(generator.next_u64()) for _ in outputs] == outputs


@pytest.mark.parametrize("vector", VECTORS["draws"], ids=lambda v: f"{v['seed']}")
def test_draw_vectors(vector: dict[str, Any]) -> None:
    drawn = draw_minibatch(vector["num_examples"], vector["batch_size"], vector["seed"])
    assert drawn == vector["rows"]


@given(st.integers(1, 200), st.integers(1, 250), st.integers(0, 2**53 - 1))
def test_distinct_rows_in_range(num_examples: int, batch_size: int, seed: int) -> None:
    drawn = draw_minibatch(num_examples, batch_size, seed)
    assert len(drawn) == len(set(drawn)) == min(batch_size, num_examples)
    assert set(drawn) <= set(range(num_examples))


def test_every_ordered_draw_is_equally_likely() -> None:
    num_examples, batch_size, draws = 6, 3, 24_000
    seen = Counter(tuple(draw_minibatch(num_examples, batch_size, s)) for s in range(draws))
    cells = math.perm(num_examples, batch_size)
    expected = draws / cells
    assert len(seen) == cells
    chi_square = sum((count - expected) ** 2 / expected for count in seen.values())
    degrees = cells - 1
    # Five standard deviations of a chi-square around its mean.
    assert abs(chi_square - degrees) < 5 * math.sqrt(2 * degrees)


@pytest.mark.parametrize(("num_examples", "batch_size", "seed"), [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_bad_arguments(num_examples: int, batch_size: int, seed: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        draw_minibatch(num_examples, batch_size, seed)
