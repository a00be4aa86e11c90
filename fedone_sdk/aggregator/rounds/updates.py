"""Updates of clients: the handler that checks an update, applies it and settles the lease."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np

from fedone_sdk.aggregator.rounds.by_class import ByClass
from fedone_sdk.aggregator.rounds.lifecycle import close_seat
from fedone_sdk.aggregator.rounds.machine import RoundMachine, find_seat, invalid
from fedone_sdk.aggregator.rounds.run_state import Closed, Lineage, Result, RunState, Seat
from fedone_sdk.aggregator.rounds.seats import count_update, renew_offers, vacate
from fedone_sdk.aggregator.rounds.spending import lease_cost, through_gateway
from fedone_sdk.algorithms import State
from fedone_sdk.budget import Usage
from fedone_sdk.errors import ProblemError
from fedone_sdk.messages import MIN_SCORED_SHARE, AlphaUpdate, LossesUpdate, ProposerReport, Receipt
from fedone_sdk.messages.tensor import from_wire

_MAX_ALPHA = 1e6
"""Largest allowed entry of alpha in a message."""


def accept(
    machine: RoundMachine,
    state: RunState,
    now: float,
    *,
    assignment_id: str,
    update: AlphaUpdate | LossesUpdate,
    body_sha256: str,
    unfit: bool = False,
) -> Result[Receipt]:
    """Accept or refuse an update; `unfit` says that its proposed text cannot be a candidate."""
    seat = find_seat(state, assignment_id)
    if state.model is not None and update.model != state.model:
        other = f"the run scores with {state.model!r}, the device with {update.model!r}"
        reason = "the device scores with another model"
        lost = vacate(machine, state, seat, reason, update.usage, now, said=other)
        return replace(cast(Result[Any], lost), refusal=ProblemError("model_mismatch", other))
    _check_scored(update)
    step = _check_update(machine, state, seat, update)
    tried = isinstance(update, LossesUpdate) and update.proposal is not None
    spent = lease_cost(machine, state, seat, update.usage, answered=True, proposed=tried)
    lease = state.account.leases[assignment_id]
    if through_gateway(machine, seat) and spent.queries < seat.num_queries:
        # Equal requests (for equal prompts on equal rows) count once, so fewer may be honest.
        least = len(np.unique(machine.candidates(state, seat).prompts, axis=0))
        if spent.queries < least and not machine.admits(own_model=True):
            raise invalid(
                f"losses: the gateway answered only {spent.queries} of {seat.num_queries} queries; "
                "losses of a model on the device are refused (participation.own_models)"
            )
        at_least = Usage(queries=seat.num_queries)
        spent = lease if spent.queries < least else spent.at_least(at_least)
    state = replace(state, account=state.account.settle(assignment_id, spent), model=update.model)
    proposed = _queue_proposal(machine, state, seat, update, unfit=unfit)
    state = proposed.state
    counted = count_update(machine, state, seat.client, now)
    state = renew_offers(machine, counted.state, seat.client, now)
    receipt = Receipt(assignment_id=assignment_id, round=state.round, body_sha256=body_sha256)
    closed = Closed(
        assignment_id=assignment_id, client=seat.client, reason="accepted", receipt=receipt
    )
    steps_done = seat.step + seat.num_steps
    seat = seat.settled(
        "done",
        spent,
        step=steps_done,
        local=step.local,
        losses=seat.losses + step.losses,
        by_class=seat.by_class + step.by_class,
        weight=update.num_examples,
        mean_loss=seat.mean_loss + (step.mean_loss - seat.mean_loss) * seat.num_steps / steps_done,
    )
    if machine.losses_exchange and steps_done < machine.spec.method.local_steps:
        # The next local step is a new assignment for the same client.
        seat = replace(seat, phase="offered", due=now + machine.CLAIM_TIMEOUT_S)
        later: Result[None] = Result(state=state.with_seat(seat))
    else:
        later = close_seat(machine, state, seat, now)
    return replace(
        cast(Result[Any], later),
        closed=(closed, *later.closed),
        log=(*counted.log, *proposed.log, *later.log),
        reply=receipt,
    )


def _queue_proposal(
    machine: RoundMachine,
    state: RunState,
    seat: Seat,
    update: AlphaUpdate | LossesUpdate,
    *,
    unfit: bool,
) -> Result[None]:
    """Queue the candidate that a client wrote, which other clients will score."""
    slot, done = machine.spec.prompt.proposed_slot, state.proposer or ProposerReport()
    if unfit:
        return Result(state=replace(state, proposer=done.and_then(dropped=1)))
    if isinstance(update, AlphaUpdate) or update.proposal is None or slot is None:
        return Result(state=state)
    proposal = update.proposal
    if not seat.reflects or proposal.parent >= seat.num_samples:
        raise invalid("proposal: the assignment asks for no proposal")
    if proposal.text in state.added or not machine.may_propose(state, seat.client):
        return Result(state=replace(state, proposer=done.and_then(dropped=1)))
    parents = machine.candidates(state, seat).prompts[:, machine.proposed_position]
    origin = Lineage(proposal.text, seat.client, (int(parents[proposal.parent]),))
    state = replace(
        state,
        waiting=(*state.waiting, (slot, proposal.text)),
        lineage=(*state.lineage, origin),
        proposer=done.and_then(added=1),
    )
    return Result(state=state, log=(origin.line(state.round, slot),))


def _check_scored(update: AlphaUpdate | LossesUpdate) -> None:
    counts = update.scored
    total = counts.scored + counts.failed + counts.vetoed
    if not total or counts.scored < MIN_SCORED_SHARE * total:
        raise invalid(
            f"scored: only {counts.scored} of {total} examples were scored; under "
            f"{MIN_SCORED_SHARE:.0%} the assignment must be declined"
        )


class _StepResult(NamedTuple):
    """The content of a valid update; without losses in the alpha exchange."""

    local: State
    mean_loss: float
    losses: tuple[tuple[float, ...], ...] = ()
    by_class: tuple[ByClass, ...] = ()


def _check_update(
    machine: RoundMachine, state: RunState, seat: Seat, update: AlphaUpdate | LossesUpdate
) -> _StepResult:
    """Check an update against its assignment; return its content."""
    if isinstance(update, LossesUpdate) and machine.losses_exchange:
        batch_size = machine.spec.method.batch_size
        if update.scored.scored > batch_size:  # Otherwise the losses would get too much weight.
            raise invalid(
                f"scored: {update.scored.scored} examples, a mini-batch has at most {batch_size}"
            )
        if len(update.losses) != seat.num_samples:
            raise invalid(f"losses: {len(update.losses)} were sent for {seat.num_samples} prompts")
        by_class = _check_by_class(machine, update)
        candidates = machine.candidates(state, seat)
        losses = machine.as_losses(candidates, update.losses, by_class)
        return _StepResult(
            local=machine.method.tell(seat.local or state.method, candidates, losses),
            mean_loss=float(np.mean(machine.clipped(update.losses))),
            losses=(update.losses,),
            by_class=() if by_class is None else (by_class,),
        )
    if isinstance(update, AlphaUpdate) and not machine.losses_exchange:
        local = _check_alpha(machine, state, seat, update)
        return _StepResult(local=local, mean_loss=update.mean_loss)
    raise invalid(
        f"exchange: is {update.exchange!r}, the run's is {machine.spec.participation.exchange!r}"
    )


def _check_by_class(machine: RoundMachine, update: LossesUpdate) -> ByClass | None:
    given = update.by_class is not None or bool(update.class_counts)
    if given != machine.calibrates:
        rule = "is missing" if machine.calibrates else "must be left out"
        raise invalid(f"by_class: {rule}; the run's calibration is {machine.spec.calibration.kind}")
    if update.by_class is None:
        return None
    labels = machine.num_labels
    if len(update.class_counts) != labels:
        number = len(update.class_counts)
        raise invalid(f"class_counts: {number} were sent for {labels} labels")
    by_class = ByClass(update.by_class, update.class_counts, update.scored.scored)
    private = machine.spec.privacy is not None
    try:
        by_class.check(update.losses, groups=machine.num_groups, private=private)
    except ValueError as exc:
        raise invalid(str(exc)) from exc
    return by_class


def _check_alpha(machine: RoundMachine, state: RunState, seat: Seat, update: AlphaUpdate) -> State:
    array = update.alpha
    if array.dtype != "float32" or array.shape != machine.shape:
        form = f"{array.dtype} {list(array.shape)}"
        raise invalid(f"alpha: is {form}, the run's is float32 {list(machine.shape)}")
    alpha = from_wire(array)
    if not (alpha >= 0).all() or not alpha.any(axis=1).all():
        raise invalid("alpha: no entry may be negative, no row may be all 0")
    if alpha.max() > _MAX_ALPHA:
        raise invalid(f"alpha: an entry is above {_MAX_ALPHA:g}")
    if not np.array_equal(machine.method.project(alpha), alpha):
        raise invalid("alpha: the method does not allow these values")
    before = state.method.alpha
    step = float(np.abs(alpha.astype(np.float64) - before).max())
    longest = machine.longest_step(before, seat.num_steps)
    if step > longest:
        allowed = f"the limit for {seat.num_steps} local steps is {longest:g}"
        raise invalid(f"alpha: an entry changed by {step:g}; {allowed}")
    return State(alpha=alpha)
