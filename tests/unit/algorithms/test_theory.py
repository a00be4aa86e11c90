from __future__ import annotations

import math

import numpy as np
import pytest

from fedone_sdk.algorithms import theory

GRID = [(c1, ratio * c1) for c1 in (1e-3, 0.5, 1.0, 40.0, 1e6) for ratio in (1e-6, 0.1, 0.7, 0.999)]


def queries(k: float, c1: float, c2: float, c: float = 1.0) -> float:
    return theory.queries_to_epsilon(c=c, c1=c1, c2=c2, clients_per_round=k)


def test_the_papers_constants() -> None:
    assert theory.gradient_variance(G=2.0, N=200, tau=0.1, nu=0.5) == pytest.approx(
        8 * 4 * 200 / (0.01 * 0.25)
    )
    assert theory.smoothness(n=20, G=2.0, N=200, tau=0.1, nu=0.5) == pytest.approx(
        20 * 2 * 200 * 1.1 / (0.01 * 0.25)
    )


@pytest.mark.parametrize(("c1", "c2"), GRID)
@pytest.mark.parametrize("c", [1e-3, 1.0, 1e5])
def test_one_client_is_best_where_c2_is_below_c1(c1: float, c2: float, c: float) -> None:
    assert theory.best_integer_clients(c1=c1, c2=c2) == 1
    spent = [queries(k, c1, c2, c) for k in range(1, 101)]
    assert spent == sorted(spent)


@pytest.mark.parametrize("ratio", [0.01, 0.5, 1.0, 1.4, 1.5, 2.0, 7.3, 100.0])
def test_optimum_by_search(ratio: float) -> None:
    """A fine grid over log K* finds c2 / c1 to 1e-3; brute force finds the integer."""
    grid = np.exp(np.linspace(math.log(ratio) - 2, math.log(ratio) + 2, 8001))
    least = grid[np.argmin([queries(k, 3.0, 3.0 * ratio) for k in grid])]
    assert theory.optimal_clients_per_round(c1=3.0, c2=3.0 * ratio) == pytest.approx(
        least, rel=1e-3
    )
    brute = min(range(1, 300), key=lambda k: queries(k, 3.0, 3.0 * ratio))
    assert theory.best_integer_clients(c1=3.0, c2=3.0 * ratio) == brute


def test_queries_are_clients_times_samples_times_rounds() -> None:
    epsilon, samples, c1, c2 = 0.05, 20, 3.0, 1.0
    for k in (1, 2, 10):
        rounds = theory.rounds_to_epsilon(epsilon=epsilon, c1=c1, c2=c2, clients_per_round=k)
        bound = theory.convergence_bound(rounds=rounds, c1=c1, c2=c2, clients_per_round=k)
        assert bound == pytest.approx(epsilon)
        assert queries(k, c1, c2, samples / epsilon**2) == pytest.approx(k * samples * rounds)


def test_constants_bound_sgd_on_a_quadratic() -> None:
    """F = L |x|^2 / 2 with noise of variance V / K*: the mean of 400 runs keeps the bound."""
    smooth, variance, rounds, eta_0, dim = 2.0, 3.0, 64, 0.8, 5
    rng = np.random.default_rng(0)
    eta = eta_0 / math.sqrt(rounds)
    assert eta <= 1 / smooth
    for k in (1, 4):
        x = np.ones((400, dim))
        c1, c2 = theory.bound_constants(
            initial_gap=smooth * dim / 2, smoothness=smooth, variance=variance, learning_rate=eta_0
        )
        total = 0.0
        for _ in range(rounds):
            gradient = smooth * x
            total += (gradient**2).sum(axis=1).mean()
            noise = rng.normal(size=x.shape) * math.sqrt(variance / k / dim)
            x = x - eta * (gradient + noise)
        assert total / rounds <= theory.convergence_bound(
            rounds=rounds, c1=c1, c2=c2, clients_per_round=k
        )


def test_growing_samples_move_the_optimum_to_half_again() -> None:
    """I = T^(1/4): Q = K* T^(5/4) is least at 1.5 c2 / c1, as the module says."""
    c1, c2 = 2.0, 3.0
    grid = np.linspace(0.1, 10, 20_000)
    spent = grid * (c1 + c2 / grid) ** 2.5
    assert grid[np.argmin(spent)] == pytest.approx(1.5 * c2 / c1, rel=1e-3)


def test_a_learning_rate_tuned_to_the_clients_makes_a_tie() -> None:
    gap, smooth, variance, epsilon = 2.0, 3.0, 5.0, 0.1
    spent = []
    for k in (1, 2, 8, 64):
        eta_0 = math.sqrt(2 * gap * k / (smooth * variance))
        c1, c2 = theory.bound_constants(
            initial_gap=gap, smoothness=smooth, variance=variance, learning_rate=eta_0
        )
        spent.append(queries(k, c1, c2, 1 / epsilon**2))
    assert spent == pytest.approx([spent[0]] * 4)


def test_bad_input() -> None:
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="tau"):
            theory.gradient_variance(G=1.0, N=2, tau=wrong, nu=0.1)
        with pytest.raises(ValueError, match="c2"):
            theory.best_integer_clients(c1=1.0, c2=wrong)
