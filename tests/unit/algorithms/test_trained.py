"""Parameters that clients train: the server's start, and accepted updates."""

from __future__ import annotations

import numpy as np
import pytest

from fedone_sdk.algorithms import State
from fedone_sdk.algorithms.trained import LARGEST, Trained


def test_the_start_is_normal_and_depends_on_the_seed() -> None:
    method = Trained(rows=40, columns=50, init_std=0.5, seed=3)
    alpha = method.init().alpha
    assert alpha.shape == method.shape == (40, 50)
    assert float(alpha.std()) == pytest.approx(0.5, rel=0.1)
    assert np.array_equal(alpha, Trained(rows=40, columns=50, init_std=0.5, seed=3).init().alpha)
    other = Trained(rows=40, columns=50, init_std=0.5, seed=4).init().alpha
    assert not np.array_equal(alpha, other)


def test_what_no_training_leads_to_is_not_feasible() -> None:
    method = Trained(rows=1, columns=3, init_std=0.02)
    wild = np.array([[3e38, -2e6, 7.5]], dtype=np.float32)
    projected = method.project(wild)
    assert projected.tolist() == [[LARGEST, -LARGEST, 7.5]]
    assert np.array_equal(method.project(projected), projected)


def test_the_prompt_is_the_parameters() -> None:
    method = Trained(rows=2, columns=2, init_std=0.02)
    state = State(alpha=np.array([[1, 2], [3, 4]], dtype=np.float32))
    assert method.prompt(state).tolist() == [1, 2, 3, 4]


def test_another_shape_or_a_memory_is_refused() -> None:
    method = Trained(rows=2, columns=2, init_std=0.02)
    with pytest.raises(ValueError, match="shape"):
        method.check(State(alpha=np.ones((2, 3), dtype=np.float32)))
    with pytest.raises(ValueError, match="no memory"):
        method.check(State(alpha=np.ones((2, 2), dtype=np.float32), memory={"m": np.ones(1)}))
