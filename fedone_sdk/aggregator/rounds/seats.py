"""Handlers for seats (the places of a round): draw clients, assign work, take a seat back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from fedone_sdk.aggregator.rounds.lifecycle import close_seat, end_early
from fedone_sdk.aggregator.rounds.machine import RoundMachine, find_seat
from fedone_sdk.aggregator.rounds.run_state import MAX_UNFIT, Result, RunState, Seat, Strikes
from fedone_sdk.aggregator.rounds.spending import release
from fedone_sdk.algorithms import Memory, State, select, stream
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.errors import ProblemError
from fedone_sdk.messages import AlphaAssignment, Assignment, LossesAssignment, Renewal, Step
from fedone_sdk.messages.tensor import prompts_to_wire, to_wire

T = TypeVar("T")

# Draws


def fill(
    machine: RoundMachine,
    state: RunState,
    now: float,
    *,
    available: Mapping[int, int],
    enrolled: int | None = None,
) -> Result[None]:
    """Draw available clients for vacant seats; end the run if no seat can ever be filled.

    `available` has the number of examples of each waiting client, by enrolment index. `enrolled` is
    the number of all clients, connected or not; None if it is unknown.
    """
    if not machine.needs_seating(state):
        return Result(state=state)
    if machine.is_exhausted(state):
        summary = reason = None
        if state.lost and not (state.round or any(seat.step for seat in state.seats)):
            found = (f"no assignment ended with an update; {text}" for text in state.last_lost)
            summary, reason = found
        return end_early(machine, state, "budget_exhausted", reason, now, summary=summary)
    if _is_failing(machine, state, available, now):
        summary, reason = (f"too many assignments were lost; {text}" for text in state.last_lost)
        return end_early(machine, state, "failed", reason, now, summary=summary)
    if last := _last_unfit(machine, state):
        summary = "no client fits the run"
        reason = f"{summary}; the last client declined: {last}"
        return end_early(machine, state, "failed", reason, now, summary=summary)
    if enrolled is not None and (spent := _num_exhausted(machine, state, enrolled)):
        reason = (
            f"privacy.max_epsilon: {spent} devices have reached it, and no other device is left; "
            "enrol more devices, then resume the run"
        )
        return end_early(machine, state, "stopped", reason, now)
    # Filtered only if necessary, because thousands of clients may be available.
    releases = machine.releases
    if state.quarantined or state.unfit or state.strikes or releases is not None:
        available = {
            client: num_examples
            for client, num_examples in available.items()
            if client not in state.quarantined
            and client not in state.unfit
            and not state.is_aside(client, now)
            and (releases is None or releases.has_room(state.releases.get(client, 0)))
        }
    return Result(state=_draw(machine, state, available, now))


def _is_failing(
    machine: RoundMachine, state: RunState, available: Mapping[int, int], now: float
) -> bool:
    """Whether too many assignments in a row were lost, and each waiting client has lost one."""
    if state.lost <= machine.MAX_LOST or not available:
        return False
    return all(client in state.drawn_last or state.is_aside(client, now) for client in available)


def _last_unfit(machine: RoundMachine, state: RunState) -> str | None:
    """Return why the last client declined, if all ``data.num_clients`` clients are unfit."""
    data = machine.spec.data
    if data is None or len(state.unfit) < min(data.num_clients, MAX_UNFIT):
        return None
    return list(state.unfit.values())[-1]


def _num_exhausted(machine: RoundMachine, state: RunState, enrolled: int) -> int:
    """Return how many devices have reached ``max_epsilon``; 0 if others can fill the seats."""
    if machine.releases is None or any(seat.phase != "done" for seat in state.seats):
        return 0
    spent = machine.releases.spent_up(state.releases)
    out = spent | state.quarantined
    if machine.spec.participation.selection == "uniform":  # A client gets one seat per round.
        out |= {seat.client for seat in state.seats}
    expected = max(enrolled, machine.min_clients)
    return len(spent) if machine.vacancies(state) and len(out) >= expected else 0


def _draw(
    machine: RoundMachine, state: RunState, available: Mapping[int, int], now: float
) -> RunState:
    part = machine.spec.participation
    vacant = machine.vacancies(state)
    waiting_to_start = state.round == 0 and not state.fills and not state.rollbacks
    if not vacant or (waiting_to_start and len(available) < machine.min_clients):
        return state
    uniform = part.selection == "uniform"
    if uniform and state.seats:
        seated = {seat.client for seat in state.seats}
        available = {c: count for c, count in available.items() if c not in seated}
    # A client that lost a seat in this round is drawn again only if no other is available.
    pool = available
    if state.drawn_last:
        others = {c: count for c, count in available.items() if c not in state.drawn_last}
        pool = others or available
    count = min(vacant, len(pool)) if uniform else vacant
    if not count or not pool:
        return state
    rng = stream(machine.seed_of(state, "selection", 0, state.fills))
    chosen = select(pool, count, rng=rng, kind=part.selection)
    taken = {seat.number for seat in state.seats}
    free = [number for number in range(len(taken) + vacant) if number not in taken]
    due = now + machine.CLAIM_TIMEOUT_S
    seats = tuple(
        Seat(
            number=number,
            client=client,
            phase="offered",
            due=due,
            weight=available[client],
            whole=machine.scores_whole(available[client]),
        )
        for number, client in zip(free, chosen, strict=False)
    )
    return replace(state, seats=state.seats + seats, fills=state.fills + 1)


# Assignments


def assign(
    machine: RoundMachine,
    state: RunState,
    now: float,
    *,
    client: int,
    assignment_id: str,
    own_model: bool = False,
    memory: Memory | None = None,
    available: Mapping[int, int] | None = None,
    enrolled: int | None = None,
) -> Result[Assignment | None]:
    """Assign the work of a client's seat. If the client has no seat, first draw clients.

    A lease reserves the cost of the work. A repeated claim gets the same assignment and lease.
    `memory` is the method's memory after the client's last work, in the losses exchange.
    `available` and `enrolled` are the arguments of `fill`.
    """
    drawn: Result[Any] = Result(state=state)
    if available and state.seat_of(client) is None:
        drawn = fill(machine, state, now, available=available, enrolled=enrolled)
    state = drawn.state
    machine = machine.at(state)
    seat = state.seat_of(client)
    if seat is None or not state.running:
        return drawn
    if seat.phase == "offered":
        state = machine.with_current_plan(state)
        machine = machine.at(state)
        affordable = machine.affordable_work(state, seat.local)
        if affordable is None:
            # The seat waits until another client's lease ends and returns budget.
            return replace(drawn, state=state)
        samples, steps = affordable
        worst = machine.worst_query * (samples * steps)
        reflects = (
            machine.may_propose(state, client)
            and state.account.affordable(machine.worst_query, samples + 1) > samples
        )
        seat = replace(
            seat,
            phase="working",
            due=now + machine.spec.participation.deadline_s,
            assignment_id=assignment_id,
            own_model=own_model,
            num_samples=samples,
            num_steps=steps,
            reflects=reflects,
            renewals=0,
            local=seat.local or _saved_local(machine, state, client, memory or {}),
        )
        lease = worst + machine.worst_query * reflects
        releases = machine.releases
        state = state.with_seat(
            seat,
            account=state.account.reserve(assignment_id, lease),
            releases=releases.counted(state.releases, seat) if releases else state.releases,
            started_at=now if state.started_at is None else state.started_at,
        )
    elif own_model and not seat.own_model:  # The client has restarted, now with a model.
        seat = replace(seat, own_model=True)
        state = state.with_seat(seat)
    return replace(drawn, state=state, reply=assignment(machine, state, seat, now))


def _saved_local(
    machine: RoundMachine, state: RunState, client: int, memory: Memory
) -> State | None:
    if machine.remembers_clients:
        for seat in state.seats:  # Finished seats are in the order of their updates.
            if seat.client == client and seat.phase == "done" and seat.local is not None:
                memory = seat.local.memory
    return replace(state.method, memory=memory) if memory else None


def assignment(machine: RoundMachine, state: RunState, seat: Seat, now: float) -> Assignment:
    """Return the assignment of a working seat."""
    common: dict[str, Any] = {
        "assignment_id": seat.assignment_id,
        "run_id": machine.run_id,
        "round": state.round,
        "deadline_s": round(max(seat.due - now, 0.001), 3),
        "leased_queries": seat.num_queries + seat.reflects,
        "vocabulary_version": len(state.proposed),
    }
    if machine.losses_exchange:
        candidates = machine.candidates(state, seat)
        biases = candidates.biases
        return LossesAssignment(
            **common,
            prompts=prompts_to_wire(candidates.prompts, machine.vocab_size),
            biases=None if biases is None else to_wire(biases),
            minibatch_seed=machine.seed(state, seat, "minibatch", seat.step),
            reflect=seat.reflects,
        )
    return AlphaAssignment(
        **common,
        alpha=to_wire(state.method.alpha),
        steps=tuple(
            Step(
                num_samples=seat.num_samples,
                minibatch_seed=machine.seed(state, seat, "minibatch", step),
                prompt_seed=machine.seed(state, seat, "prompts", step),
            )
            for step in range(seat.num_steps)
        ),
    )


def renew(
    machine: RoundMachine, state: RunState, now: float, *, assignment_id: str
) -> Result[Renewal]:
    """Restart an assignment's deadline, up to `RoundMachine.MAX_RENEWALS` times."""
    seat = find_seat(state, assignment_id)
    if seat.renewals >= machine.MAX_RENEWALS:
        raise ProblemError(
            "renewal_refused",
            f"assignment {assignment_id} was renewed {machine.MAX_RENEWALS} times already",
        )
    deadline_s = machine.spec.participation.deadline_s
    seat = replace(seat, due=now + deadline_s, renewals=seat.renewals + 1)
    return Result(state=state.with_seat(seat), reply=Renewal(deadline_s=deadline_s))


# Lost seats


def decline(
    machine: RoundMachine,
    state: RunState,
    now: float,
    *,
    assignment_id: str,
    reason: str,
    usage: Usage = NOTHING,
    unfit: bool = False,
) -> Result[None]:
    """End an assignment that its client declines. An unfit client also loses its other seats."""
    seat = find_seat(state, assignment_id)
    if not state.running:
        status = "paused" if state.paused else state.status
        raise ProblemError("run_conflict", f"the run is {status}; its open work is kept")
    why = "the client declined"
    return vacate(machine, state, seat, why, usage, now, said=reason, unfit=unfit)


def expire(machine: RoundMachine, state: RunState, now: float) -> Result[None]:
    """Vacate the seats whose deadline has passed."""
    result: Result[None] = Result(state=state)
    for seat in state.timed_seats:
        if seat.due <= now and result.state.running:
            lost = vacate(machine, result.state, seat, "the deadline passed", None, now)
            result = result.then(lost)
    return result


def vacate(
    machine: RoundMachine,
    state: RunState,
    seat: Seat,
    reason: str,
    reported: Usage | None,
    now: float,
    *,
    said: str | None = None,
    unfit: bool = False,
) -> Result[None]:
    """Take a seat from its client and charge the seat's lease.

    `reported` is the usage that the client reports, `said` is the client's reason. If the client is
    unfit for the run, it gets no more seats, and the seat does not count as lost.
    """
    was_working, renewals = seat.phase == "working" and not unfit, seat.renewals
    seat, result = release(machine, state, seat, reason, reported, said=said)
    state = renew_offers(machine, result.state, seat.client, now)
    strikes = state.strikes.get(seat.client, Strikes())
    cost = min(1 + renewals, machine.MAX_STRIKES)
    strikes = strikes._replace(recent=max(strikes.recent, cost))
    summary = f"last: {reason}"
    full = summary if said is None else f"{summary}: {said}"
    state = replace(
        state,
        lost=state.lost + was_working,
        last_lost=(summary, full) if was_working else state.last_lost,
        strikes=_newest({**state.strikes, seat.client: strikes}),
        drawn_last=state.drawn_last | {seat.client},
    )
    if unfit:
        state = _exclude_unfit(state, seat, said or reason)
    if seat.step:
        # Earlier local steps of the seat are paid for, so their result is used.
        return result.then(close_seat(machine, state, replace(seat, phase="done"), now))
    return replace(result, state=state.without_seat(seat))


def _exclude_unfit(state: RunState, seat: Seat, reason: str) -> RunState:
    others = {client: why for client, why in state.unfit.items() if client != seat.client}
    for other in state.seats:
        started = other.step or other.phase != "offered" or other.number == seat.number
        if other.client == seat.client and not started:
            state = state.without_seat(other)
    return replace(state, unfit=_newest({**others, seat.client: reason}))


def _newest(clients: Mapping[int, T]) -> dict[int, T]:
    return dict(list(clients.items())[-MAX_UNFIT:])


def count_update(machine: RoundMachine, state: RunState, client: int, now: float) -> Result[None]:
    """After an update of `client`, remove strikes of `client`; other strikes become proven."""
    strikes, log = {}, []
    for other, known in state.strikes.items():
        if other == client:
            after = Strikes(proven=known.proven - 1)
        elif known.recent:
            count = known.recent + known.proven
            after = Strikes(proven=count, until=now + _pause_s(machine, count))
        else:
            after = known
        if after.proven > 0:
            strikes[other] = after
        if after.until > max(known.until, now):
            log.append(("aside", {"client": other, "losses": after.proven, "until": after.until}))
    if state.lost or state.strikes:
        state = replace(state, lost=0, strikes=strikes)
    return Result(state=state, log=tuple(log))


def _pause_s(machine: RoundMachine, count: int) -> float:
    if count < machine.MAX_STRIKES:
        return 0.0
    doublings = min(count - machine.MAX_STRIKES, 32)
    return min(machine.spec.participation.deadline_s * 2.0**doublings, machine.LONGEST_ASIDE_S)


def clear_unfit(machine: RoundMachine, state: RunState, now: float, *, client: int) -> Result[None]:
    """Allow draws of an unfit client again, because its data or requirements have changed."""
    if client not in state.unfit:
        return Result(state=state)
    unfit = {other: why for other, why in state.unfit.items() if other != client}
    return Result(state=replace(state, unfit=unfit))


def renew_offers(machine: RoundMachine, state: RunState, client: int, now: float) -> RunState:
    """After the end of a client's work, restart the claim deadline of its other seats."""
    due = now + machine.CLAIM_TIMEOUT_S
    waiting = [seat for seat in state.seats if (seat.client, seat.phase) == (client, "offered")]
    for seat in waiting:
        state = state.with_seat(replace(seat, due=due))
    return state


# Quarantine


def quarantine(
    machine: RoundMachine, state: RunState, now: float, *, client: int, reason: str
) -> Result[None]:
    """Put a client in quarantine, and remove its seats with their results from the round."""
    result: Result[None] = Result(state=state)
    for seat in state.seats:
        if seat.client == client:
            why = "the client was quarantined"
            seat, released = release(machine, result.state, seat, why, None, said=reason)
            result = result.then(replace(released, state=released.state.without_seat(seat)))
    quarantined = state.quarantined | {client}
    return replace(result, state=replace(result.state, quarantined=quarantined))


def lift_quarantine(
    machine: RoundMachine, state: RunState, now: float, *, client: int
) -> Result[None]:
    """Release a client from quarantine."""
    return Result(state=replace(state, quarantined=state.quarantined - {client}))
