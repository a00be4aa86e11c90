"""The round machine: all decisions about a run, without I/O."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

from fedone_sdk.aggregator.rounds import (
    deadlines,
    events,
    lifecycle,
    prompts,
    seats,
    spending,
    updates,
    work,
)
from fedone_sdk.aggregator.rounds.events import Event, Refused, SeatOffered
from fedone_sdk.aggregator.rounds.rules import Rules
from fedone_sdk.aggregator.rounds.state import RunState, Transition
from fedone_sdk.errors import ProblemError

_HANDLERS: dict[type[Any], Callable[[Rules, Any, RunState, float], Transition]] = {
    events.SeatsVacant: seats.fill_vacancies,
    events.TimePassed: deadlines.expire,
    events.QuarantineRequested: seats.quarantine,
    events.QuarantineLifted: seats.lift_quarantine,
    events.WorkRequested: work.assign,
    events.RenewalRequested: deadlines.renew,
    events.WorkDeclined: work.decline,
    events.UnfitCleared: seats.clear_unfit,
    events.UpdateArrived: updates.accept,
    events.CallReserved: spending.reserve_call,
    events.CallSettled: spending.settle_call,
    events.EvaluationReserved: spending.reserve_evaluation,
    events.EvaluationSettled: spending.settle_evaluation,
    events.CandidatesProposed: prompts.propose,
    events.Measured: lifecycle.record_metric,
    events.ModelSeen: lifecycle.record_model,
    events.PauseRequested: lifecycle.pause,
    events.RaiseRequested: lifecycle.raise_caps,
    events.ReplicasLost: lifecycle.charge_lost_replicas,
    events.ResumeRequested: lifecycle.resume,
    events.RollbackRequested: lifecycle.roll_back,
    events.StopRequested: lifecycle.stop,
}


_SLOW_EVENTS = (
    events.WorkRequested | events.UpdateArrived | events.StopRequested | events.RollbackRequested
)


class RoundMachine(Rules):
    """State machine of one run.

    ``step(state, event, now) -> (state, effects)`` is a pure function. The service stores the new
    state and performs the effects in one transaction. Each event has one handler, a function of the
    run's `Rules` in the module of its concern.
    """

    def step(self, state: RunState, event: Event, now: float) -> Transition:
        """Apply one event.

        Returns:
            The next state and the effects. A refused event leaves the state unchanged and returns
            one `Refused`.
        """
        try:
            after, effects = _HANDLERS[type(event)](self.at(state), event, state, now)
        except ProblemError as refusal:
            return state, (Refused(code=refusal.code, detail=refusal.detail),)
        was, account = state.account, after.account
        if len(account.leases) < len(was.leases) or account.cap is not was.cap:
            # Released budget may pay for an offered seat: wake its client.
            offers = [SeatOffered(client=s.client) for s in after.seats if s.phase == "offered"]
            effects += tuple(offer for offer in offers if offer not in effects)
        return after, effects

    def is_slow_step(self, event: Event) -> bool:
        """Whether the step for this event may take more than a few milliseconds."""
        return self.is_slow and isinstance(event, _SLOW_EVENTS)

    def needs_seating(self, state: RunState) -> bool:
        """Whether a `SeatsVacant` event can change the state."""
        if not state.running:
            return False
        return bool(self.vacancies(state)) or self.is_exhausted(state)

    def can_resume(self, state: RunState) -> bool:
        """Whether the run can be resumed."""
        return lifecycle.can_resume(state)

    def has_lost_calls(self, state: RunState, alive: Set[str]) -> bool:
        """Whether a replica that has exited left pending calls of the run."""
        attempts = [attempt for seat in state.seats for attempt in seat.sent]
        attempts.extend(state.evaluation.leases)
        return any(spending.is_lost(attempt, alive) for attempt in attempts)
