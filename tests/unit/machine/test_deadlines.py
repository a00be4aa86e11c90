"""Late, slow and silent clients."""

from __future__ import annotations

import pytest

from fedone_sdk.aggregator.rounds import ONE_QUERY, RoundMachine
from fedone_sdk.aggregator.rounds.run_state import Closed
from fedone_sdk.aggregator.rounds.seats import decline, renew
from fedone_sdk.aggregator.rounds.spending import reserve_call
from fedone_sdk.budget import NOTHING, Usage
from tests.unit.machine.game import LOSSES, SAMPLES, Game, both, refusal, spec_of


class TestDeadlines:
    @both
    def test_a_lost_seat_goes_to_another_client(self, exchange: str) -> None:
        game = Game(spec_of(participation={"exchange": exchange}))
        work = game.take([0, 1])
        loser = game.state.seats[0].client
        assert not game.advance(99).closed
        (closed,) = game.advance(1).closed
        assert closed == Closed(
            assignment_id=work.assignment_id, client=loser, reason="the deadline passed"
        )
        assert game.state.seats == ()
        assert game.spent.queries == SAMPLES  # it scores itself, so all of it may be spent
        assert game.seat([0, 1]) == [1 - loser]

    def test_an_unused_offer_costs_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(RoundMachine, "MAX_LOST", 1)
        game = Game(spec_of())
        for _ in range(5):
            assert len(game.seat([0, 1])) == 1
            assert not game.advance(10).closed
        assert game.state.running
        assert game.spent == NOTHING

    def test_renewal_gives_a_full_deadline(self) -> None:
        game = Game(spec_of())
        work = game.take()
        game.advance(60)
        assert game.apply(renew, assignment_id=work.assignment_id).reply.deadline_s == 100
        game.advance(99)
        assert game.state.seat_with(work.assignment_id) is not None
        assert game.state.next_deadline == game.now + 1

    @both
    def test_renewals_are_counted(self, exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(RoundMachine, "MAX_RENEWALS", 2)
        game = Game(spec_of(participation={"exchange": exchange}))
        work = game.take()
        for _ in range(2):
            game.advance(99)
            assert game.apply(renew, assignment_id=work.assignment_id).refusal is None
        game.advance(50)
        refused = refusal(game.apply(renew, assignment_id=work.assignment_id))
        assert (refused.code, refused.detail) == (
            "renewal_refused",
            f"assignment {work.assignment_id} was renewed 2 times already",
        )
        game.advance(49)
        assert game.state.seat_with(work.assignment_id) is not None
        assert len(game.advance(1).closed) == 1

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
        late = {"assignment_id": work.assignment_id}
        for refused in (
            game.apply(renew, **late),
            game.apply(decline, **late, reason="late"),
            game.apply(reserve_call, **game.call(work, ONE_QUERY)),
        ):
            assert refusal(refused).code == "assignment_expired"

    def test_local_steps_before_the_deadline_count(self) -> None:
        game = Game(spec_of(rounds=2, local_steps=3, participation=LOSSES))
        game.send(game.take())
        game.take()
        game.advance(100)
        assert game.state.round == 1
        assert game.rounds[-1].report.queries == 2 * SAMPLES  # the lost one was paid too
        assert game.closed[-1].reason == "the deadline passed"

    @both
    def test_too_many_lost_in_a_row_fail_the_run(
        self, exchange: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(RoundMachine, "MAX_LOST", 2)
        game = Game(spec_of(participation={"exchange": exchange, "clients_per_round": 3}))
        works = [game.claim(client) for client in game.seat(range(5))]
        for work in works:
            assert work is not None
            game.apply(decline, assignment_id=work.assignment_id, reason="no battery")
        for client in game.seat(range(5)):  # Two have not been tried.
            work = game.claim(client)
            assert work is not None
            game.apply(decline, assignment_id=work.assignment_id, reason="no battery")
        game.seat(range(5))
        assert (game.state.status, game.state.reason) == (
            "failed",
            "too many assignments were lost; last: the client declined: no battery",
        )
        # Nothing is left behind: no lease, no seat, and a late client gets an answer.
        assert game.leased == NOTHING
        assert game.state.seats == ()
        closed = {one.assignment_id for one in game.closed if one.receipt is None}
        assert len(closed) == 5
        assert works[0] is not None
        assert refusal(game.send(works[0])).code == "assignment_expired"

    def test_an_accepted_update_ends_the_row(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(RoundMachine, "MAX_LOST", 2)
        game = Game(spec_of(rounds=9))
        for _ in range(6):
            game.take()
            game.advance(100)
            game.take()
            game.advance(100)
            game.send(game.take())
        assert game.state.round == 6


class TestSetAside:
    """A client that loses work while others answer costs the run less and less."""

    def lose(self, game: Game, client: int, times: int) -> None:
        for _ in range(times):
            assert game.seat([client]) == [client]
            work = game.claim(client)
            assert work is not None
            game.apply(decline, assignment_id=work.assignment_id, reason="no battery")

    def test_for_longer_each_time(self) -> None:
        game = Game(spec_of(rounds=9))
        for _ in range(3):
            assert game.seat([0]) == [0]
            self.lose_seated(game)
            game.send(game.take([1]))
        assert game.log[-1] == ("aside", {"client": 0, "losses": 3, "until": game.now + 100})
        assert (game.seat([0]), game.seat([0, 1])) == ([], [1])
        game.send(game.take())
        game.now += 100
        self.lose(game, 0, 1)
        game.send(game.take([1]))
        assert game.state.strikes[0].until == game.now + 200

    @staticmethod
    def lose_seated(game: Game) -> None:
        work = game.take()
        game.apply(decline, assignment_id=work.assignment_id, reason="no battery")

    def test_an_outage_of_the_model_is_nobody_s_fault(self) -> None:
        game = Game(spec_of())
        self.lose(game, 0, 9)
        assert game.seat([0]) == [0]
        self.lose_seated(game)
        game.send(game.take([1]))  # It has recovered.
        assert game.seat([0]) == [0]

    @pytest.mark.parametrize(("renewals", "strikes"), [(0, 1), (1, 2), (9, 3)])
    def test_missed_offers_and_renewals_count(self, renewals: int, strikes: int) -> None:
        game = Game(spec_of())
        game.seat([0])
        game.advance(10)
        assert game.state.strikes[0].recent == 1
        game = Game(spec_of())
        work = game.take([0])
        for _ in range(renewals):
            game.apply(renew, assignment_id=work.assignment_id)
        game.advance(100)
        assert game.state.strikes[0].recent == strikes

    def test_its_updates_count_for_it(self) -> None:
        game = Game(spec_of(rounds=9))
        for _ in range(4):
            self.lose(game, 0, 1)
            game.send(game.take([1]))
            game.send(game.take([0]))
        assert 0 not in game.state.strikes

    def test_many_that_decline_do_not_end_the_run(self) -> None:
        """While another one waits that has not been tried."""
        game = Game(spec_of(rounds=1))
        clients = list(range(100))
        for client in range(99):
            work = game.take([c for c in clients if c == client])
            game.apply(decline, assignment_id=work.assignment_id, reason="no")
        game.send(game.take(clients))
        assert game.state.status == "completed"
