"""The query analysis of FedOne: why one client per round asks the model least.

Wang et al., "FedOne: Query-Efficient Federated Learning for Black-box Discrete Prompt Learning",
ICML 2025 (arXiv:2506.14929). Symbols: n positions, N tokens, tau the temperature, nu the floor of
alpha, G a bound on the loss, I prompts per step, K* clients per round, T rounds.

The derivation that these functions follow, for one local step and non-convex losses. F is
L-smooth, the round's update is alpha - eta g with E g = grad F and Var g <= V / K*: an average
over K* clients drawn independently. The descent lemma with eta <= 1/L gives

    (eta / 2) E|grad F(alpha_t)|^2 <= E F(alpha_t) - E F(alpha_t+1) + L eta^2 V / (2 K*).

Summed over T rounds with a learning rate eta = eta_0 / sqrt(T) that does not depend on K*, and
with D = F(alpha_0) - min F,

    (1/T) sum_t E|grad F(alpha_t)|^2 <= (c1 + c2 / K*) / sqrt(T),
    c1 = 2 D / eta_0,   c2 = L eta_0 V.

Hence T_eps(K*) = (c1 + c2/K*)^2 / eps^2 rounds reach eps, and at K* I queries a round

    Q_eps(K*) = K* I T_eps(K*) = c (c1 sqrt(K*) + c2 / sqrt(K*))^2,   c = I / eps^2,

which is least at K* = c2 / c1. Below 1, as under the paper's constants, it grows over all K* >= 1.

What the result leans on:

- The learning rate is the same for all K*. Tuned for each K*, eta_0 ~ sqrt(K*) balances the bound
  at 2 sqrt(2 D L V / (K* T)), and Q_eps no longer depends on K*: one client is then a tie.
- c is a constant, so I is. With I = T^(1/4), c grows with T_eps(K*) and the least point moves to
  1.5 c2 / c1 (in general (1 + 2a) c2 / c1 for I = T^a): still 1 client while c2 / c1 < 2/3.
- The lemma's sigma_alpha^2 / I^2 is generous: the variance of a mean of I independent terms
  falls as 1/I. It only enters c2, through V, and a larger V only moves K* towards more clients.
"""

from __future__ import annotations

import math

from . import _checks

__all__ = [
    "best_integer_clients",
    "bound_constants",
    "convergence_bound",
    "gradient_variance",
    "optimal_clients_per_round",
    "queries_to_epsilon",
    "rounds_to_epsilon",
    "smoothness",
]


def gradient_variance(*, G: float, N: int, tau: float, nu: float) -> float:
    """Return sigma_alpha^2 = 8 G^2 N / (tau^2 nu^2), the paper's bound on a sample's variance.

    Args:
        G: Bound on the loss.
        N: Tokens per position.
        tau: Temperature.
        nu: Floor of alpha.
    """
    _positive(G=G, N=N, tau=tau, nu=nu)
    return 8.0 * G**2 * N / (tau**2 * nu**2)


def smoothness(*, n: int, G: float, N: int, tau: float, nu: float) -> float:
    """Return L = n G N (tau + 1) / (tau^2 nu^2), the paper's smoothness of the expected loss.

    Args:
        n: Positions of the prompt.
        G: Bound on the loss.
        N: Tokens per position.
        tau: Temperature.
        nu: Floor of alpha.
    """
    _positive(n=n, G=G, N=N, tau=tau, nu=nu)
    return n * G * N * (tau + 1.0) / (tau**2 * nu**2)


def bound_constants(
    *, initial_gap: float, smoothness: float, variance: float, learning_rate: float
) -> tuple[float, float]:
    """Return c1 = 2 D / eta_0 and c2 = L eta_0 V.

    Args:
        initial_gap: D, the first loss minus the least.
        smoothness: L.
        variance: V of one client's gradient: between clients, plus sigma_alpha^2 / I of sampling
            (the paper's lemma has 1 / I^2).
        learning_rate: eta_0, where eta = eta_0 / sqrt(T).
    """
    _positive(
        initial_gap=initial_gap,
        smoothness=smoothness,
        variance=variance,
        learning_rate=learning_rate,
    )
    return 2.0 * initial_gap / learning_rate, smoothness * learning_rate * variance


def convergence_bound(*, rounds: float, c1: float, c2: float, clients_per_round: float) -> float:
    """Return (c1 + c2 / K*) / sqrt(T), which bounds the mean squared gradient norm."""
    _positive(rounds=rounds, c1=c1, c2=c2, clients_per_round=clients_per_round)
    return (c1 + c2 / clients_per_round) / math.sqrt(rounds)


def rounds_to_epsilon(*, epsilon: float, c1: float, c2: float, clients_per_round: float) -> float:
    """Return T_eps(K*) = (c1 + c2 / K*)^2 / eps^2, the rounds after which the bound is eps."""
    _positive(epsilon=epsilon, c1=c1, c2=c2, clients_per_round=clients_per_round)
    return ((c1 + c2 / clients_per_round) / epsilon) ** 2


def queries_to_epsilon(*, c: float, c1: float, c2: float, clients_per_round: float) -> float:
    """Return Q_eps(K*) = c (c1 sqrt(K*) + c2 / sqrt(K*))^2, with c = I / eps^2."""
    _positive(c=c, c1=c1, c2=c2, clients_per_round=clients_per_round)
    root = math.sqrt(clients_per_round)
    return c * (c1 * root + c2 / root) ** 2


def optimal_clients_per_round(*, c1: float, c2: float) -> float:
    """Return c2 / c1, the K* of fewest queries; below 1 under the paper's constants."""
    _positive(c1=c1, c2=c2)
    return c2 / c1


def best_integer_clients(*, c1: float, c2: float) -> int:
    """Return the whole K* >= 1 of fewest queries, the smaller one of a tie."""
    # Q is convex in K*: one of the whole numbers around its minimum is the best.
    below = max(1, math.floor(optimal_clients_per_round(c1=c1, c2=c2)))
    return min(
        (below, below + 1),
        key=lambda k: queries_to_epsilon(c=1.0, c1=c1, c2=c2, clients_per_round=k),
    )


def _positive(**values: float) -> None:
    for name, value in values.items():
        _checks.number(name, value)
