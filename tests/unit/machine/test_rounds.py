"""Rounds of the machine: their clients, their updates, and the resulting alpha."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedone_sdk.aggregator.rounds import RoundMachine
from fedone_sdk.aggregator.rounds.run_state import Seat, offers
from fedone_sdk.aggregator.rounds.seats import decline, fill
from fedone_sdk.algorithms import alpha_sha256
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.messages import AlphaAssignment, Scored, Tensor
from tests.unit.machine.game import (
    ALPHA,
    LENGTH,
    LOSSES,
    SAMPLES,
    Game,
    N,
    answer_to,
    both,
    refusal,
    spec_of,
)


class TestRounds:
    @both
    def test_one_client_a_round(self, exchange: str) -> None:
        game = Game(spec_of(participation={"exchange": exchange}))
        before = game.state.method.alpha
        work = game.take()
        assert (work.round, work.leased_queries, work.deadline_s) == (0, SAMPLES, 100)
        assert game.leased == Usage(queries=SAMPLES)
        result = game.send(work)
        assert result.reply.assignment_id == work.assignment_id
        finished = result.finished
        assert finished is not None
        assert finished.report.queries == SAMPLES
        assert game.state.round == 1
        assert game.spent == Usage(queries=SAMPLES)
        assert game.leased == NOTHING
        assert not np.array_equal(game.state.method.alpha, before)
        game.play()
        assert game.state.status == "completed"
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
            assert (game.send(work).finished is not None) == (number == 2)
        assert game.rounds[-1].clients == tuple(sorted(clients))
        assert game.reports[0].queries == 3 * SAMPLES

    def test_alpha_is_the_mean_and_by_default_the_plain_one(self) -> None:
        counts = {"examples": (0.25, 0.75), "plain": (0.5, 0.5), None: (0.5, 0.5)}
        for aggregation, shares in counts.items():
            part = {} if aggregation is None else {"aggregation": aggregation}
            game = Game(spec_of(participation={"clients_per_round": 2, **part}))
            clients = sorted(game.seat(range(2)))
            alphas = [np.full((LENGTH, N), value, np.float32) for value in (0.3, 0.4)]
            for client, alpha, held in zip(clients, alphas, (10, 30), strict=True):
                work = game.claim(client)
                assert work is not None
                packed = Tensor.from_bytes(alpha.tobytes(), alpha.shape, "float32")
                game.send(work, game.update_for(work, alpha=packed, num_examples=held))
            expected = shares[0] * 0.3 + shares[1] * 0.4
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
            before = game.state
            game.send(work)
            if step < 2:
                assert offers(before, game.state) == (game.state.seats[0].client,)
        assert len({work.assignment_id for work in works}) == 3
        assert len({work.minibatch_seed for work in works}) == 3  # type: ignore[union-attr]
        assert game.state.status == "completed"
        assert game.rounds[-1].report.queries == 3 * SAMPLES
        (seat,) = game.rounds[-1].record["seats"]
        assert [len(losses) for losses in seat["losses"]] == [SAMPLES] * 3

    def test_alpha_is_the_mean_of_the_steps_with_the_logged_losses(self) -> None:
        game = Game(spec_of(participation={**LOSSES, "clients_per_round": 2}, local_steps=2))
        game.play()
        state = game.machine.initial_state().method
        for finished in game.rounds:
            alphas, weights = [], []
            for record in json.loads(json.dumps(finished.record))["seats"]:
                weights.append(record["weight"])
                local = state
                for step, losses in enumerate(record["losses"]):
                    seat = Seat(number=record["number"], client=record["client"], phase="working",
                                due=0, step=step, num_samples=record["num_samples"],
                                local=local)  # fmt: skip
                    at_round = dataclasses.replace(game.state, round=finished.report.round)
                    asked = game.machine.candidates(at_round, seat)
                    local = game.machine.method.tell(local, asked, losses)
                alphas.append(local.alpha)
            mean = np.average(np.array(alphas, np.float64), axis=0, weights=weights)
            state = state.evolve(alpha=mean.astype(np.float32))
            assert alpha_sha256(state.alpha) == finished.record["alpha_sha256"]
        assert alpha_sha256(state.alpha) == alpha_sha256(game.state.method.alpha)

    def test_waits_for_enough_clients_before_the_first_round_only(self) -> None:
        game = Game(spec_of(participation={"min_clients": 3}))
        assert game.seat([0, 1]) == []
        assert len(game.seat([0, 1, 2])) == 1
        work = game.claim(game.state.seats[0].client)
        assert work is not None
        game.send(work)
        assert len(game.seat([1])) == 1

    def test_a_client_s_adamw_memory_travels_with_its_work(self) -> None:
        game = Game(spec_of(optimizer="adamw", participation=LOSSES, rounds=2))
        assert game.machine.remembers_clients
        game.send(game.take([7]))
        ((client, memory),) = game.memories
        assert (client, int(memory["t"])) == (7, 1)
        (client,) = game.seat([7])
        work = game.claim(client, memory=memory)
        assert work is not None
        game.send(work)
        assert int(game.memories[-1][1]["t"]) == 2

    def test_a_client_s_second_seat_of_a_round_continues_its_first(self) -> None:
        part = {"selection": "proportional", "clients_per_round": 2, **LOSSES}
        game = Game(spec_of(optimizer="adamw", participation=part, rounds=1))
        assert game.seat([7]) == [7, 7]
        for _ in range(2):
            work = game.claim(7)
            assert work is not None
            assert game.state.round == 0
            assert not game.memories
            game.send(work)
        ((_, memory),) = game.memories
        assert int(memory["t"]) == 2

    @both
    def test_a_client_has_time_for_each_of_its_seats(self, exchange: str) -> None:
        """However long the first one takes it: it cannot come for the second before."""
        part = {"selection": "proportional", "clients_per_round": 3, "exchange": exchange}
        game = Game(spec_of(participation=part))
        assert game.seat([4]) == [4, 4, 4]
        for _ in range(3):
            game.advance(9)
            work = game.claim(4)
            assert work is not None
            assert game.state.next_deadline == game.now + 100
            game.advance(99)
            game.send(work)
        assert game.rounds[-1].clients == (4, 4, 4)
        assert all(one.receipt is not None for one in game.closed)

    @pytest.mark.parametrize("end", ["works", "vanishes", "declines", "never comes"])
    def test_a_client_that_vanishes_loses_all_its_seats(self, end: str) -> None:
        part = {"selection": "proportional", "clients_per_round": 2, **LOSSES}
        game = Game(spec_of(participation=part))
        assert game.seat([4]) == [4, 4]
        if end != "never comes":
            work = game.claim(4)
            assert work is not None
            if end == "works":
                game.send(work)
            elif end == "vanishes":
                game.advance(100)
            else:
                game.apply(decline, assignment_id=work.assignment_id, reason="no battery")
        assert game.state.next_deadline == game.now + 10
        game.advance(9)
        assert game.state.seat_of(4) is not None
        game.advance(1)
        assert game.state.seat_of(4) is None
        assert set(game.seat([4, 5])) == {5}


class TestSizes:
    def test_alpha_and_a_gateway_s_answer_must_fit_a_message(self) -> None:
        with pytest.raises(ValueError, match="alpha would hold"):
            RoundMachine("run", spec_of(), vocab_size=2**22)
        with pytest.raises(ValueError, match="answer of the gateway would hold"):
            RoundMachine("run", spec_of(num_samples=65536, batch_size=1024), vocab_size=N)


class TestDeterminism:
    @given(st.permutations(range(5)), st.permutations(range(5)), st.booleans(), st.booleans())
    @settings(max_examples=15)
    def test_the_order_of_clients_does_not_matter(
        self, arrivals: list[int], answers: list[int], proportional: bool, losses: bool
    ) -> None:
        """The order of answers does not matter: the same alpha to the last bit."""

        def played(arrivals: list[int], answers: list[int]) -> str:
            selection = "proportional" if proportional else "uniform"
            exchange = "losses" if losses else "alpha"
            part = {"clients_per_round": 3, "selection": selection, "min_clients": 5}
            game = Game(spec_of(participation={**part, "exchange": exchange}))
            while game.state.running:
                held = {client: 3 + client for client in arrivals}
                game.apply(fill, available=held)
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


MAX_ALPHA = 1e6


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
            (Tensor.pack([0.5] * 9, (3, 3), "float32"), "float32 [3, 3]"),
            (Tensor.pack([0.5] * 6, (3, 2), "float32"), "float32 [3, 2]"),
            (Tensor.pack([0.5] * 6, (6,), "float32"), "float32 [6]"),
            (Tensor.pack([1] * 6, (2, 3), "uint8"), "uint8 [2, 3]"),
            (Tensor.pack([0.5] * 5 + [0.0], (2, 3), "float32"), "does not allow these values"),
            (Tensor.pack([0.5] * 5 + [1e-9], (2, 3), "float32"), "does not allow these values"),
            (Tensor.pack([0.5] * 5 + [-0.5], (2, 3), "float32"), "no entry may be negative"),
            (Tensor.pack([0.0] * 6, (2, 3), "float32"), "no entry may be negative"),
            (Tensor.pack([MAX_ALPHA + 1.0] * 6, (2, 3), "float32"), "an entry is above 1e+06"),
            (Tensor.pack([3.4e38] * 6, (2, 3), "float32"), "an entry is above 1e+06"),
        ],
        ids=str,
    )
    def test_alphas(self, alpha: Tensor, detail: str) -> None:
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
            (Scored(scored=8, failed=1, vetoed=1), True), (Scored(scored=4, failed=1), True),
            (Scored(scored=79, failed=21), False), (Scored(scored=3, vetoed=1), False),
            (Scored(scored=0), False), (Scored(scored=0, failed=5), False),
        ],
        ids=str,
    )  # fmt: skip
    def test_too_few_scored(self, exchange: str, scored: Scored, welcome: bool) -> None:
        game = Game(spec_of(participation={"exchange": exchange}, batch_size=100))
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
        work = game.take()
        usage = Usage(queries=SAMPLES)
        refused = refusal(game.send(work, game.update_for(work, model="model-b", usage=usage)))
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
        """The largest numbers that an update may have, from both clients of a round."""
        game = Game(spec_of(rounds=1, participation={"exchange": exchange, "clients_per_round": 2}))
        for client in game.seat():
            work = game.claim(client)
            assert work is not None
            changes: dict[str, Any] = {"num_examples": 2**31}
            if exchange == "losses":
                changes["losses"] = (1e6, -1e6, 1e6, 1e6)
            else:
                changes["alpha"] = Tensor.pack([MAX_ALPHA] * 6, (2, 3), "float32")
                changes["mean_loss"] = 1e6
            game.send(work, game.update_for(work, **changes))
        assert game.state.status == "completed"
        assert np.isfinite(game.state.method.alpha).all()
