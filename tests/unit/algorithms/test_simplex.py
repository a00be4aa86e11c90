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


def test_huge_entries_lose_nothing() -> None:
    np.testing.assert_allclose(project_to_simplex([[1e9, 1e9 + 0.5, -1e12]]), [[0.25, 0.75, 0.0]])


@pytest.mark.parametrize(
    ("rows", "floor"),
    [([[np.nan, 1]], 0.0), (1.0, 0.0), ([], 0.0), ([[1.0, 2.0]], 0.5), ([[1.0, 2.0]], -0.1)],
)
def test_bad_input(rows: object, floor: float) -> None:
    with pytest.raises(ValueError, match=r"rows|floor"):
        project_to_simplex(rows, floor=floor)  # type: ignore[arg-type]
