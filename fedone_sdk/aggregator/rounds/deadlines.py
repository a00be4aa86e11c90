"""Deadlines of seats: an assignment expires with its lease, unless the client renews it."""

from __future__ import annotations

from dataclasses import replace

from fedone_sdk.aggregator.rounds.events import (
    DeadlineExtended,
    Effect,
    RenewalRequested,
    TimePassed,
)
from fedone_sdk.aggregator.rounds.rules import Rules, working
from fedone_sdk.aggregator.rounds.seats import vacate
from fedone_sdk.aggregator.rounds.state import RunState, Transition
from fedone_sdk.errors import ProblemError


def expire(rules: Rules, event: TimePassed, state: RunState, now: float) -> Transition:
    """Vacate the seats whose deadline has passed."""
    effects: list[Effect] = []
    for seat in state.timed_seats:
        if seat.due <= now and state.running:
            state, more = vacate(rules, state, seat, "the deadline passed", None, now)
            effects.extend(more)
    return state, tuple(effects)


def renew(rules: Rules, event: RenewalRequested, state: RunState, now: float) -> Transition:
    """Give a client a full new deadline, up to `Rules.MAX_RENEWALS` times."""
    seat = working(state, event.assignment_id)
    most = rules.MAX_RENEWALS
    if seat.renewals >= most:
        raise ProblemError(
            "renewal_refused",
            f"assignment {event.assignment_id} was renewed {most} times already",
        )
    deadline_s = rules.spec.participation.deadline_s
    seat = replace(seat, due=now + deadline_s, renewals=seat.renewals + 1)
    return state.with_seat(seat), (DeadlineExtended(deadline_s=deadline_s),)
