"""Candidates that are added during a run."""

from __future__ import annotations

from dataclasses import replace

from fedone_sdk.aggregator.rounds.events import CandidatesProposed
from fedone_sdk.aggregator.rounds.rules import Rules
from fedone_sdk.aggregator.rounds.state import RunState, Transition
from fedone_sdk.errors import ProblemError


def propose(rules: Rules, event: CandidatesProposed, state: RunState, now: float) -> Transition:
    """Queue new candidates until the round ends; prompts already drawn stay the same."""
    proposer = rules.spec.prompt.proposer
    if proposer is None or event.slot != rules.spec.prompt.proposed_slot:
        raise ProblemError("run_conflict", f"no candidates are proposed for slot {event.slot!r}")
    known = {text for _, text in (*state.proposed, *state.waiting)}
    room = proposer.max_candidates - len(known)
    fresh = [text for text in dict.fromkeys(event.texts) if text not in known][: max(room, 0)]
    if not fresh or not state.running:
        return state, ()
    waiting = (*state.waiting, *((event.slot, text) for text in fresh))
    return replace(state, waiting=waiting), ()


def admit_candidates(rules: Rules, state: RunState) -> RunState:
    """Return the state with the queued candidates in its vocabulary."""
    if not state.waiting:
        return state
    state = replace(state, proposed=(*state.proposed, *state.waiting), waiting=())
    return replace(state, method=rules.at(state).with_new_candidates(state.method))
