"""Clients in quarantine."""

from __future__ import annotations

import pytest

from fedone_sdk.aggregator.rounds.run_state import Closed
from fedone_sdk.aggregator.rounds.seats import lift_quarantine, quarantine
from fedone_sdk.aggregator.rounds.spending import reserve_call
from fedone_sdk.budget import NOTHING, Usage
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
