"""The model that scores a run whose devices have their own models."""

from __future__ import annotations

from typing import Any

import pytest

from fedone_sdk.aggregator.rounds.events import (
    Assigned,
    Refused,
    ResumeRequested,
    RunRolledBack,
    StopRequested,
    UnfitCleared,
    WorkRequested,
)
from fedone_sdk.budget import NOTHING
from fedone_sdk.messages import AlphaAssignment, LossesAssignment
from tests.unit.machine.game import LOSSES, MODEL, SAMPLES, Game, both, refusal, spec_of

ODD = "model-odd"


def game_of(rounds: int = 5, **participation: Any) -> Game:
    return Game(spec_of(rounds=rounds, participation={**LOSSES, **participation}))


def asked(game: Game, client: int, model: str) -> AlphaAssignment | LossesAssignment | Refused:
    """The answer to a client that names its model in the claim."""
    assert client in game.seat([client])
    game.made += 1
    found = game.apply(event(game, client, model))
    return next(
        e.assignment if isinstance(e, Assigned) else e
        for e in found
        if isinstance(e, (Assigned, Refused))
    )


def event(game: Game, client: int, model: str) -> WorkRequested:
    return WorkRequested(
        client=client, assignment_id=f"work-{game.made}", own_model=True, model=model
    )


def works(game: Game, client: int, model: str) -> None:
    """A client claims a seat and does its work."""
    work = asked(game, client, model)
    assert not isinstance(work, Refused)
    game.send(work, game.update_for(work, model=model))


class TestAsked:
    def test_a_mismatch_costs_nothing(self) -> None:
        game = game_of()
        works(game, 0, MODEL)
        before = game.spent
        refused = asked(game, 1, ODD)
        assert isinstance(refused, Refused)
        assert refused.code == "model_mismatch"
        assert refused.detail == f"the run scores with {MODEL!r}, the device with {ODD!r}"
        assert (game.spent, game.leased, game.state.seats) == (before, NOTHING, ())
        assert game.state.lost == 0  # It does not count against the run.
        assert game.state.passed == {1}
        works(game, 2, MODEL)
        assert game.state.round == 2

    def test_one_odd_device_does_not_decide_for_all(self) -> None:
        """It comes first; the round that it scored is done again, and nothing else is lost."""
        game = game_of(rounds=3)
        works(game, 9, ODD)
        assert (game.state.round, game.state.model) == (1, ODD)
        assert isinstance(asked(game, 0, MODEL), Refused)  # one against one
        assert game.seat([1]) == [1]
        effects = game.apply(event(game, 1, MODEL))
        (back,) = [effect for effect in effects if isinstance(effect, RunRolledBack)]
        assert (back.to_round, game.state.round, game.state.model) == (0, 0, MODEL)
        assert back.record["reason"] == f"most devices have the model {MODEL!r}, not {ODD!r}"
        assert game.spent.queries == SAMPLES
        assert isinstance(asked(game, 9, ODD), Refused)
        for client in (0, 1, 2):
            works(game, client, MODEL)
        assert (game.state.status, game.spent.queries) == ("completed", 4 * SAMPLES)

    def test_three_that_agree_settle_it(self) -> None:
        game = game_of(rounds=9)
        for client in (0, 1):
            works(game, client, MODEL)
        assert set(game.state.votes) == {0, 1}
        works(game, 2, MODEL)
        assert game.state.votes == {}
        for client in range(3, 12):  # However many there are of another one from now on.
            assert isinstance(asked(game, client, ODD), Refused)
        assert (game.state.round, game.state.model) == (3, MODEL)

    def test_a_device_has_one_vote(self) -> None:
        game = game_of(rounds=9)
        works(game, 0, MODEL)
        for _ in range(4):
            assert isinstance(asked(game, 1, ODD), Refused)
            assert game.seat([1]) == []  # It does not fit,
            game.apply(UnfitCleared(client=1))  # and says that it has changed.
        assert isinstance(asked(game, 0, ODD), Refused)
        assert (game.state.model, game.state.votes) == (MODEL, {0: MODEL, 1: ODD})

    def test_a_pin_decides(self) -> None:
        game = game_of(model=MODEL)
        assert game.state.model == MODEL
        for client in range(5):
            assert isinstance(asked(game, client, ODD), Refused)
        works(game, 9, MODEL)
        assert (game.state.round, game.spent.queries) == (1, SAMPLES)

    def test_a_pin_outlasts_a_resume(self) -> None:
        game = game_of(model=MODEL)
        game.apply(StopRequested())
        game.apply(ResumeRequested())
        assert game.state.model == MODEL

    def test_work_that_is_out_is_given_again(self) -> None:
        """The device was restarted with another model: its update shows it."""
        game = game_of()
        work = asked(game, 0, MODEL)
        found = game.apply(event(game, 0, ODD))
        assert found == (Assigned(assignment=work),)

    def test_next_to_a_gateway(self) -> None:
        game = Game(spec_of(participation=LOSSES), gateway=True)
        assert isinstance(asked(game, 0, ODD), Refused)
        works(game, 1, MODEL)
        assert game.state.round == 1


class TestUpdates:
    """Devices that name their model with their update only, as older ones do."""

    @both
    def test_most_decide(self, exchange: str) -> None:
        game = Game(spec_of(rounds=2, participation={"exchange": exchange}))

        def returned(client: int, model: str) -> tuple[Any, ...]:
            game.seat([client])
            work = game.claim(client)
            assert work is not None
            return game.send(work, game.update_for(work, model=model))

        returned(9, ODD)
        assert refusal(returned(0, MODEL)).code == "model_mismatch"
        assert (game.state.round, game.state.model) == (1, ODD)
        assert refusal(returned(1, MODEL)).code == "model_mismatch"
        assert (game.state.round, game.state.model) == (0, MODEL)
        returned(2, MODEL)
        returned(3, MODEL)
        assert game.state.status == "completed"
        assert game.spent.queries == 5 * SAMPLES
        assert game.leased == NOTHING


@pytest.mark.parametrize("given", ["", "x" * 301])
def test_a_pin_is_a_fingerprint(given: str) -> None:
    with pytest.raises(ValueError, match=r"participation\.model"):
        spec_of(participation={"model": given})
