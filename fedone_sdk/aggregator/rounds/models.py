"""Which model scores a run, where its devices have models of their own."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from fedone_sdk.aggregator.rounds.events import Effect, RollbackRequested
from fedone_sdk.aggregator.rounds.lifecycle import roll_back
from fedone_sdk.aggregator.rounds.rules import Rules
from fedone_sdk.aggregator.rounds.state import RunState
from fedone_sdk.aggregator.rounds.transition import Transition

__all__ = ["AGREEING", "vote_model", "model_mismatch"]

AGREEING = 3
"""Devices that must name the same model before a run's model is settled."""


def vote_model(rules: Rules, state: RunState, client: int, model: str, now: float) -> Transition:
    """Takes note of the model that a device has.

    Until `AGREEING` devices have the same one, the run's model is the one that most devices have;
    of several, the one that the run has, or that was named first. Where that changes, the run
    begins again: rounds that another model scored say nothing of this one.
    """
    settled = state.model is not None and not state.votes
    if settled or rules.required_model is not None:
        return state, ()
    votes = {**state.votes, client: state.votes.get(client, model)}
    counts = Counter(votes.values())
    most = max(counts.values())
    before, chosen = state.model, state.model
    if chosen is None or counts[chosen] < most:
        chosen = next(named for named in votes.values() if counts[named] == most)
    effects: tuple[Effect, ...] = ()
    if before not in (None, chosen):
        state, effects = roll_back(
            rules,
            RollbackRequested(
                method=rules.start().method,
                memories={one: {} for one in votes},
                to_round=0,
                reason=f"most devices have the model {chosen!r}, not {before!r}",
            ),
            state,
            now,
        )
    return replace(
        state,
        model=chosen,
        votes={} if most >= AGREEING else votes,
        unfit=state.unfit if before in (None, chosen) else {},  # Some of them have this model.
    ), effects


def model_mismatch(rules: Rules, state: RunState, model: str) -> str | None:
    """Why a device with this model cannot work for a run; None where it can."""
    known = state.model or rules.required_model
    if known is None or known == model:
        return None
    return f"the run scores with {known!r}, the device with {model!r}"
