"""Handlers that end a round, or stop, pause, resume or roll back a run, or raise its caps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from fedone_sdk.aggregator.rounds.machine import RoundMachine
from fedone_sdk.aggregator.rounds.run_state import FinishedRound, Lineage, Result, RunState, Seat
from fedone_sdk.aggregator.rounds.spending import charge_lost, release
from fedone_sdk.algorithms import Memory, State, aggregate, alpha_sha256
from fedone_sdk.algorithms.defence import Admitted, Contribution, Defence, ledger
from fedone_sdk.algorithms.gradient import drawn_advantage
from fedone_sdk.algorithms.observations import clusters
from fedone_sdk.budget import Budget
from fedone_sdk.errors import ProblemError
from fedone_sdk.messages import ProposerReport, RoundReport, RunStatus, Verdict
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
    """End a run during a round: close open work, and aggregate the finished local steps.

    If no step is finished, the round is discarded. After a resume, the same clients and prompts are
    drawn again, so that the model's earlier answers come from the cache.
    """
    result = _release_all(machine, state, f"the run ended as {status}")
    finished_first = sorted(result.state.seats, key=lambda seat: seat.phase != "done")
    kept = tuple(replace(seat, phase="done") for seat in finished_first if seat.step)
    if kept:
        result = result.then(finish_round(machine, replace(result.state, seats=kept), now))
        if result.state.status == "completed":  # The round was the last of the run.
            return result
    else:
        result = replace(result, state=result.state.without_draw())
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

    With `keep`, clients can continue their open work after a resume. Without `keep`, the round ends
    with the updates so far.
    """
    if not (state.running or state.paused):
        raise ProblemError("run_conflict", f"the run has ended: {state.status}")
    if keep:
        return Result(state=state.end(status, reason, now))
    return end_early(machine, state, status, reason, now)


def resume(machine: RoundMachine, state: RunState, now: float) -> Result[None]:
    """Resume a stopped, paused or failed run with the server's current model."""
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
    """Raise caps; a cap that is None in `caps` stays as it is.

    A run that ended with ``budget_exhausted`` continues. A completed run continues if its search
    ended before the last round and can use more queries. A stopped run stays stopped.
    """
    account = state.account
    if account.cap is None:
        raise ProblemError("run_conflict", "the run has no caps")
    try:
        cap = account.cap.raised(caps)
    except ValueError as exc:
        raise ProblemError("run_conflict", str(exc)) from exc
    for unit, limit, committed in caps.pairs(account.held):
        if committed > limit:
            raise ProblemError("run_conflict", f"{unit}: {committed} are spent or leased already")
    if cap == account.cap:
        return Result(state=state)
    ended = state.status in ("budget_exhausted", "completed")
    if state.status == "completed" and not _has_more_queries(machine, state, cap):
        done = f"after {state.round} of {machine.spec.rounds} rounds"
        raise ProblemError(
            "run_conflict",
            f"the run is {state.status} {done}: a higher cap gives it no more work; for more "
            "rounds, add a run with another name",
        )
    state = replace(state, account=replace(account, cap=cap))
    if ended:
        state = _run_again(machine, state, now)
    caps_now = {unit: str(value) for unit, value in cap.model_dump(exclude_none=True).items()}
    return Result(state=state, log=(("budget", {"round": state.round, "cap": caps_now}),))


def _has_more_queries(machine: RoundMachine, state: RunState, cap: Budget) -> bool:
    ended_early = state.round < machine.spec.rounds and machine.method.finished(state.method)
    return ended_early and machine.more_asks(cap)


def _with_new_deadlines(machine: RoundMachine, state: RunState, now: float) -> tuple[Seat, ...]:
    deadline_s = machine.spec.participation.deadline_s
    patience = {"offered": machine.CLAIM_TIMEOUT_S, "working": deadline_s, "done": 0.0}
    return tuple(replace(seat, due=now + patience[seat.phase]) for seat in state.seats)


def charge_lost_replicas(
    machine: RoundMachine, state: RunState, now: float, *, alive: frozenset[str], down: bool
) -> Result[None]:
    """Charge the reserved amounts of calls that are pending on replicas not in `alive`.

    `down` says that no replica has served the run for a while. All deadlines then restart.
    """
    state = charge_lost(state, alive)
    if down:
        # If the clock was set back meanwhile, stored times may be too far in the future.
        latest = now + machine.LONGEST_ASIDE_S
        strikes = {
            client: known._replace(until=min(known.until, latest))
            for client, known in state.strikes.items()
        }
        seats = _with_new_deadlines(machine, state, now)
        state = replace(state, seats=seats, strikes=strikes)
    return Result(state=state)


def pause(
    machine: RoundMachine, state: RunState, now: float, *, reason: str, summary: str | None = None
) -> Result[None]:
    """Pause a run until an operator resumes it; open work is kept.

    Operators get `reason`. Viewers get `summary`, which has no text of the provider. If `summary`
    is None, viewers get `reason`.
    """
    summary = summary or reason
    if state.paused:  # The new reason is appended.
        before = state.reason or ""
        reason, summary = _join(before, reason), _join(state.summary or before, summary)
    elif state.running:
        state = state.end("stopped", None, now)
        reason, summary = f"paused: {reason}", f"paused: {summary}"
    else:
        return Result(state=state)
    different = None if summary == reason else summary
    return Result(state=replace(state, paused=True, reason=reason, summary=different))


def _join(known: str, new: str) -> str:
    return known if new in known else f"{known}; {new}"


def record_model(machine: RoundMachine, state: RunState, now: float, *, model: str) -> Result[None]:
    """Record the name that the provider reports for the model; a new name pauses the run.

    If only the ``system_fingerprint`` is new, it is recorded and the run continues.
    """
    if model in state.models:
        return Result(state=state)
    before = state.models[-1] if state.models else None
    names = {known.partition(SERVED_BY)[0] for known in state.models}
    state = replace(state, models=(*state.models, model))
    if before is None or model.partition(SERVED_BY)[0] in names:
        return Result(state=state)
    reason = f"the provider now reports the model {model!r}, before it was {before!r}"
    return pause(machine, state, now, reason=f"{reason}; resume the run to accept the change")


def roll_back(
    machine: RoundMachine, state: RunState, now: float, *, method: State, to_round: int, reason: str
) -> Result[None]:
    """Roll a run back to its state after an earlier round; what it has spent stays charged."""
    if not (state.running or state.can_resume):
        raise ProblemError("run_conflict", f"a run that is {state.status} cannot be rolled back")
    if not 0 <= to_round <= state.round:
        detail = f"cannot roll back to round {to_round}; the run has done {state.round} rounds"
        raise ProblemError("run_conflict", detail)
    result = _release_all(machine, state, "the run was rolled back")
    state = result.state.without_draw(
        round=to_round,
        # Candidates that were added after that round stay.
        method=machine.with_new_candidates(method),
        lost=0,
        merged_at=min(state.merged_at, to_round),
        # A run that starts again from round 0 may use another model.
        model=state.model if to_round else machine.required_model or state.model,
        rollbacks=state.rollbacks + 1,
        planned=None,  # The next assignment computes it from the caps at that time.
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
    """Record a metric on the dev split: without a prompt, or before or after the tuning.

    `biased` is the metric without a prompt and with a label bias. `at` (round, number of rollbacks)
    says which prompt was evaluated as ``after``. If the run has continued since, nothing changes.
    """
    now_at = (state.round, state.rollbacks)
    if which == "after" and (state.running or at not in (None, now_at)):
        return Result(state=state)  # The run has continued, so this was not its final prompt.
    changes = {which: value} | ({} if biased is None else {"no_prompt_biased": biased})
    state = replace(state, metric=state.metric.model_copy(update=changes))
    return Result(state=replace(state, verdict=verdict) if which == "after" else state)


def count_call(
    machine: RoundMachine, state: RunState, now: float, *, failure: str | None
) -> Result[None]:
    """Count a call of the model that writes candidates; `failure` is the error of a failed call."""
    done = (state.proposer or ProposerReport()).and_then(
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
    parents: tuple[int, ...] = (),
) -> Result[None]:
    """Queue new candidates for a slot; they are added at the end of the round.

    The prompts of the current round are drawn already, so they cannot use the new candidates.
    `dropped` is the number of texts of the proposer that cannot be candidates. `parents` are the
    candidates that were merged into the texts, if any.
    """
    proposer = machine.spec.prompt.proposer
    if proposer is None or slot != machine.spec.prompt.proposed_slot:
        raise ProblemError("run_conflict", f"the run's proposer does not write for slot {slot!r}")
    room = proposer.max_candidates - len(state.added)
    fresh = [text for text in dict.fromkeys(texts) if text not in state.added][: max(room, 0)]
    if not state.running:
        return Result(state=state)
    waiting = (*state.waiting, *((slot, text) for text in fresh))
    dropped += len(texts) - len(fresh)
    done = (state.proposer or ProposerReport()).and_then(added=len(fresh), dropped=dropped)
    origins = [Lineage(text, None, parents) for text in fresh if parents]
    state = replace(state, waiting=waiting, proposer=done, lineage=(*state.lineage, *origins))
    return Result(state=state, log=tuple(origin.line(state.round, slot) for origin in origins))


def begin_merge(machine: RoundMachine, state: RunState, now: float) -> Result[tuple[int, ...]]:
    """Start a merge, if one is due: return the candidates that the proposer merges.

    Each of them is the best one for at least two clients, so that no single client decides.
    A candidate is merged at most once. If n clients have scored, at most max(2, sqrt(n)) candidates
    are merged, because a merge of many texts loses details (Li et al. 2026, "Combee").
    """
    proposer = machine.spec.prompt.proposer
    due = proposer is not None and state.round - state.merged_at >= proposer.merge_every
    if not due or not state.running:
        return Result(state=state, reply=())
    num_clients = clusters(state.method.memory, machine.proposed_position)
    merges = [origin for origin in state.lineage if origin.client is None]
    merged = {parent for merge in merges for parent in merge.parents}
    best = [c for c, count in num_clients.most_common() if count > 1 and c not in merged]
    best = best[: max(2, math.isqrt(num_clients.total()))]
    if len(best) < 2:
        return Result(state=state, reply=())
    return Result(state=replace(state, merged_at=state.round), reply=tuple(best))


def close_seat(machine: RoundMachine, state: RunState, seat: Seat, now: float) -> Result[None]:
    """Store a seat whose work is done; the round ends if this is its last seat."""
    # The seat moves to the end, so that the log lists seats in the order of their last updates.
    others = (other for other in state.seats if other.key != seat.key)
    state = replace(state, seats=(*others, seat))
    num_done = sum(other.phase == "done" for other in state.seats)
    if num_done < machine.spec.participation.clients_per_round:
        return Result(state=state)
    return finish_round(machine, state, now)


def finish_round(machine: RoundMachine, state: RunState, now: float) -> Result[None]:
    """Aggregate the results of the finished seats, and start the next round or end the run."""
    done = [seat for seat in state.seats if seat.phase == "done"]
    # Sorted by enrolment index, because floating-point sums depend on the order.
    seats = sorted(done, key=lambda seat: (seat.client, seat.number))
    by_examples = machine.spec.participation.aggregation == "examples"
    weights = [seat.weight for seat in seats] if by_examples else None
    admitted, defence, verdicts = _judge(machine, state, seats)
    method = _aggregate(machine, state, admitted, weights)
    report = RoundReport(
        round=state.round,
        client_id="",
        queries=sum(seat.queries for seat in seats),
        mean_loss=float(np.average([s.mean_loss for s in seats], weights=weights)),
    )
    record: dict[str, Any] = {
        "round": state.round,
        "seats": [_seat_record(machine, seat) for seat in done],
    }
    if state.waiting:
        record["candidates"] = [list(each) for each in state.waiting]
    quarantined = state.quarantined
    if machine.defence is not None and not machine.defence.only_bounds:
        banned = _new_quarantines(machine, machine.defence, state, defence, verdicts)
        quarantined = quarantined.union(banned)
        record["defence"] = [
            {"number": seat.number}
            | {name: getattr(verdict, name) for name in ("scale", "outlier", "agreement")}
            for seat, verdict in zip(seats, verdicts, strict=True)
        ]
        record["quarantined"] = [{"client": c, "reason": why} for c, why in banned.items()]
    memories = {seat.client: seat.local.memory for seat in done if seat.local is not None}
    state = state.without_draw(
        round=state.round + 1,
        method=method,
        defence=defence,
        quarantined=quarantined,
        proposed=(*state.proposed, *state.waiting),
        waiting=(),
    )
    if state.proposed:
        machine = machine.at(state)
        state = replace(state, method=machine.with_new_candidates(state.method))
    record["alpha_sha256"] = alpha_sha256(state.method.alpha)
    # In the alpha exchange `finished` is not called: a client's false alpha could end the run.
    search_ended = machine.losses_exchange and machine.method.finished(state.method)
    if state.round >= machine.spec.rounds or search_ended:
        cap = None if state.account.cap is None else state.account.cap.queries
        most = machine.planned_queries if cap is None else cap
        left = most - state.account.spent.queries if search_ended else 0
        reason = f"the search ended by itself; {left:,} of {most:,} queries are left"
        state = state.end("completed", reason if left > 0 else None, now)
    return Result(
        state=state,
        finished=FinishedRound(
            report=report, clients=tuple(seat.client for seat in seats), record=record
        ),
        memories={c: m for c, m in memories.items() if m} if machine.remembers_clients else {},
    )


def _judge(
    machine: RoundMachine, state: RunState, seats: Sequence[Seat]
) -> tuple[list[Seat], Memory, list[Admitted]]:
    if machine.defence is None:
        return list(seats), state.defence, []
    contributions = [_contribution(machine, state, seat) for seat in seats]
    verdicts, memory = machine.defence.admit(state.method.alpha, contributions, state.defence)
    kept = [_apply_verdict(seat, verdict) for seat, verdict in zip(seats, verdicts, strict=True)]
    return kept, memory, verdicts


def _contribution(machine: RoundMachine, state: RunState, seat: Seat) -> Contribution:
    if machine.defence is not None and machine.defence.only_bounds:
        alpha = (seat.local or state.method).alpha
        return Contribution(client=seat.client, alpha=alpha, mean_loss=seat.mean_loss)
    compared = [np.array(losses, dtype=np.float64) for losses in seat.losses]
    advantage = None
    # If there was one local step, or the method has a memory, the defence judges the losses of the
    # first step. Otherwise it judges the change of alpha.
    if compared and (len(compared) == 1 or machine.method.shares_memory):
        first = replace(seat, local=None, step=0, num_samples=len(compared[0]))
        asked = machine.candidates(state, first)
        advantage = drawn_advantage(asked, machine.clipped(compared[0]))
    # Equal numbers can have a standard deviation above 0, because their mean is rounded.
    spreads = [float(np.std(step)) if np.ptp(step) else 0.0 for step in compared]
    return Contribution(
        client=seat.client,
        alpha=(seat.local or state.method).alpha,
        mean_loss=seat.mean_loss,
        advantage=advantage,
        spread=max(spreads) if spreads else None,
    )


def _apply_verdict(seat: Seat, admitted: Admitted) -> Seat:
    if admitted.outlier:
        return replace(seat, local=None)
    if admitted.scale == 1.0 or seat.local is None:
        return seat
    return replace(seat, local=State(alpha=admitted.alpha, memory=seat.local.memory))


def _new_quarantines(
    machine: RoundMachine,
    defence: Defence,
    state: RunState,
    memory: Memory,
    verdicts: Sequence[Admitted],
) -> Mapping[int, str]:
    # After an operator has lifted a quarantine, only a new rejected update puts the client back.
    suspects = {verdict.client for verdict in verdicts if verdict.outlier}
    outliers = sorted(defence.quarantined(memory) & suspects)
    # More than half of the clients, and enough clients for a round, stay out of quarantine.
    known = {line.client: line for line in ledger(memory)}
    num_kept = max(len(known) // 2 + 1, machine.spec.participation.clients_per_round)
    room = len(known) - num_kept - len(state.quarantined.intersection(known))
    return {
        client: f"{known[client].outliers} of its {known[client].rounds} updates were rejected"
        for client in outliers[: max(room, 0)]
    }


def _aggregate(
    machine: RoundMachine, state: RunState, seats: Sequence[Seat], weights: list[int] | None
) -> State:
    if not machine.method.shares_memory:
        alphas = [(seat.local or state.method).alpha for seat in seats]
        return State(alpha=machine.method.project(aggregate(alphas, weights)))
    if len(seats) == 1:
        return seats[0].local or state.method
    # Memories cannot be averaged, so the losses of the seats are applied one after another.
    method = state.method
    for seat in seats:
        if seat.local is not None:
            asked = machine.candidates(state, replace(seat, local=None, step=0))
            by_class = seat.by_class[0] if seat.by_class else None
            losses = machine.as_losses(asked, seat.losses[0], by_class)
            method = machine.method.tell(method, asked, losses)
    return method


def _seat_record(machine: RoundMachine, seat: Seat) -> dict[str, Any]:
    names = "number", "client", "num_samples", "weight", "queries", "mean_loss"
    record: dict[str, Any] = {name: getattr(seat, name) for name in names}
    if machine.losses_exchange:
        record["losses"] = [list(losses) for losses in seat.losses]
    return record
