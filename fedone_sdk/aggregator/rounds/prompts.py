"""Choice of prompts: by the method, from the seeds of the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedone_sdk.aggregator.rounds.curves import Curves
from fedone_sdk.aggregator.rounds.rules import Rules
from fedone_sdk.aggregator.rounds.state import RunState, Seat
from fedone_sdk.algorithms import Candidates, State, stream


def candidates(rules: Rules, state: RunState, seat: Seat) -> Candidates:
    """Return the prompts of a seat's current step."""
    base = seat.local or state.method
    key = (seat.client, seat.slot, seat.step, seat.num_samples, state.round, state.rollbacks)
    known = rules.drawn.get(key)
    if known is not None and known[0] is base:
        return known[1]
    rng = stream(rules.seed(state, seat, "prompts", seat.step))
    drawn = rules.algorithm.ask(base, rng, seat.num_samples)
    if len(rules.drawn) >= 2 * rules.spec.participation.clients_per_round:
        rules.drawn.clear()
    rules.drawn[key] = (base, drawn)
    return drawn


def updated_local(
    rules: Rules,
    state: RunState,
    seat: Seat,
    losses: Sequence[float],
    curves: Curves | None = None,
) -> State:
    """Return a client's method state after the losses of its current step (losses exchange).

    Args:
        rules: The run's rules.
        state: The run.
        seat: The seat.
        losses: One per prompt.
        curves: Losses by class and label bias, in runs with label calibration.
    """
    base = seat.local or state.method
    asked = candidates(rules, state, seat)
    return rules.algorithm.tell(base, asked, rules.as_losses(losses, curves))


def evaluated_prompt(rules: Rules, state: RunState) -> NDArray[Any]:
    """Return the prompt of the evaluation curve, in the form of `Method.prompt`."""
    if rules.spec.evaluation.prompt == "mode":
        return rules.method.prompt(state.method)
    rng = stream(rules.seed_of(state, "evaluation", 0, 0))
    drawn: NDArray[np.int64] = rules.algorithm.ask(state.method, rng, 1).prompts[0]
    return drawn
