"""The paper's formulas: their relations, and the documentation's conclusions."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from fedone_paper import theory

SETTINGS = [
    {"epsilon": epsilon, "E": steps, "n": n, "G": bound, "psi_variance": psi, "alpha_variance": al}
    for epsilon, steps, n, bound, psi, al in product(
        (0.05, 1.0), (1, 2, 20), (1, 20), (1e-3, 5.0), (1e-4, 2.0), (1e-4, 3e9)
    )
]


def queries(k: float, c1: float, c2: float, c: float = 1.0) -> float:
    return theory.queries_to_epsilon(c=c, c1=c1, c2=c2, clients_per_round=k)


def test_lemmas() -> None:
    assert theory.policy_gradient_variance(G=2.0, N=200, tau=0.1, nu=0.5) == pytest.approx(
        8 * 4 * 200 / (0.01 * 0.25)
    )
    assert theory.smoothness(n=20, G=2.0, N=200, tau=0.1, nu=0.5) == pytest.approx(
        20 * 2 * 200 * 1.1 / (0.01 * 0.25)
    )


def test_theorem() -> None:
    """Equation 12, term by term: T = 100, eta = 0.1, E = 1, n = 2, K* = 4."""
    found = theory.convergence_bound(
        T=100,
        eta=0.1,
        clients_per_round=4,
        E=1,
        n=2,
        B=10,
        I=5,
        G=3.0,
        psi_variance=0.5,
        alpha_variance=7.0,
    )
    first = 4 * 3.0 / (0.1 * 100)
    second = (2 * 2 * 2 * 0.5 * 1.25 + 2 * 2 * 0.5) / 10
    third = (2 * 2 * 2 * 7.0 * 1.25 + 2 * 2 * 7.0) / 25
    assert found == pytest.approx(first + second + third)


@pytest.mark.parametrize("setting", SETTINGS)
def test_printed_relation_of_the_constants(setting: dict[str, float]) -> None:
    """c1 = c2 + 4 G / eps^2 + 2 n (sigma_psi^2 + sigma_alpha^2) / eps^2."""
    c1, c2 = theory.query_constants(**setting)
    noise = setting["psi_variance"] + setting["alpha_variance"]
    apart = 4 * setting["G"] + 2 * setting["n"] * noise
    assert c1 == pytest.approx(c2 + apart / setting["epsilon"] ** 2, rel=1e-12)


@pytest.mark.parametrize("setting", SETTINGS)
def test_one_client_per_round_needs_the_fewest_queries(setting: dict[str, float]) -> None:
    c1, c2 = theory.query_constants(**setting)
    steps = setting["E"]
    best = theory.optimal_clients_per_round(c1=c1, c2=c2)
    assert best < (steps + 1) / (steps + 2) < 1
    assert steps != 1 or best < 2 / 3
    spent = [queries(k, c1, c2) for k in range(1, 101)]
    assert spent == sorted(spent)
    # Rising already to the right of the least point, falling to the left of it.
    assert queries(best, c1, c2) <= min(queries(best * 1.01, c1, c2), queries(best / 1.01, c1, c2))


@pytest.mark.parametrize("k", [1, 3, 10])
def test_corollaries_follow_from_the_theorem(k: int) -> None:
    """eta = 1 / sqrt(T), B = sqrt(T), I = T^(1/4) (Corollary 3.5): at T_eps the bound is eps^2."""
    setting = {"E": 2, "n": 20, "G": 5.0, "psi_variance": 0.3, "alpha_variance": 4.0}
    epsilon = 0.5
    c1, c2 = theory.query_constants(epsilon=epsilon, **setting)
    steps = theory.iterations_to_epsilon(c1=c1, c2=c2, clients_per_round=k)
    bound = theory.convergence_bound(
        T=steps, eta=steps**-0.5, B=steps**0.5, I=steps**0.25, clients_per_round=k, **setting
    )
    assert bound == pytest.approx(epsilon**2)
    assert queries(k, c1, c2, 20) == pytest.approx(20 * steps * k)


def test_where_two_clients_would_then_ask_less_than_one() -> None:
    """With G small: by prompts from E = 15 on, by example calls at E = 1 already."""

    def better(steps: int, exponent: float) -> bool:
        c1, c2 = theory.query_constants(
            epsilon=1.0, E=steps, n=20, G=1e-9, psi_variance=1.0, alpha_variance=1.0
        )
        one, two = (k * (c1 + c2 / k) ** (2 * (1 + exponent)) for k in (1, 2))
        return two < one

    assert [better(steps, 0.25) for steps in (1, 2, 14, 15)] == [False, False, False, True]
    assert better(1, 0.75)


def test_noise_that_an_average_divides_lets_two_clients_ask_less() -> None:
    """SGD on F = L x^2 / 2, noise V / K*: (2 D / eta_0 + L eta_0 V / K*) / sqrt(T) bounds it."""
    smooth, variance, rounds, eta_0, dim = 2.0, 30.0, 64, 3.0, 5
    rng = np.random.default_rng(0)
    eta = eta_0 / math.sqrt(rounds)
    assert eta <= 1 / smooth
    c1, c2 = 2 * (smooth * dim / 2) / eta_0, smooth * eta_0 * variance
    for k in (1, 4):
        x = np.ones((400, dim))
        total = 0.0
        for _ in range(rounds):
            gradient = smooth * x
            total += (gradient**2).sum(axis=1).mean()
            noise = rng.normal(size=x.shape) * math.sqrt(variance / k / dim)
            x = x - eta * (gradient + noise)
        assert total / rounds <= (c1 + c2 / k) / math.sqrt(rounds)
    assert c2 / c1 > 1
    assert queries(2, c1, c2) < queries(1, c1, c2)
    # eta_0 = sqrt(2 D K* / (L V)), here sqrt(K*): c1 and c2 / K* are equal, and all K* tie.
    tied = [queries(k, 2.0 / k**0.5, 2.0 * k**0.5) for k in (1, 2, 8, 64)]
    assert tied == pytest.approx([tied[0]] * 4)
