from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cmaes import CMA

from fedone_paper import Settings
from fedone_paper.bbt import CmaEs, bounded, projected, reach
from fedone_paper.federated import Tuning, run_trial, run_tuning, tuning_federation
from fedone_sdk.algorithms import stream
from fedone_sdk.data import load_examples
from fedone_sdk.evaluation.engine import Trial, Workspace

SIZE = 20
OPTIMUM = np.random.default_rng(1).uniform(-2.0, 2.0, size=SIZE)
Loss = Callable[[np.ndarray], np.ndarray]


def sphere(points: np.ndarray) -> np.ndarray:
    return ((points - OPTIMUM) ** 2).sum(axis=-1)


def ellipsoid(points: np.ndarray) -> np.ndarray:
    """Axes of condition 10^4, turned against the coordinates."""
    turn, _ = np.linalg.qr(np.random.default_rng(2).normal(size=(SIZE, SIZE)))
    return np.geomspace(1.0, 1e4, SIZE) @ (((points - OPTIMUM) @ turn) ** 2).T


def search(loss: Loss, steps: int, bound: float = 1e4, sigma: float = 1.0) -> tuple[Any, CmaEs]:
    mean, cma = np.zeros(SIZE), CmaEs.initial(SIZE, sigma)
    for step in range(steps):
        points = cma.sample(mean, 12, stream(step))
        mean, cma = cma.after(mean, points, loss(bounded(points, bound)), reach=reach(bound))
    return mean, cma


def test_finds_an_optimum_on_the_bounds_and_stays_there() -> None:
    """Told what was cut off at the bounds, CMA-ES is back at a distance of 1 after 400 steps."""
    for steps, distance in (200, 1e-2), (600, 1e-4):
        mean, _ = search(sphere, steps, bound=1.1)
        assert np.abs(mean).max() <= reach(1.1)
        np.testing.assert_allclose(bounded(mean, 1.1), np.clip(OPTIMUM, -1.1, 1.1), atol=distance)


@pytest.mark.parametrize("population", [2, 3, 4, 5, 12, 200])
def test_a_step_is_the_librarys(population: int) -> None:
    mean, cma = np.zeros(SIZE), CmaEs.initial(SIZE, 1.0)
    for step in range(15):
        points = cma.sample(mean, population, stream(step))
        losses = ellipsoid(points)
        # Populations below 4 have a rate of 0, by which the library divides to take a minimum.
        with np.errstate(divide="ignore"):
            library = CMA(
                mean=mean, sigma=cma.sigma, cov=cma.covariance, population_size=population
            )
        library._p_sigma, library._pc = cma.sigma_path, cma.covariance_path
        library._g = cma.generation
        library.tell(list(zip(points, losses, strict=True)))
        mean, cma = cma.after(mean, points, losses, reach=1e4)
        np.testing.assert_allclose(mean, library._mean, rtol=1e-6, atol=1e-9)
        assert cma.sigma == pytest.approx(library._sigma, rel=1e-9)
        np.testing.assert_allclose(cma.covariance, library._C, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(cma.sigma_path, library._p_sigma, rtol=1e-7, atol=1e-9)
        np.testing.assert_allclose(cma.covariance_path, library._pc, rtol=1e-7, atol=1e-9)
        assert cma.generation == library.generation


def test_draws_do_not_depend_on_the_choice_of_eigenvectors() -> None:
    """The root that turns draws into points is the symmetric positive one, which is unique."""
    mean, cma = search(ellipsoid, 10)
    draws = stream(4).standard_normal((SIZE, SIZE))
    root = np.linalg.solve(draws, (cma.sample(mean, SIZE, stream(4)) - mean) / cma.sigma)
    np.testing.assert_allclose(root, root.T, atol=1e-9)
    np.testing.assert_allclose(root @ root, cma.covariance, atol=1e-9)
    assert np.linalg.eigvalsh(root).min() > 0.0


@pytest.mark.parametrize("ties", [np.zeros(12), np.repeat([1.0, 0.0], 6)])
def test_constant_and_tied_losses_break_nothing(ties: np.ndarray) -> None:
    mean, cma = search(lambda points: ties, 300, bound=5.0)
    assert np.abs(mean).max() <= reach(5.0)
    assert 1e-3 < cma.sigma < 1e3


@pytest.mark.parametrize(
    ("bound", "number", "within"),
    # The margin is 0.3, and at most the bound.
    [(5.0, 0.0, 0.0), (5.0, 4.7, 4.7), (5.0, 5.0, 5.0 - 0.3**2 / 1.2), (5.0, 5.3, 5.0),
     (5.0, 9.6, 1.0), (5.0, 11.6, -1.0), (5.0, 21.2 + 3.0, 3.0), (0.01, 0.01, 0.0075),
     (0.01, 0.02, 0.01)],
)  # fmt: skip
def test_bounded(bound: float, number: float, within: float) -> None:
    found = bounded([number, -number], bound)
    assert found.dtype == np.float32
    assert found == pytest.approx([within, -within], rel=1e-6, abs=1e-6)


def test_projected() -> None:
    """The standard deviation asked for within five standard errors; bounded; from its seed."""
    options: dict[str, Any] = {"size": 256, "scale": 0.3, "bound": 1e3, "seed": 3}
    z = np.random.default_rng(0).normal(size=500)
    prompt = projected(z, prompt_len=20, **options)
    rms = 0.3 * np.sqrt((z**2).mean())
    assert prompt.std() == pytest.approx(rms, abs=5 * rms / np.sqrt(2 * prompt.size))
    shorter = projected(z, prompt_len=4, **options)
    np.testing.assert_allclose(prompt[:4], shorter, rtol=1e-5, atol=1e-6)
    small = {**options, "bound": 0.5}
    np.testing.assert_allclose(
        projected(z, prompt_len=4, **small),
        projected(bounded(z, 0.5), prompt_len=4, **options),
        rtol=1e-5,
        atol=1e-6,
    )
    assert not np.allclose(projected(z, prompt_len=4, **{**options, "seed": 4}), shorter, atol=0.1)


SMALL: dict[str, Any] = {
    "task": "sst2",
    "method": {"name": "gs-bdpl", "num_samples": 4, "batch_size": 4, "learning_rate": 0.01},
    "seed": 3,
    "num_clients": 4,
    "shots": 4,
    "prompt_len": 3,
    "vocab_size": 20,
    "rounds": 6,
    "clients_per_round": 2,
    "every": 2,
    "curve_examples": 16,
}


def workspace(trial: Trial, folder: Path) -> Workspace:
    return Workspace(inputs=trial.inputs, folder=folder)


def test_held_out_rows_are_no_clients(glue: Path, tmp_path: Path) -> None:
    tuning = Tuning(**{**SMALL, "held_out": 8, "shots": 12})
    trial = run_trial("pilot", Settings(data=glue), tuning, run_tuning)
    assert "dev" not in trial.inputs
    federation = tuning_federation(trial.options, workspace(trial, tmp_path / "pilot"))
    rows = load_examples(glue / "sst2" / "train.jsonl")
    assert list(federation.dev) == rows[::8]
    held = [row for shard in federation.shards for row in shard]
    assert held
    assert all(row in rows for row in held)
    assert not [row for row in held if row in federation.dev]
