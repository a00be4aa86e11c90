"""Assignments: claim, renewal, decline."""

from __future__ import annotations

from dataclasses import replace

from fedone_sdk.aggregator.rounds.events import (
    Assigned,
    DeadlineExtended,
    Refused,
    RenewalRequested,
    WorkDeclined,
    WorkRequested,
)
from fedone_sdk.aggregator.rounds.models import model_mismatch, vote_model
from fedone_sdk.aggregator.rounds.privacy import count_releases
from fedone_sdk.aggregator.rounds.rules import Rules, working
from fedone_sdk.aggregator.rounds.seats import vacate
from fedone_sdk.aggregator.rounds.state import RunState, Transition
from fedone_sdk.algorithms import State
from fedone_sdk.algorithms.trained import Trained
from fedone_sdk.errors import ProblemError


def assign(rules: Rules, event: WorkRequested, state: RunState, now: float) -> Transition:
    """Assign the work of a client's seat, under a lease."""
    seat = state.seat_of(event.client)
    if seat is None or not state.running:
        return state, ()
    if seat.phase == "offered":
        if event.model is not None and not isinstance(rules.method, Trained):
            state, restarted = vote_model(rules, state, event.client, event.model, now)
            if restarted:
                return state, restarted
            detail = model_mismatch(rules, state, event.model)
            if detail is not None:  # No lease is open yet, so this is free.
                state, effects = vacate(rules, state, seat, detail, None, now, unfit=detail)
                return state, (*effects, Refused(code="model_mismatch", detail=detail))
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
    return state, (Assigned(assignment=rules.assignment(state, seat, now)),)


def _saved_local(rules: Rules, state: RunState, event: WorkRequested) -> State | None:
    """Return the method state with the client's saved memory, if any."""
    memory = event.memory
    if rules.remembers_clients:
        for seat in state.seats:  # In the order in which they were finished.
            if seat.client == event.client and seat.phase == "done" and seat.local is not None:
                memory = seat.local.memory
    return replace(state.method, memory=memory) if memory else None


def renew(rules: Rules, event: RenewalRequested, state: RunState, now: float) -> Transition:
    """Give a client a full new deadline, up to ``participation.max_renewals`` times."""
    seat = working(state, event.assignment_id)
    most = rules.spec.participation.max_renewals
    if seat.renewals >= most:
        raise ProblemError(
            "renewal_refused",
            f"assignment {event.assignment_id} was renewed {most} times already",
        )
    deadline_s = rules.spec.participation.deadline_s
    seat = replace(seat, due=now + deadline_s, renewals=seat.renewals + 1)
    return state.with_seat(seat), (DeadlineExtended(deadline_s=deadline_s),)


def decline(rules: Rules, event: WorkDeclined, state: RunState, now: float) -> Transition:
    """Take an assignment back from a client that declines it."""
    seat = working(state, event.assignment_id)
    if not state.running:
        status = "paused" if state.paused else state.status
        raise ProblemError("run_conflict", f"the run is {status}; the work is kept")
    reason = f"the client declined: {event.reason}"
    unfit = event.reason if event.unfit else None
    return vacate(rules, state, seat, reason, event.usage, now, unfit=unfit)
