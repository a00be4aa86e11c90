"""Seats of a round: draw clients, vacate seats, quarantine clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fedone_sdk.aggregator.rounds.closing import close_seat
from fedone_sdk.aggregator.rounds.events import (
    Effect,
    QuarantineLifted,
    QuarantineRequested,
    SeatOffered,
    SeatsVacant,
    UnfitCleared,
)
from fedone_sdk.aggregator.rounds.lifecycle import end_early
from fedone_sdk.aggregator.rounds.privacy import may_take_seat
from fedone_sdk.aggregator.rounds.rules import Rules
from fedone_sdk.aggregator.rounds.spending import release
from fedone_sdk.aggregator.rounds.state import MOST_UNFIT, RunState, Seat, Transition
from fedone_sdk.algorithms import select, stream
from fedone_sdk.budget import Usage


def fill_vacancies(rules: Rules, event: SeatsVacant, state: RunState, now: float) -> Transition:
    """Offer vacant seats to available clients; end the run if none can ever be filled."""
    if not state.running:
        return state, ()
    if rules.is_exhausted(state):
        return end_early(rules, state, "budget_exhausted", _no_answer_reason(state), now)
    if reason := _no_fit_reason(rules, state):
        return end_early(rules, state, "failed", reason, now)
    if event.enrolled is not None and (spent := _num_exhausted(rules, state, event.enrolled)):
        reason = (
            f"privacy.max_epsilon: {spent} devices have reached it, and no other is available; "
            "enrol more, then resume the run"
        )
        return end_early(rules, state, "stopped", reason, now)
    available = event.available
    # Filters only when needed: thousands of clients may be available.
    if state.quarantined or state.unfit or rules.releases is not None:
        available = {
            client: held
            for client, held in available.items()
            if client not in state.quarantined
            and client not in state.unfit
            and may_take_seat(rules.releases, state.releases, client)
        }
    return _fill_vacant(rules, state, available, now)


def _no_answer_reason(state: RunState) -> str | None:
    """Return the reason of a run that spent its budget without a single answer."""
    if state.round or not state.lost or any(seat.step for seat in state.seats):
        return None
    return f"no backend answered: {state.lost} assignments failed"


def _no_fit_reason(rules: Rules, state: RunState) -> str | None:
    """Return why no client fits, once all clients of a run with ``data`` have declined."""
    data = rules.spec.data
    if data is None or len(state.unfit) < min(data.num_clients, MOST_UNFIT):
        return None
    return f"no client fits; last: {list(state.unfit.values())[-1]}"


def _num_exhausted(rules: Rules, state: RunState, enrolled: int) -> int:
    """Return the number of devices at ``max_epsilon`` if no seat can be filled; else 0."""
    if rules.releases is None or any(seat.phase != "done" for seat in state.seats):
        return 0
    spent = rules.releases.spent_up(state.releases)
    out = spent | state.quarantined
    if rules.spec.participation.selection == "uniform":  # A client gets one seat per round.
        out |= {seat.client for seat in state.seats}
    expected = max(enrolled, rules.min_clients)
    return len(spent) if rules.vacancies(state) and len(out) >= expected else 0


def _fill_vacant(
    rules: Rules, state: RunState, available: Mapping[int, int], now: float
) -> Transition:
    part = rules.spec.participation
    vacant = rules.vacancies(state)
    waiting_to_start = state.round == 0 and not state.fills and not state.rollbacks
    if not vacant or (waiting_to_start and len(available) < rules.min_clients):
        return state, ()
    uniform = part.selection == "uniform"
    if uniform and state.seats:
        seated = {seat.client for seat in state.seats}
        available = {c: held for c, held in available.items() if c not in seated}
    # A client that gave a seat up is drawn again only if no other is available.
    pool = available
    if state.passed:
        fresh = {client: held for client, held in available.items() if client not in state.passed}
        pool = fresh or available
    count = min(vacant, len(pool)) if uniform else vacant
    if not count or not pool:
        return state, ()
    chosen = select(pool, count, rng=stream(rules.selection_seed(state)), kind=part.selection)
    taken = {seat.slot for seat in state.seats}
    slots = [slot for slot in range(len(taken) + vacant) if slot not in taken]
    due = now + rules.CLAIM_TIMEOUT_S
    seats = tuple(
        Seat(slot=slot, client=client, phase="offered", due=due, weight=available[client])
        for slot, client in zip(slots, chosen, strict=False)
    )
    state = replace(state, seats=state.seats + seats, fills=state.fills + 1)
    return state, tuple(SeatOffered(client=seat.client) for seat in seats)


def vacate(
    rules: Rules,
    state: RunState,
    seat: Seat,
    reason: str,
    reported: Usage | None,
    now: float,
    *,
    unfit: str | None = None,
) -> Transition:
    """Take a seat from its client and charge its lease.

    A client with a reason in `unfit` gets no other seat of the run. It declines before it queries a
    model, so this costs nothing and does not count towards `Rules.MAX_LOST`.
    """
    was_working = seat.phase == "working" and unfit is None
    state, seat, effects = release(rules, state, seat, reason, reported, unasked=unfit is not None)
    state = renew_offers(rules, state, seat.client, now)
    state = replace(state, lost=state.lost + was_working, passed=state.passed | {seat.client})
    if unfit is not None:
        state = _without_unfit(state, seat, unfit)
    more: tuple[Effect, ...] = ()
    if state.lost > rules.MAX_LOST:
        state, more = end_early(rules, state, "failed", f"last: {reason}", now)
    elif seat.step:
        # Earlier local steps are paid for: the seat closes with their result.
        state, more = close_seat(rules, state, replace(seat, phase="done"), now)
    else:
        state = state.without_seat(seat)
    return state, effects + more


def _without_unfit(state: RunState, seat: Seat, reason: str) -> RunState:
    """Record an unfit client and remove its other offered seats."""
    others = {client: why for client, why in state.unfit.items() if client != seat.client}
    newest = list(others.items())[-(MOST_UNFIT - 1) :]
    for other in state.seats:
        started = other.step or other.phase != "offered" or other.slot == seat.slot
        if other.client == seat.client and not started:
            state = state.without_seat(other)
    return replace(state, unfit={**dict(newest), seat.client: reason})


def clear_unfit(rules: Rules, event: UnfitCleared, state: RunState, now: float) -> Transition:
    """Let an unfit client be drawn again."""
    if event.client not in state.unfit:
        return state, ()
    return replace(state, unfit={c: why for c, why in state.unfit.items() if c != event.client}), ()


def renew_offers(rules: Rules, state: RunState, client: int, now: float) -> RunState:
    """Restart the claim deadline of a client's other seats, after its work has ended."""
    due = now + rules.CLAIM_TIMEOUT_S
    waiting = [seat for seat in state.seats if (seat.client, seat.phase) == (client, "offered")]
    for seat in waiting:
        state = state.with_seat(replace(seat, due=due))
    return state


def quarantine(rules: Rules, event: QuarantineRequested, state: RunState, now: float) -> Transition:
    """Put a client in quarantine and remove its seats with their results."""
    effects: list[Effect] = []
    for seat in state.seats:
        if seat.client == event.client:
            reason = f"the client was quarantined: {event.reason}"
            state, seat, closed = release(rules, state, seat, reason, None)
            effects.extend(closed)
            state = state.without_seat(seat)
    return replace(state, quarantined=state.quarantined | {event.client}), tuple(effects)


def lift_quarantine(
    rules: Rules, event: QuarantineLifted, state: RunState, now: float
) -> Transition:
    """Release a client from quarantine."""
    return replace(state, quarantined=state.quarantined - {event.client}), ()
