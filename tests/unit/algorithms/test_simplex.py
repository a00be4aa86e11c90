from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from fedone_sdk.algorithms import project_to_simplex
from fedone_sdk.algorithms.simplex import nearest_capped

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


def nearest_by_enumeration(row: np.ndarray, floor: float) -> np.ndarray:
    """The nearest point of {floor <= p <= 1, sum p <= 1}: the best of all active sets."""
    best, distance = np.full(row.shape, floor), np.inf
    for where, tight in itertools.product(
        itertools.product((floor, 1.0, None), repeat=len(row)), (False, True)
    ):
        free = np.array([bound is None for bound in where])
        point = np.array([0.0 if bound is None else bound for bound in where])
        point[free] = row[free]
        if tight:
            if not free.any():
                continue
            point[free] -= (point.sum() - 1.0) / free.sum()
        if (
            point.min() >= floor - 1e-12
            and point.max() <= 1.0 + 1e-12
            and point.sum() <= 1.0 + 1e-12
            and ((point - row) ** 2).sum() < distance
        ):
            best, distance = point, ((point - row) ** 2).sum()
    return best


@settings(max_examples=60)
@given(
    arrays(np.float64, array_shapes(min_dims=2, max_dims=2, max_side=4),
           elements=st.floats(-2, 2) | st.floats(0, 0.4)),
    st.floats(0.0, 0.9),
)  # fmt: skip
def test_capped_is_the_nearest_point(rows: np.ndarray, share: float) -> None:
    floor = share / rows.shape[1]
    expected = [nearest_by_enumeration(row, floor) for row in rows]
    np.testing.assert_allclose(nearest_capped(rows, floor=floor), expected, atol=2e-6)


@given(ROWS, st.floats(0.0, 0.9))
def test_capped_is_feasible_and_keeps_what_is(rows: np.ndarray, share: float) -> None:
    floor = float(np.float32(share / rows.shape[1]))
    once = nearest_capped(rows, floor=floor)
    assert floor <= once.min() <= once.max() <= 1.0
    assert once.sum(axis=1, dtype=np.float64).max() <= 1.0 + 1e-6
    assert nearest_capped(once.astype(np.float64), floor=floor).tobytes() == once.tobytes()


def test_capped_leaves_rows_below_1_as_they_are() -> None:
    rows = np.array([[0.125, 0.25, 0.0], [0.5, 0.75, -1.0], [2.0, 0.0, 0.0]])
    assert nearest_capped(rows, floor=0.0).tolist() == [
        [0.125, 0.25, 0.0],
        [0.375, 0.625, 0.0],
        [1.0, 0.0, 0.0],
    ]


def test_capped_is_what_the_bisection_of_the_papers_code_finds() -> None:
    """Thresholds in [0, max], as in Diao et al.'s `solve_v_total_exact`, but to the last bit."""
    rows = np.random.default_rng(0).uniform(size=(40, 20)) * np.linspace(0.01, 0.5, 40)[:, None]
    low, high = np.zeros((40, 1)), rows.max(axis=1, keepdims=True)
    for _ in range(80):
        middle = (low + high) / 2
        below = np.clip(rows - middle, 0, 1).sum(axis=1, keepdims=True) < 1.0
        low, high = np.where(below, low, middle), np.where(below, middle, high)
    assert np.count_nonzero(rows.sum(axis=1) < 1.0) in range(5, 35)
    np.testing.assert_allclose(
        nearest_capped(rows, floor=0.0), np.clip(rows - low, 0, 1), atol=1e-7
    )
