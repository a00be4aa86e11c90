from __future__ import annotations

import itertools

import pytest

from fedone_sdk.algorithms import stream, stream_seed


def test_golden() -> None:
    """A change here breaks the replay of every recorded run."""
    assert stream_seed(0, "prompts", 0) == 6032246725198565
    assert stream_seed(42, "selection", 7, 3, 1) == 6293953501188262
    assert stream_seed(2**64 - 1, "mini-batch", 2**32, 5) == 4197997181581972
    assert stream(0).random(2).tolist() == [0.014067035665647709, 0.2577672456246177]
    assert stream(2**53 - 1).integers(1000, size=4).tolist() == [646, 322, 380, 466]


def test_each_part_makes_another_stream() -> None:
    numbers = (0, 1, 2**32, 2**32 + 1)
    seeds = {
        stream_seed(run, purpose, round_number, client, step)
        for purpose in ("prompts", "selection")
        for run, round_number, client, step in itertools.product(numbers, repeat=4)
    }
    assert len(seeds) == 2 * 4**4
    assert all(0 <= seed < 2**53 for seed in seeds)


@pytest.mark.parametrize("wrong", [-1, 2**64, 1.5, "1", None, True])
def test_bad_numbers(wrong: object) -> None:
    with pytest.raises(ValueError, match="round_number"):
        stream_seed(0, "prompts", wrong)  # type: ignore[arg-type]


def test_bad_seed() -> None:
    with pytest.raises(ValueError, match="seed"):
        stream(-1)
