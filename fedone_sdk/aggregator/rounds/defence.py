"""The defences at work in a run: what its seats brought, judged before it is aggregated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedone_sdk.aggregator.rounds.state import RunState, Seat
from fedone_sdk.algorithms import Method, State
from fedone_sdk.algorithms.defence import Admitted, Contribution, Defence
from fedone_sdk.spec import RunSpec

__all__ = ["admission_record", "admitted_seat", "contribution", "defence_of"]


def defence_of(spec: RunSpec, method: Method) -> Defence | None:
    """The judge that a run's ``defence`` describes; None where updates are taken as they come."""
    wanted = spec.defence
    if not wanted.judges:
        return None
    return Defence(
        num_samples=spec.method.num_samples,
        # The alpha of a method with a pool follows from the pool: its steps cannot be scaled.
        trust_region=None if method.shares_memory else wanted.trust_region,
        outliers=wanted.outliers,
        quarantine=wanted.quarantine,
        max_influence=None if method.shares_memory else wanted.max_influence,
    )


def contribution(
    state: RunState,
    seat: Seat,
    compared: Sequence[NDArray[np.float64]],
    mean_loss: float,
    advantage: NDArray[np.float64] | None,
) -> Contribution:
    """What a finished seat would do.

    Args:
        state: The run at the round's start.
        seat: The seat.
        compared: What its prompts are compared by, step by step.
        mean_loss: Over all of its prompts.
        advantage: Per token how much worse it looked in the seat's first local step; None looks
            at the step of alpha itself.
    """
    # The mean of equal numbers may be rounded: their spread is none nevertheless.
    spreads = [float(np.std(step)) if np.ptp(step) else 0.0 for step in compared]
    return Contribution(
        client=seat.client,
        alpha=(seat.local or state.method).alpha,
        mean_loss=mean_loss,
        advantage=advantage,
        spread=max(spreads) if spreads else None,
    )


def admitted_seat(seat: Seat, admitted: Admitted) -> Seat:
    """The seat with what of its step counts."""
    if admitted.outlier:
        return replace(seat, local=None)
    if admitted.scale == 1.0 or seat.local is None:
        return seat
    return replace(seat, local=State(alpha=admitted.alpha, memory=seat.local.memory))


def admission_record(seat: Seat, admitted: Admitted) -> dict[str, Any]:
    """What the log says of it."""
    return {
        "slot": seat.slot,
        "scale": admitted.scale,
        "outlier": admitted.outlier,
        "agreement": admitted.agreement,
    }
