from __future__ import annotations

import numpy as np
import pytest

from fedone_sdk.algorithms import aggregate
from fedone_sdk.algorithms.aggregation import median, trimmed_mean

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
    [
        ([], None),
        ([ALPHAS[0], ALPHAS[0].T], None),
        ([ALPHAS[0] * np.nan], None),
        (ALPHAS, [1, 2]),
        (ALPHAS, [1, 2, -1]),
        (ALPHAS, [0, 0, 0]),
        (ALPHAS, [1, 2, np.inf]),
        (ALPHAS[:1], [0]),
    ],
)
def test_bad_input(alphas: list[np.ndarray], weights: list[float] | None) -> None:
    with pytest.raises(ValueError, match=r"alphas|weights"):
        aggregate(alphas, weights)


def matrices(*values: float) -> list[np.ndarray]:
    return [np.full((2, 3), value, dtype=np.float32) for value in values]


def test_robust_aggregates_leave_one_client_alone() -> None:
    assert trimmed_mean(ALPHAS[:1], 0.4).tobytes() == ALPHAS[0].tobytes()
    assert median(ALPHAS[:1]).tobytes() == ALPHAS[0].tobytes()


def test_trimmed_mean_leaves_out_both_ends() -> None:
    updated = matrices(1.0, 2.0, 3.0, 7.0, 1e30)
    assert (trimmed_mean(updated, 0.1) == 4.0).all()  # rounded up: one at each end
    assert (trimmed_mean(updated, 0.2) == 4.0).all()
    assert (trimmed_mean(updated, 0.4) == 3.0).all()
    assert (trimmed_mean(matrices(1.0, 5.0), 0.4) == 3.0).all()  # something stays


def test_no_trim_is_the_plain_mean() -> None:
    np.testing.assert_allclose(trimmed_mean(ALPHAS, 0.0), aggregate(ALPHAS), rtol=1e-7)


def test_a_share_is_counted_without_rounding_noise() -> None:
    hundred = matrices(*[0.0] * 7, *[1.0] * 86, *[9.0] * 7)
    assert (trimmed_mean(hundred, 0.07) == 1.0).all()


def test_robust_aggregates_are_entry_by_entry_and_in_any_order() -> None:
    stacked = np.stack(ALPHAS).astype(np.float64)
    np.testing.assert_array_equal(median(ALPHAS), np.median(stacked, axis=0).astype(np.float32))
    for robust in (median, lambda alphas: trimmed_mean(alphas, 0.2)):
        assert robust(ALPHAS).tobytes() == robust(ALPHAS[::-1]).tobytes()
        assert robust(ALPHAS).dtype == np.float32


@pytest.mark.parametrize("liars", [1, 2])
def test_a_minority_cannot_move_them_out_of_the_others_range(liars: int) -> None:
    honest = list(RNG.random((5, 2, 4), dtype=np.float32))
    lies = [np.full((2, 4), np.float32(sign * 1e30)) for sign in (1, -1)[:liars]]
    low, high = np.min(honest, axis=0), np.max(honest, axis=0)
    for moved in (median(honest + lies), trimmed_mean(honest + lies, 0.25)):
        assert (low <= moved).all()
        assert (moved <= high).all()


@pytest.mark.parametrize("trim", [-0.1, 0.5, 1.0, float("nan")])
def test_impossible_trims(trim: float) -> None:
    with pytest.raises(ValueError, match="trim"):
        trimmed_mean(ALPHAS, trim)


@pytest.mark.parametrize("wrong", [[], [ALPHAS[0], ALPHAS[0].T], [ALPHAS[0] * np.nan]])
def test_robust_aggregates_check_alphas_too(wrong: list[np.ndarray]) -> None:
    for robust in (median, lambda alphas: trimmed_mean(alphas, 0.1)):
        with pytest.raises(ValueError, match="alphas"):
            robust(wrong)
