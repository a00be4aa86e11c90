"""Handlers for leases: reserve the cost of model calls in a run's account, and charge it."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import Literal

from fedone_sdk.aggregator.rounds.machine import RoundMachine, find_seat
from fedone_sdk.aggregator.rounds.run_state import Closed, Result, RunState, Seat
from fedone_sdk.budget import NOTHING, Account, Usage
from fedone_sdk.errors import BudgetExhausted, ProblemError
from fedone_sdk.messages import ProposerReport

_REFLECTION = "reflection"
"""The item of `Seat.calls` for a reflection; all other items have digests of requests."""

_REPEATED = "repeated/"
"""Prefix of the digest in `Seat.calls` of a request that was sent again."""


def release(
    machine: RoundMachine,
    state: RunState,
    seat: Seat,
    reason: str,
    reported: Usage | None,
    *,
    said: str | None = None,
) -> tuple[Seat, Result[None]]:
    """End a seat's open assignment, if it has one, without an update, and settle its lease."""
    if seat.phase != "working" or seat.assignment_id is None:
        return seat, Result(state=state)
    closed = Closed(assignment_id=seat.assignment_id, client=seat.client, reason=reason, said=said)
    spent = lease_cost(machine, state, seat, reported, answered=False)
    account = state.account.settle(seat.assignment_id, spent)
    seat = seat.settled("offered", spent)
    return seat, Result(state=state.with_seat(seat, account=account), closed=(closed,))


def through_gateway(machine: RoundMachine, seat: Seat) -> bool:
    """Whether a seat's client has declared that it queries the server's model."""
    return machine.gateway_model is not None and not seat.own_model


def lease_cost(
    machine: RoundMachine,
    state: RunState,
    seat: Seat,
    reported: Usage | None,
    *,
    answered: bool,
    proposed: bool = False,
) -> Usage:
    """Return what a seat's lease costs when it ends; `answered` says that it ends by an update.

    If the client uses the gateway, its gateway calls are charged, and pending calls cost their
    upper bound. If the client has its own model, it reports its usage (`reported`):

    - An update costs the whole lease, or the reported usage if the run trusts reports.
    - A decline costs the reported usage.
    - Without a report, the gateway calls are charged if the run has a gateway, else the lease.

    If `seat.reflects`, the lease includes one query to score a new candidate. This query is charged
    only if the client reports it or sends a candidate.
    """
    lease = state.account.leases[seat.assignment_id or ""]
    queries = 0 if reported is None else reported.queries
    if seat.reflects and answered and not proposed and queries <= seat.num_queries:
        # The bound may have risen since the claim; `beyond` then returns no negative amount.
        lease = lease.beyond(machine.worst_query)
    metered = seat.used + seat.max_pending
    has_gateway = machine.gateway_model is not None
    trusted = machine.spec.participation.own_models == "trusted"
    if through_gateway(machine, seat) or (has_gateway and reported is None):
        return metered
    if reported is None or (answered and not trusted):
        return lease.at_least(metered)
    # A trusted report may exceed the lease if there is no gateway, but not in queries.
    bounded = has_gateway or not trusted
    most = lease if bounded else reported.model_copy(update={"queries": lease.queries})
    return (reported - reported.beyond(most)).at_least(metered)


def reserve_call(
    machine: RoundMachine,
    state: RunState,
    now: float,
    *,
    assignment_id: str,
    call: str,
    reservation_id: str,
    worst: Usage,
) -> Result[None]:
    """Reserve the upper bound on the cost of a gateway call.

    `call` identifies the request; the queries of a repeated request are not counted again.
    `reservation_id` starts with the replica's id. If it is in use, its amount grows by `worst`.
    """
    seat, lease = find_seat(state, assignment_id), state.account.leases[assignment_id]
    queries = new_queries(state, assignment_id, call, worst.queries)
    sent = seat.sent.get(reservation_id, NOTHING) + worst.without_queries()
    repeated = {_REPEATED + call} if worst.queries and call in seat.calls else frozenset()
    seat = replace(
        seat,
        calls=seat.calls | {call} | repeated,
        sent={**seat.sent, reservation_id: sent},
        used=seat.used + Usage(queries=queries),
    )
    # Repeated requests may cost more than the lease. Then the lease grows, within the caps.
    missing = (seat.used + seat.max_pending).beyond(lease)
    try:
        account = state.account.add(assignment_id, missing)
    except BudgetExhausted as exc:
        raise ProblemError("lease_exhausted", str(exc)) from exc
    return Result(state=state.with_seat(seat, account=account))


def begin_reflection(
    machine: RoundMachine, state: RunState, now: float, *, assignment_id: str
) -> Result[None]:
    """Record that the server writes a candidate for an assignment; refuse a second request."""
    seat = find_seat(state, assignment_id)
    if _REFLECTION in seat.calls:
        raise ProblemError("run_conflict", "a reflection was already requested for this assignment")
    return Result(state=state.with_seat(replace(seat, calls=seat.calls | {_REFLECTION})))


def new_queries(
    state: RunState, assignment_id: str, call: str, queries: int, pending: int = 0
) -> int:
    """Return how many queries of a gateway call are new, or refuse the call.

    A repeated request costs money again, but has no new queries. `pending` is the number of queries
    of other calls that are admitted, but not reserved yet.
    """
    seat = find_seat(state, assignment_id)
    if not state.running:
        # The reason is left out: it may have a provider's message that quotes another device.
        status = "paused" if state.paused else state.status
        raise ProblemError("run_conflict", f"the run is {status}")
    queries = 0 if call in seat.calls else queries
    left = state.account.leases[assignment_id].queries - seat.used.queries - pending
    if queries > left:
        raise ProblemError(
            "lease_exhausted", f"{queries} queries were sent, the lease has {left} left"
        )
    return queries


def settle_call(
    machine: RoundMachine,
    state: RunState,
    now: float,
    *,
    assignment_id: str,
    reservation_id: str,
    used: Usage,
    reserved: Usage,
) -> Result[None]:
    """Charge the cost of a gateway call, except its queries, which `reserve_call` has counted."""
    seat = state.seat_with(assignment_id)
    if seat is None or reservation_id not in seat.sent:
        # The seat or the replica was lost, and `reserved` was charged. The bill may be higher.
        if (missing := used.beyond(reserved)) == NOTHING:
            return Result(state=state)
        return Result(state=replace(state, account=state.account.charge(missing)))
    sent = {other: worst for other, worst in seat.sent.items() if other != reservation_id}
    seat = replace(seat, sent=sent, used=seat.used + used)
    account = state.account.raise_lease(assignment_id, seat.used + seat.max_pending)
    return Result(state=state.with_seat(seat, account=account))


def return_queries(
    machine: RoundMachine,
    state: RunState,
    now: float,
    *,
    assignment_id: str,
    call: str,
    queries: int,
) -> Result[None]:
    """Return the queries of a failed gateway call to the lease; a later call uses them again.

    They stay counted if the request was sent twice, because the other call may be answered.
    """
    seat = state.seat_with(assignment_id)
    if seat is None or call not in seat.calls or _REPEATED + call in seat.calls:
        return Result(state=state)
    used = seat.used - Usage(queries=queries)
    return Result(state=state.with_seat(replace(seat, calls=seat.calls - {call}, used=used)))


def _is_lost(reservation_id: str, alive: Set[str]) -> bool:
    return reservation_id.partition("/")[0] not in alive


def has_lost_calls(state: RunState, alive: Set[str]) -> bool:
    """Whether pending calls of the run belong to a replica that has exited."""
    ids = [*state.evaluation.leases, *(each for seat in state.seats for each in seat.sent)]
    return any(_is_lost(each, alive) for each in ids)


def charge_lost(state: RunState, alive: Set[str]) -> RunState:
    """Charge the upper bound of exited replicas' pending calls, which may have been sent."""
    account, evaluation = state.account, state.evaluation
    for lease_id, worst in state.evaluation.leases.items():
        if _is_lost(lease_id, alive):
            account = account.settle(lease_id, worst.without_queries())
            evaluation = evaluation.settle(lease_id, worst)
    seats = []
    for seat in state.seats:
        lost = [each for each in seat.sent if _is_lost(each, alive)]
        gone = sum((seat.sent[each] for each in lost), NOTHING)
        sent = {each: worst for each, worst in seat.sent.items() if each not in lost}
        seats.append(replace(seat, used=seat.used + gone, sent=sent) if lost else seat)
    return replace(state, account=account, evaluation=evaluation, seats=tuple(seats))


ModelRole = Literal["proposer", "judge"]
"""A model other than the run's model. Reports list its cost separately, without queries."""


def reserve_evaluation(
    machine: RoundMachine,
    state: RunState,
    now: float,
    *,
    lease_id: str,
    worst: Usage,
    billed: bool = False,
) -> Result[None]:
    """Reserve the upper bound `worst` on the cost of an evaluation, or of another model's call.

    With `billed`, `worst` is the part of a bill beyond its bound, and may exceed a cap.
    """
    if lease_id in state.evaluation.leases:
        return Result(state=state)  # An earlier attempt was stored.
    add = Account.raise_lease if billed else Account.add
    try:
        state = replace(
            state,
            evaluation=add(state.evaluation, lease_id, worst),
            account=add(state.account, lease_id, worst.without_queries()),
        )
    except BudgetExhausted as exc:
        raise ProblemError("lease_exhausted", str(exc)) from exc
    return Result(state=state)


def settle_evaluation(
    machine: RoundMachine,
    state: RunState,
    now: float,
    *,
    lease_id: str,
    used: Usage,
    role: ModelRole | None = None,
) -> Result[None]:
    """Charge the cost of an evaluation, or of a call of the model in `role`."""
    if lease_id not in state.evaluation.leases:
        return Result(state=state)  # Settled, or charged in full for a lost replica.
    account = state.account.settle(lease_id, used.without_queries())
    evaluation = state.evaluation.settle(lease_id, used)
    if role == "proposer":
        state = replace(state, proposer=(state.proposer or ProposerReport()).and_then(spent=used))
    elif role == "judge":
        state = replace(state, judge=(state.judge or NOTHING) + used)
    return Result(state=replace(state, account=account, evaluation=evaluation))
