"""Clients in quarantine."""

from __future__ import annotations

import dataclasses

import pytest

from fedone_sdk.aggregator.rounds.lifecycle import resume, stop
from fedone_sdk.aggregator.rounds.run_state import MAX_UNFIT, Closed
from fedone_sdk.aggregator.rounds.seats import clear_unfit, decline, lift_quarantine, quarantine
from fedone_sdk.aggregator.rounds.spending import reserve_call
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.spec import RunSpec
from tests.unit.machine.game import GATEWAY_QUERY, LOSSES, SAMPLES, Game, both, refusal, spec_of


def test_it_is_never_drawn_not_even_alone() -> None:
    game = Game(spec_of(participation={"min_clients": 1}))
    game.apply(quarantine, client=1, reason="lies")
    assert game.seat([1]) == []
    assert game.machine.needs_seating(game.state)
    for _ in range(3):
        assert game.seat([0, 1]) == [0]
        game.send(game.take())
    assert game.state.status == "completed"


@pytest.mark.parametrize("selection", ["uniform", "proportional"])
def test_it_may_come_back(selection: str) -> None:
    game = Game(spec_of(participation={"min_clients": 1, "selection": selection}))
    game.apply(quarantine, client=1, reason="lies")
    game.apply(lift_quarantine, client=1)
    game.apply(lift_quarantine, client=5)
    assert game.state.quarantined == frozenset()
    assert game.seat([1]) == [1]


@both
def test_its_open_work_is_closed_and_charged(exchange: str) -> None:
    game = Game(spec_of(participation={"exchange": exchange}))
    work = game.take([0, 1])
    (seat,) = game.state.seats
    (closed,) = game.apply(quarantine, client=seat.client, reason="lies").closed
    assert closed == Closed(
        assignment_id=work.assignment_id,
        client=seat.client,
        reason="the client was quarantined",
        said="lies",
    )
    assert (game.spent, game.leased) == (Usage(queries=SAMPLES), NOTHING)
    assert game.state.lost == 0
    assert refusal(game.send(work)).code == "assignment_expired"
    assert game.seat([0, 1]) == [1 - seat.client]


def test_through_the_gateway_it_costs_what_the_server_saw() -> None:
    game = Game(spec_of(), gateway=True)
    work = game.take([3])
    game.gateway(work, 1)
    game.apply(reserve_call, **game.call(work, GATEWAY_QUERY))
    game.apply(quarantine, client=3, reason="lies")
    assert game.spent == Usage(queries=1, requests=1) + GATEWAY_QUERY


def test_an_offer_is_taken_back() -> None:
    game = Game(spec_of())
    assert game.seat([3, 4, 5]) != []
    (seat,) = game.state.seats
    game.apply(quarantine, client=seat.client, reason="lies")
    assert game.claim(seat.client) is None
    assert game.spent == NOTHING


def test_its_earlier_local_steps_do_not_count() -> None:
    game = Game(spec_of(local_steps=2, participation=LOSSES))
    before = game.state.method.alpha.tobytes()
    game.send(game.take([0, 1]))
    (seat,) = game.state.seats
    game.apply(quarantine, client=seat.client, reason="lies")
    assert (game.state.seats, game.state.round) == ((), 0)
    assert game.state.method.alpha.tobytes() == before
    assert game.spent == Usage(queries=SAMPLES)


def test_what_it_has_done_in_the_round_does_not_count_either() -> None:
    """Nor is it stored: it is not in the log, which must suffice to compute alpha."""
    part = {"clients_per_round": 2, "min_clients": 1, **LOSSES}
    game = Game(spec_of(optimizer="adamw", participation=part))
    first, second = game.seat([0, 1])
    work = game.claim(first)
    assert work is not None
    game.send(work)
    game.apply(quarantine, client=first, reason="lies")
    assert [seat.client for seat in game.state.seats] == [second]
    game.play([second, 7])
    records = [dict(one.record) for one in game.rounds]
    assert {seat["client"] for record in records for seat in record["seats"]} == {second, 7}
    saved = {client for client, _ in game.memories}
    assert saved == {second, 7}


def test_all_its_seats_are_taken() -> None:
    part = {"selection": "proportional", "clients_per_round": 3, "min_clients": 1}
    game = Game(spec_of(participation=part))
    assert game.seat([4]) == [4, 4, 4]
    game.claim(4)
    game.apply(quarantine, client=4, reason="lies")
    assert game.state.seats == ()
    assert game.seat([4]) == []


WHY = "field 'label' is 'billing', not one of: low, high"


def declines(game: Game, client: int, *, unfit: bool = True, usage: Usage = NOTHING) -> None:
    assert game.seat([client]) == [client]
    work = game.claim(client, own_model=True)
    assert work is not None
    game.apply(decline, assignment_id=work.assignment_id, reason=WHY, usage=usage, unfit=unfit)


def game_of(**budget: int) -> Game:
    return Game(spec_of(rounds=2, budget=budget or None, participation=LOSSES))


def test_they_count_neither_as_failures_nor_to_the_budget() -> None:
    game = game_of(queries=8)
    for client in range(60):  # more than `RoundMachine.MAX_LOST`
        declines(game, client)
    assert (game.state.status, game.state.lost) == ("running", 0)
    assert (game.spent, game.leased) == (NOTHING, NOTHING)
    assert set(game.state.unfit) == set(range(60))
    game.play([100])
    assert game.state.status == "completed"


def test_what_they_did_ask_is_spent() -> None:
    game = game_of()
    declines(game, 0, usage=Usage(queries=1))
    assert game.spent.queries == 1


def test_they_are_not_drawn_until_they_change() -> None:
    game = game_of()
    declines(game, 0)
    assert game.seat([0]) == []
    game.apply(clear_unfit, client=0)
    assert game.seat([0]) == [0]


def test_other_seats_of_theirs_are_taken() -> None:
    wide = {"clients_per_round": 3, "selection": "proportional", **LOSSES}
    game = Game(spec_of(participation=wide))
    assert game.seat([0]) == [0, 0, 0]
    work = game.claim(0)
    assert work is not None
    game.apply(decline, assignment_id=work.assignment_id, reason=WHY, unfit=True)
    assert game.state.seats == ()


def test_a_run_whose_clients_are_all_known_fails() -> None:
    """A simulation has no other clients to wait for."""
    data = {"train": "train.jsonl", "num_clients": 2, "shots": 1}
    spec = spec_of(participation=LOSSES)
    game = Game(RunSpec.model_validate({**spec.model_dump(mode="json"), "data": data}))
    for _ in range(2):
        assert game.state.running
        seated = game.seat([0, 1])
        work = game.claim(seated[0])
        assert work is not None
        game.apply(decline, assignment_id=work.assignment_id, reason=WHY, unfit=True)
    game.seat([0, 1])
    reason = f"no client fits the run; the last client declined: {WHY}"
    assert (game.state.status, game.state.reason) == ("failed", reason)


def test_a_budget_without_a_result_is_reported() -> None:
    """Leases of lost work stay charged, and the run reports the reason of the last loss."""
    game = game_of(queries=8)
    for client in (0, 1):
        declines(game, client, unfit=False, usage=Usage(queries=4))
    game.seat([2])
    assert game.state.status == "budget_exhausted"
    reason = "no assignment ended with an update; last: the client declined"
    assert (game.state.summary, game.state.reason) == (reason, f"{reason}: {WHY}")


def test_a_resume_allows_them_again() -> None:
    game = game_of()
    declines(game, 0)
    game.apply(stop)
    game.apply(resume)
    assert game.seat([0]) == [0]


def test_so_many_are_remembered() -> None:
    game = game_of()
    game.state = dataclasses.replace(game.state, unfit=dict.fromkeys(range(MAX_UNFIT), WHY))
    declines(game, MAX_UNFIT)
    assert list(game.state.unfit) == list(range(1, MAX_UNFIT + 1))
