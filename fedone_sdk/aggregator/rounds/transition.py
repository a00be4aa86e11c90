"""The result of an event, and elementary changes of a run's state."""

from __future__ import annotations

from dataclasses import replace

from fedone_sdk.aggregator.rounds.events import Effect, RunEnded
from fedone_sdk.aggregator.rounds.state import RunState, Seat
from fedone_sdk.messages import RunStatus

Transition = tuple[RunState, tuple[Effect, ...]]
"""The next state and the effects."""


def with_seat(state: RunState, seat: Seat) -> RunState:
    """Return the state with the seat of the same slot and client replaced."""
    seats = tuple(seat if _is_same(s, seat) else s for s in state.seats)
    return replace(state, seats=seats)


def without_seat(state: RunState, seat: Seat) -> RunState:
    """Return the state without this seat."""
    return replace(state, seats=tuple(s for s in state.seats if not _is_same(s, seat)))


def _is_same(one: Seat, other: Seat) -> bool:
    return (one.slot, one.client) == (other.slot, other.client)


def end_run(state: RunState, status: RunStatus, reason: str | None, now: float) -> Transition:
    """End the run, finally or until it is resumed."""
    state = replace(state, status=status, reason=reason, summary=None, ended_at=now, paused=False)
    return state, (RunEnded(status=status),)
