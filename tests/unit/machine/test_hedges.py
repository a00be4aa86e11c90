"""Backups for slow clients: two clients have the work of one seat, and one update counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fedone_sdk.aggregator.events import (
    Accepted,
    Closed,
    Declined,
    PauseAsked,
    Prolonged,
    Quarantined,
    Renewed,
    ResumeAsked,
    RoundFinished,
    RunEnded,
    SeatOffered,
    SeatsVacant,
)
from fedone_sdk.aggregator.state import Seat
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.messages import AlphaAssignment, LossesAssignment
from tests.unit.machine.game import (
    ALL_GONE,
    GATEWAY_QUERY,
    LOSSES,
    SAMPLES,
    Game,
    answer_to,
    answered,
    both,
    refusal,
    spec_of,
)

Work = AlphaAssignment | LossesAssignment


def hedging(*, gateway: bool = False, rounds: int = 2, **more: Any) -> Game:
    """A game whose seats get a backup after 30 of 100 seconds."""
    spec = more.pop("spec", {})
    part = {"hedge_after_s": 30, "min_clients": 1, **more}
    return Game(spec_of(rounds=rounds, participation=part, **spec), gateway=gateway)


def slow(game: Game, clients: tuple[int, ...] = (0, 1, 2)) -> tuple[Work, Work]:
    """The work of a slow client, and that of its backup."""
    first = game.take(clients)
    game.advance(30)
    (backup,) = game.seat(clients)
    second = game.claim(backup)
    assert second is not None
    return first, second


def owner(game: Game, work: Work) -> int:
    seat = game.state.seat_with(work.assignment_id)
    assert seat is not None
    return seat.client


class TestWhenABackupIsDrawn:
    def test_after_the_time_and_not_before(self) -> None:
        game = hedging()
        game.take([0, 1])
        game.advance(29)
        assert not game.machine.wants_seating(game.state)
        assert game.seat([0, 1]) == []
        game.advance(1)
        assert game.machine.wants_seating(game.state)
        (first,) = game.state.seats
        assert game.seat([0, 1]) == [1 - first.client]
        assert [seat.slot for seat in game.state.seats] == [0, 0]
        assert game.machine.vacancies(game.state) == 0

    def test_the_watcher_is_told_when(self) -> None:
        """And not again for what it knows: it would never sleep."""
        game = hedging()
        game.take()
        started = game.now
        assert game.machine.next_deadline(game.state) == started + 30
        game.advance(30)
        assert game.machine.next_deadline(game.state) == started + 100

    def test_never_unless_the_run_wants_it(self) -> None:
        game = hedging(hedge_after_s=None)
        game.take()
        game.advance(99)
        assert game.seat() == []

    def test_a_renewal_does_not_put_it_off(self) -> None:
        game = hedging()
        work = game.take([0, 1])
        game.advance(29)
        game.apply(Renewed(assignment_id=work.assignment_id))
        game.advance(1)
        assert len(game.seat([0, 1])) == 1

    def test_the_backup_holds_no_other_seat_of_the_round(self) -> None:
        game = hedging(clients_per_round=2, selection="proportional")
        game.seat([0, 1])
        for seat in game.state.seats:
            game.claim(seat.client)
        game.advance(30)
        assert game.seat({seat.client for seat in game.state.seats}) == []
        assert game.seat([0, 1, 7]) == [7]  # one client, so one backup for two slow seats
        assert sorted(seat.slot for seat in game.state.seats) == [0, 0, 1]

    def test_whoever_gave_a_seat_up_is_no_backup(self) -> None:
        game = hedging(clients_per_round=2)
        game.seat([0, 1])
        works = [game.claim(client) for client in (0, 1)]
        assert works[0] is not None
        game.apply(Declined(assignment_id=works[0].assignment_id, reason="tired"))
        assert game.seat([2]) == [2]
        game.claim(2)
        game.advance(30)
        assert game.seat([0]) == []
        assert game.seat([0, 3]) == [3]

    def test_vacant_seats_come_first(self) -> None:
        game = hedging(clients_per_round=2)
        game.seat([0])
        game.claim(0)
        game.advance(30)
        assert game.seat([0, 1]) == [1]
        assert [seat.slot for seat in game.state.seats] == [0, 1]
        assert game.seat([0, 1, 2]) == [2]
        assert [seat.slot for seat in game.state.seats] == [0, 1, 0]

    def test_the_caps_must_allow_whole_work_twice(self) -> None:
        for queries, backups in ((2 * SAMPLES - 1, 0), (2 * SAMPLES, 1)):
            game = hedging(spec={"budget": {"queries": queries}})
            game.take([0, 1])
            game.advance(30)
            assert game.machine.wants_seating(game.state) == bool(backups)
            assert len(game.seat([0, 1])) == backups

    def test_an_offer_that_is_out_has_the_money_first(self) -> None:
        for queries, backups in ((3 * SAMPLES - 1, 0), (3 * SAMPLES, 1)):
            budget = {"budget": {"queries": queries}}
            game = hedging(clients_per_round=2, claim_timeout_s=60, spec=budget)
            first, _ = game.seat([0, 1])
            game.claim(first)
            game.advance(30)  # the other seat's client may still come
            assert len(game.seat([0, 1, 2])) == backups

    def test_the_draw_is_the_runs_own(self) -> None:
        drawn = set()
        for seed in range(6):
            games = [hedging(), hedging()]
            for game in games:
                game.machine.spec = game.spec.model_copy(update={"seed": seed})
                slow(game, tuple(range(9)))
            one, other = ([seat.client for seat in game.state.seats] for game in games)
            assert one == other
            drawn.add(tuple(one))
        assert len(drawn) > 1

    def test_no_backup_for_later_local_steps(self) -> None:
        game = hedging(**LOSSES, spec={"local_steps": 2})
        game.send(game.take([0, 1]))
        game.take([0, 1])
        game.advance(30)
        assert game.machine.next_deadline(game.state) == game.now + 70
        assert game.seat([0, 1]) == []

    def test_a_pause_and_a_restart_begin_the_time_anew(self) -> None:
        game = hedging()
        game.take([0, 1])
        game.advance(20)
        game.apply(ALL_GONE)
        game.advance(29)
        game.apply(PauseAsked(reason="the key was revoked"))
        game.advance(500)
        game.apply(ResumeAsked())
        game.advance(29)
        assert game.seat([0, 1]) == []
        game.advance(1)
        assert len(game.seat([0, 1])) == 1


class TestWhoWins:
    @both
    @pytest.mark.parametrize("winner", [0, 1])
    def test_the_first_update(self, exchange: str, winner: int) -> None:
        game = hedging(exchange=exchange)
        works = slow(game)
        won, lost = works[winner], works[1 - winner]
        clients = owner(game, won), owner(game, lost)
        assert game.leased == Usage(queries=2 * SAMPLES)
        accepted, closed, finished = game.send(won, answer_to(game, won))
        assert isinstance(accepted, Accepted)
        assert closed == Closed(
            assignment_id=lost.assignment_id,
            client=clients[1],
            reason="another client was faster",
        )
        assert isinstance(finished, RoundFinished)
        assert finished.clients == (clients[0],)
        assert [seat["client"] for seat in finished.record["seats"]] == [clients[0]]
        # The other scored itself: all of its lease may be spent, and is, once.
        assert (game.spent, game.leased) == (Usage(queries=2 * SAMPLES), NOTHING)
        assert refusal(game.send(lost)).code == "assignment_expired"
        assert game.spent == Usage(queries=2 * SAMPLES)

    @both
    def test_each_has_prompts_of_its_own(self, exchange: str) -> None:
        game = hedging(exchange=exchange)
        first, second = slow(game)
        if isinstance(first, LossesAssignment) and isinstance(second, LossesAssignment):
            assert first.minibatch_seed != second.minibatch_seed
        elif isinstance(first, AlphaAssignment) and isinstance(second, AlphaAssignment):
            assert first.steps != second.steps

    def test_the_log_is_enough_to_compute_the_round_again(self) -> None:
        game = hedging(**LOSSES, rounds=1)
        start = game.state
        _, second = slow(game)
        game.send(second, answer_to(game, second))
        (record,) = game.only(RoundFinished).record["seats"]
        seat = Seat(slot=record["slot"], client=record["client"], phase="done", due=0.0,
                    num_samples=record["num_samples"])  # fmt: skip
        local = game.machine.learned(start, seat, record["losses"][0])
        done = replace(start, seats=(replace(seat, local=local, step=1),))
        state, _ = game.machine.finish_round(done, 0.0)
        assert state.method.alpha.tobytes() == game.state.method.alpha.tobytes()

    def test_the_next_local_steps_are_the_winners(self) -> None:
        game = hedging(**LOSSES, spec={"local_steps": 2})
        _, second = slow(game)
        client = owner(game, second)
        effects = game.send(second)
        assert effects[-1] == SeatOffered(client=client)
        (seat,) = game.state.seats
        assert (seat.client, seat.step, seat.phase) == (client, 1, "offered")
        work = game.claim(client)
        assert work is not None
        game.send(work)
        assert game.state.round == 1

    def test_through_the_gateway_the_other_costs_what_the_server_saw(self) -> None:
        game = hedging(gateway=True)
        first, second = slow(game)
        game.gateway(first, 2)
        under_way = game.asked(first, GATEWAY_QUERY)
        game.apply(under_way)
        game.gateway(second, SAMPLES)
        game.send(second)
        seen = Usage(queries=2, requests=2) + GATEWAY_QUERY
        assert game.spent == seen + Usage(queries=SAMPLES, requests=SAMPLES)
        assert game.leased == NOTHING
        assert game.apply(answered(under_way, NOTHING)) == ()
        assert game.spent == seen + Usage(queries=SAMPLES, requests=SAMPLES)

    def test_a_backup_that_has_not_come_yet_loses_its_seat(self) -> None:
        game = hedging()
        first = game.take([0, 1])
        game.advance(30)
        (backup,) = game.seat([0, 1])
        game.send(first)
        assert game.state.round == 1
        assert game.claim(backup) is None
        assert game.spent == Usage(queries=SAMPLES)

    def test_a_wrong_update_decides_nothing(self) -> None:
        game = hedging(**LOSSES)
        first, second = slow(game)
        assert refusal(game.send(second, game.update_for(second, losses=(0.5, 0.5)))).code == (
            "invalid_message"
        )
        assert len(game.state.seats) == 2
        game.send(first)
        assert game.state.round == 1


class TestWhoIsLost:
    def test_the_backup_does_not_come(self) -> None:
        game = hedging()
        game.take([0, 1, 2])
        game.advance(30)
        (backup,) = game.seat([0, 1, 2])
        game.advance(10)
        assert len(game.state.seats) == 1
        (another,) = game.seat([0, 1, 2])
        assert another != backup
        assert game.state.lost == 0
        assert game.spent == NOTHING

    def test_the_first_client_is_lost_and_its_backup_goes_on(self) -> None:
        game = hedging()
        first, second = slow(game)
        (closed,) = game.advance(70)
        assert isinstance(closed, Closed)
        assert closed.assignment_id == first.assignment_id
        assert game.machine.vacancies(game.state) == 0
        game.send(second)
        assert game.state.round == 1
        assert game.spent == Usage(queries=2 * SAMPLES)

    def test_a_backup_that_is_left_alone_may_have_one_itself(self) -> None:
        game = hedging()
        first, second = slow(game, (0, 1, 2))
        game.advance(30)
        assert game.seat([0, 1, 2]) == []  # two clients are enough for a seat
        game.apply(Declined(assignment_id=first.assignment_id, reason="tired"))
        (third,) = game.seat([0, 1, 2])
        assert game.claim(third) is not None
        assert game.state.seat_with(second.assignment_id) is not None

    def test_both_are_lost(self) -> None:
        game = hedging()
        slow(game, (0, 1, 2))
        lost = {seat.client for seat in game.state.seats}
        effects = game.advance(100)
        assert [type(effect) for effect in effects] == [Closed, Closed]
        assert game.state.seats == ()
        assert game.state.lost == 2
        assert game.spent == Usage(queries=2 * SAMPLES)
        assert lost.isdisjoint(game.seat([0, 1, 2]))
        game.play()
        assert game.state.status == "completed"

    def test_a_quarantined_client_leaves_the_other_its_seat(self) -> None:
        game = hedging()
        first, second = slow(game)
        game.apply(Quarantined(client=owner(game, first), reason="lies"))
        assert [seat.assignment_id for seat in game.state.seats] == [second.assignment_id]
        game.send(second)
        assert game.state.round == 1

    def test_the_end_of_the_run_settles_both(self) -> None:
        game = hedging(max_lost=1)
        first, second = slow(game)
        for work in (first, second):
            game.apply(Declined(assignment_id=work.assignment_id, reason="tired"))
        assert game.only(RunEnded).status == "failed"
        assert (game.state.seats, game.leased) == ((), NOTHING)

    def test_asking_again_gives_each_its_own_work(self) -> None:
        game = hedging()
        works = slow(game)
        for work in works:
            again = game.claim(owner(game, work))
            assert again is not None
            assert again.assignment_id == work.assignment_id
        assert game.leased == Usage(queries=2 * SAMPLES)

    def test_both_may_renew(self) -> None:
        game = hedging()
        for work in slow(game):
            effects = game.apply(Renewed(assignment_id=work.assignment_id))
            assert effects == (Prolonged(deadline_s=100),)


def test_every_order_of_a_hedged_round_gives_the_winners_alpha() -> None:
    """Who else was asked, and how it ended, leaves no trace in alpha."""
    alphas = []
    for fate in ("slow", "declines", "late"):
        game = hedging(rounds=1, **LOSSES)
        first, second = slow(game)
        if fate == "declines":
            game.apply(Declined(assignment_id=first.assignment_id, reason="tired"))
        if fate == "late":
            game.advance(70)
        game.apply(SeatsVacant(available={}))
        game.send(second, answer_to(game, second))
        assert game.state.status == "completed"
        alphas.append(game.state.method.alpha.tobytes())
    assert len(set(alphas)) == 1
