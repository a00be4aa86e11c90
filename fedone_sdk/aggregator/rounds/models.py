"""The model that scores a run whose devices have their own models."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from fedone_sdk.aggregator.rounds.events import Effect, RollbackRequested
from fedone_sdk.aggregator.rounds.lifecycle import roll_back
from fedone_sdk.aggregator.rounds.rules import Rules
from fedone_sdk.aggregator.rounds.state import RunState, Transition

AGREEING = 3
"""Number of devices that must report the same model before the run's model is final."""


def vote_model(rules: Rules, state: RunState, client: int, model: str, now: float) -> Transition:
    """Count a device's model as its vote.

    Until `AGREEING` devices report the same model, the run's model is that of the majority; ties
    keep the current model, or take the first reported. A change of the model rolls the run back to
    round 0, because losses of different models are not comparable.
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
                method=rules.initial_state().method,
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
        unfit=state.unfit if before in (None, chosen) else {},  # Some may have the new model.
    ), effects


def model_mismatch(rules: Rules, state: RunState, model: str) -> str | None:
    """Return why a device with this model cannot work for the run; None if it can."""
    known = state.model or rules.required_model
    if known is None or known == model:
        return None
    return f"the run scores with {known!r}, the device with {model!r}"
