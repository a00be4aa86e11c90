"""How a run pauses, stops and resumes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedone_sdk.aggregator.rounds import ONE_QUERY
from fedone_sdk.aggregator.rounds.events import (
    Measured,
    ModelSeen,
    PauseRequested,
    ResumeRequested,
    RollbackRequested,
    RoundFinished,
    RunEnded,
    StopRequested,
    WorkClosed,
    WorkDeclined,
)
from fedone_sdk.aggregator.rounds.rules import Rules
from fedone_sdk.budget import NOTHING
from fedone_sdk.messages import AlphaAssignment, LossesAssignment
from tests.unit.machine.game import LOSSES, MODEL, SAMPLES, Game, both, refusal, spec_of


class TestPauses:
    def paused(self) -> tuple[Game, AlphaAssignment | LossesAssignment]:
        """A game that paused during work whose queries were sent."""
        game = Game(spec_of(rounds=3), gateway=True)
        work = game.take()
        game.gateway(work, SAMPLES)
        game.apply(PauseRequested(reason="the key was revoked"))
        return game, work

    def test_a_pause_ends_only_waits(self) -> None:
        game, work = self.paused()
        assert (game.state.status, game.state.paused) == ("stopped", True)
        assert game.state.reason == "paused: the key was revoked"
        assert game.only(RunEnded).status == "stopped"
        assert game.state.seat_with(work.assignment_id) is not None
        assert game.leased.queries == SAMPLES

    def test_no_deadline_passes_and_no_query_is_sent_meanwhile(self) -> None:
        game, work = self.paused()
        game.advance(100_000)
        assert game.state.seat_with(work.assignment_id) is not None
        declined = WorkDeclined(assignment_id=work.assignment_id, reason="the gateway failed")
        assert refusal(game.apply(declined)).code == "run_conflict"
        assert refusal(game.apply(game.asked(work, ONE_QUERY))).code == "run_conflict"

    def test_resumed_the_same_client_gets_the_same_work(self) -> None:
        game, work = self.paused()
        game.advance(100_000)
        game.apply(ResumeRequested())
        assert (game.state.status, game.state.paused, game.state.reason) == ("running", False, None)
        again = game.claim(game.state.seats[0].client)
        assert again == work
        game.send(again)
        assert game.state.round == 1
        assert game.spent.queries == SAMPLES

    def test_an_update_that_was_on_its_way_counts(self) -> None:
        game, work = self.paused()
        game.send(work)
        assert (game.state.round, game.state.status, game.state.paused) == (1, "stopped", True)
        assert game.leased == NOTHING

    def test_a_paused_run_can_be_stopped_for_good(self) -> None:
        game, _ = self.paused()
        game.apply(StopRequested())
        assert (game.state.status, game.state.paused, game.leased) == ("stopped", False, NOTHING)
        game.apply(PauseRequested(reason="too late"))
        assert not game.state.paused


class TestModels:
    def test_the_first_model_is_noted(self) -> None:
        game = Game(spec_of(), gateway=True)
        assert game.apply(ModelSeen(model="m-1")) == ()
        assert game.apply(ModelSeen(model="m-1")) == ()
        assert (game.state.models, game.state.status) == (("m-1",), "running")

    def test_another_one_pauses_the_run_until_it_is_accepted(self) -> None:
        game = Game(spec_of(), gateway=True)
        game.apply(ModelSeen(model="m-1"))
        game.apply(ModelSeen(model="m-2"))
        assert game.state.paused
        assert game.state.reason == (
            "paused: the provider answers with 'm-2' now, it was 'm-1'; resume the run to accept it"
        )
        game.apply(ResumeRequested())
        game.apply(ModelSeen(model="m-2"))
        game.apply(ModelSeen(model="m-1"))  # a cache may still hold its answers
        assert (game.state.models, game.state.status) == (("m-1", "m-2"), "running")

    def test_a_paused_run_tells_of_it_too(self) -> None:
        game = Game(spec_of(), gateway=True)
        game.apply(ModelSeen(model="m-1"))
        game.apply(PauseRequested(reason="the key was revoked"))
        game.apply(ModelSeen(model="m-2"))
        assert game.state.reason == (
            "paused: the key was revoked; the provider answers with 'm-2' now, it was 'm-1'; "
            "resume the run to accept it"
        )

    def test_an_ended_run_only_notes_it(self) -> None:
        game = Game(spec_of(), gateway=True)
        game.apply(ModelSeen(model="m-1"))
        game.apply(StopRequested())
        game.apply(ModelSeen(model="m-2"))
        assert (game.state.reason, game.state.paused) == (None, False)
        assert game.state.models == ("m-1", "m-2")

    def test_a_resume_accepts_the_server_s_model(self) -> None:
        game = Game(spec_of(), gateway=True)
        game.state = replace(game.state, model="another")
        game.apply(PauseRequested(reason="the server's model is another"))
        game.apply(ResumeRequested())
        assert game.state.model == game.machine.gateway_model

    def test_a_server_that_cannot_ask_its_model_keeps_the_runs_one(self) -> None:
        game = Game(spec_of(), gateway=True)
        game.machine = game.machine.with_model("", game.machine.worst_query)
        game.apply(StopRequested())
        game.apply(ResumeRequested())
        assert game.state.model == MODEL


class TestStopAndResume:
    @both
    def test_stop_settles_and_resume_continues(self, exchange: str) -> None:
        game = Game(spec_of(rounds=2, participation={"exchange": exchange, "clients_per_round": 2}))
        first, second = game.seat()
        done, lost = game.claim(first), game.claim(second)
        assert done is not None
        assert lost is not None
        game.send(done)
        effects = game.apply(StopRequested(reason="enough"))
        assert [type(effect) for effect in effects] == [WorkClosed, RoundFinished, RunEnded]
        assert (game.state.status, game.state.reason) == ("stopped", "enough")
        assert game.state.ended_at == game.now
        assert game.state.round == 1
        assert game.leased == NOTHING
        assert game.seat() == []
        assert game.claim(first) is None
        assert refusal(game.send(lost)).code == "assignment_expired"
        game.apply(ResumeRequested())
        assert game.state.running
        assert (game.state.reason, game.state.ended_at) == (None, None)
        game.play()
        assert game.state.status == "completed"

    def test_a_stop_that_ends_the_last_round_completes_the_run(self) -> None:
        game = Game(spec_of(rounds=1, participation={"clients_per_round": 2}))
        first, second = game.seat()
        done = game.claim(first)
        assert done is not None
        game.claim(second)
        game.send(done)
        effects = game.apply(StopRequested())
        assert [type(effect) for effect in effects] == [WorkClosed, RoundFinished, RunEnded]
        assert (game.state.status, game.state.round) == ("completed", 1)

    def test_stop_between_local_steps_keeps_them(self) -> None:
        game = Game(
            spec_of(rounds=9, local_steps=2, participation={"clients_per_round": 2, **LOSSES})
        )
        before = game.state.method.alpha
        first, second = game.seat()
        work, other = game.claim(first), game.claim(second)
        assert work is not None
        assert other is not None
        game.send(work)  # is offered its second step now
        game.apply(StopRequested())
        assert game.reports[0].queries == SAMPLES
        assert game.only(RoundFinished).clients == (first,)
        assert not np.array_equal(game.state.method.alpha, before)

    @both
    def test_a_stopped_round_restarts(self, exchange: str) -> None:
        """Its clients get the same queries again: they may have been paid for."""
        game = Game(spec_of(participation={"exchange": exchange, "clients_per_round": 3}))
        clients = range(20)
        for client in game.seat(clients):
            game.claim(client)
        seats = game.state.seats
        game.apply(StopRequested())
        assert game.state.seats == ()
        game.apply(ResumeRequested())
        for client in game.seat(clients):
            game.claim(client)
        ids = {seat.slot: seat.assignment_id for seat in seats}
        again = [replace(seat, assignment_id=ids[seat.slot]) for seat in game.state.seats]
        assert again == list(seats)

    @both
    def test_a_client_that_declined_before_the_stop_is_drawn_again(self, exchange: str) -> None:
        game = Game(spec_of(participation={"exchange": exchange, "clients_per_round": 3}))
        clients = range(20)
        first = game.seat(clients)
        for client in first:
            work = game.claim(client)
            assert work is not None
            game.apply(WorkDeclined(assignment_id=work.assignment_id, reason="no battery"))
        assert set(first).isdisjoint(game.seat(clients))
        game.apply(StopRequested())
        game.apply(ResumeRequested())
        assert game.seat(clients) == first

    def test_stopping_is_no_failure_of_the_clients(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Rules, "MAX_LOST", 1)
        game = Game(spec_of(participation={"clients_per_round": 3}))
        for client in game.seat():
            game.claim(client)
        effects = game.apply(StopRequested())
        assert game.state.status == "stopped"
        assert [type(e) for e in effects] == [WorkClosed] * 3 + [RunEnded]

    def test_a_failed_run_may_go_on_with_a_new_row(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Rules, "MAX_LOST", 1)
        game = Game(spec_of())
        for _ in range(2):
            game.take()
            game.advance(100)
        assert game.state.status == "failed"
        game.apply(ResumeRequested())
        game.take()
        game.advance(100)
        assert game.state.running

    def test_only_where_it_makes_sense(self) -> None:
        game = Game(spec_of())
        assert refusal(game.apply(ResumeRequested())).code == "run_conflict"
        game.apply(StopRequested())
        assert refusal(game.apply(StopRequested())).code == "run_conflict"
        done = Game(spec_of(rounds=1))
        done.play()
        for event in (ResumeRequested(), StopRequested()):
            refused = refusal(done.apply(event))
            assert (refused.code, "completed" in refused.detail) == ("run_conflict", True)

    def test_a_measurement_of_another_prompt_is_not_the_end_s(self) -> None:
        game = Game(spec_of(rounds=5))
        start = game.state
        game.send(game.take())

        def after(value: float, at: tuple[int, int]) -> float | None:
            game.apply(Measured(which="after", value=value, at=at))
            return game.state.metric.after

        game.apply(StopRequested())
        assert after(0.1, (0, 0)) is None
        assert after(0.2, (1, 0)) == 0.2
        game.apply(RollbackRequested(method=start.method, to_round=0, reason="a lying client"))
        assert after(0.2, (1, 0)) is None
        assert after(0.3, (0, 0)) is None
        assert after(0.4, (0, 1)) == 0.4

    def test_ended_by_whom(self) -> None:
        game = Game(spec_of())
        game.apply(StopRequested(status="failed", reason="the disk is full"))
        assert (game.state.status, game.state.reason) == ("failed", "the disk is full")


class TestKeptStops:
    def test_a_stop_that_keeps_work_continues_it_after_a_resume(self) -> None:
        game = Game(spec_of(rounds=3), gateway=True)
        work = game.take()
        game.gateway(work, SAMPLES)
        leased = game.state.account.leased
        game.apply(StopRequested(reason="interrupted", keep=True))
        assert (game.state.status, game.state.paused) == ("stopped", False)
        assert game.state.reason == "interrupted"
        assert game.state.account.leased == leased != NOTHING
        assert [seat.assignment_id for seat in game.state.seats] == [work.assignment_id]
        declined = WorkDeclined(assignment_id=work.assignment_id, reason="the app ends")
        assert refusal(game.apply(declined)).code == "run_conflict"
        game.advance(100_000)
        game.apply(ResumeRequested())
        again = game.claim(game.state.seats[0].client)
        assert again == work
        game.send(again)
        assert game.state.round == 1
        assert game.spent.queries == SAMPLES
