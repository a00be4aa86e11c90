"""Choice of prompts by the method, and candidates that are added during a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedone_sdk.aggregator.rounds.curves import Curves
from fedone_sdk.aggregator.rounds.events import CandidatesProposed
from fedone_sdk.aggregator.rounds.rules import Rules
from fedone_sdk.aggregator.rounds.state import RunState, Seat, Transition
from fedone_sdk.algorithms import Candidates, State, stream
from fedone_sdk.errors import ProblemError


def candidates(rules: Rules, state: RunState, seat: Seat) -> Candidates:
    """Return the prompts of a seat's current step."""
    base = seat.local or state.method
    key = (seat.client, seat.slot, seat.step, seat.num_samples, state.round, state.rollbacks)
    known = rules.drawn.get(key)
    if known is not None and known[0] is base:
        return known[1]
    rng = stream(rules.seed(state, seat, "prompts", seat.step))
    drawn = rules.method.ask(base, rng, seat.num_samples)
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
    return rules.method.tell(base, asked, rules.as_losses(losses, curves))


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
