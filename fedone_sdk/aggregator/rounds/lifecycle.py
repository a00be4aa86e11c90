"""Lifecycle of a run: stop, pause, resume, higher caps, rollback, measurements, proposals."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from fedone_sdk.aggregator.rounds.closing import finish_round
from fedone_sdk.aggregator.rounds.machine import RoundMachine
from fedone_sdk.aggregator.rounds.spending import charge_lost, release
from fedone_sdk.aggregator.rounds.state import Result, RunState, Seat
from fedone_sdk.algorithms import State, alpha_sha256
from fedone_sdk.budget import Budget
from fedone_sdk.errors import ProblemError
from fedone_sdk.messages import Helper, RunStatus, Verdict
from fedone_sdk.messages.base import SERVED_BY


def end_early(
    machine: RoundMachine,
    state: RunState,
    status: RunStatus,
    reason: str | None,
    now: float,
    *,
    summary: str | None = None,
) -> Result[None]:
    """End a run during a round: close open work and aggregate the local steps already paid for.

    A round without any finished step is discarded. After a resume it repeats the same draw, so
    that clients answer the same queries from their caches.
    """
    result = _release_all(machine, state, f"the run ended as {status}")
    finished_first = sorted(result.state.seats, key=lambda seat: seat.phase != "done")
    kept = tuple(replace(seat, phase="done") for seat in finished_first if seat.step)
    if kept:
        result = result.then(finish_round(machine, replace(result.state, seats=kept), now))
        if result.state.status == "completed":  # This round was the last one.
            return result
    else:
        result = result.changed(seats=(), fills=0, passed=frozenset())
    return replace(result, state=result.state.end(status, reason, now, summary=summary))


def _release_all(machine: RoundMachine, state: RunState, reason: str) -> Result[None]:
    result: Result[None] = Result(state=state)
    for seat in state.seats:
        result = result.then(release(machine, result.state, seat, reason, None)[1])
    return result


def stop(
    machine: RoundMachine,
    state: RunState,
    now: float,
    *,
    status: Literal["stopped", "failed"] = "stopped",
    reason: str | None = None,
    keep: bool = False,
) -> Result[None]:
    """End a running or paused run on request.

    `keep` keeps the round's open work for a resume, which then draws the same prompts. Else the
    round ends with the updates so far.
    """
    if not (state.running or state.paused):
        raise ProblemError("run_conflict", f"the run has ended: {state.status}")
    if keep:
        return Result(state=state.end(status, reason, now))
    return end_early(machine, state, status, reason, now)


def resume(machine: RoundMachine, state: RunState, now: float) -> Result[None]:
    """Resume a stopped, paused or failed run, with the current model."""
    if not state.can_resume:
        raise ProblemError("run_conflict", f"a run that is {state.status} cannot be resumed")
    return Result(state=_run_again(machine, state, now))


def _run_again(machine: RoundMachine, state: RunState, now: float) -> RunState:
    return replace(
        state,
        status="running",
        reason=None,
        summary=None,
        ended_at=None,
        lost=0,
        strikes={},
        paused=False,
        seats=_with_new_deadlines(machine, state, now),
        model=machine.required_model or state.model,
        unfit={},
        metric=state.metric.model_copy(update={"after": None}),
        verdict=None,
    )


def raise_caps(machine: RoundMachine, state: RunState, now: float, *, caps: Budget) -> Result[None]:
    """Raise caps; None in `caps` keeps a cap.

    A run that ended with `budget_exhausted` runs again, and so does a finished search that can use
    more queries. A stopped run stays stopped.
    """
    account = state.account
    if account.cap is None:
        raise ProblemError("run_conflict", "the run has no caps")
    try:
        cap = account.cap.raised(caps)
    except ValueError as exc:
        raise ProblemError("run_conflict", str(exc)) from exc
    for unit, limit, held in caps.pairs(account.held):
        if held > limit:
            raise ProblemError("run_conflict", f"{unit}: {held} are spent or leased already")
    if cap == account.cap:
        return Result(state=state)
    ended = state.status in ("budget_exhausted", "completed")
    if state.status == "completed" and not _has_more_queries(machine, state, cap):
        done = f"after {state.round} of {machine.spec.rounds} rounds"
        raise ProblemError(
            "run_conflict",
            f"the run is {state.status} {done}: a higher cap gives it no more work; a run with "
            "more rounds takes another name",
        )
    state = replace(state, account=replace(account, cap=cap))
    if ended:
        state = _run_again(machine, state, now)
    caps_now = {unit: str(value) for unit, value in cap.model_dump(exclude_none=True).items()}
    return Result(state=state, log=(("budget", {"round": state.round, "cap": caps_now}),))


def _has_more_queries(machine: RoundMachine, state: RunState, cap: Budget) -> bool:
    over_itself = state.round < machine.spec.rounds and machine.method.finished(state.method)
    return over_itself and machine.more_asks(cap)


def _with_new_deadlines(machine: RoundMachine, state: RunState, now: float) -> tuple[Seat, ...]:
    deadline_s = machine.spec.participation.deadline_s
    patience = {"offered": machine.CLAIM_TIMEOUT_S, "working": deadline_s, "done": 0.0}
    return tuple(replace(seat, due=now + patience[seat.phase]) for seat in state.seats)


def charge_lost_replicas(
    machine: RoundMachine, state: RunState, now: float, *, alive: frozenset[str], down: bool
) -> Result[None]:
    """Charge pending calls of replicas that are not in `alive` in full.

    `down` means that no replica served the run for a while: deadlines start again.
    """
    state = charge_lost(state, alive)
    if down:
        state = replace(state, seats=_with_new_deadlines(machine, state, now))
    return Result(state=state)


def pause(
    machine: RoundMachine, state: RunState, now: float, *, reason: str, summary: str | None = None
) -> Result[None]:
    """Pause a run until an operator resumes it; open work is kept.

    `reason` is for operators. `summary` is without the provider's text, for viewers; None is
    `reason`.
    """
    shown = summary or reason
    if state.paused:  # Adds the new reason for the operator who resumes the run.
        known = state.reason or ""
        full, shown = _joined(known, reason), _joined(state.summary or known, shown)
    elif state.running:
        state = state.end("stopped", None, now)
        full, shown = f"paused: {reason}", f"paused: {shown}"
    else:
        return Result(state=state)
    short = None if shown == full else shown
    return Result(state=replace(state, paused=True, reason=full, summary=short))


def _joined(known: str, new: str) -> str:
    return known if new in known else f"{known}; {new}"


def record_model(machine: RoundMachine, state: RunState, now: float, *, model: str) -> Result[None]:
    """Record the provider's name of its model; a new name pauses the run.

    A new ``system_fingerprint`` of a known name is recorded only.
    """
    if model in state.models:
        return Result(state=state)
    before = state.models[-1] if state.models else None
    names = {known.partition(SERVED_BY)[0] for known in state.models}
    state = replace(state, models=(*state.models, model))
    if before is None or model.partition(SERVED_BY)[0] in names:
        return Result(state=state)
    reason = f"the provider answers with {model!r} now, it was {before!r}"
    return pause(machine, state, now, reason=f"{reason}; resume the run to accept it")


def roll_back(
    machine: RoundMachine, state: RunState, now: float, *, method: State, to_round: int, reason: str
) -> Result[None]:
    """Roll a run back to its state after an earlier round; its spending stays."""
    if not (state.running or state.can_resume):
        raise ProblemError("run_conflict", f"a run that is {state.status} cannot be rolled back")
    if not 0 <= to_round <= state.round:
        raise ProblemError("run_conflict", f"the run has done {state.round} rounds, not {to_round}")
    result = _release_all(machine, state, "the run was rolled back")
    state = replace(
        result.state,
        round=to_round,
        # Candidates that were added since then stay.
        method=machine.with_new_candidates(method),
        seats=(),
        passed=frozenset(),
        fills=0,
        lost=0,
        # After a rollback to round 0 no result depends on the model.
        model=state.model if to_round else machine.required_model or state.model,
        rollbacks=state.rollbacks + 1,
        planned=None,  # The next assignment plans for the caps of its time.
        metric=state.metric.model_copy(update={"after": None}),
        verdict=None,
    )
    record = {
        "round": state.round,
        "rollbacks": state.rollbacks,
        "reason": reason,
        "alpha_sha256": alpha_sha256(state.method.alpha),
    }
    return replace(result, state=state, log=(("rollback", record),))


def record_metric(
    machine: RoundMachine,
    state: RunState,
    now: float,
    *,
    which: Literal["no_prompt", "before", "after"],
    value: float,
    biased: float | None = None,
    at: tuple[int, int] | None = None,
    verdict: Verdict | None = None,
) -> Result[None]:
    """Record the dev metric of a prompt; of ``no_prompt`` also the one with its own label bias.

    For ``after``, `at` is the round and the number of rollbacks when the prompt was current.
    """
    here = (state.round, state.rollbacks)
    if which == "after" and (state.running or at not in (None, here)):
        return Result(state=state)  # The run has continued: this is not its final prompt.
    found: dict[str, float] = {which: value}
    if biased is not None:
        found["no_prompt_biased"] = biased
    metric = state.metric.model_copy(update=found)
    if which != "after":
        return Result(state=replace(state, metric=metric))
    return Result(state=replace(state, metric=metric, verdict=verdict))


def count_call(
    machine: RoundMachine, state: RunState, now: float, *, failure: str | None
) -> Result[None]:
    """Count a call of the run's proposer, and why it failed."""
    done = (state.proposer or Helper()).and_then(
        calls=1, failed=int(failure is not None), failure=failure
    )
    return Result(state=replace(state, proposer=done))


def propose(
    machine: RoundMachine,
    state: RunState,
    now: float,
    *,
    slot: str,
    texts: tuple[str, ...],
    dropped: int = 0,
) -> Result[None]:
    """Queue new candidates for a slot until the round ends; drawn prompts stay the same.

    `dropped` is the number of other texts, which were not fit.
    """
    proposer = machine.spec.prompt.proposer
    if proposer is None or slot != machine.spec.prompt.proposed_slot:
        raise ProblemError("run_conflict", f"no candidates are proposed for slot {slot!r}")
    room = proposer.max_candidates - len(state.added)
    fresh = [text for text in dict.fromkeys(texts) if text not in state.added][: max(room, 0)]
    if not state.running:
        return Result(state=state)
    waiting = (*state.waiting, *((slot, text) for text in fresh))
    dropped += len(texts) - len(fresh)
    done = (state.proposer or Helper()).and_then(added=len(fresh), dropped=dropped)
    return Result(state=replace(state, waiting=waiting, proposer=done))
