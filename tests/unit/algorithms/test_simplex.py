from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from fedone_sdk.algorithms import project_to_simplex

ROWS = arrays(
    np.float64, array_shapes(min_dims=2, max_dims=2, max_side=8), elements=st.floats(-50, 50)
)


@given(ROWS, st.floats(0.0, 0.9))
def test_meets_the_kkt_conditions(rows: np.ndarray, share: float) -> None:
    """The unique projection: feasible, and above the floor it is the row minus one threshold."""
    floor = share / rows.shape[1]
    for row, projected in zip(rows, project_to_simplex(rows, floor=floor), strict=True):
        assert projected.sum() == pytest.approx(1.0, abs=1e-9)
        assert projected.min() >= floor
        free = projected > floor
        thresholds = (row - projected)[free]
        assert np.ptp(thresholds) < 1e-9
        assert np.all(row[~free] - floor <= thresholds.max() + 1e-9)


@given(ROWS)
def test_agrees_with_bisection(rows: np.ndarray) -> None:
    low_t = np.full((len(rows), 1), rows.min() - 2.0)
    high_t = np.full((len(rows), 1), rows.max())
    for _ in range(200):
        middle = (low_t + high_t) / 2
        too_much = np.maximum(rows - middle, 0).sum(axis=1, keepdims=True) > 1
        low_t, high_t = np.where(too_much, middle, low_t), np.where(too_much, high_t, middle)
    np.testing.assert_allclose(project_to_simplex(rows), np.maximum(rows - low_t, 0), atol=1e-9)


@given(arrays(np.float64, (3, 5), elements=st.floats(0.01, 1.0)))
def test_keeps_points_of_the_simplex(rows: np.ndarray) -> None:
    rows /= rows.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(project_to_simplex(rows), rows, atol=1e-12)


def test_lifts_rows_that_sum_below_1() -> None:
    np.testing.assert_allclose(
        project_to_simplex([[0.1, 0.2], [-5.0, -5.0]]), [[0.45, 0.55], [0.5, 0.5]]
    )


def test_huge_entries_lose_nothing() -> None:
    np.testing.assert_allclose(project_to_simplex([[1e9, 1e9 + 0.5, -1e12]]), [[0.25, 0.75, 0.0]])


@pytest.mark.parametrize(
    ("rows", "floor"),
    [([[np.nan, 1]], 0.0), (1.0, 0.0), ([], 0.0), ([[1.0, 2.0]], 0.5), ([[1.0, 2.0]], -0.1)],
)
def test_bad_input(rows: object, floor: float) -> None:
    with pytest.raises(ValueError, match=r"rows|floor"):
        project_to_simplex(rows, floor=floor)  # type: ignore[arg-type]
