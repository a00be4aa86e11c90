"""The end of a round: defences, aggregation, the server step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedone_sdk.aggregator.rounds.admission import admission_record, admitted_seat, contribution
from fedone_sdk.aggregator.rounds.events import (
    ClientQuarantined,
    Effect,
    MemorySaved,
    RoundFinished,
)
from fedone_sdk.aggregator.rounds.prompts import admit_candidates, candidates
from fedone_sdk.aggregator.rounds.rules import Rules
from fedone_sdk.aggregator.rounds.state import RunState, Seat, Transition
from fedone_sdk.algorithms import Memory, State, aggregate, alpha_sha256
from fedone_sdk.algorithms.defence import Admitted, Defence, ledger
from fedone_sdk.algorithms.estimator import drawn_advantage
from fedone_sdk.messages import RoundReport


def close_seat(rules: Rules, state: RunState, seat: Seat, now: float) -> Transition:
    """Store a finished seat; the last one ends the round."""
    # Appended last: the log keeps the order in which seats were finished.
    state = replace(state, seats=(*state.without_seat(seat).seats, seat))
    if rules.vacancies(state) or any(s.phase != "done" for s in state.seats):
        return state, ()
    return finish_round(rules, state, now)


def _save_memories(rules: Rules, state: RunState) -> tuple[Effect, ...]:
    """Return effects that save the method memory of the clients whose seats are done."""
    if not rules.remembers_clients:
        return ()
    memories = {s.client: s.local.memory for s in state.seats if s.phase == "done" and s.local}
    return tuple(MemorySaved(client=client, memory=m) for client, m in memories.items() if m)


def finish_round(rules: Rules, state: RunState, now: float) -> Transition:
    """Aggregate the finished seats and start the next round."""
    # Sorted by enrolment index: floating-point sums depend on the order.
    seats = sorted(
        (seat for seat in state.seats if seat.phase == "done"),
        key=lambda seat: (seat.client, seat.slot),
    )
    weights = (
        [seat.weight for seat in seats]
        if rules.spec.participation.aggregation == "examples"
        else None
    )
    admitted, defence, verdicts = _judge(rules, state, seats)
    method = _aggregate(rules, state, admitted, weights)
    report = RoundReport(
        round=state.round,
        client_id="",
        queries=sum(seat.queries for seat in seats),
        mean_loss=float(np.average([s.mean_loss for s in seats], weights=weights)),
    )
    record: dict[str, Any] = {
        "round": state.round,
        "seats": [_seat_record(rules, seat) for seat in state.seats if seat.phase == "done"],
    }
    if state.waiting:
        record["candidates"] = [list(each) for each in state.waiting]
    banned: tuple[ClientQuarantined, ...] = ()
    if rules.defence is not None:
        banned = _quarantine(rules, rules.defence, state, defence, verdicts)
        record["defence"] = [
            admission_record(seat, one) for seat, one in zip(seats, verdicts, strict=True)
        ]
        record["quarantined"] = [{"client": one.client, "reason": one.reason} for one in banned]
    saved = _save_memories(rules, state)
    state = replace(
        state,
        round=state.round + 1,
        method=method,
        defence=defence,
        quarantined=state.quarantined.union(one.client for one in banned),
        seats=(),
        passed=frozenset(),
        fills=0,
    )
    state = admit_candidates(rules, state)
    rules = rules.at(state)
    record["alpha_sha256"] = alpha_sha256(state.method.alpha)
    finished = RoundFinished(
        report=report, clients=tuple(seat.client for seat in seats), record=record
    )
    over = (*saved, finished, *banned)
    # In the alpha exchange the memory comes from a client, so it cannot end the run.
    over_itself = rules.losses_exchange and rules.method.finished(state.method)
    if state.round < rules.spec.rounds and not over_itself:
        return state, over
    left = rules.planned_queries - state.account.spent.queries if over_itself else 0
    reason = f"the search ended by itself; {left} queries were not needed" if left > 0 else None
    state, effects = state.end("completed", reason, now)
    return state, (*over, *effects)


def _judge(
    rules: Rules, state: RunState, seats: Sequence[Seat]
) -> tuple[list[Seat], Memory, list[Admitted]]:
    """Return the seats with their admitted steps, the defence's memory and its verdicts."""
    if rules.defence is None:
        return list(seats), state.defence, []
    contributions = []
    for seat in seats:
        compared, advantage = rules.compared_losses(seat), None
        # Only the first step's prompts can be drawn again; alpha does not describe a pool.
        if compared and (len(compared) == 1 or rules.method.shares_memory):
            first = replace(seat, local=None, step=0, num_samples=len(compared[0]))
            asked = candidates(rules, state, first)
            advantage = drawn_advantage(asked, rules.clipped(compared[0]))
        mean_loss = seat.mean_loss
        if seat.curves:
            mean_loss = float(np.mean([rules.clipped(step).mean() for step in compared]))
        contributions.append(contribution(state, seat, compared, mean_loss, advantage))
    verdicts, memory = rules.defence.admit(state.method.alpha, contributions, state.defence)
    kept = [admitted_seat(seat, one) for seat, one in zip(seats, verdicts, strict=True)]
    return kept, memory, verdicts


def _quarantine(
    rules: Rules, defence: Defence, state: RunState, memory: Memory, verdicts: Sequence[Admitted]
) -> tuple[ClientQuarantined, ...]:
    """Return the clients that this round puts in quarantine."""
    # A readmitted client returns to quarantine only with a new outlier.
    suspects = {one.client for one in verdicts if one.outlier}
    found = sorted(defence.quarantined(memory) & suspects)
    # Outliers are a minority by definition, and a round needs K* clients.
    known = {line.client: line for line in ledger(memory)}
    staying = max(len(known) // 2 + 1, rules.spec.participation.clients_per_round)
    room = len(known) - staying - len(state.quarantined.intersection(known))
    return tuple(
        ClientQuarantined(
            client=client,
            round=state.round,
            reason=f"{known[client].outliers} of its {known[client].rounds} updates were held back",
        )
        for client in found[: max(room, 0)]
    )


def _aggregate(
    rules: Rules, state: RunState, seats: Sequence[Seat], weights: list[int] | None
) -> State:
    """Return the method's state after the round."""
    if rules.method.shares_memory:
        if len(seats) == 1:
            return seats[0].local or state.method
        # Pools have no mean: the method receives the seats' losses one after the other.
        method = state.method
        for seat in seats:
            if seat.local is not None:
                asked = candidates(rules, state, replace(seat, local=None, step=0))
                curves = seat.curves[0] if seat.curves else None
                method = rules.method.tell(method, asked, rules.as_losses(seat.losses[0], curves))
        return method
    alphas = [(seat.local or state.method).alpha for seat in seats]
    return State(alpha=rules.method.project(aggregate(alphas, weights)))


def _seat_record(rules: Rules, seat: Seat) -> dict[str, Any]:
    record: dict[str, Any] = {
        "slot": seat.slot,
        "client": seat.client,
        "num_samples": seat.num_samples,
        "weight": seat.weight,
        "queries": seat.queries,
        "mean_loss": seat.mean_loss,
    }
    if rules.losses_exchange:
        record["losses"] = [list(losses) for losses in seat.losses]
    return record
