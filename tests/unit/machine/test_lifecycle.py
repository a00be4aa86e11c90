"""How a run pauses, stops and resumes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedone_sdk.aggregator.rounds import ONE_QUERY, RoundMachine
from fedone_sdk.aggregator.rounds.lifecycle import (
    pause,
    record_metric,
    record_model,
    resume,
    roll_back,
    stop,
)
from fedone_sdk.aggregator.rounds.seats import decline
from fedone_sdk.aggregator.rounds.spending import reserve_call
from fedone_sdk.budget import NOTHING
from fedone_sdk.messages import AlphaAssignment, LossesAssignment
from tests.unit.machine.game import LOSSES, MODEL, SAMPLES, Game, both, refusal, spec_of


class TestPauses:
    def paused(self) -> tuple[Game, AlphaAssignment | LossesAssignment]:
        """A game that paused during work whose queries were sent."""
        game = Game(spec_of(rounds=3), gateway=True)
        work = game.take()
        game.gateway(work, SAMPLES)
        game.apply(pause, reason="the key was revoked")
        return game, work

    def test_a_pause_ends_only_waits(self) -> None:
        game, work = self.paused()
        assert (game.state.status, game.state.paused) == ("stopped", True)
        assert game.state.reason == "paused: the key was revoked"
        assert game.state.seat_with(work.assignment_id) is not None
        assert game.leased.queries == SAMPLES

    def test_no_deadline_passes_and_no_query_is_sent_meanwhile(self) -> None:
        game, work = self.paused()
        game.advance(100_000)
        assert game.state.seat_with(work.assignment_id) is not None
        refused = game.apply(decline, assignment_id=work.assignment_id, reason="it failed")
        assert refusal(refused).code == "run_conflict"
        call = game.call(work, ONE_QUERY)
        assert refusal(game.apply(reserve_call, **call)).code == "run_conflict"

    def test_an_update_that_was_on_its_way_counts(self) -> None:
        game, work = self.paused()
        game.send(work)
        assert (game.state.round, game.state.status, game.state.paused) == (1, "stopped", True)
        assert game.leased == NOTHING

    def test_a_paused_run_can_be_stopped_for_good(self) -> None:
        game, _ = self.paused()
        game.apply(stop)
        assert (game.state.status, game.state.paused, game.leased) == ("stopped", False, NOTHING)
        game.apply(pause, reason="too late")
        assert not game.state.paused


class TestModels:
    def test_another_one_pauses_the_run_until_it_is_accepted(self) -> None:
        game = Game(spec_of(), gateway=True)
        game.apply(record_model, model="m-1")
        game.apply(record_model, model="m-2")
        assert game.state.paused
        assert game.state.reason == (
            "paused: the provider answers with 'm-2' now, it was 'm-1'; resume the run to accept it"
        )
        game.apply(resume)
        game.apply(record_model, model="m-2")
        game.apply(record_model, model="m-1")  # a cache may still hold its answers
        assert (game.state.models, game.state.status) == (("m-1", "m-2"), "running")

    def test_a_changed_system_is_recorded_only(self) -> None:
        game = Game(spec_of(), gateway=True)
        systems = [f"m:1 (system_fingerprint fp_{number})" for number in range(3)]
        for model in ("m:1", *systems):
            game.apply(record_model, model=model)
        assert (game.state.models, game.state.paused) == (("m:1", *systems), False)
        game.apply(record_model, model="m:2 (system_fingerprint fp_0)")
        assert game.state.paused

    def test_a_resume_accepts_the_server_s_model(self) -> None:
        game = Game(spec_of(), gateway=True)
        game.state = replace(game.state, model="another")
        game.apply(pause, reason="the server's model is another")
        game.apply(resume)
        assert game.state.model == game.machine.gateway_model

    def test_a_server_that_cannot_ask_its_model_keeps_the_runs_one(self) -> None:
        game = Game(spec_of(), gateway=True)
        game.machine = game.machine.with_model("", game.machine.worst_query)
        game.apply(stop)
        game.apply(resume)
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
        result = game.apply(stop, reason="enough")
        assert (len(result.closed), result.finished is None) == (1, False)
        assert (game.state.status, game.state.reason) == ("stopped", "enough")
        assert game.state.ended_at == game.now
        assert game.state.round == 1
        assert game.leased == NOTHING
        assert game.seat() == []
        assert game.claim(first) is None
        assert refusal(game.send(lost)).code == "assignment_expired"
        game.apply(resume)
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
        game.apply(stop)
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
        game.apply(stop)
        assert game.reports[0].queries == SAMPLES
        assert game.rounds[-1].clients == (first,)
        assert not np.array_equal(game.state.method.alpha, before)

    @both
    def test_a_stopped_round_restarts(self, exchange: str) -> None:
        """Its clients get the same queries again: they may have been paid for."""
        game = Game(spec_of(participation={"exchange": exchange, "clients_per_round": 3}))
        clients = range(20)
        for client in game.seat(clients):
            game.claim(client)
        seats = game.state.seats
        game.apply(stop)
        assert game.state.seats == ()
        game.apply(resume)
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
            game.apply(decline, assignment_id=work.assignment_id, reason="no battery")
        assert set(first).isdisjoint(game.seat(clients))
        game.apply(stop)
        game.apply(resume)
        assert game.seat(clients) == first

    def test_a_failed_run_may_go_on_with_a_new_row(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(RoundMachine, "MAX_LOST", 1)
        game = Game(spec_of())
        for _ in range(2):
            game.take()
            game.advance(100)
        game.seat([game.closed[-1].client])
        assert game.state.status == "failed"
        game.apply(resume)
        game.take()
        game.advance(100)
        assert game.state.running

    def test_only_where_it_makes_sense(self) -> None:
        game = Game(spec_of())
        assert refusal(game.apply(resume)).code == "run_conflict"
        game.apply(stop)
        assert refusal(game.apply(stop)).code == "run_conflict"
        done = Game(spec_of(rounds=1))
        done.play()
        for handler in (resume, stop):
            refused = refusal(done.apply(handler))
            assert (refused.code, "completed" in refused.detail) == ("run_conflict", True)

    def test_a_measurement_of_another_prompt_is_not_the_end_s(self) -> None:
        game = Game(spec_of(rounds=5))
        start = game.state
        game.send(game.take())

        def after(value: float, at: tuple[int, int]) -> float | None:
            game.apply(record_metric, which="after", value=value, at=at)
            return game.state.metric.after

        game.apply(stop)
        assert after(0.1, (0, 0)) is None
        assert after(0.2, (1, 0)) == 0.2
        game.apply(roll_back, method=start.method, to_round=0, reason="a lying client")
        assert after(0.2, (1, 0)) is None
        assert after(0.3, (0, 0)) is None
        assert after(0.4, (0, 1)) == 0.4


class TestKeptStops:
    def test_a_stop_that_keeps_work_continues_it_after_a_resume(self) -> None:
        game = Game(spec_of(rounds=3), gateway=True)
        work = game.take()
        game.gateway(work, SAMPLES)
        leased = game.state.account.leased
        game.apply(stop, reason="interrupted", keep=True)
        assert (game.state.status, game.state.paused) == ("stopped", False)
        assert game.state.reason == "interrupted"
        assert game.state.account.leased == leased != NOTHING
        assert [seat.assignment_id for seat in game.state.seats] == [work.assignment_id]
        refused = game.apply(decline, assignment_id=work.assignment_id, reason="the app ends")
        assert refusal(refused).code == "run_conflict"
        game.advance(100_000)
        game.apply(resume)
        again = game.claim(game.state.seats[0].client)
        assert again == work
        game.send(again)
        assert game.state.round == 1
        assert game.spent.queries == SAMPLES
