"""The round machine: every decision about a run, with no I/O."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

from fedone_sdk.aggregator.rounds import (
    caps,
    closing,
    events,
    growth,
    lifecycle,
    seats,
    spending,
    updates,
    work,
)
from fedone_sdk.aggregator.rounds.events import Event, Refused, SeatOffered
from fedone_sdk.aggregator.rounds.rules import Rules
from fedone_sdk.aggregator.rounds.state import RunState
from fedone_sdk.aggregator.rounds.transition import Transition
from fedone_sdk.errors import ProblemError

__all__ = ["RoundMachine"]

_HANDLERS: dict[type[Any], Callable[[Rules, Any, RunState, float], Transition]] = {
    events.SeatsVacant: seats.fill_vacancies,
    events.TimePassed: seats.expire,
    events.QuarantineRequested: seats.quarantine,
    events.QuarantineLifted: seats.lift_quarantine,
    events.WorkRequested: work.assign,
    events.RenewalRequested: work.renew,
    events.WorkDeclined: work.decline,
    events.UnfitCleared: seats.clear_unfit,
    events.UpdateArrived: updates.accept,
    events.CallReserved: spending.reserve_call,
    events.CallSettled: spending.settle_call,
    events.EvaluationReserved: spending.reserve_evaluation,
    events.EvaluationSettled: spending.settle_evaluation,
    events.CandidatesProposed: growth.propose,
    events.Measured: lifecycle.record_metric,
    events.ModelSeen: lifecycle.record_model,
    events.PauseRequested: lifecycle.pause,
    events.RaiseRequested: caps.raise_caps,
    events.ReplicasLost: lifecycle.charge_lost_replicas,
    events.ResumeRequested: lifecycle.resume,
    events.RollbackRequested: lifecycle.roll_back,
    events.StopRequested: lifecycle.stop,
}


_SLOW_EVENTS = (
    events.WorkRequested | events.UpdateArrived | events.StopRequested | events.RollbackRequested
)


class RoundMachine(Rules):
    """Decides what happens in one run.

    ``step(state, event, now) -> (state, effects)`` is a pure function of its arguments: a service
    stores the new state and performs the effects in one go; a simulator and a replay drive the
    very same code. What an event does stands in the module of its concern, as a function of the
    run's `Rules`.
    """

    def step(self, state: RunState, event: Event, now: float) -> Transition:
        """Applies one event.

        Returns:
            The next state, and what is to be done about it; a refusal leaves the state as it was.
        """
        try:
            after, effects = _HANDLERS[type(event)](self.at(state), event, state, now)
        except ProblemError as refusal:
            return state, (Refused(code=refusal.code, detail=refusal.detail),)
        was, account = state.account, after.account
        if len(account.leases) < len(was.leases) or account.cap is not was.cap:
            # What a lease gave back, or a higher cap, may pay for a seat that waits for it.
            offers = [SeatOffered(client=s.client) for s in after.seats if s.phase == "offered"]
            effects += tuple(offer for offer in offers if offer not in effects)
        return after, effects

    def is_slow_step(self, event: Event) -> bool:
        """Whether a step may take more than some milliseconds: it asks, tells or projects."""
        return self.is_slow and isinstance(event, _SLOW_EVENTS)

    def needs_seating(self, state: RunState) -> bool:
        """Whether a `SeatsVacant` event could change something."""
        if not state.running:
            return False
        return bool(self.vacancies(state)) or self.is_exhausted(state)

    def can_resume(self, state: RunState) -> bool:
        """Whether a run was broken off, so that it can go on."""
        return lifecycle.can_resume(state)

    def next_deadline(self, state: RunState) -> float | None:
        """When the next seat runs out, seconds since the epoch."""
        return min((seat.due for seat in seats.timed_seats(state)), default=None)

    def has_lost_calls(self, state: RunState, alive: Set[str]) -> bool:
        """Whether a replica that is gone had something under way for the run."""
        attempts = [attempt for seat in state.seats for attempt in seat.sent]
        attempts.extend(state.evaluation.leases)
        return any(spending.is_lost(attempt, alive) for attempt in attempts)

    def finish_round(self, state: RunState, now: float) -> Transition:
        """Ends the round of a state whose seats are done; a replay computes it again so."""
        return closing.finish_round(self.at(state), state, now)
