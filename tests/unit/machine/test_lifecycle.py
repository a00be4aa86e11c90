"""How a run pauses, stops, resumes, goes back to a round, and gets higher caps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedone_sdk.aggregator.rounds import ONE_QUERY, RoundMachine
from fedone_sdk.aggregator.rounds.lifecycle import (
    pause,
    raise_caps,
    record_metric,
    record_model,
    resume,
    roll_back,
    stop,
)
from fedone_sdk.aggregator.rounds.run_state import Result, RunState, offers
from fedone_sdk.aggregator.rounds.seats import assignment, decline
from fedone_sdk.aggregator.rounds.spending import reserve_call, reserve_evaluation
from fedone_sdk.algorithms import alpha_sha256
from fedone_sdk.budget import NOTHING, Budget, Usage
from fedone_sdk.messages import AlphaAssignment, LossesAssignment
from tests.unit.machine.game import LOSSES, MODEL, SAMPLES, Game, answer_to, both, refusal, spec_of


class TestPauses:
    def paused(self) -> tuple[Game, AlphaAssignment | LossesAssignment]:
        """A game that paused during work whose queries were sent."""
        game = Game(spec_of(rounds=3), gateway=True)
        work = game.take()
        game.gateway(work, SAMPLES)
        game.apply(pause, reason="the key was revoked")
        return game, work

    def test_a_pause_ends_only_waits_no_deadline_passes_and_no_query_is_sent(self) -> None:
        game, work = self.paused()
        assert (game.state.status, game.state.paused) == ("stopped", True)
        assert game.state.reason == "paused: the key was revoked"
        assert game.state.seat_with(work.assignment_id) is not None
        assert game.leased.queries == SAMPLES
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

    def test_a_round_waits_for_seats_without_a_client(self) -> None:
        game = Game(spec_of(participation={"clients_per_round": 2, "min_clients": 1}))
        work = game.take([0])
        game.apply(pause, reason="the key was revoked")
        game.send(work)
        game.apply(resume)
        assert (game.state.round, game.seat([0, 1])) == (0, [1])

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
            "paused: the provider now reports the model 'm-2', before it was 'm-1'; "
            "resume the run to accept the change"
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
        ids = {seat.number: seat.assignment_id for seat in seats}
        again = [replace(seat, assignment_id=ids[seat.number]) for seat in game.state.seats]
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
            assert f"cannot roll back to round {to_round};" in refused.detail

    def test_a_gateway_s_run_keeps_its_model(self) -> None:
        game = Game(spec_of(rounds=5), gateway=True)
        states = rounds(game, 1)
        back(game, states[0])
        assert game.state.model == MODEL
        rounds(game, 1)
        assert game.state.round == 1


SEARCH: dict[str, Any] = {"name": "random", "rounds": 100, "participation": LOSSES}


def raised(game: Game, **caps: Any) -> Any:
    return game.apply(raise_caps, caps=Budget(**caps))


@both
def test_a_run_that_is_raised_is_the_run_with_the_higher_cap(exchange: str) -> None:
    part = {"exchange": exchange}
    whole = Game(spec_of(rounds=9, budget={"queries": 20}, participation=part))
    whole.play()
    game = Game(spec_of(rounds=9, budget={"queries": 8}, participation=part))
    game.play()
    game.apply(record_metric, which="after", value=0.5)
    assert game.state.status == "budget_exhausted"
    raised(game, queries=20)
    assert (game.state.running, game.state.metric.after, game.state.ended_at) == (True, None, None)
    assert game.log == [("budget", {"round": 2, "cap": {"queries": "20"}})]
    game.play()
    assert (game.state.status, game.spent) == ("budget_exhausted", whole.spent)
    assert alpha_sha256(game.state.method.alpha) == alpha_sha256(whole.state.method.alpha)


def test_a_seat_that_waits_for_money_gets_its_work() -> None:
    game = Game(spec_of(rounds=9, budget={"queries": 8, "requests": 8}), gateway=True)
    (client,) = game.seat()
    lease = Usage(requests=8)
    game.apply(reserve_evaluation, lease_id="this-replica/evaluation", worst=lease)
    assert game.claim(client) is None
    before = game.state
    raised(game, requests=16)
    assert offers(before, game.state) == (client,)
    assert game.claim(client) is not None


def test_a_search_that_ended_by_itself_searches_on() -> None:
    """Its halving is cancelled: it would evaluate only the old prompts, or none."""
    game = Game(spec_of(budget={"queries": 20 * SAMPLES}, halving=0.25, **SEARCH))
    game.play()
    assert game.state.status == "completed"
    assert game.state.round < 100
    rounds, known = game.state.round, int(game.state.method.memory["progress"][1])
    assert known >= 0  # where the halving began
    assert refusal(raised(game, queries=20 * SAMPLES + 1)).code == "run_conflict"
    raised(game, queries=40 * SAMPLES)
    assert game.state.running
    game.take()
    assert game.state.method.memory["progress"][1] == -1
    assert game.machine.at(game.state).method.wanted(game.state.method) == SAMPLES
    game.play()
    assert game.state.round > rounds


def test_a_race_under_way_is_not_disturbed_within_a_round() -> None:
    game = Game(spec_of(budget={"queries": 20 * SAMPLES}, halving=0.25, **SEARCH))
    while game.state.method.memory.get("progress", (0, -1))[1] < 0:
        work = game.take()
        game.send(work)
    work = game.take()
    raised(game, queries=60 * SAMPLES)
    # The losses that come are those of the prompts that were sent.
    assert assignment(game.machine, game.state, game.state.seats[0], game.now) == work
    game.send(work)
    game.take()
    assert game.state.method.memory["progress"][1] == -1


@pytest.mark.parametrize(
    ("caps", "said"),
    [
        ({"queries": 7}, "queries: the cap is 8, and a cap can only be raised"),
        ({"usd": 5}, "usd: has no cap; a new cap would lower what may be spent"),
    ],
)
def test_a_cap_is_never_lowered(caps: Any, said: str) -> None:
    game = Game(spec_of(rounds=9, budget={"queries": 8}))
    before = game.state
    assert refusal(raised(game, **caps)).detail == said
    raised(game, queries=8)  # as after an answer that was lost
    assert game.state is before


def test_a_run_without_caps_or_with_all_rounds_done_is_not_raised() -> None:
    game = Game(spec_of(rounds=2))
    assert refusal(raised(game, queries=8)).detail == "the run has no caps"
    game = Game(spec_of(rounds=2, budget={"queries": 90}))
    game.play()
    said = (
        "the run is completed after 2 of 2 rounds: a higher cap gives it no more work; for more "
        "rounds, add a run with another name"
    )
    assert refusal(raised(game, queries=99)).detail == said


def test_a_stopped_run_stays_stopped() -> None:
    game = Game(spec_of(rounds=9, budget={"queries": 8}))
    game.apply(stop)
    raised(game, queries=16)
    assert (game.state.status, game.state.account.cap) == ("stopped", Budget(queries=16))
