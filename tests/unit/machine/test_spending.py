"""Amounts that the machine reserves, charges and returns."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedone_sdk.aggregator.dispatch.open_work import OpenWork
from fedone_sdk.aggregator.rounds.lifecycle import charge_lost_replicas, stop
from fedone_sdk.aggregator.rounds.run_state import offers
from fedone_sdk.aggregator.rounds.seats import decline
from fedone_sdk.aggregator.rounds.spending import (
    has_lost_calls,
    reserve_call,
    reserve_evaluation,
    return_queries,
    settle_evaluation,
)
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.errors import ProblemError
from fedone_sdk.messages import AlphaAssignment, LossesAssignment
from tests.unit.machine.game import (
    ALL_GONE,
    ALPHA,
    GATEWAY_QUERY,
    LOSSES,
    MODEL,
    SAMPLES,
    Game,
    both,
    refusal,
    spec_of,
)


class TestBudget:
    @both
    @pytest.mark.parametrize(
        ("rounds", "cap", "queries", "status"),
        [
            (9, 10, [4, 4, 2], "budget_exhausted"),
            (9, 9, [4, 4], "budget_exhausted"),  # One query is of no use.
            (3, 12, [4, 4, 4], "completed"),
        ],
    )
    def test_the_last_round_asks_for_what_is_left(
        self, exchange: str, rounds: int, cap: int, queries: list[int], status: str
    ) -> None:
        participation = {"exchange": exchange}
        game = Game(spec_of(rounds=rounds, budget={"queries": cap}, participation=participation))
        game.play()
        assert [report.queries for report in game.reports] == queries
        assert (game.state.status, game.spent.queries) == (status, sum(queries))

    @pytest.mark.parametrize(
        ("cap", "steps", "samples"),
        [(24, 3, 4), (12, 3, 4), (11, 3, 3), (8, 3, 2), (6, 3, 2), (5, 2, 2), (3, 1, 3)],
    )
    def test_fewer_prompts_before_fewer_local_steps(
        self, cap: int, steps: int, samples: int
    ) -> None:
        game = Game(spec_of(local_steps=3, budget={"queries": cap}, participation=ALPHA))
        work = game.take()
        assert isinstance(work, AlphaAssignment)
        assert [step.num_samples for step in work.steps] == [samples] * steps
        assert work.leased_queries == samples * steps <= cap

    @both
    def test_seats_that_were_paid_for_are_aggregated(self, exchange: str) -> None:
        """Two seats and money for one: its work makes the last round."""
        participation = {"exchange": exchange, "clients_per_round": 2}
        game = Game(spec_of(rounds=9, budget={"queries": 5}, participation=participation))
        before = game.state.method.alpha
        first, second = game.seat()
        work = game.claim(first)
        assert work is not None
        assert game.claim(second) is None  # it waits for what the first may give back
        game.send(work)
        assert game.state.running
        assert game.seat() == []
        assert game.state.status == "budget_exhausted"
        assert game.reports[0].queries == 4
        assert not np.array_equal(game.state.method.alpha, before)

    def test_local_steps_that_were_paid_for_are_aggregated(self) -> None:
        """The money ends between two local steps of the losses exchange."""
        budget = {"queries": 5}
        run = {"rounds": 9, "local_steps": 2, "budget": budget, "participation": LOSSES}
        game = Game(spec_of(optimizer="adamw", **run))
        before = game.state.method.alpha
        game.send(game.take())
        assert game.machine.needs_seating(game.state)
        game.seat()
        assert game.state.status == "budget_exhausted"
        assert [report.queries for report in game.reports] == [4]
        assert not np.array_equal(game.state.method.alpha, before)
        assert game.memories[-1][0] == game.rounds[-1].clients[0]

    def test_a_seat_waits_for_the_amount_that_another_returns(self) -> None:
        participation = {"clients_per_round": 2, "own_models": "trusted"}
        game = Game(spec_of(budget={"queries": 5}, participation=participation))
        first, second = game.seat()
        work = game.claim(first)
        assert work is not None
        assert game.claim(second) is None
        assert not game.machine.needs_seating(game.state)
        before = game.state
        game.apply(decline, assignment_id=work.assignment_id, reason="low battery", usage=NOTHING)
        assert offers(before, game.state) == (second,)  # it is woken, and finds work now
        assert game.claim(second) is not None

    @pytest.mark.parametrize(
        ("unit", "cap", "samples"), [("requests", 7, 3), ("usd", "0.025", 2), ("tokens", 45, 4)]
    )
    def test_other_units_bound_the_work_too(self, unit: str, cap: Any, samples: int) -> None:
        game = Game(spec_of(budget={unit: cap}), gateway=True)
        work = game.take()
        assert work.leased_queries == samples


class TestWhatALostSeatCost:
    def test_through_the_gateway_what_the_server_saw(self) -> None:
        game = Game(spec_of(), gateway=True)
        work = game.take()
        assert game.leased == GATEWAY_QUERY * SAMPLES
        game.gateway(work, 2)
        under_way = GATEWAY_QUERY
        asked = game.call(work, under_way)
        game.apply(reserve_call, **asked)
        game.advance(100)
        assert game.spent == Usage(queries=2, requests=2) + under_way
        # Its answer comes too late to change anything.
        game.answered(asked, NOTHING)
        assert game.spent == Usage(queries=2, requests=2) + under_way

    @pytest.mark.parametrize(
        ("own_models", "expected"),
        [(None, Usage(queries=1)), ("trusted", Usage(queries=1, requests=9))],
    )
    def test_a_model_on_the_device(self, own_models: str | None, expected: Usage) -> None:
        game = Game(spec_of(participation={"own_models": own_models}))
        work = game.take()
        usage = Usage(queries=1, requests=9)
        game.apply(decline, assignment_id=work.assignment_id, reason="broken", usage=usage)
        assert game.spent == expected

    def test_a_trusted_client_cannot_report_more_queries_than_it_leased(self) -> None:
        game = Game(spec_of(budget={"queries": 4}, participation={"own_models": "trusted"}))
        work = game.take()
        game.send(work, game.update_for(work, usage=Usage(queries=400, requests=7)))
        assert game.spent == Usage(queries=4, requests=7)


ways = pytest.mark.parametrize("way", ["declined", "late", "stopped"])


class TestAModelOnTheDeviceBesideThatOfTheServer:
    """The server's model is not queried, and the spending of the device's model is unknown."""

    @staticmethod
    def claimed(game: Game, *, own_model: bool) -> LossesAssignment | AlphaAssignment:
        work = game.claim(game.seat()[0], own_model=own_model)
        assert work is not None
        return work

    @staticmethod
    def end(game: Game, work: LossesAssignment | AlphaAssignment, way: str, usage: Usage) -> None:
        if way == "late":
            game.advance(100)
        elif way == "stopped":
            game.apply(stop)
        else:
            game.apply(decline, assignment_id=work.assignment_id, reason="failed", usage=usage)

    @ways
    @pytest.mark.parametrize(("own_models", "requests"), [("charged", 1), ("trusted", 7)])
    def test_work_that_is_lost_costs_what_is_reported(
        self, way: str, own_models: str, requests: int
    ) -> None:
        game = Game(spec_of(participation={"own_models": own_models}), gateway=True)
        work, usage = self.claimed(game, own_model=True), Usage(queries=1, requests=requests)
        self.end(game, work, way, usage)
        assert game.spent == (usage if way == "declined" else NOTHING)

    @ways
    def test_through_the_gateway_no_query_costs_nothing(self, way: str) -> None:
        game = Game(spec_of(), gateway=True)
        work = self.claimed(game, own_model=False)
        self.end(game, work, way, Usage(queries=SAMPLES))
        assert game.spent == NOTHING

    def test_no_report_passes_its_lease(self) -> None:
        """Caps are on what the server's model costs."""
        trusted = {"own_models": "trusted"}
        game = Game(spec_of(budget={"requests": 10}, participation=trusted), gateway=True)
        work = self.claimed(game, own_model=True)
        self.end(game, work, "declined", Usage(queries=1, requests=500))
        assert game.spent == Usage(queries=1, requests=2 * SAMPLES)

    def test_a_client_that_returns_with_a_model_pays_for_it(self) -> None:
        game = Game(spec_of(participation={"own_models": "charged"}), gateway=True)
        work = self.claimed(game, own_model=False)
        assert game.claim(game.state.seats[0].client, own_model=True) == work
        game.send(work)
        assert game.spent == GATEWAY_QUERY * SAMPLES

    @both
    @pytest.mark.parametrize(
        ("own_models", "expected"),
        [("charged", GATEWAY_QUERY * SAMPLES), ("trusted", Usage(queries=SAMPLES, requests=3))],
    )
    def test_an_update(self, exchange: str, own_models: str, expected: Usage) -> None:
        participation = {"exchange": exchange, "own_models": own_models}
        game = Game(spec_of(participation=participation), gateway=True)
        work = self.claimed(game, own_model=True)
        usage = Usage(queries=SAMPLES, requests=3)
        game.send(work, game.update_for(work, usage=usage))
        assert game.spent == expected


class TestGatewaySpending:
    @pytest.mark.parametrize("own_model", [False, True])
    @pytest.mark.parametrize("times", [1, 9])
    def test_a_candidate_that_is_not_tried_returns_its_query(
        self, own_model: bool, times: int
    ) -> None:
        """But the gateway's calls are charged, and a query may cost more than at the claim."""
        participation = {"own_models": "charged"}
        game = Game(spec_of(participation=participation | LOSSES), gateway=True)
        (client,) = game.seat()
        work = game.claim(client, own_model=own_model)
        assert work is not None
        seat = replace(game.state.seats[0], reflects=True)
        account = game.state.account.add(work.assignment_id, GATEWAY_QUERY)
        game.state = game.state.with_seat(seat, account=account)
        game.gateway(work, SAMPLES + 1)
        game.machine = game.machine.with_model(MODEL, GATEWAY_QUERY * times)
        game.send(work)
        assert game.spent.queries == SAMPLES + 1
        assert game.spent.requests >= SAMPLES + 1

    @pytest.mark.parametrize("own_models", [None, "charged"])
    def test_an_update_that_the_gateway_never_scored(self, own_models: str | None) -> None:
        """It costs its lease, or its losses are invented: by default no device has a model."""
        game = Game(spec_of(participation={"own_models": own_models}), gateway=True)
        work = game.take()
        game.gateway(work, 1)
        if own_models is None:
            assert refusal(game.send(work)).code == "invalid_message"
        else:
            game.send(work)
            assert game.spent == GATEWAY_QUERY * SAMPLES

    def test_no_more_queries_than_leased(self) -> None:
        game = Game(spec_of(), gateway=True)
        work = game.take()
        game.gateway(work, SAMPLES - 1)
        refused = refusal(game.apply(reserve_call, **game.call(work, GATEWAY_QUERY * 2)))
        assert (refused.code, refused.detail) == (
            "lease_exhausted",
            "2 queries were sent, the lease has 1 left",
        )

    def test_a_retry_bills_requests_while_the_cap_allows(self) -> None:
        game = Game(spec_of(budget={"requests": 10}), gateway=True)
        work = game.take()  # 4 queries, 8 requests at worst
        ask = GATEWAY_QUERY * SAMPLES
        asked = game.call(work, ask, "call")
        game.apply(reserve_call, **asked)
        game.answered(asked, ask.without_queries())
        again = GATEWAY_QUERY
        assert game.apply(reserve_call, **game.call(work, again, "call")).refusal is None
        assert (game.leased.queries, game.leased.requests) == (SAMPLES, 10)
        refused = refusal(game.apply(reserve_call, **game.call(work, again, "call")))
        assert refused.code == "lease_exhausted"
        assert "budget of 10 requests exhausted" in refused.detail

    def test_queries_of_a_request_that_was_sent_twice_are_not_returned(self) -> None:
        """One replica finds the model blocked, but another one may have sent its answer."""
        game = Game(spec_of(), gateway=True)
        work = game.take()
        call = {"assignment_id": work.assignment_id, "call": "call", "queries": SAMPLES}
        for times in (1, 2):
            for _ in range(times):
                game.apply(reserve_call, **game.call(work, GATEWAY_QUERY * SAMPLES, "call"))
            game.apply(return_queries, **call)
            assert game.state.seats[0].used.queries == SAMPLES * (times - 1)


class TestOverruns:
    def test_what_was_spent_beyond_a_lease_is_held_from_then_on(self) -> None:
        game = Game(spec_of(budget={"requests": 20}), gateway=True)
        work = game.take()  # 4 queries, 8 requests at worst
        asked = game.call(work, GATEWAY_QUERY * SAMPLES)
        game.apply(reserve_call, **asked)
        game.answered(asked, Usage(requests=15))
        assert (game.leased.queries, game.leased.requests) == (SAMPLES, 15)
        game.send(work)
        assert game.spent.requests == 15
        assert game.state.status == "running"  # 5 requests pay for two more prompts

    def test_what_was_spent_beyond_a_lost_seat_is_charged(self) -> None:
        game = Game(spec_of(), gateway=True)
        asked = game.call(game.take(), GATEWAY_QUERY * SAMPLES)
        game.apply(reserve_call, **asked)
        game.advance(101)
        assert game.spent == asked["worst"]
        game.answered(asked, Usage(requests=15))
        assert game.spent.requests == 15


class TestRestarts:
    def test_pending_calls_are_spent_once_and_may_be_repeated(self) -> None:
        game = Game(spec_of(rounds=2, budget={"queries": 8}), gateway=True)
        work = game.take()
        game.apply(reserve_call, **game.call(work, GATEWAY_QUERY * SAMPLES, "call"))
        game.advance(99)
        game.apply(charge_lost_replicas, **ALL_GONE)
        game.advance(99)  # a new deadline: the client cannot help it
        lost = (GATEWAY_QUERY * SAMPLES).without_queries()
        seat = game.state.seat_with(work.assignment_id)
        assert seat is not None
        assert (seat.sent, seat.used) == ({}, lost + Usage(queries=SAMPLES))
        # The same request again is paid again, but is no new logical query.
        again = game.call(work, GATEWAY_QUERY * SAMPLES, "call")
        assert game.apply(reserve_call, **again).refusal is None
        game.answered(again, Usage(requests=SAMPLES))
        game.send(work)
        assert game.spent == lost + Usage(queries=SAMPLES, requests=SAMPLES)

    def test_only_pending_calls_of_lost_replicas_are_charged(self) -> None:
        game = Game(spec_of(), gateway=True)
        work = game.take()
        lost, kept = (
            {**game.call(work, GATEWAY_QUERY), "reservation_id": f"{one}/1"} for one in ("a", "b")
        )
        worst = GATEWAY_QUERY.without_queries()
        for asked in (lost, kept):
            game.apply(reserve_call, **asked)
        due = game.state.seats[0].due
        game.advance(1)
        assert has_lost_calls(game.state, frozenset({"b"}))
        game.apply(charge_lost_replicas, alive=frozenset({"b"}), down=False)
        (seat,) = game.state.seats
        assert (seat.sent, seat.used) == ({"b/1": worst}, worst + Usage(queries=2))
        assert seat.due == due  # others served it meanwhile
        assert not has_lost_calls(game.state, frozenset({"b"}))
        # The lost replica was only slow: its call was charged in full.
        state = game.state
        game.answered(lost, NOTHING)
        assert game.state is state
        game.answered(kept, NOTHING)
        assert game.state.seats[0].used == worst + Usage(queries=2)

    def test_an_attempt_that_needs_more_is_one_attempt(self) -> None:
        game = Game(spec_of(), gateway=True)
        work = game.take()
        asked = game.call(work, GATEWAY_QUERY)
        for _ in range(2):
            game.apply(reserve_call, **asked)
        (seat,) = game.state.seats
        worst = GATEWAY_QUERY.without_queries()
        assert seat.sent == {asked["reservation_id"]: worst + worst}
        assert seat.used == Usage(queries=1)
        game.answered(asked, worst)
        assert game.state.seats[0].used == GATEWAY_QUERY


class TestEvaluation:
    def test_queries_apart_all_else_together(self) -> None:
        game = Game(spec_of(budget={"queries": 8, "requests": 9}), gateway=True)
        worst = Usage(queries=3, requests=5)
        game.apply(reserve_evaluation, lease_id="evaluation-1", worst=worst)
        assert game.state.evaluation.leased == worst
        assert game.leased == Usage(requests=5)
        assert game.take().leased_queries == 2  # 4 requests are left, a query takes 2 at worst
        used = Usage(queries=3, requests=3)
        game.apply(settle_evaluation, lease_id="evaluation-1", used=used)
        assert game.state.evaluation.spent == Usage(queries=3, requests=3)
        assert game.spent == Usage(requests=3)

    @pytest.mark.parametrize("lost", [False, True])
    def test_a_bill_above_its_bound_is_charged_once(self, lost: bool) -> None:
        """Also if the replica was lost, and if the store loses each answer."""
        game = Game(spec_of(), gateway=True)
        worst, beyond = Usage(queries=3, requests=5), Usage(requests=2)
        game.apply(reserve_evaluation, lease_id="evaluation-1", worst=worst)
        if lost:
            game.apply(charge_lost_replicas, **ALL_GONE)
        for _ in range(2):
            game.apply(reserve_evaluation, lease_id="evaluation-2", worst=beyond, billed=True)
        for _ in range(2):
            game.apply(settle_evaluation, lease_id="evaluation-1", used=worst)
            game.apply(settle_evaluation, lease_id="evaluation-2", used=beyond)
        assert game.state.evaluation.spent == worst + beyond
        assert game.spent == (worst + beyond).without_queries()

    def test_training_waits_for_evaluation_before_it_gives_up(self) -> None:
        game = Game(spec_of(budget={"requests": 4}), gateway=True)
        worst = Usage(requests=4)
        game.apply(reserve_evaluation, lease_id="evaluation-1", worst=worst)
        assert len(game.seat()) == 1
        assert game.claim(game.state.seats[0].client) is None
        assert game.state.running
        game.apply(settle_evaluation, lease_id="evaluation-1", used=NOTHING)
        assert game.take().leased_queries == 2


async def test_a_replica_looks_again_before_it_refuses_a_call() -> None:
    """Its copy of a run may still have the client's last work, whose lease is used up."""
    game = Game(spec_of(participation=LOSSES), gateway=True)
    run = SimpleNamespace(state=game.state)
    client: Any = SimpleNamespace(index=0)

    async def refresh() -> None:
        run.state = game.state

    registry = SimpleNamespace(refresh=refresh)
    dispatcher = SimpleNamespace(runs_of=lambda client: [run])
    parts: Any = {"store": SimpleNamespace(shared=True), "registry": registry}
    work = OpenWork(**parts, dispatcher=dispatcher, gateway=None, companions={})
    first = game.take([0])
    await work.check_lease(client, "a")
    game.gateway(first, SAMPLES)
    used_up, call = game.state, next(iter(game.state.seats[0].calls))
    run.state = used_up
    await work.check_lease(client, call)  # Repeated.
    with pytest.raises(ProblemError, match="lease_exhausted"):
        await work.check_lease(client, "a")
    game.send(first)
    game.take([0])
    run.state = used_up
    await work.check_lease(client, "a")
