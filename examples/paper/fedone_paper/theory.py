"""The query analysis of FedOne, formula by formula.

Wang et al., "FedOne: Query-Efficient Federated Learning for Black-box Discrete Prompt Learning",
ICML 2025 (arXiv:2506.14929). Equation numbers are the paper's.

Symbols: n positions, N tokens, tau the temperature, nu the floor of alpha, G a bound on the loss,
I prompts and B examples per step, E local steps, K* clients per round, T local steps in all,
eta the learning rate, sigma_psi^2 the variance over examples (eq. 9) and sigma_alpha^2 that over
prompts (eq. 22). docs/explanation/algorithm.md discusses the consequences and the limits of these
formulas.
"""

from __future__ import annotations

import math

__all__ = [
    "convergence_bound",
    "iterations_to_epsilon",
    "optimal_clients_per_round",
    "policy_gradient_variance",
    "queries_to_epsilon",
    "query_constants",
    "smoothness",
]


def policy_gradient_variance(*, G: float, N: int, tau: float, nu: float) -> float:
    """Return sigma_alpha^2 = 8 G^2 N / (tau^2 nu^2) (Theorem 3.4, Lemma A.1, eq. 22)."""
    _positive(G=G, N=N, tau=tau, nu=nu)
    return 8.0 * G**2 * N / (tau**2 * nu**2)


def smoothness(*, n: int, G: float, N: int, tau: float, nu: float) -> float:
    """Return L = n G N (tau + 1) / (tau^2 nu^2) (Theorem 3.4, Lemma A.2, eq. 26)."""
    _positive(n=n, G=G, N=N, tau=tau, nu=nu)
    return n * G * N * (tau + 1.0) / (tau**2 * nu**2)


def convergence_bound(
    *,
    T: float,
    eta: float,
    clients_per_round: float,
    E: float,
    n: float,
    B: float,
    I: float,  # noqa: E741 - the paper's symbol
    G: float,
    psi_variance: float,
    alpha_variance: float,
) -> float:
    """Return the bound on the mean squared gradient norm over T steps (Theorem 3.4, eq. 12).

    4 G / (eta T) + (2 (E + 1) n sigma_psi^2 (1 + 1/K*) + 2 n sigma_psi^2) / B
                  + (2 (E + 1) n sigma_alpha^2 (1 + 1/K*) + 2 n sigma_alpha^2) / I^2

    The theorem takes eta < min(1 / (L lambda), 1 / L), with lambda the bound on the diversity of
    the clients' gradients (eq. 11).
    """
    _positive(T=T, eta=eta, clients_per_round=clients_per_round, E=E, n=n, B=B, I=I, G=G)
    _positive(psi_variance=psi_variance, alpha_variance=alpha_variance)
    share = 2.0 * (E + 1.0) * n * (1.0 + 1.0 / clients_per_round) + 2.0 * n
    return 4.0 * G / (eta * T) + share * (psi_variance / B + alpha_variance / I**2)


def query_constants(
    *, epsilon: float, E: float, n: float, G: float, psi_variance: float, alpha_variance: float
) -> tuple[float, float]:
    """Return c1 and c2 (proof of Corollary 3.6, below eq. 45).

    c1 = 4 G / eps^2 + 2 (E + 2) n (sigma_psi^2 + sigma_alpha^2) / eps^2
    c2 = 2 (E + 1) n (sigma_psi^2 + sigma_alpha^2) / eps^2

    Args:
        epsilon: Target gradient norm; its square bounds the mean squared gradient norm (eq. 43).
        E: Local steps of a round.
        n: Positions of the prompt.
        G: Bound on the loss.
        psi_variance: sigma_psi^2.
        alpha_variance: sigma_alpha^2.
    """
    _positive(epsilon=epsilon, E=E, n=n, G=G)
    _positive(psi_variance=psi_variance, alpha_variance=alpha_variance)
    noise = 2.0 * n * (psi_variance + alpha_variance) / epsilon**2
    return 4.0 * G / epsilon**2 + (E + 2.0) * noise, (E + 1.0) * noise


def iterations_to_epsilon(*, c1: float, c2: float, clients_per_round: float) -> float:
    """Return T_eps(K*) = (c1 + c2 / K*)^2, local steps to an epsilon-solution (eq. 44)."""
    _positive(c1=c1, c2=c2, clients_per_round=clients_per_round)
    return (c1 + c2 / clients_per_round) ** 2


def queries_to_epsilon(*, c: float, c1: float, c2: float, clients_per_round: float) -> float:
    """Return Q_eps(K*) = c T_eps K* = c (c1 sqrt(K*) + c2 / sqrt(K*))^2 (eqs. 14 and 45).

    Args:
        c: Queries of a client's local step: I.
        c1: Of `query_constants`.
        c2: Of `query_constants`.
        clients_per_round: K*.
    """
    _positive(c=c, c1=c1, c2=c2, clients_per_round=clients_per_round)
    root = math.sqrt(clients_per_round)
    return c * (c1 * root + c2 / root) ** 2


def optimal_clients_per_round(*, c1: float, c2: float) -> float:
    """Return c2 / c1, the K* with the fewest queries (proof of Corollary 3.6).

    With the constants of `query_constants` it is below (E + 1) / (E + 2), so below 1.
    """
    _positive(c1=c1, c2=c2)
    return c2 / c1


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0.0):
            raise ValueError(f"{name} must be a finite number > 0, not {value!r}")
