"""The round machine: what every event does in every state, and what no order of them can break."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fedone_sdk.aggregator.codec import arrays_of, decode, encode_arrays, encode_document
from fedone_sdk.aggregator.events import (
    Accepted,
    Assigned,
    Closed,
    Declined,
    Effect,
    EvaluationReserved,
    EvaluationSettled,
    Event,
    GatewayAnswered,
    GatewayAsked,
    Measured,
    MemorySaved,
    ModelSeen,
    PauseAsked,
    Refused,
    Renewed,
    Restarted,
    ResumeAsked,
    RoundFinished,
    RunEnded,
    SeatOffered,
    SeatsVacant,
    StopAsked,
    TimePassed,
    UpdateArrived,
    WorkAsked,
)
from fedone_sdk.aggregator.machine import ONE_QUERY, RoundMachine
from fedone_sdk.aggregator.state import RunState, Seat
from fedone_sdk.algorithms import State, alpha_sha256, stream
from fedone_sdk.budget import NOTHING, Account, Usage
from fedone_sdk.messages import (
    AlphaAssignment,
    AlphaUpdate,
    Array,
    LossesAssignment,
    LossesUpdate,
    Scored,
)
from fedone_sdk.messages.ndarray import from_wire, memory_from_wire, memory_to_wire, to_wire
from fedone_sdk.spec import RunSpec

N, LENGTH, SAMPLES, MODEL = 3, 2, 4, "model-a"
GATEWAY_QUERY = Usage(queries=1, requests=2, prompt_tokens=10, usd=Decimal("0.01"))


def spec_of(
    *,
    rounds: int = 3,
    budget: Mapping[str, Any] | None = None,
    participation: Mapping[str, Any] | None = None,
    evaluation: Mapping[str, Any] | None = None,
    **method: Any,
) -> RunSpec:
    name = method.get("name", "gs-bdpl")
    few: dict[str, Any] = {"num_samples": SAMPLES, "batch_size": 2}
    local = {} if name == "evolution" else {"optimizer": "sgd", "learning_rate": 0.01}
    if name == "gs-bdpl":
        few["tau"] = 1.0  # at this temperature the prompts of a step differ, so that alpha moves
    return RunSpec.model_validate(
        {
            "task": {"template": "{prompt} {text} {mask}", "labels": {0: " no", 1: " yes"}},
            "prompt": {
                "length": LENGTH,
                "vocabulary": {"kind": "list", "candidates": ["a", "b", "c"]},
            },
            "method": {"name": name, **few, **local, **method},
            "participation": {"deadline_s": 100, "claim_timeout_s": 10, **(participation or {})},
            "budget": budget,
            "rounds": rounds,
            "evaluation": evaluation or {},
        }
    )


def plain(value: object) -> Any:
    """A value with nothing in it that compares by identity: arrays as dtype, shape and bytes."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return value


def saved_and_loaded(state: RunState) -> RunState:
    return decode(json.loads(json.dumps(encode_document(state))), encode_arrays(arrays_of(state)))


class Game:
    """A machine, its state, and a clock; checks at every step what must hold at every step."""

    def __init__(self, spec: RunSpec, *, gateway: bool = False) -> None:
        self.machine = RoundMachine(
            "run",
            spec,
            vocab_size=N,
            worst_query=GATEWAY_QUERY if gateway else ONE_QUERY,
            gateway_model=MODEL if gateway else None,
        )
        self.spec = spec
        self.state = self.machine.start()
        self.now = 1000.0
        self.made = 0
        self.effects: list[Effect] = []
        self.check(self.state)

    def apply(self, event: Event) -> tuple[Effect, ...]:
        before, frozen = self.state, plain(self.state)
        after, effects = self.machine.step(before, event, self.now)
        # Pure: the same inputs give the same outputs, and stay as they are; a restart in between
        # makes no difference.
        assert plain(before) == frozen
        again = self.machine.step(saved_and_loaded(before), event, self.now)
        assert plain(again) == plain((after, effects))
        self.check(after, before)
        refusals = [effect for effect in effects if isinstance(effect, Refused)]
        assert len(refusals) <= 1
        if refusals and refusals[0].code != "model_mismatch":
            assert after is before
        self.state = after
        self.effects.extend(effects)
        return effects

    def check(self, state: RunState, before: RunState | None = None) -> None:
        assert plain(saved_and_loaded(state)) == plain(state)
        for account in (state.account, state.evaluation):
            check_within_cap(account)
        participation = self.spec.participation
        assert len(state.seats) <= participation.clients_per_round
        assert len({seat.slot for seat in state.seats}) == len(state.seats)
        if participation.selection == "uniform":
            assert len({seat.client for seat in state.seats}) == len(state.seats)
        working = {seat.assignment_id for seat in state.seats if seat.phase == "working"}
        assert None not in working
        leased = {lease for lease in state.account.leases if not lease.startswith("evaluation")}
        assert working == leased
        assert state.running or state.paused or not state.seats
        assert 0 <= state.round <= self.spec.rounds
        if before is not None:
            assert state.round - before.round in (0, 1)
            for unit in Usage.model_fields:
                assert getattr(state.account.spent, unit) >= getattr(before.account.spent, unit)
        if state.status == "completed":
            assert state.round == self.spec.rounds
        assert np.isfinite(state.method.alpha).all()
        assert (state.method.alpha >= 0).all()

    # What well-behaved clients do

    def seat(self, clients: Iterable[int] = (0, 1, 2), held: int = 5) -> list[int]:
        """Offers free seats; answers who got one."""
        effects = self.apply(SeatsVacant(available=dict.fromkeys(clients, held)))
        return [effect.client for effect in effects if isinstance(effect, SeatOffered)]

    def claim(self, client: int, **more: Any) -> AlphaAssignment | LossesAssignment | None:
        self.made += 1
        asked = WorkAsked(client=client, assignment_id=f"work-{self.made}", **more)
        effects = self.apply(asked)
        return next((e.assignment for e in effects if isinstance(e, Assigned)), None)

    def take(self, clients: Iterable[int] = (0, 1, 2)) -> AlphaAssignment | LossesAssignment:
        """Seats a client and gives it its work."""
        seated = [seat.client for seat in self.state.seats if seat.phase == "offered"]
        assignment = self.claim((seated or self.seat(clients))[0])
        assert assignment is not None
        return assignment

    def update_for(
        self, work: AlphaAssignment | LossesAssignment, **changes: Any
    ) -> AlphaUpdate | LossesUpdate:
        common: dict[str, Any] = {
            "num_examples": 5,
            "scored": Scored(scored=2),
            "usage": NOTHING,
            "model": MODEL,
        }
        if isinstance(work, LossesAssignment):
            losses = tuple(0.5 + 0.1 * i for i in range(work.prompts.shape[0]))
            return LossesUpdate(**{**common, "losses": losses, **changes})
        alpha = np.frombuffer(work.alpha.to_bytes(), "<f4").reshape(work.alpha.shape)
        packed = Array.from_bytes((alpha * np.float32(1.25)).tobytes(), alpha.shape, "float32")
        return AlphaUpdate(**{**common, "alpha": packed, "mean_loss": 0.5, **changes})

    def send(
        self,
        work: AlphaAssignment | LossesAssignment,
        update: AlphaUpdate | LossesUpdate | None = None,
    ) -> tuple[Effect, ...]:
        return self.apply(
            UpdateArrived(
                assignment_id=work.assignment_id,
                update=self.update_for(work) if update is None else update,
                body_sha256="ab" * 32,
            )
        )

    def gateway(self, work: AlphaAssignment | LossesAssignment, queries: int) -> None:
        """Asks the model for some queries, which cost half of the worst case."""
        worst = self.machine.worst_query * queries
        assert self.apply(self.asked(work, worst)) == ()
        worst, used = worst.without_queries(), Usage(requests=queries)
        self.apply(GatewayAnswered(assignment_id=work.assignment_id, worst=worst, used=used))

    def asked(
        self, work: AlphaAssignment | LossesAssignment, worst: Usage, call: str | None = None
    ) -> GatewayAsked:
        """The gateway is asked; by a request of its own unless `call` names it."""
        self.made += 1
        name = f"call-{self.made}" if call is None else call
        return GatewayAsked(assignment_id=work.assignment_id, call=name, worst=worst)

    def play(self, clients: Iterable[int] = (0, 1, 2), most: int = 500) -> None:
        """Plays on to the end of the run, with clients that do all they are asked."""
        for _ in range(most):
            if not self.state.running:
                return
            self.advance(11)
            if self.machine.wants_seating(self.state):
                self.seat(clients)
            offered = [seat.client for seat in self.state.seats if seat.phase == "offered"]
            for client in offered:
                self.claim(client)
            for seat in self.state.seats:
                if seat.phase == "working":
                    work = self.machine._assignment(self.state, seat, self.now)
                    if self.machine.gateway_model and not seat.used.queries + seat.sent.queries:
                        self.gateway(work, work.leased_queries)
                    self.send(work, answer_to(self, work))
        pytest.fail(f"the run did not end: {self.state}")

    def advance(self, seconds: float) -> tuple[Effect, ...]:
        self.now += seconds
        return self.apply(TimePassed())

    @property
    def reports(self) -> list[Any]:
        return [effect.report for effect in self.effects if isinstance(effect, RoundFinished)]

    @property
    def spent(self) -> Usage:
        return self.state.account.spent

    @property
    def leased(self) -> Usage:
        return self.state.account.leased

    def only(self, kind: type[Any]) -> Any:
        """The one effect of this kind so far."""
        (effect,) = [effect for effect in self.effects if isinstance(effect, kind)]
        return effect


def check_within_cap(account: Account) -> None:
    if account.cap is None:
        return
    held = account.held.model_dump()
    held["tokens"] = held["prompt_tokens"] + held["completion_tokens"]
    for unit, cap in account.cap.model_dump(exclude_none=True).items():
        assert held[unit] <= cap, f"{held[unit]} {unit} of {cap}"


def refusal(effects: tuple[Effect, ...]) -> Refused:
    (refused,) = [effect for effect in effects if isinstance(effect, Refused)]
    return refused


both = pytest.mark.parametrize("exchange", ["alpha", "losses"])
ALPHA, LOSSES = {"exchange": "alpha"}, {"exchange": "losses"}


class TestRounds:
    @both
    def test_one_client_a_round(self, exchange: str) -> None:
        game = Game(spec_of(participation={"exchange": exchange}))
        before = game.state.method.alpha
        work = game.take()
        assert (work.round, work.leased_queries, work.deadline_s) == (0, SAMPLES, 100)
        assert game.leased == Usage(queries=SAMPLES)
        accepted, finished = game.send(work)
        assert isinstance(accepted, Accepted)
        assert accepted.receipt.assignment_id == work.assignment_id
        assert isinstance(finished, RoundFinished)
        assert finished.report.queries == SAMPLES
        assert game.state.round == 1
        assert game.spent == Usage(queries=SAMPLES)
        assert game.leased == NOTHING
        assert not np.array_equal(game.state.method.alpha, before)
        game.play()
        assert game.state.status == "completed"
        assert game.only(RunEnded).status == "completed"
        assert [report.round for report in game.reports] == [0, 1, 2]
        assert game.spent == Usage(queries=3 * SAMPLES)

    @both
    def test_a_round_waits_for_all_its_seats(self, exchange: str) -> None:
        game = Game(spec_of(participation={"exchange": exchange, "clients_per_round": 3}))
        clients = game.seat(range(5))
        assert len(set(clients)) == 3
        works = [game.claim(client) for client in clients]
        assert game.leased == Usage(queries=3 * SAMPLES)
        assert len({work.assignment_id for work in works if work}) == 3
        for number, work in enumerate(works):
            assert game.state.round == 0
            assert work is not None
            effects = game.send(work)
            assert any(isinstance(e, RoundFinished) for e in effects) == (number == 2)
        assert game.only(RoundFinished).clients == tuple(sorted(clients))
        assert game.reports[0].queries == 3 * SAMPLES

    def test_alpha_is_the_weighted_mean(self) -> None:
        for aggregation, shares in ("examples", (0.25, 0.75)), ("plain", (0.5, 0.5)):
            game = Game(spec_of(participation={"clients_per_round": 2, "aggregation": aggregation}))
            clients = sorted(game.seat(range(2)))
            alphas = [np.full((LENGTH, N), value, np.float32) for value in (0.5, 2.0)]
            for client, alpha, held in zip(clients, alphas, (10, 30), strict=True):
                work = game.claim(client)
                assert work is not None
                packed = Array.from_bytes(alpha.tobytes(), alpha.shape, "float32")
                game.send(work, game.update_for(work, alpha=packed, num_examples=held))
            expected = shares[0] * 0.5 + shares[1] * 2.0
            np.testing.assert_allclose(game.state.method.alpha, expected, rtol=1e-6)

    def test_local_steps_of_the_alpha_exchange_are_one_assignment(self) -> None:
        game = Game(spec_of(rounds=1, local_steps=3, participation=ALPHA))
        work = game.take()
        assert isinstance(work, AlphaAssignment)
        assert work.leased_queries == 3 * SAMPLES
        assert len(work.steps) == 3
        seeds = [step.minibatch_seed for step in work.steps]
        seeds += [step.prompt_seed for step in work.steps]
        assert len(set(seeds)) == 6
        game.send(work)
        assert game.state.status == "completed"
        assert game.spent.queries == 3 * SAMPLES

    def test_local_steps_of_the_losses_exchange_are_exchanges_with_one_client(self) -> None:
        game = Game(spec_of(rounds=1, local_steps=3, participation=LOSSES))
        works = []
        for step in range(3):
            assert game.state.round == 0
            work = game.take()
            works.append(work)
            effects = game.send(work)
            if step < 2:
                assert effects[1:] == (SeatOffered(client=game.state.seats[0].client),)
        assert len({work.assignment_id for work in works}) == 3
        assert len({work.minibatch_seed for work in works}) == 3  # type: ignore[union-attr]
        assert game.state.status == "completed"
        assert game.only(RoundFinished).report.queries == 3 * SAMPLES
        (seat,) = game.only(RoundFinished).record["seats"]
        assert [len(losses) for losses in seat["losses"]] == [SAMPLES] * 3

    @both
    def test_replay_from_the_log(self, exchange: str) -> None:
        """A round's record says what its alpha was made of."""
        game = Game(
            spec_of(participation={"exchange": exchange, "clients_per_round": 2}, local_steps=2)
        )
        game.play()
        state = game.machine.start().method
        for effect in game.effects:
            if not isinstance(effect, RoundFinished):
                continue
            alphas, weights = [], []
            for record in json.loads(json.dumps(effect.record))["seats"]:
                weights.append(record["weight"])
                if exchange == "alpha":
                    array = Array.model_validate(record["alpha"])
                    alphas.append(np.frombuffer(array.to_bytes(), "<f4").reshape(array.shape))
                    continue
                local = state
                for step, losses in enumerate(record["losses"]):
                    seat = Seat(slot=record["slot"], client=record["client"], phase="working",
                                due=0, step=step, num_samples=record["num_samples"],
                                local=local)  # fmt: skip
                    at_round = dataclasses.replace(game.state, round=effect.report.round)
                    asked = game.machine.candidates(at_round, seat)
                    local = game.machine.algorithm.tell(local, asked, losses)
                alphas.append(local.alpha)
            mean = np.average(np.array(alphas, np.float64), axis=0, weights=weights)
            state = state.evolve(alpha=mean.astype(np.float32))
            assert alpha_sha256(state.alpha) == effect.record["alpha_sha256"]
        assert alpha_sha256(state.alpha) == alpha_sha256(game.state.method.alpha)

    def test_waits_for_enough_clients_before_the_first_round_only(self) -> None:
        game = Game(spec_of(participation={"min_clients": 3}))
        assert game.seat([0, 1]) == []
        assert len(game.seat([0, 1, 2])) == 1
        work = game.claim(game.state.seats[0].client)
        assert work is not None
        game.send(work)
        assert len(game.seat([1])) == 1

    def test_server_optimizer_keeps_its_memory(self) -> None:
        game = Game(spec_of(participation={"server_optimizer": "adamw"}))
        game.send(game.take())
        memory = dict(game.state.server_memory)
        assert int(memory["t"]) == 1
        game.send(game.take())
        assert int(game.state.server_memory["t"]) == 2
        assert int(memory["t"]) == 1

    def test_a_client_s_adamw_memory_comes_and_goes_with_its_work(self) -> None:
        game = Game(spec_of(optimizer="adamw", participation=LOSSES, rounds=2))
        assert game.machine.remembers_clients
        game.send(game.take([7]))
        saved = game.only(MemorySaved)
        assert saved.client == 7
        assert int(saved.memory["t"]) == 1
        (client,) = game.seat([7])
        work = game.claim(client, memory=saved.memory)
        assert work is not None
        game.send(work)
        newest = [e for e in game.effects if isinstance(e, MemorySaved)][-1]
        assert int(newest.memory["t"]) == 2

    def test_one_client_may_hold_two_seats_where_selection_is_with_replacement(self) -> None:
        game = Game(
            spec_of(participation={"selection": "proportional", "clients_per_round": 2, **LOSSES})
        )
        assert game.seat([4]) == [4, 4]
        first = game.claim(4)
        assert isinstance(first, LossesAssignment)
        game.send(first)
        second = game.claim(4)
        assert isinstance(second, LossesAssignment)
        assert second.minibatch_seed != first.minibatch_seed
        game.send(second)
        assert game.only(RoundFinished).clients == (4, 4)


class TestBudget:
    @both
    def test_no_multiple_of_a_full_round(self, exchange: str) -> None:
        """The last round asks for fewer prompts."""
        game = Game(spec_of(rounds=9, budget={"queries": 10}, participation={"exchange": exchange}))
        game.play()
        assert [report.queries for report in game.reports] == [4, 4, 2]
        assert game.state.status == "budget_exhausted"
        assert game.spent.queries == 10

    @both
    def test_one_query_left_is_of_no_use(self, exchange: str) -> None:
        game = Game(spec_of(rounds=9, budget={"queries": 9}, participation={"exchange": exchange}))
        game.play()
        assert [report.queries for report in game.reports] == [4, 4]
        assert (game.state.status, game.spent.queries) == ("budget_exhausted", 8)

    @both
    def test_the_cap_exactly_on_the_last_round_completes(self, exchange: str) -> None:
        game = Game(spec_of(rounds=3, budget={"queries": 12}, participation={"exchange": exchange}))
        game.play()
        assert (game.state.status, game.spent.queries) == ("completed", 12)

    def test_no_budget_for_anything(self) -> None:
        game = Game(spec_of(budget={"queries": 1}))
        game.play()
        assert (game.state.status, game.reports) == ("budget_exhausted", [])

    def test_an_exhausted_run_has_a_deployable_prompt(self) -> None:
        game = Game(spec_of(rounds=9, budget={"queries": 8}, participation=LOSSES))
        game.play()
        prompt = game.machine.algorithm.prompt(game.state.method)
        assert prompt.shape == (LENGTH,)
        assert game.state.round == 2

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
        game = Game(
            spec_of(
                rounds=9,
                budget={"queries": 5},
                participation={"exchange": exchange, "clients_per_round": 2},
            )
        )
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
        game = Game(
            spec_of(
                rounds=9,
                local_steps=2,
                budget={"queries": 5},
                optimizer="adamw",
                participation=LOSSES,
            )
        )
        before = game.state.method.alpha
        game.send(game.take())
        assert game.machine.wants_seating(game.state)
        game.seat()
        assert game.state.status == "budget_exhausted"
        assert [report.queries for report in game.reports] == [4]
        assert not np.array_equal(game.state.method.alpha, before)
        assert game.only(MemorySaved).client == game.only(RoundFinished).clients[0]

    def test_a_seat_waits_for_what_another_gives_back(self) -> None:
        game = Game(
            spec_of(
                budget={"queries": 5},
                participation={"clients_per_round": 2, "trusted_clients": True},
            )
        )
        first, second = game.seat()
        work = game.claim(first)
        assert work is not None
        assert game.claim(second) is None
        assert not game.machine.wants_seating(game.state)
        effects = game.apply(
            Declined(assignment_id=work.assignment_id, reason="low battery", usage=NOTHING)
        )
        assert SeatOffered(client=second) in effects  # it is woken, and finds work now
        assert game.claim(second) is not None

    @pytest.mark.parametrize(
        ("unit", "cap", "samples"), [("requests", 7, 3), ("usd", "0.025", 2), ("tokens", 45, 4)]
    )
    def test_other_units_bound_the_work_too(self, unit: str, cap: Any, samples: int) -> None:
        game = Game(spec_of(budget={unit: cap}), gateway=True)
        work = game.take()
        assert work.leased_queries == samples


class TestDeadlines:
    @both
    def test_a_lost_seat_goes_to_another_client(self, exchange: str) -> None:
        game = Game(spec_of(participation={"exchange": exchange}))
        work = game.take([0, 1])
        loser = game.state.seats[0].client
        assert game.advance(99) == ()
        (closed,) = game.advance(1)
        assert closed == Closed(
            assignment_id=work.assignment_id, client=loser, reason="the deadline passed"
        )
        assert game.state.seats == ()
        assert game.spent.queries == SAMPLES  # it scores itself, so all of it may be spent
        assert game.seat([0, 1]) == [1 - loser]

    def test_the_same_client_again_where_nobody_else_is_left(self) -> None:
        game = Game(spec_of())
        game.take([3])
        game.advance(100)
        assert game.seat([3]) == [3]

    def test_an_offer_that_nobody_takes_up_costs_nothing(self) -> None:
        game = Game(spec_of(participation={"max_lost": 1}))
        for _ in range(5):
            assert len(game.seat([0, 1])) == 1
            assert game.advance(10) == ()
        assert game.state.running
        assert game.spent == NOTHING

    def test_renewal_gives_a_full_deadline(self) -> None:
        game = Game(spec_of())
        work = game.take()
        game.advance(60)
        (again,) = game.apply(Renewed(assignment_id=work.assignment_id))
        assert isinstance(again, Assigned)
        assert again.assignment == work
        game.advance(99)
        assert game.state.seat_with(work.assignment_id) is not None
        assert game.machine.next_deadline(game.state) == game.now + 1

    @both
    def test_asking_again_gives_the_same_work_and_no_second_lease(self, exchange: str) -> None:
        game = Game(spec_of(participation={"exchange": exchange}))
        work = game.take()
        game.now += 30
        again = game.claim(game.state.seats[0].client)
        assert again is not None
        assert again.deadline_s == 70
        assert again.model_copy(update={"deadline_s": 100.0}) == work
        assert game.leased == Usage(queries=SAMPLES)

    @both
    def test_a_late_update_is_refused(self, exchange: str) -> None:
        game = Game(spec_of(participation={"exchange": exchange}))
        work = game.take()
        game.advance(100)
        assert refusal(game.send(work)).code == "assignment_expired"
        for event in (
            Renewed(assignment_id=work.assignment_id),
            Declined(assignment_id=work.assignment_id, reason="late"),
            game.asked(work, ONE_QUERY),
        ):
            assert refusal(game.apply(event)).code == "assignment_expired"

    def test_local_steps_before_the_deadline_count(self) -> None:
        game = Game(spec_of(rounds=2, local_steps=3, participation=LOSSES))
        game.send(game.take())
        game.take()
        game.advance(100)
        assert game.state.round == 1
        assert game.only(RoundFinished).report.queries == 2 * SAMPLES  # the lost one was paid too
        assert game.only(Closed).reason == "the deadline passed"

    @both
    def test_too_many_lost_in_a_row_fail_the_run(self, exchange: str) -> None:
        game = Game(
            spec_of(participation={"exchange": exchange, "max_lost": 2, "clients_per_round": 3})
        )
        works = [game.claim(client) for client in game.seat(range(9))]
        for work in works:
            assert work is not None
            game.apply(Declined(assignment_id=work.assignment_id, reason="no battery"))
            if game.state.running:
                for client in game.seat(range(9)):
                    game.claim(client)
        assert (game.state.status, game.state.reason) == (
            "failed",
            "last: the client declined: no battery",
        )
        # Nothing is left behind: no lease, no seat, and an answer for whoever is late.
        assert game.leased == NOTHING
        assert game.state.seats == ()
        closed = {effect.assignment_id for effect in game.effects if isinstance(effect, Closed)}
        assert len(closed) == 5
        assert works[0] is not None
        assert refusal(game.send(works[0])).code == "assignment_expired"

    def test_an_accepted_update_ends_the_row(self) -> None:
        game = Game(spec_of(rounds=9, participation={"max_lost": 2}))
        for _ in range(6):
            game.take()
            game.advance(100)
            game.take()
            game.advance(100)
            game.send(game.take())
        assert game.state.round == 6

    def test_all_seats_may_be_lost_at_once(self) -> None:
        game = Game(spec_of(participation={"clients_per_round": 3, "max_lost": 2}))
        for client in game.seat():
            game.claim(client)
        effects = game.advance(100)
        assert [type(effect) for effect in effects] == [Closed, Closed, Closed, RunEnded]
        assert game.state.status == "failed"


class TestWhatALostSeatCost:
    def test_through_the_gateway_what_the_server_saw(self) -> None:
        game = Game(spec_of(), gateway=True)
        work = game.take()
        assert game.leased == GATEWAY_QUERY * SAMPLES
        game.gateway(work, 2)
        under_way = GATEWAY_QUERY
        game.apply(game.asked(work, under_way))
        game.advance(100)
        assert game.spent == Usage(queries=2, requests=2) + under_way
        # Its answer comes too late to change anything.
        answered = GatewayAnswered(
            assignment_id=work.assignment_id, worst=under_way.without_queries(), used=NOTHING
        )
        assert game.apply(answered) == ()
        assert game.spent == Usage(queries=2, requests=2) + under_way

    def test_a_seat_that_asked_nothing_costs_nothing(self) -> None:
        game = Game(spec_of(), gateway=True)
        game.take()
        game.advance(100)
        assert game.spent == NOTHING

    @pytest.mark.parametrize(
        ("trusted", "expected"), [(False, Usage(queries=4)), (True, Usage(queries=1, requests=9))]
    )
    def test_a_model_on_the_device(self, trusted: bool, expected: Usage) -> None:
        game = Game(spec_of(participation={"trusted_clients": trusted}))
        work = game.take()
        usage = Usage(queries=1, requests=9)
        game.apply(Declined(assignment_id=work.assignment_id, reason="broken", usage=usage))
        assert game.spent == expected

    def test_even_trusted_silence_is_charged_in_full(self) -> None:
        game = Game(spec_of(participation={"trusted_clients": True}))
        game.take()
        game.advance(100)
        assert game.spent == Usage(queries=SAMPLES)

    def test_a_trusted_client_cannot_report_more_queries_than_it_leased(self) -> None:
        game = Game(spec_of(budget={"queries": 4}, participation={"trusted_clients": True}))
        work = game.take()
        game.send(work, game.update_for(work, usage=Usage(queries=400, requests=7)))
        assert game.spent == Usage(queries=4, requests=7)


class TestGatewaySpending:
    def test_an_update_costs_what_was_used(self) -> None:
        game = Game(spec_of(), gateway=True)
        work = game.take()
        game.gateway(work, SAMPLES)
        game.send(work)
        assert game.spent == Usage(queries=SAMPLES, requests=SAMPLES)

    def test_an_update_that_the_gateway_never_scored_costs_its_lease(self) -> None:
        """A model on the device did: what it spent, nobody saw."""
        game = Game(spec_of(), gateway=True)
        work = game.take()
        game.gateway(work, 1)
        game.send(work)
        assert game.spent == GATEWAY_QUERY * SAMPLES

    def test_no_more_queries_than_leased(self) -> None:
        game = Game(spec_of(), gateway=True)
        work = game.take()
        game.gateway(work, SAMPLES - 1)
        refused = refusal(game.apply(game.asked(work, GATEWAY_QUERY * 2)))
        assert (refused.code, refused.detail) == (
            "lease_exhausted",
            "2 queries asked, 1 left under the lease",
        )

    def test_a_retry_bills_requests_while_the_cap_allows(self) -> None:
        game = Game(spec_of(budget={"requests": 10}), gateway=True)
        work = game.take()  # 4 queries, 8 requests at worst
        ask = GATEWAY_QUERY * SAMPLES
        game.apply(game.asked(work, ask, "call"))
        used = ask.without_queries()
        game.apply(GatewayAnswered(assignment_id=work.assignment_id, worst=used, used=used))
        again = GATEWAY_QUERY
        assert game.apply(game.asked(work, again, "call")) == ()
        assert (game.leased.queries, game.leased.requests) == (SAMPLES, 10)
        refused = refusal(game.apply(game.asked(work, again, "call")))
        assert refused.code == "lease_exhausted"
        assert "budget of 10 requests exhausted" in refused.detail


class TestOverruns:
    def test_what_was_spent_beyond_a_lease_is_held_from_then_on(self) -> None:
        game = Game(spec_of(budget={"requests": 20}), gateway=True)
        work = game.take()  # 4 queries, 8 requests at worst
        game.apply(game.asked(work, GATEWAY_QUERY * SAMPLES))
        worst = (GATEWAY_QUERY * SAMPLES).without_queries()
        game.apply(
            GatewayAnswered(assignment_id=work.assignment_id, worst=worst, used=Usage(requests=15))
        )
        assert (game.leased.queries, game.leased.requests) == (SAMPLES, 15)
        game.send(work)
        assert game.spent.requests == 15
        assert game.state.status == "running"  # 5 requests pay for two more prompts


class TestPauses:
    def paused(self) -> tuple[Game, AlphaAssignment | LossesAssignment]:
        """A game that paused amid work whose queries were asked."""
        game = Game(spec_of(rounds=3), gateway=True)
        work = game.take()
        game.gateway(work, SAMPLES)
        game.apply(PauseAsked(reason="the key was revoked"))
        return game, work

    def test_a_pause_ends_nothing_but_the_waiting(self) -> None:
        game, work = self.paused()
        assert (game.state.status, game.state.paused) == ("stopped", True)
        assert game.state.reason == "paused: the key was revoked"
        assert game.only(RunEnded).status == "stopped"
        assert game.state.seat_with(work.assignment_id) is not None
        assert game.leased.queries == SAMPLES

    def test_no_deadline_passes_and_nothing_is_asked_meanwhile(self) -> None:
        game, work = self.paused()
        game.advance(100_000)
        assert game.state.seat_with(work.assignment_id) is not None
        declined = Declined(assignment_id=work.assignment_id, reason="the gateway failed")
        assert refusal(game.apply(declined)).code == "run_conflict"
        assert refusal(game.apply(game.asked(work, ONE_QUERY))).code == "run_conflict"

    def test_resumed_the_same_client_gets_the_same_work(self) -> None:
        game, work = self.paused()
        game.advance(100_000)
        game.apply(ResumeAsked())
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
        game.apply(StopAsked())
        assert (game.state.status, game.state.paused, game.leased) == ("stopped", False, NOTHING)
        game.apply(PauseAsked(reason="too late"))
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
        game.apply(ResumeAsked())
        game.apply(ModelSeen(model="m-2"))
        game.apply(ModelSeen(model="m-1"))  # a cache may still hold its answers
        assert (game.state.models, game.state.status) == (("m-1", "m-2"), "running")

    def test_a_paused_run_tells_of_it_too(self) -> None:
        game = Game(spec_of(), gateway=True)
        game.apply(ModelSeen(model="m-1"))
        game.apply(PauseAsked(reason="the key was revoked"))
        game.apply(ModelSeen(model="m-2"))
        assert game.state.reason == (
            "paused: the key was revoked; the provider answers with 'm-2' now, it was 'm-1'; "
            "resume the run to accept it"
        )

    def test_an_ended_run_only_notes_it(self) -> None:
        game = Game(spec_of(), gateway=True)
        game.apply(ModelSeen(model="m-1"))
        game.apply(StopAsked())
        game.apply(ModelSeen(model="m-2"))
        assert (game.state.reason, game.state.paused) == (None, False)
        assert game.state.models == ("m-1", "m-2")

    def test_who_resumes_accepts_the_servers_model(self) -> None:
        game = Game(spec_of(), gateway=True)
        game.state = replace(game.state, model="another")
        game.apply(PauseAsked(reason="the server's model is another"))
        game.apply(ResumeAsked())
        assert game.state.model == game.machine.gateway_model


class TestRestarts:
    def test_what_was_under_way_is_spent_once_and_may_be_asked_again(self) -> None:
        game = Game(spec_of(rounds=2, budget={"queries": 8}), gateway=True)
        work = game.take()
        game.apply(game.asked(work, GATEWAY_QUERY * SAMPLES, "call"))
        game.advance(99)
        game.apply(Restarted())
        game.advance(99)  # a new deadline: the client cannot help it
        lost = (GATEWAY_QUERY * SAMPLES).without_queries()
        seat = game.state.seat_with(work.assignment_id)
        assert seat is not None
        assert (seat.sent, seat.used) == (NOTHING, lost + Usage(queries=SAMPLES))
        # The same request again is paid again, but is no new logical query.
        assert game.apply(game.asked(work, GATEWAY_QUERY * SAMPLES, "call")) == ()
        game.apply(
            GatewayAnswered(
                assignment_id=work.assignment_id, worst=lost, used=Usage(requests=SAMPLES)
            )
        )
        game.send(work)
        assert game.spent == lost + Usage(queries=SAMPLES, requests=SAMPLES)

    def test_evaluation_under_way_is_spent(self) -> None:
        game = Game(spec_of(), gateway=True)
        worst = Usage(queries=3, requests=5)
        game.apply(EvaluationReserved(lease_id="evaluation-1", worst=worst))
        game.apply(Restarted())
        assert (game.state.evaluation.spent, game.spent) == (worst, Usage(requests=5))
        assert game.leased == NOTHING


class TestBadUpdates:
    def refused(self, game: Game, work: Any, update: Any) -> str:
        before = game.state
        refused = refusal(game.send(work, update))
        assert refused.code == "invalid_message"
        assert game.state is before
        game.send(work)  # and the right one is still welcome
        assert game.state.round == 1
        return refused.detail

    @pytest.mark.parametrize(
        ("alpha", "detail"),
        [
            (Array.pack([0.5] * 9, (3, 3), "float32"), "float32 [3, 3]"),
            (Array.pack([0.5] * 6, (3, 2), "float32"), "float32 [3, 2]"),
            (Array.pack([0.5] * 6, (6,), "float32"), "float32 [6]"),
            (Array.pack([1] * 6, (2, 3), "uint8"), "uint8 [2, 3]"),
            (Array.pack([0.5] * 5 + [0.0], (2, 3), "float32"), "outside what the method allows"),
            (Array.pack([0.5] * 5 + [1e-9], (2, 3), "float32"), "outside what the method allows"),
            (Array.pack([0.5] * 5 + [-0.5], (2, 3), "float32"), "must be positive"),
            (Array.pack([0.0] * 6, (2, 3), "float32"), "must be positive"),
        ],
        ids=str,
    )
    def test_alphas(self, alpha: Array, detail: str) -> None:
        game = Game(spec_of(participation=ALPHA))
        work = game.take()
        assert detail in self.refused(game, work, game.update_for(work, alpha=alpha))

    @pytest.mark.parametrize("count", [3, 5])
    def test_number_of_losses(self, count: int) -> None:
        game = Game(spec_of(participation=LOSSES))
        work = game.take()
        update = game.update_for(work, losses=(0.5,) * count)
        assert self.refused(game, work, update) == f"losses: {count} were sent for 4 prompts"

    def test_the_other_exchange(self) -> None:
        losses, alpha = Game(spec_of(participation=LOSSES)), Game(spec_of(participation=ALPHA))
        works = [game.take() for game in (losses, alpha)]
        updates = [g.update_for(w) for g, w in zip((losses, alpha), works, strict=True)]
        assert "the run's is 'losses'" in self.refused(losses, works[0], updates[1])
        assert "the run's is 'alpha'" in self.refused(alpha, works[1], updates[0])

    @both
    @pytest.mark.parametrize(
        ("scored", "welcome"),
        [
            (Scored(scored=8, failed=1, vetoed=1), True),
            (Scored(scored=4, failed=1), True),
            (Scored(scored=79, failed=21), False),
            (Scored(scored=3, vetoed=1), False),
            (Scored(scored=0), False),
            (Scored(scored=0, failed=5), False),
        ],
        ids=str,
    )
    def test_too_few_scored(self, exchange: str, scored: Scored, welcome: bool) -> None:
        game = Game(spec_of(participation={"exchange": exchange}))
        work = game.take()
        update = game.update_for(work, scored=scored)
        if welcome:
            game.send(work, update)
            assert game.state.round == 1
        else:
            assert "must be declined" in self.refused(game, work, update)

    @both
    def test_another_model(self, exchange: str) -> None:
        game = Game(spec_of(participation={"exchange": exchange}))
        game.send(game.take())
        assert game.state.model == MODEL  # the first one sets it
        work = game.take()
        refused = refusal(game.send(work, game.update_for(work, model="model-b")))
        assert refused.code == "model_mismatch"
        assert "'model-b'" in refused.detail
        # Such a client would not get better: its seat is free, its lease settled.
        assert game.state.seats == ()
        assert game.leased == NOTHING
        assert game.spent.queries == 2 * SAMPLES
        assert game.state.round == 1

    def test_the_gateway_s_model_is_known_from_the_start(self) -> None:
        game = Game(spec_of(), gateway=True)
        work = game.take()
        update = game.update_for(work, model="model-b")
        assert refusal(game.send(work, update)).code == "model_mismatch"

    @both
    def test_extreme_numbers_cannot_break_a_round(self, exchange: str) -> None:
        """The largest numbers that a message may carry, from both clients of a round."""
        game = Game(spec_of(rounds=1, participation={"exchange": exchange, "clients_per_round": 2}))
        for client in game.seat():
            work = game.claim(client)
            assert work is not None
            changes: dict[str, Any] = {"num_examples": 2**31}
            if exchange == "losses":
                changes["losses"] = (1e6, -1e6, 1e6, 1e6)
            else:
                largest = float(np.finfo(np.float32).max)
                changes["alpha"] = Array.pack([largest] * 6, (2, 3), "float32")
                changes["mean_loss"] = 1e6
            game.send(work, game.update_for(work, **changes))
        assert game.state.status == "completed"


class TestStopAndResume:
    @both
    def test_stop_settles_and_resume_goes_on(self, exchange: str) -> None:
        game = Game(spec_of(rounds=2, participation={"exchange": exchange, "clients_per_round": 2}))
        first, second = game.seat()
        done, lost = game.claim(first), game.claim(second)
        assert done is not None
        assert lost is not None
        game.send(done)
        effects = game.apply(StopAsked(reason="enough"))
        assert [type(effect) for effect in effects] == [Closed, RoundFinished, RunEnded]
        assert (game.state.status, game.state.reason) == ("stopped", "enough")
        assert game.state.ended_at == game.now
        assert game.state.round == 1
        assert game.leased == NOTHING
        assert game.seat() == []
        assert game.claim(first) is None
        assert refusal(game.send(lost)).code == "assignment_expired"
        game.apply(ResumeAsked())
        assert game.state.running
        assert (game.state.reason, game.state.ended_at) == (None, None)
        game.play()
        assert game.state.status == "completed"

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
        game.apply(StopAsked())
        assert game.reports[0].queries == SAMPLES
        assert game.only(RoundFinished).clients == (first,)
        assert not np.array_equal(game.state.method.alpha, before)

    def test_stopping_is_no_failure_of_the_clients(self) -> None:
        game = Game(spec_of(participation={"clients_per_round": 3, "max_lost": 1}))
        for client in game.seat():
            game.claim(client)
        effects = game.apply(StopAsked())
        assert game.state.status == "stopped"
        assert [type(e) for e in effects] == [Closed] * 3 + [RunEnded]

    def test_a_failed_run_may_go_on_with_a_new_row(self) -> None:
        game = Game(spec_of(participation={"max_lost": 1}))
        for _ in range(2):
            game.take()
            game.advance(100)
        assert game.state.status == "failed"
        game.apply(ResumeAsked())
        game.take()
        game.advance(100)
        assert game.state.running

    def test_only_where_it_makes_sense(self) -> None:
        game = Game(spec_of())
        assert refusal(game.apply(ResumeAsked())).code == "run_conflict"
        game.apply(StopAsked())
        assert refusal(game.apply(StopAsked())).code == "run_conflict"
        done = Game(spec_of(rounds=1))
        done.play()
        for event in (ResumeAsked(), StopAsked()):
            refused = refusal(done.apply(event))
            assert (refused.code, "completed" in refused.detail) == ("run_conflict", True)

    def test_ended_by_whom(self) -> None:
        game = Game(spec_of())
        game.apply(StopAsked(status="failed", reason="the disk is full"))
        assert (game.state.status, game.state.reason) == ("failed", "the disk is full")


class TestEvaluation:
    def test_queries_apart_all_else_together(self) -> None:
        game = Game(
            spec_of(budget={"queries": 8, "requests": 9}, evaluation={"queries": 3}), gateway=True
        )
        worst = Usage(queries=3, requests=5)
        game.apply(EvaluationReserved(lease_id="evaluation-1", worst=worst))
        assert game.state.evaluation.leased == worst
        assert game.leased == Usage(requests=5)
        assert game.take().leased_queries == 2  # 4 requests are left, a query takes 2 at worst
        game.apply(EvaluationSettled(lease_id="evaluation-1", used=Usage(queries=3, requests=3)))
        assert game.state.evaluation.spent == Usage(queries=3, requests=3)
        assert game.spent == Usage(requests=3)
        refused = refusal(
            game.apply(EvaluationReserved(lease_id="evaluation-2", worst=Usage(queries=1)))
        )
        assert (refused.code, "3 queries exhausted" in refused.detail) == ("lease_exhausted", True)

    def test_a_cap_on_all_requests_holds_evaluation_back(self) -> None:
        game = Game(spec_of(budget={"requests": 4}), gateway=True)
        worst = Usage(queries=1, requests=5)
        refused = refusal(game.apply(EvaluationReserved(lease_id="evaluation-1", worst=worst)))
        assert refused.code == "lease_exhausted"
        assert game.state.evaluation.leased == NOTHING

    def test_training_waits_for_evaluation_before_it_gives_up(self) -> None:
        game = Game(spec_of(budget={"requests": 4}), gateway=True)
        game.apply(EvaluationReserved(lease_id="evaluation-1", worst=Usage(requests=4)))
        assert len(game.seat()) == 1
        assert game.claim(game.state.seats[0].client) is None
        assert game.state.running
        game.apply(EvaluationSettled(lease_id="evaluation-1", used=NOTHING))
        assert game.take().leased_queries == 2

    def test_an_unknown_lease(self) -> None:
        game = Game(spec_of())
        settled = EvaluationSettled(lease_id="evaluation-9", used=NOTHING)
        assert refusal(game.apply(settled)).code == "not_found"

    def test_measured(self) -> None:
        game = Game(spec_of())
        game.apply(Measured(which="before", value=0.5))
        game.apply(Measured(which="after", value=0.25))  # too early: the run goes on
        game.apply(StopAsked())
        game.apply(Measured(which="after", value=0.75))
        metric = game.state.metric
        assert (metric.no_prompt, metric.before, metric.after) == (None, 0.5, 0.75)
        game.apply(ResumeAsked())
        assert (game.state.metric.before, game.state.metric.after) == (0.5, None)


class TestSizes:
    def test_alpha_must_fit_a_message(self) -> None:
        with pytest.raises(ValueError, match="alpha would hold"):
            RoundMachine("run", spec_of(), vocab_size=2**22)

    def test_a_gateway_s_answer_must_fit_a_message(self) -> None:
        with pytest.raises(ValueError, match="answer of the gateway would hold"):
            RoundMachine("run", spec_of(num_samples=65536, batch_size=1024), vocab_size=N)


class TestDeterminism:
    @given(st.permutations(range(5)), st.permutations(range(5)), st.booleans(), st.booleans())
    @settings(max_examples=15, deadline=None)
    def test_the_order_of_clients_does_not_matter(
        self, arrivals: list[int], answers: list[int], proportional: bool, losses: bool
    ) -> None:
        """Whoever comes first, answers first: the same alpha to the last bit."""

        def played(arrivals: list[int], answers: list[int]) -> str:
            selection = "proportional" if proportional else "uniform"
            exchange = "losses" if losses else "alpha"
            game = Game(
                spec_of(
                    participation={
                        "clients_per_round": 3,
                        "selection": selection,
                        "exchange": exchange,
                        "min_clients": 5,
                    }
                )
            )
            while game.state.running:
                held = {client: 3 + client for client in arrivals}
                game.apply(SeatsVacant(available=held))
                while any(seat.phase != "done" for seat in game.state.seats):
                    works = []
                    for client in arrivals:
                        if game.state.seat_of(client) is not None:
                            works.append((answers.index(client), game.claim(client)))
                    for _, work in sorted(works, key=lambda pair: pair[0]):
                        # What comes back depends on the work alone, as on a real device.
                        assert work is not None
                        game.send(work, answer_to(game, work))
            return alpha_sha256(game.state.method.alpha)

        assert played(arrivals, answers) == played(list(range(5)), list(range(5)))

    def test_both_exchanges_agree(self) -> None:
        """E = 1 and local SGD: the device's arithmetic is the server's."""
        for server_optimizer in ("none", "adamw"):
            hashes = []
            for exchange in ("alpha", "losses"):
                game = Game(
                    spec_of(
                        rounds=6,
                        learning_rate=0.003,
                        participation={
                            "exchange": exchange,
                            "server_optimizer": server_optimizer,
                            "clients_per_round": 2,
                            "min_clients": 4,
                        },
                    )
                )
                while game.state.running:
                    for client in game.seat(range(4)):
                        work = game.claim(client)
                        assert work is not None
                        game.send(work, answer_to(game, work))
                hashes.append(alpha_sha256(game.state.method.alpha))
            assert hashes[0] == hashes[1]


def answer_to(game: Game, work: AlphaAssignment | LossesAssignment) -> AlphaUpdate | LossesUpdate:
    """What a device answers whose losses depend on prompts and mini-batch only."""

    def losses_of(rows: list[list[float]], seed: int) -> tuple[float, ...]:
        return tuple((3 * sum(row) + row[0] + seed % 7) / 10 for row in rows)

    if isinstance(work, LossesAssignment):
        losses = losses_of(work.prompts.rows(), work.minibatch_seed)
        return game.update_for(work, losses=losses)
    method = game.machine.algorithm
    state = State(alpha=from_wire(work.alpha), memory=memory_from_wire(work.memory))
    for step in work.steps:
        asked = method.ask(state, stream(step.prompt_seed), step.num_samples)
        rows = asked.indices.astype(float).tolist()
        state = method.tell(state, asked, losses_of(rows, step.minibatch_seed))
    memory = memory_to_wire(state.memory) if method.shares_memory else {}
    return game.update_for(work, alpha=to_wire(state.alpha), memory=memory)


# Events in any order


class AnyOrder(RuleBasedStateMachine):
    """Events in any order; `Game.apply` checks every step."""

    @initialize(
        method=st.sampled_from(["gs-bdpl", "gs-bdpl", "bdpl", "evolution"]),
        exchange=st.sampled_from(["alpha", "losses"]),
        clients_per_round=st.integers(1, 3),
        local_steps=st.integers(1, 3),
        selection=st.sampled_from(["uniform", "proportional"]),
        optimizer=st.sampled_from(["sgd", "adamw"]),
        server_optimizer=st.sampled_from(["none", "adamw"]),
        gateway=st.booleans(),
        trusted=st.booleans(),
        rounds=st.integers(1, 4),
        max_lost=st.integers(1, 4),
        queries=st.none() | st.integers(0, 60),
        requests=st.none() | st.integers(0, 90),
        usd=st.none() | st.decimals("0", "0.5", places=3),
        evaluation=st.none() | st.integers(1, 9),
    )
    def begin(
        self,
        method: str,
        exchange: str,
        clients_per_round: int,
        local_steps: int,
        selection: str,
        optimizer: str,
        server_optimizer: str,
        gateway: bool,
        trusted: bool,
        rounds: int,
        max_lost: int,
        queries: int | None,
        requests: int | None,
        usd: Decimal | None,
        evaluation: int | None,
    ) -> None:
        options: dict[str, Any] = {"name": method, "local_steps": local_steps}
        if method != "evolution":
            options["optimizer"] = optimizer
        else:
            server_optimizer = "none"
            if exchange == "alpha" or local_steps > 1:
                clients_per_round = 1
        # Without a gateway the server can bound queries only; the service refuses other caps.
        caps = {"queries": queries}
        if gateway:
            caps |= {"requests": requests, "usd": usd}  # type: ignore[dict-item]
        budget = {unit: cap for unit, cap in caps.items() if cap is not None}
        self.game = Game(
            spec_of(
                rounds=rounds,
                budget=budget or None,
                participation={
                    "exchange": exchange,
                    "clients_per_round": clients_per_round,
                    "selection": selection,
                    "server_optimizer": server_optimizer,
                    "trusted_clients": trusted,
                    "max_lost": max_lost,
                    "min_clients": 1,
                },
                evaluation={"queries": evaluation},
                **options,
            ),
            gateway=gateway,
        )
        self.memories: dict[int, Any] = {}
        self.known: list[Any] = []
        self.calls: list[tuple[str, Usage]] = []
        self.may_have_been_sent = NOTHING
        self.evaluations: list[tuple[str, Usage]] = []

    @property
    def state(self) -> RunState:
        return self.game.state

    def apply(self, event: Event) -> tuple[Effect, ...]:
        effects = self.game.apply(event)
        for effect in effects:
            if isinstance(effect, MemorySaved):
                self.memories[effect.client] = effect.memory
            elif isinstance(effect, Assigned):
                self.known.append(effect.assignment)
        return effects

    @rule(clients=st.dictionaries(st.integers(0, 5), st.integers(1, 9), max_size=6))
    def seats_vacant(self, clients: dict[int, int]) -> None:
        self.apply(SeatsVacant(available=clients))

    @rule(client=st.integers(0, 5))
    def work_asked(self, client: int) -> None:
        before = self.state.account.leases
        seat = self.state.seat_of(client)
        self.game.made += 1
        event = WorkAsked(
            client=client,
            assignment_id=f"work-{self.game.made}",
            memory=self.memories.get(client, {}) if self.game.machine.remembers_clients else {},
        )
        effects = self.apply(event)
        if seat is None or seat.phase == "working":
            assert self.state.account.leases == before
            assert bool(effects) == (seat is not None and self.state.running)

    @rule()
    def every_seat_works(self) -> None:
        for seat in self.state.seats:
            if seat.phase == "offered":
                self.work_asked(seat.client)

    @precondition(lambda self: self.known)
    @rule(
        data=st.data(),
        model=st.sampled_from([MODEL, MODEL, MODEL, MODEL, "model-b"]),
        scored=st.sampled_from([Scored(scored=2), Scored(scored=2), Scored(scored=1, failed=1)]),
        loss=st.floats(-1e6, 1e6),
        reported=st.integers(0, 9),
    )
    def update(
        self, data: st.DataObject, model: str, scored: Scored, loss: float, reported: int
    ) -> None:
        work = data.draw(st.sampled_from(self.known))
        changes: dict[str, Any] = {"model": model, "scored": scored}
        changes["usage"] = Usage(queries=reported, requests=reported)
        if isinstance(work, LossesAssignment):
            changes["losses"] = (loss, *([0.25] * (work.prompts.shape[0] - 1)))
        self.game.send(work, answer_to(self.game, work).model_copy(update=changes))

    @precondition(lambda self: self.known)
    @rule(data=st.data(), reported=st.integers(0, 9))
    def declined(self, data: st.DataObject, reported: int) -> None:
        work = data.draw(st.sampled_from(self.known))
        usage = Usage(queries=reported)
        self.apply(Declined(assignment_id=work.assignment_id, reason="tired", usage=usage))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def renewed(self, data: st.DataObject) -> None:
        work = data.draw(st.sampled_from(self.known))
        self.apply(Renewed(assignment_id=work.assignment_id))

    @precondition(lambda self: self.known and self.game.machine.gateway_model)
    @rule(data=st.data(), queries=st.integers(1, 12), retry=st.booleans())
    def gateway_asked(self, data: st.DataObject, queries: int, retry: bool) -> None:
        work = data.draw(st.sampled_from(self.known))
        worst = GATEWAY_QUERY * queries
        seat = self.state.seat_with(work.assignment_id)
        known = sorted(seat.calls) if retry and seat is not None else []
        call = known[0] if known else None
        if not self.apply(self.game.asked(work, worst, call)):
            self.calls.append((work.assignment_id, worst.without_queries()))
            self.may_have_been_sent += worst.without_queries() if known else worst

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), share=st.integers(0, 4))
    def gateway_answered(self, data: st.DataObject, share: int) -> None:
        position = data.draw(st.integers(0, len(self.calls) - 1))
        assignment_id, worst = self.calls.pop(position)
        used = Usage(requests=worst.requests * share // 4)
        in_time = self.state.seat_with(assignment_id) is not None
        answered = GatewayAnswered(assignment_id=assignment_id, worst=worst, used=used)
        assert self.apply(answered) == ()
        if in_time:
            back = {u: getattr(worst, u) - getattr(used, u) for u in Usage.model_fields}
            sent = self.may_have_been_sent
            self.may_have_been_sent = Usage(**{u: getattr(sent, u) - back[u] for u in back})

    @rule(queries=st.integers(1, 5))
    def evaluation_reserved(self, queries: int) -> None:
        lease_id = f"evaluation-{len(self.evaluations)}-{self.game.made}-{queries}"
        if lease_id in self.state.evaluation.leases:
            return
        worst = GATEWAY_QUERY * queries
        if not self.apply(EvaluationReserved(lease_id=lease_id, worst=worst)):
            self.evaluations.append((lease_id, worst))

    @precondition(lambda self: self.evaluations)
    @rule(data=st.data())
    def evaluation_settled(self, data: st.DataObject) -> None:
        position = data.draw(st.integers(0, len(self.evaluations) - 1))
        lease_id, worst = self.evaluations.pop(position)
        self.apply(EvaluationSettled(lease_id=lease_id, used=Usage(queries=worst.queries)))

    @rule(seconds=st.sampled_from([1, 10, 60, 100]))
    def time_passes(self, seconds: float) -> None:
        self.game.now += seconds
        self.apply(TimePassed())

    @rule()
    def restarted(self) -> None:
        self.apply(Restarted())
        self.calls.clear()
        self.evaluations.clear()

    @rule(model=st.sampled_from(["m-1", "m-2"]))
    def model_seen(self, model: str) -> None:
        self.apply(ModelSeen(model=model))

    @rule()
    def pause(self) -> None:
        self.apply(PauseAsked(reason="the key was revoked"))

    @rule(status=st.sampled_from(["stopped", "failed"]))
    def stop(self, status: Any) -> None:
        self.apply(StopAsked(status=status))

    @rule()
    def resume(self) -> None:
        self.apply(ResumeAsked())

    @rule(value=st.floats(0, 1))
    def measured(self, value: float) -> None:
        self.apply(Measured(which="before", value=value))

    @invariant()
    def what_may_have_been_sent_is_held(self) -> None:
        if not hasattr(self, "game"):
            return
        held = self.state.account.held
        for unit in Usage.model_fields:
            assert getattr(self.may_have_been_sent, unit) <= getattr(held, unit)
        reported = sum(report.queries for report in self.game.reports)
        assert reported <= self.state.account.spent.queries

    def teardown(self) -> None:
        """However it came here, the run can be played to an end that leaves nothing open."""
        if not hasattr(self, "game"):
            return
        for lease_id, worst in self.evaluations:
            self.apply(EvaluationSettled(lease_id=lease_id, used=worst))
        if self.state.status in ("stopped", "failed"):
            self.apply(ResumeAsked())
        self.game.play(range(6))
        assert self.state.status in ("completed", "budget_exhausted", "failed")
        assert self.state.account.leased == NOTHING
        ends = [effect for effect in self.game.effects if isinstance(effect, RunEnded)]
        assert ends[-1].status == self.state.status


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
