"""The end of a round: defences, aggregation, and the next round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedone_sdk.aggregator.rounds.machine import RoundMachine
from fedone_sdk.aggregator.rounds.state import FinishedRound, Result, RunState, Seat
from fedone_sdk.algorithms import Memory, State, aggregate, alpha_sha256
from fedone_sdk.algorithms.defence import Admitted, Contribution, Defence, ledger
from fedone_sdk.algorithms.gradient import drawn_advantage
from fedone_sdk.messages import RoundReport


def close_seat(machine: RoundMachine, state: RunState, seat: Seat, now: float) -> Result[None]:
    """Store a finished seat; the last one ends the round."""
    # Appended last: the log keeps the order in which seats were finished.
    state = replace(state, seats=(*state.without_seat(seat).seats, seat))
    if machine.vacancies(state) or any(s.phase != "done" for s in state.seats):
        return Result(state=state)
    return finish_round(machine, state, now)


def finish_round(machine: RoundMachine, state: RunState, now: float) -> Result[None]:
    """Aggregate the finished seats and start the next round, or end the run."""
    done = [seat for seat in state.seats if seat.phase == "done"]
    # Sorted by enrolment index: floating-point sums depend on the order.
    seats = sorted(done, key=lambda seat: (seat.client, seat.slot))
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
        banned = _banned(machine, machine.defence, state, defence, verdicts)
        quarantined = quarantined.union(banned)
        record["defence"] = [
            {
                "slot": seat.slot,
                "scale": one.scale,
                "outlier": one.outlier,
                "agreement": one.agreement,
            }
            for seat, one in zip(seats, verdicts, strict=True)
        ]
        record["quarantined"] = [{"client": c, "reason": why} for c, why in banned.items()]
    memories = {seat.client: seat.local.memory for seat in done if seat.local is not None}
    state = replace(
        state,
        round=state.round + 1,
        method=method,
        defence=defence,
        quarantined=quarantined,
        seats=(),
        passed=frozenset(),
        fills=0,
        proposed=(*state.proposed, *state.waiting),
        waiting=(),
    )
    machine = machine.at(state)
    state = replace(state, method=machine.with_new_candidates(state.method))
    record["alpha_sha256"] = alpha_sha256(state.method.alpha)
    # In the alpha exchange the memory comes from a client, so it cannot end the run.
    over_itself = machine.losses_exchange and machine.method.finished(state.method)
    if state.round >= machine.spec.rounds or over_itself:
        cap = None if state.account.cap is None else state.account.cap.queries
        most = machine.planned_queries if cap is None else cap
        left = most - state.account.spent.queries if over_itself else 0
        unused = f"the search ended by itself; {left:,} of {most:,} queries are left"
        state = state.end("completed", unused if left > 0 else None, now)
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
    """Return the seats with their admitted steps, the defence's memory and its verdicts."""
    if machine.defence is None:
        return list(seats), state.defence, []
    contributions = [_contribution(machine, state, seat) for seat in seats]
    verdicts, memory = machine.defence.admit(state.method.alpha, contributions, state.defence)
    kept = [_admitted(seat, one) for seat, one in zip(seats, verdicts, strict=True)]
    return kept, memory, verdicts


def _contribution(machine: RoundMachine, state: RunState, seat: Seat) -> Contribution:
    if machine.defence is not None and machine.defence.only_bounds:
        alpha = (seat.local or state.method).alpha
        return Contribution(client=seat.client, alpha=alpha, mean_loss=seat.mean_loss)
    compared = [np.array(losses, dtype=np.float64) for losses in seat.losses]
    advantage = None
    # Only the first step's prompts can be drawn again; alpha does not describe a pool.
    if compared and (len(compared) == 1 or machine.method.shares_memory):
        first = replace(seat, local=None, step=0, num_samples=len(compared[0]))
        asked = machine.candidates(state, first)
        advantage = drawn_advantage(asked, machine.clipped(compared[0]))
    # Rounding of the mean gives equal numbers a standard deviation above 0.
    spreads = [float(np.std(step)) if np.ptp(step) else 0.0 for step in compared]
    return Contribution(
        client=seat.client,
        alpha=(seat.local or state.method).alpha,
        mean_loss=seat.mean_loss,
        advantage=advantage,
        spread=max(spreads) if spreads else None,
    )


def _admitted(seat: Seat, admitted: Admitted) -> Seat:
    """Return the seat with the admitted part of its step."""
    if admitted.outlier:
        return replace(seat, local=None)
    if admitted.scale == 1.0 or seat.local is None:
        return seat
    return replace(seat, local=State(alpha=admitted.alpha, memory=seat.local.memory))


def _banned(
    machine: RoundMachine,
    defence: Defence,
    state: RunState,
    memory: Memory,
    verdicts: Sequence[Admitted],
) -> Mapping[int, str]:
    """Return the clients that this round puts in quarantine, with the reasons."""
    # A readmitted client returns to quarantine only with a new outlier.
    suspects = {one.client for one in verdicts if one.outlier}
    found = sorted(defence.quarantined(memory) & suspects)
    # Outliers are a minority by definition, and a round needs K* clients.
    known = {line.client: line for line in ledger(memory)}
    staying = max(len(known) // 2 + 1, machine.spec.participation.clients_per_round)
    room = len(known) - staying - len(state.quarantined.intersection(known))
    return {
        client: f"{known[client].outliers} of its {known[client].rounds} updates were held back"
        for client in found[: max(room, 0)]
    }


def _aggregate(
    machine: RoundMachine, state: RunState, seats: Sequence[Seat], weights: list[int] | None
) -> State:
    if not machine.method.shares_memory:
        alphas = [(seat.local or state.method).alpha for seat in seats]
        return State(alpha=machine.method.project(aggregate(alphas, weights)))
    if len(seats) == 1:
        return seats[0].local or state.method
    # Pools have no mean: the method receives the seats' losses one after the other.
    method = state.method
    for seat in seats:
        if seat.local is not None:
            asked = machine.candidates(state, replace(seat, local=None, step=0))
            by_class = seat.by_class[0] if seat.by_class else None
            losses = machine.as_losses(asked, seat.losses[0], by_class)
            method = machine.method.tell(method, asked, losses)
    return method


def _seat_record(machine: RoundMachine, seat: Seat) -> dict[str, Any]:
    record: dict[str, Any] = {
        "slot": seat.slot,
        "client": seat.client,
        "num_samples": seat.num_samples,
        "weight": seat.weight,
        "queries": seat.queries,
        "mean_loss": seat.mean_loss,
    }
    if machine.losses_exchange:
        record["losses"] = [list(losses) for losses in seat.losses]
    return record
