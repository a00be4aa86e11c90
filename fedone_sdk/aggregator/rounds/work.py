"""Assignments: claim and decline."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedone_sdk.aggregator.rounds.events import (
    Assigned,
    WorkDeclined,
    WorkRequested,
)
from fedone_sdk.aggregator.rounds.privacy import count_releases
from fedone_sdk.aggregator.rounds.prompts import candidates
from fedone_sdk.aggregator.rounds.rules import Rules, working
from fedone_sdk.aggregator.rounds.seats import vacate
from fedone_sdk.aggregator.rounds.state import RunState, Seat, Transition
from fedone_sdk.algorithms import State
from fedone_sdk.errors import ProblemError
from fedone_sdk.messages import AlphaAssignment, LossesAssignment, Step
from fedone_sdk.messages.ndarray import memory_to_wire, prompts_to_wire, to_wire


def assign(rules: Rules, event: WorkRequested, state: RunState, now: float) -> Transition:
    """Assign the work of a client's seat, under a lease."""
    seat = state.seat_of(event.client)
    if seat is None or not state.running:
        return state, ()
    if seat.phase == "offered":
        state = rules.with_current_plan(state)
        rules = rules.at(state)
        affordable = rules.affordable_work(state, seat.local)
        if affordable is None:
            # Another client's lease may release budget; the seat waits for it.
            return state, ()
        samples, steps = affordable
        worst = rules.worst_query * (samples * steps)
        seat = replace(
            seat,
            phase="working",
            due=now + rules.spec.participation.deadline_s,
            assignment_id=event.assignment_id,
            own_model=event.own_model,
            num_samples=samples,
            num_steps=steps,
            renewals=0,
            local=seat.local or _saved_local(rules, state, event),
        )
        state = replace(
            state.with_seat(seat),
            account=state.account.reserve(event.assignment_id, worst),
            releases=count_releases(rules.releases, state.releases, seat),
            started_at=now if state.started_at is None else state.started_at,
        )
    elif event.own_model and not seat.own_model:  # The client restarted with a model.
        seat = replace(seat, own_model=True)
        state = state.with_seat(seat)
    # A repeated claim gets the same assignment and no second lease.
    return state, (Assigned(assignment=assignment(rules, state, seat, now)),)


def _saved_local(rules: Rules, state: RunState, event: WorkRequested) -> State | None:
    """Return the method state with the client's saved memory, if any."""
    memory = event.memory
    if rules.remembers_clients:
        for seat in state.seats:  # In the order in which they were finished.
            if seat.client == event.client and seat.phase == "done" and seat.local is not None:
                memory = seat.local.memory
    return replace(state.method, memory=memory) if memory else None


def assignment(
    rules: Rules, state: RunState, seat: Seat, now: float
) -> AlphaAssignment | LossesAssignment:
    """Return the assignment of a working seat."""
    common: dict[str, Any] = {
        "assignment_id": seat.assignment_id,
        "run_id": rules.run_id,
        "round": state.round,
        "deadline_s": round(max(seat.due - now, 0.001), 3),
        "leased_queries": seat.num_samples * seat.num_steps,
        "vocabulary_version": len(state.proposed),
    }
    if rules.losses_exchange:
        return LossesAssignment(
            **common,
            prompts=prompts_to_wire(candidates(rules, state, seat).prompts, rules.vocab_size),
            minibatch_seed=rules.seed(state, seat, "minibatch", seat.step),
        )
    return AlphaAssignment(
        **common,
        alpha=to_wire(state.method.alpha),
        memory=memory_to_wire(state.method.memory),
        steps=tuple(
            Step(
                num_samples=seat.num_samples,
                minibatch_seed=rules.seed(state, seat, "minibatch", step),
                prompt_seed=rules.seed(state, seat, "prompts", step),
            )
            for step in range(seat.num_steps)
        ),
    )


def decline(rules: Rules, event: WorkDeclined, state: RunState, now: float) -> Transition:
    """Take an assignment back from a client that declines it."""
    seat = working(state, event.assignment_id)
    if not state.running:
        status = "paused" if state.paused else state.status
        raise ProblemError("run_conflict", f"the run is {status}; the work is kept")
    reason = f"the client declined: {event.reason}"
    unfit = event.reason if event.unfit else None
    return vacate(rules, state, seat, reason, event.usage, now, unfit=unfit)
