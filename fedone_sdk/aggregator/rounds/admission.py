"""Adapter between seats and the defences of `fedone_sdk.algorithms.defence`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedone_sdk.aggregator.rounds.state import RunState, Seat
from fedone_sdk.algorithms import Algorithm, State
from fedone_sdk.algorithms.defence import Admitted, Contribution, Defence
from fedone_sdk.spec import RunSpec


def defence_of(spec: RunSpec, method: Algorithm) -> Defence | None:
    """Return the defence of a run; None if every update is aggregated unchanged."""
    wanted = spec.defence
    if not wanted.judges:
        return None
    return Defence(
        num_samples=spec.method.num_samples,
        # Methods with a pool derive alpha from the pool, so a step cannot be scaled.
        trust_region=None if method.shares_memory else wanted.trust_region,
        outliers=wanted.outliers,
        quarantine=wanted.quarantine,
    )


def contribution(
    state: RunState,
    seat: Seat,
    compared: Sequence[NDArray[np.float64]],
    mean_loss: float,
    advantage: NDArray[np.float64] | None,
) -> Contribution:
    """Return the contribution of a finished seat.

    Args:
        state: The run at the start of the round.
        seat: The seat.
        compared: Losses that its prompts are compared by, per local step.
        mean_loss: Mean over all of its prompts.
        advantage: Per token, how much higher its losses were in the seat's first local step; None
            uses the step of alpha.
    """
    # Rounding of the mean gives equal numbers a standard deviation above 0.
    spreads = [float(np.std(step)) if np.ptp(step) else 0.0 for step in compared]
    return Contribution(
        client=seat.client,
        alpha=(seat.local or state.method).alpha,
        mean_loss=mean_loss,
        advantage=advantage,
        spread=max(spreads) if spreads else None,
    )


def admitted_seat(seat: Seat, admitted: Admitted) -> Seat:
    """Return the seat with the admitted part of its step."""
    if admitted.outlier:
        return replace(seat, local=None)
    if admitted.scale == 1.0 or seat.local is None:
        return seat
    return replace(seat, local=State(alpha=admitted.alpha, memory=seat.local.memory))


def admission_record(seat: Seat, admitted: Admitted) -> dict[str, Any]:
    """Return the log record of a seat's admission."""
    return {
        "slot": seat.slot,
        "scale": admitted.scale,
        "outlier": admitted.outlier,
        "agreement": admitted.agreement,
    }
