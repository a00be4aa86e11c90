from __future__ import annotations

import numpy as np
import pytest

from fedone_sdk.algorithms import aggregate

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
