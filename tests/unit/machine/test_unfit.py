"""Clients that fit no work of a run cost nothing and are not drawn again."""

from __future__ import annotations

import dataclasses

from fedone_sdk.aggregator.rounds.lifecycle import resume, stop
from fedone_sdk.aggregator.rounds.run_state import MOST_UNFIT
from fedone_sdk.aggregator.rounds.seats import clear_unfit, decline
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.spec import RunSpec
from tests.unit.machine.game import LOSSES, Game, spec_of

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
    assert (game.state.status, game.state.reason) == ("failed", f"no client fits; last: {WHY}")


def test_a_budget_without_a_result_is_reported() -> None:
    """Devices with their own model, which does not answer: their leases stay spent."""
    game = game_of(queries=8)
    for client in (0, 1):
        declines(game, client, unfit=False, usage=Usage(queries=4))
    game.seat([2])
    assert game.state.status == "budget_exhausted"
    assert game.state.reason == "no backend answered: 2 assignments failed"


def test_a_resume_allows_them_again() -> None:
    game = game_of()
    declines(game, 0)
    game.apply(stop)
    game.apply(resume)
    assert game.seat([0]) == [0]


def test_so_many_are_remembered() -> None:
    game = game_of()
    game.state = dataclasses.replace(game.state, unfit=dict.fromkeys(range(MOST_UNFIT), WHY))
    declines(game, MOST_UNFIT)
    assert list(game.state.unfit) == list(range(1, MOST_UNFIT + 1))
