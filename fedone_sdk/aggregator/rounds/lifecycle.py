"""Lifecycle of a run: stop, pause, resume, higher caps, rollback."""

from __future__ import annotations

from dataclasses import replace

from fedone_sdk.aggregator.rounds.closing import finish_round
from fedone_sdk.aggregator.rounds.events import (
    CapsRaised,
    Effect,
    Measured,
    ModelSeen,
    PauseRequested,
    RaiseRequested,
    ReplicasLost,
    ResumeRequested,
    RollbackRequested,
    RunRolledBack,
    StopRequested,
)
from fedone_sdk.aggregator.rounds.rules import Rules
from fedone_sdk.aggregator.rounds.spending import charge_lost, release
from fedone_sdk.aggregator.rounds.state import RunState, Seat, Transition
from fedone_sdk.algorithms import State, alpha_sha256
from fedone_sdk.budget import Budget
from fedone_sdk.errors import ProblemError
from fedone_sdk.messages import RunStatus


def can_resume(state: RunState) -> bool:
    """Whether the run can be resumed."""
    return state.status in ("stopped", "failed")


def end_early(
    rules: Rules, state: RunState, status: RunStatus, reason: str | None, now: float
) -> Transition:
    """End a run during a round: close open work and aggregate the local steps already paid for.

    A round without any finished step is discarded. After a resume it repeats the same draw, so
    that clients answer the same queries from their caches.
    """
    effects: list[Effect] = []
    for seat in state.seats:
        state, seat, closed = release(rules, state, seat, f"the run ended as {status}", None)
        effects.extend(closed)
    finished_first = sorted(state.seats, key=lambda seat: seat.phase != "done")
    kept = tuple(replace(seat, phase="done") for seat in finished_first if seat.step)
    if kept:
        state, finished = finish_round(rules, replace(state, seats=kept), now)
        effects.extend(finished)
    else:
        state = replace(state, seats=(), fills=0, passed=frozenset())
    if state.running:
        state, over = state.end(status, reason, now)
        effects.extend(over)
    return state, tuple(effects)


def stop(rules: Rules, event: StopRequested, state: RunState, now: float) -> Transition:
    """End a run on request."""
    if state.paused:
        state = replace(state, status="running")  # so that `end_early` closes its open work
    if not state.running:
        raise ProblemError("run_conflict", f"the run has ended: {state.status}")
    if event.keep:
        return state.end(event.status, event.reason, now)
    return end_early(rules, state, event.status, event.reason, now)


def resume(rules: Rules, event: ResumeRequested, state: RunState, now: float) -> Transition:
    """Resume a stopped or failed run."""
    if not can_resume(state):
        raise ProblemError("run_conflict", f"a run that is {state.status} cannot be resumed")
    return run_again(rules, state, now), ()


def run_again(rules: Rules, state: RunState, now: float) -> RunState:
    """Return the running state of a run that had ended."""
    return replace(
        state,
        status="running",
        reason=None,
        summary=None,
        ended_at=None,
        lost=0,
        paused=False,
        seats=_with_new_deadlines(rules, state, now),
        # A resume accepts the current model.
        model=_current_model(rules, state),
        unfit={},
        metric=state.metric.model_copy(update={"after": None}),
        verdict=None,
    )


def raise_caps(rules: Rules, event: RaiseRequested, state: RunState, now: float) -> Transition:
    """Raise caps.

    A run that ended with `budget_exhausted` runs again, and so does a finished search that can use
    more queries. A stopped run stays stopped.
    """
    account = state.account
    if account.cap is None:
        raise ProblemError("run_conflict", "the run has no caps")
    try:
        cap = account.cap.raised(event.caps)
    except ValueError as exc:
        raise ProblemError("run_conflict", str(exc)) from exc
    for unit, limit, held in event.caps.pairs(account.held):
        if held > limit:
            raise ProblemError("run_conflict", f"{unit}: {held} are spent or leased already")
    if cap == account.cap:
        return state, ()
    ended = state.status in ("budget_exhausted", "completed")
    if ended and state.status != "budget_exhausted" and not _has_more_queries(rules, state, cap):
        done = f"after {state.round} of {rules.spec.rounds} rounds"
        raise ProblemError(
            "run_conflict",
            f"the run is {state.status} {done}: a higher cap gives it no more work; a run with "
            "more rounds takes another name",
        )
    state = replace(state, account=replace(account, cap=cap))
    if ended:
        state = run_again(rules, state, now)
    record = {
        "round": state.round,
        "cap": {unit: str(value) for unit, value in cap.model_dump(exclude_none=True).items()},
    }
    return state, (CapsRaised(record=record),)


def _has_more_queries(rules: Rules, state: RunState, cap: Budget) -> bool:
    over_itself = state.round < rules.spec.rounds and rules.method.finished(state.method)
    return over_itself and rules.more_asks(cap)


def _current_model(rules: Rules, state: RunState) -> str | None:
    """Return the model that scores from now on; the current one while the gateway's is unknown."""
    return rules.required_model or state.model


def _with_new_deadlines(rules: Rules, state: RunState, now: float) -> tuple[Seat, ...]:
    deadline_s = rules.spec.participation.deadline_s
    patience = {"offered": rules.CLAIM_TIMEOUT_S, "working": deadline_s, "done": 0.0}
    return tuple(replace(seat, due=now + patience[seat.phase]) for seat in state.seats)


def charge_lost_replicas(
    rules: Rules, event: ReplicasLost, state: RunState, now: float
) -> Transition:
    """Charge pending calls of exited replicas; after downtime, restart the clients' deadlines."""
    after = charge_lost(state, event.alive)
    if event.down:
        after = replace(after, seats=_with_new_deadlines(rules, after, now))
    return after, ()


def pause(rules: Rules, event: PauseRequested, state: RunState, now: float) -> Transition:
    """Pause a run and keep its open work."""
    detail, shown = event.reason, event.summary or event.reason
    if state.paused:  # Adds the new reason for the operator who resumes the run.
        reason = state.reason or ""
        return _with_reason(
            state, _join_reasons(reason, detail), _join_reasons(state.summary or reason, shown)
        ), ()
    if not state.running:
        return state, ()
    reason = f"paused: {detail}"
    state, effects = state.end("stopped", reason, now)
    return replace(_with_reason(state, reason, f"paused: {shown}"), paused=True), effects


def _with_reason(state: RunState, reason: str, summary: str) -> RunState:
    return replace(state, reason=reason, summary=None if summary == reason else summary)


def _join_reasons(known: str, new: str) -> str:
    return known if new in known else f"{known}; {new}"


def record_model(rules: Rules, event: ModelSeen, state: RunState, now: float) -> Transition:
    """Record the provider's name of its model; a new name pauses the run."""
    if event.model in state.models:
        return state, ()
    before = state.models[-1] if state.models else None
    state = replace(state, models=(*state.models, event.model))
    if before is None:
        return state, ()
    reason = f"the provider answers with {event.model!r} now, it was {before!r}"
    return pause(rules, PauseRequested(reason=f"{reason}; resume the run to accept it"), state, now)


def roll_back(rules: Rules, event: RollbackRequested, state: RunState, now: float) -> Transition:
    """Roll a run back to an earlier round; its spending stays."""
    if not (state.running or can_resume(state)):
        raise ProblemError("run_conflict", f"a run that is {state.status} cannot be rolled back")
    if not 0 <= event.to_round <= state.round:
        raise ProblemError(
            "run_conflict", f"the run has done {state.round} rounds, not {event.to_round}"
        )
    effects: list[Effect] = []
    for seat in state.seats:
        state, _, closed = release(rules, state, seat, "the run was rolled back", None)
        effects.extend(closed)
    state = replace(
        state,
        round=event.to_round,
        # Candidates that were added since then stay.
        method=rules.with_new_candidates(
            State(alpha=event.method.alpha, memory=event.method.memory)
        ),
        seats=(),
        passed=frozenset(),
        fills=0,
        lost=0,
        # After a rollback to round 0 no result depends on the model.
        model=state.model if event.to_round else _current_model(rules, state),
        rollbacks=state.rollbacks + 1,
        planned=None,  # The next assignment plans for the caps of its time.
        metric=state.metric.model_copy(update={"after": None}),
        verdict=None,
    )
    record = {
        "round": state.round,
        "rollbacks": state.rollbacks,
        "reason": event.reason,
        "alpha_sha256": alpha_sha256(state.method.alpha),
    }
    return state, (*effects, RunRolledBack(to_round=state.round, record=record))


def record_metric(rules: Rules, event: Measured, state: RunState, now: float) -> Transition:
    """Record the metric of a prompt."""
    here = (state.round, state.rollbacks)
    if event.which == "after" and (state.running or event.at not in (None, here)):
        return state, ()  # The run has continued: this is not its final prompt.
    metric = state.metric.model_copy(update={event.which: event.value})
    if event.which != "after":
        return replace(state, metric=metric), ()
    return replace(state, metric=metric, verdict=event.verdict), ()
