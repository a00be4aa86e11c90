"""Rollbacks to an earlier round."""

from __future__ import annotations

from typing import Any

import pytest

from fedone_sdk.aggregator.rounds.events import (
    PauseRequested,
    ResumeRequested,
    RollbackRequested,
    RoundFinished,
    RunRolledBack,
    SeatOffered,
    SeatsVacant,
    StopRequested,
    WorkClosed,
)
from fedone_sdk.aggregator.rounds.state import RunState
from fedone_sdk.algorithms import alpha_sha256, stream_seed
from fedone_sdk.budget import NOTHING, Usage
from tests.unit.machine.game import (
    LOSSES,
    MODEL,
    SAMPLES,
    Game,
    answer_to,
    both,
    refusal,
    spec_of,
)


def back(state: RunState, **more: Any) -> RollbackRequested:
    """The event that sets a run back to where it stood once."""
    return RollbackRequested(
        method=state.method,
        to_round=state.round,
        **{"reason": "a lying client", **more},
    )


def rounds(game: Game, count: int) -> list[RunState]:
    """Plays rounds; answers where the run stood before each, and stands now."""
    states = [game.state]
    for _ in range(count):
        work = game.take(range(6))
        game.send(work, answer_to(game, work))
        states.append(game.state)
    return states


class TestRollback:
    @both
    @pytest.mark.parametrize("to_round", [0, 1, 2])
    def test_alpha_and_memory_are_those_of_then(self, exchange: str, to_round: int) -> None:
        game = Game(spec_of(rounds=5, participation={"exchange": exchange}))
        states = rounds(game, 2)
        (went,) = game.apply(back(states[to_round]))
        assert isinstance(went, RunRolledBack)
        digest = alpha_sha256(states[to_round].method.alpha)
        assert went.to_round == to_round
        assert went.record == {
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
        closed, went = game.apply(back(states[0]))
        assert isinstance(closed, WorkClosed)
        assert (closed.assignment_id, closed.reason) == (
            work.assignment_id,
            "the run was rolled back",
        )
        assert isinstance(went, RunRolledBack)
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
            game.apply(back(start))
        assert len(set(drawn)) > 4
        assert len(set(prompts)) == len(set(minibatches)) == 8

    def test_a_run_without_a_rollback_keeps_its_draws(self) -> None:
        """A stored run of an older version continues with the same ones."""
        game = Game(spec_of(rounds=3, local_steps=2, participation=LOSSES))
        assert game.machine.selection_seed(game.state) == stream_seed(0, "selection", 0)
        game.send(game.take([7]))
        (seat,) = game.state.seats
        assert game.machine.seed(game.state, seat, "prompts", seat.step) == (
            stream_seed(0, "prompts", 0, 7, 1)
        )

    def test_a_client_that_lost_a_seat_may_be_drawn_again(self) -> None:
        game = Game(spec_of(rounds=5))
        start = game.state
        game.take([0])
        game.advance(100)
        assert game.state.passed == {0}
        game.apply(back(start))
        assert (game.state.passed, game.state.fills, game.state.lost) == (frozenset(), 0, 0)

    def test_it_need_not_wait_for_all_clients_again(self) -> None:
        game = Game(spec_of(participation={"min_clients": 3}))
        start = game.state
        rounds(game, 1)
        game.apply(back(start))
        assert len(game.seat([0])) == 1

    @pytest.mark.parametrize("status", ["stopped", "failed"])
    def test_a_run_that_was_broken_off(self, status: Any) -> None:
        game = Game(spec_of(rounds=5))
        states = rounds(game, 2)
        game.apply(StopRequested(status=status))
        game.apply(back(states[1]))
        assert (game.state.status, game.state.round) == (status, 1)
        game.apply(ResumeRequested())
        game.play()
        assert game.state.status == "completed"

    def test_a_paused_run_gives_up_the_work_that_it_kept(self) -> None:
        game = Game(spec_of(rounds=5))
        states = rounds(game, 1)
        game.take()
        game.apply(PauseRequested(reason="the key was revoked"))
        game.apply(back(states[0]))
        assert (game.state.status, game.state.paused) == ("stopped", True)
        assert (game.state.seats, game.leased) == ((), NOTHING)
        game.apply(ResumeRequested())
        assert game.state.round == 0
        game.play()
        assert game.state.status == "completed"

    def test_not_once_it_is_over_for_good(self) -> None:
        for budget, status in ((None, "completed"), ({"queries": SAMPLES}, "budget_exhausted")):
            game = Game(spec_of(rounds=2, budget=budget))
            start = game.state
            game.play()
            assert game.state.status == status
            refused = refusal(game.apply(back(start)))
            assert (refused.code, refused.detail) == (
                "run_conflict",
                f"a run that is {status} cannot be rolled back",
            )

    def test_not_to_a_round_that_was_not_done(self) -> None:
        game = Game(spec_of(rounds=5))
        rounds(game, 1)
        for to_round in (-1, 2):
            event = RollbackRequested(
                method=game.state.method, to_round=to_round, reason="a mistake"
            )
            refused = refusal(game.apply(event))
            assert refused.detail == f"the run has done 1 rounds, not {to_round}"

    def test_a_gateway_s_run_keeps_its_model(self) -> None:
        game = Game(spec_of(rounds=5), gateway=True)
        states = rounds(game, 1)
        game.apply(back(states[0]))
        assert game.state.model == MODEL
        rounds(game, 1)
        assert game.state.round == 1

    def test_rounds_are_reported_again(self) -> None:
        game = Game(spec_of(rounds=2))
        states = rounds(game, 1)
        game.apply(back(states[0]))
        rounds(game, 1)
        finished = [e.report.round for e in game.effects if isinstance(e, RoundFinished)]
        assert finished == [0, 0]

    def test_twice(self) -> None:
        game = Game(spec_of(rounds=5))
        states = rounds(game, 2)
        game.apply(back(states[1]))
        game.apply(back(states[0]))
        assert (game.state.round, game.state.rollbacks) == (0, 2)
        effects = game.apply(SeatsVacant(available={0: 1}))
        assert effects == (SeatOffered(client=0),)
