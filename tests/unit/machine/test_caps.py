"""Raises of caps."""

from __future__ import annotations

from typing import Any

import pytest

from fedone_sdk.aggregator.rounds.lifecycle import raise_caps, record_metric, stop
from fedone_sdk.aggregator.rounds.run_state import offers
from fedone_sdk.aggregator.rounds.seats import assignment
from fedone_sdk.aggregator.rounds.spending import reserve_evaluation
from fedone_sdk.algorithms import alpha_sha256
from fedone_sdk.budget import Budget, Usage
from tests.unit.machine.game import LOSSES, SAMPLES, Game, both, refusal, spec_of

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
        ({"usd": 5}, "usd: has no cap; one would lower what may be spent"),
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
        "the run is completed after 2 of 2 rounds: a higher cap gives it no more work; a run with "
        "more rounds takes another name"
    )
    assert refusal(raised(game, queries=99)).detail == said


def test_a_stopped_run_stays_stopped() -> None:
    game = Game(spec_of(rounds=9, budget={"queries": 8}))
    game.apply(stop)
    raised(game, queries=16)
    assert (game.state.status, game.state.account.cap) == ("stopped", Budget(queries=16))
