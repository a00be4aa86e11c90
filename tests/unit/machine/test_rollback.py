"""Rollbacks to an earlier round."""

from __future__ import annotations

from typing import Any

import pytest

from fedone_sdk.aggregator.rounds.lifecycle import pause, resume, roll_back, stop
from fedone_sdk.aggregator.rounds.run_state import Result, RunState
from fedone_sdk.algorithms import alpha_sha256
from fedone_sdk.budget import NOTHING, Usage
from tests.unit.machine.game import LOSSES, MODEL, SAMPLES, Game, answer_to, both, refusal, spec_of


def back(game: Game, state: RunState) -> Result[Any]:
    """Set a run back to where it stood once."""
    return game.apply(roll_back, method=state.method, to_round=state.round, reason="a lying client")


def rounds(game: Game, count: int) -> list[RunState]:
    """Plays rounds; answers where the run stood before each, and stands now."""
    states = [game.state]
    for _ in range(count):
        work = game.take(range(6))
        if game.machine.gateway_model is not None:
            game.gateway(work, work.leased_queries)
        game.send(work, answer_to(game, work))
        states.append(game.state)
    return states


class TestRollback:
    @both
    @pytest.mark.parametrize("to_round", [0, 1, 2])
    def test_alpha_and_memory_are_those_of_then(self, exchange: str, to_round: int) -> None:
        game = Game(spec_of(rounds=5, participation={"exchange": exchange}))
        states = rounds(game, 2)
        back(game, states[to_round])
        ((kind, record),) = game.log
        digest = alpha_sha256(states[to_round].method.alpha)
        assert kind == "rollback"
        assert record == {
            "round": to_round,
            "rollbacks": 1,
            "reason": "a lying client",
            "alpha_sha256": digest,
        }
        assert alpha_sha256(game.state.method.alpha) == digest
        assert game.state.round == to_round
        assert game.spent == Usage(queries=2 * SAMPLES)
        game.play(range(6))
        assert game.state.status == "completed"
        assert game.spent == Usage(queries=(2 + 5 - to_round) * SAMPLES)

    def test_open_work_is_closed_and_charged_once(self) -> None:
        game = Game(spec_of(rounds=5))
        states = rounds(game, 1)
        work = game.take()
        (closed,) = back(game, states[0]).closed
        assert (closed.assignment_id, closed.reason) == (
            work.assignment_id,
            "the run was rolled back",
        )
        assert (game.spent, game.leased) == (Usage(queries=2 * SAMPLES), NOTHING)
        assert refusal(game.send(work)).code == "assignment_expired"
        assert game.spent == Usage(queries=2 * SAMPLES)

    def test_the_same_draws_do_not_come_again(self) -> None:
        game = Game(spec_of(rounds=9, participation=LOSSES))
        start = game.state
        drawn, prompts, minibatches = [], [], []
        for _ in range(8):
            (client,) = game.seat(range(50))
            work = game.claim(client)
            assert work is not None
            drawn.append(client)
            prompts.append(game.machine.seed(game.state, game.state.seats[0], "prompts", 0))
            minibatches.append(work.minibatch_seed)  # type: ignore[union-attr]
            back(game, start)
        assert len(set(drawn)) > 4
        assert len(set(prompts)) == len(set(minibatches)) == 8

    @pytest.mark.parametrize("status", ["stopped", "failed"])
    def test_a_run_that_was_broken_off(self, status: Any) -> None:
        game = Game(spec_of(rounds=5))
        states = rounds(game, 2)
        game.apply(stop, status=status)
        back(game, states[1])
        assert (game.state.status, game.state.round) == (status, 1)
        game.apply(resume)
        game.play()
        assert game.state.status == "completed"

    def test_a_paused_run_gives_up_the_work_that_it_kept(self) -> None:
        game = Game(spec_of(rounds=5))
        states = rounds(game, 1)
        game.take()
        game.apply(pause, reason="the key was revoked")
        back(game, states[0])
        assert (game.state.status, game.state.paused) == ("stopped", True)
        assert (game.state.seats, game.leased) == ((), NOTHING)
        game.apply(resume)
        assert game.state.round == 0
        game.play()
        assert game.state.status == "completed"

    def test_not_once_it_is_over_for_good(self) -> None:
        for budget, status in ((None, "completed"), ({"queries": SAMPLES}, "budget_exhausted")):
            game = Game(spec_of(rounds=2, budget=budget))
            start = game.state
            game.play()
            assert game.state.status == status
            refused = refusal(back(game, start))
            assert (refused.code, refused.detail) == (
                "run_conflict",
                f"a run that is {status} cannot be rolled back",
            )

    def test_not_to_a_round_that_was_not_done(self) -> None:
        game = Game(spec_of(rounds=5))
        rounds(game, 1)
        for to_round in (-1, 2):
            refused = refusal(
                game.apply(
                    roll_back, method=game.state.method, to_round=to_round, reason="a mistake"
                )
            )
            assert refused.detail == f"the run has done 1 rounds, not {to_round}"

    def test_a_gateway_s_run_keeps_its_model(self) -> None:
        game = Game(spec_of(rounds=5), gateway=True)
        states = rounds(game, 1)
        back(game, states[0])
        assert game.state.model == MODEL
        rounds(game, 1)
        assert game.state.round == 1
