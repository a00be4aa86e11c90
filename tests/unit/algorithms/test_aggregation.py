from __future__ import annotations

import itertools

import numpy as np
import pytest

from fedone_sdk.algorithms import aggregate, select, stream, stream_seed

RNG = np.random.default_rng(0)
ALPHAS = list(RNG.random((3, 2, 4), dtype=np.float32))


def test_one_client_comes_back_bit_for_bit() -> None:
    for weights in (None, [3], [0.1]):
        result = aggregate(ALPHAS[:1], weights)
        assert result.tobytes() == ALPHAS[0].tobytes()
        assert not np.shares_memory(result, ALPHAS[0])


def test_plain_and_weighted_means_in_float64() -> None:
    doubles = np.array(ALPHAS, dtype=np.float64)
    plain = aggregate(ALPHAS)
    assert plain.dtype == np.float32
    np.testing.assert_array_equal(plain, doubles.mean(axis=0).astype(np.float32))
    np.testing.assert_allclose(
        aggregate(ALPHAS, [1, 2, 5]),
        np.average(doubles, axis=0, weights=[1, 2, 5]).astype(np.float32),
        rtol=1e-7,
    )
    np.testing.assert_array_equal(aggregate(ALPHAS, [0, 7, 0]), ALPHAS[1])


@pytest.mark.parametrize(
    ("alphas", "weights"),
    [([], None), ([ALPHAS[0], ALPHAS[0].T], None), ([ALPHAS[0] * np.nan], None), (ALPHAS, [1, 2]),
     (ALPHAS, [1, 2, -1]), (ALPHAS, [0, 0, 0]), (ALPHAS, [1, 2, np.inf]), (ALPHAS[:1], [0])],
)  # fmt: skip
def test_impossible_aggregates(alphas: list[np.ndarray], weights: list[float] | None) -> None:
    with pytest.raises(ValueError, match=r"alphas|weights"):
        aggregate(alphas, weights)


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


def test_golden_selections() -> None:
    held = {index: index for index in range(10)}
    assert select(held, 3, rng=stream(42)) == [0, 1, 4]
    assert select(held, 3, rng=stream(42), kind="proportional") == [3, 4, 5]


@pytest.mark.parametrize(
    ("held", "count", "kind"),
    [({1: 5}, 2, "uniform"), ({}, 1, "uniform"), ({}, 1, "proportional"),
     ({1: 0}, 1, "proportional"), ({1: -1}, 1, "proportional"), ({1: 5}, 0, "uniform"),
     ({1: 5}, 1, "best")],
)  # fmt: skip
def test_impossible_selections(held: dict[int, int], count: int, kind: str) -> None:
    with pytest.raises(ValueError, match=r"select|count|examples"):
        select(held, count, rng=stream(0), kind=kind)
