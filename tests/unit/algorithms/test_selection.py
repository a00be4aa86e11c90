from __future__ import annotations

import numpy as np
import pytest

from fedone_sdk.algorithms import select, stream


def counts(held: dict[int, int], count: int, kind: str, rounds: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    drawn = [select(held, count, rng=rng, kind=kind) for _ in range(rounds)]
    return np.bincount(np.concatenate(drawn), minlength=max(held) + 1)[sorted(held)]


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    return float(((observed - expected) ** 2 / expected).sum())


def test_uniform_chooses_each_equally_often() -> None:
    """Chi-square with 9 degrees of freedom below 33.7, its 99.99 % point."""
    held = {3 * index: index for index in range(10)}
    assert chi_square(counts(held, 1, "uniform", 20_000), np.full(10, 2000.0)) < 33.7
    # Without replacement the counts vary less than multinomial ones.
    assert chi_square(counts(held, 4, "uniform", 5_000), np.full(10, 2000.0)) < 33.7


def test_proportional_follows_the_examples_held() -> None:
    """Chi-square with 3 degrees of freedom below 21.1, its 99.99 % point."""
    held = {5: 10, 1: 20, 2: 30, 9: 40}
    observed = counts(held, 2, "proportional", 10_000)
    assert chi_square(observed, 200.0 * np.array([20, 30, 10, 40])) < 21.1


def test_uniform_is_without_replacement() -> None:
    assert sorted(select(dict.fromkeys(range(6), 1), 6, rng=stream(0))) == list(range(6))


def test_proportional_is_with_replacement_and_skips_the_empty() -> None:
    assert select({4: 0, 7: 3, 8: 0}, 3, rng=stream(0), kind="proportional") == [7, 7, 7]


def test_golden() -> None:
    held = {index: index for index in range(10)}
    assert select(held, 3, rng=stream(42)) == [0, 1, 4]
    assert select(held, 3, rng=stream(42), kind="proportional") == [3, 4, 5]


@pytest.mark.parametrize(
    ("held", "count", "kind"),
    [
        ({1: 5}, 2, "uniform"),
        ({}, 1, "uniform"),
        ({}, 1, "proportional"),
        ({1: 0}, 1, "proportional"),
        ({1: -1}, 1, "proportional"),
        ({1: 5}, 0, "uniform"),
        ({1: 5}, 1, "best"),
    ],
)
def test_bad_input(held: dict[int, int], count: int, kind: str) -> None:
    with pytest.raises(ValueError, match=r"select|count|examples"):
        select(held, count, rng=stream(0), kind=kind)
