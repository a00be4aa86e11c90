from __future__ import annotations

import math

import numpy as np
import pytest

from fedone_sdk.algorithms import SGD, AdamW, make_optimizer


def torch_adamw(
    theta: float, gradients: list[float], lr: float, b1: float, b2: float, eps: float, wd: float
) -> float:
    """One number through torch.optim.AdamW, written from its documentation."""
    m = v = 0.0
    for t, g in enumerate(gradients, start=1):
        theta -= lr * wd * theta
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        m_hat, v_hat = m / (1 - b1**t), v / (1 - b2**t)
        theta -= lr * m_hat / (math.sqrt(v_hat) + eps)
    return theta


@pytest.mark.parametrize("weight_decay", [0.0, 0.01, 0.3])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5)])
def test_adamw_follows_torch(weight_decay: float, betas: tuple[float, float]) -> None:
    rng = np.random.default_rng(0)
    start, gradients = rng.normal(size=(2, 3)), rng.normal(size=(25, 2, 3)) * 100
    gradients[:, 1, 2] = 0.0
    optimizer = AdamW(learning_rate=0.02, betas=betas, weight_decay=weight_decay)
    params, memory = start, {}
    for gradient in gradients:
        params, memory = optimizer.update(params, gradient, memory)
    for at in np.ndindex(2, 3):
        expected = torch_adamw(
            start[at], gradients[(slice(None), *at)].tolist(), 0.02, *betas, 1e-8, weight_decay
        )
        assert params[at] == pytest.approx(expected, rel=1e-12)
    assert memory["t"] == 25
    assert [memory[key].dtype.name for key in "mvt"] == ["float64", "float64", "int64"]


def test_sgd() -> None:
    params, memory = SGD(learning_rate=0.5).update(np.ones(2), np.array([1.0, -2.0]), {})
    assert params.tolist() == [0.5, 2.0]
    assert memory == {}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lion", {"learning_rate": 1.0}),
        ("sgd", {}),
        ("sgd", {"learning_rate": 0.0}),
        ("sgd", {"learning_rate": 1.0, "weight_decay": 0.1}),
        ("adamw", {"learning_rate": 1.0, "betas": (0.9, 1.0)}),
        ("adamw", {"learning_rate": 1.0, "betas": (0.9,)}),
        ("adamw", {"learning_rate": 1.0, "eps": 0.0}),
        ("adamw", {"learning_rate": 1.0, "weight_decay": -1.0}),
    ],
)
def test_bad_options(name: str, options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"optimizer|learning_rate|betas|eps|weight_decay"):
        make_optimizer(name, **options)


def test_a_memory_of_another_shape_is_refused() -> None:
    optimizer = AdamW(learning_rate=0.1)
    _, memory = optimizer.update(np.ones(3), np.ones(3), {})
    with pytest.raises(ValueError, match="shape"):
        optimizer.update(np.ones((2, 3)), np.ones((2, 3)), memory)
