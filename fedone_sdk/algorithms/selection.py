"""Selection of the clients of a round."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from . import _checks

SELECTIONS = ("proportional", "uniform")


def select(
    available: Mapping[int, int], count: int, *, rng: np.random.Generator, kind: str = "uniform"
) -> list[int]:
    """Choose clients. The result depends on the indices, not on the order of arrival.

    Args:
        available: Examples held, by enrolment index.
        count: How many to choose, K*.
        rng: The round's selection stream.
        kind: "uniform" without replacement, or "proportional" to the examples held, with
            replacement (aggregate those without weights).

    Returns:
        Enrolment indices in the order drawn.
    """
    _checks.integer("count", count, minimum=1)
    _checks.choice("selection", kind, SELECTIONS)
    clients = sorted(available)
    # Both kinds use only `random`: NumPy may change `choice` between versions.
    if kind == "uniform":
        if count > len(clients):
            raise ValueError(f"cannot select {count} of {len(clients)} clients")
        drawn = rng.random(len(clients))
        if count == 1:  # FedOne: one client of perhaps thousands, each round.
            return [clients[np.argmin(drawn)]]
        # Only the smallest draws are sorted, as few of many clients are chosen. Ties are stable.
        least = np.flatnonzero(drawn <= np.partition(drawn, count - 1)[count - 1])
        order = least[np.argsort(drawn[least], kind="stable")]
        return [clients[k] for k in order[:count]]
    held = [_checks.integer(f"examples of client {k}", available[k]) for k in clients]
    if sum(held) == 0:
        raise ValueError("cannot select in proportion to examples: no client holds any")
    cumulative = np.cumsum(held) / sum(held)
    return [clients[k] for k in np.searchsorted(cumulative, rng.random(count), side="right")]
