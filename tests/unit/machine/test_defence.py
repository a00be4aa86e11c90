"""The defences and the noise's accounts in the round machine."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from fedone_sdk.aggregator.http.run_routes import client_influences
from fedone_sdk.aggregator.rounds.lifecycle import resume, roll_back
from fedone_sdk.aggregator.rounds.seats import fill, lift_quarantine
from fedone_sdk.algorithms import State, aggregate, alpha_sha256
from fedone_sdk.algorithms.defence import ledger
from fedone_sdk.messages import AlphaAssignment, AlphaUpdate, LossesUpdate
from fedone_sdk.messages.tensor import from_wire, to_wire
from fedone_sdk.spec import RunSpec
from tests.unit.machine.game import Game, answer_to, both, refusal, spec_of

CLIENTS = (0, 1, 2, 3)
ATTACKER = 3


def defended(exchange: str = "losses", *, defence: Any = "standard", **options: Any) -> RunSpec:
    participation = {"exchange": exchange, **options.pop("participation", {})}
    extra = {key: options.pop(key) for key in ("privacy", "data") if key in options}
    options.setdefault("rounds", 60)
    plain = spec_of(participation=participation, num_samples=20, learning_rate=1e-3, **options)
    return RunSpec.model_validate({**plain.model_dump(), "defence": defence, **extra})


def ascent(game: Game, work: Any) -> AlphaUpdate | LossesUpdate:
    """What an honest client would say, turned round and made louder."""
    honest = answer_to(game, work)
    if isinstance(honest, LossesUpdate):
        losses = np.array(honest.losses)
        turned = losses.mean() - 10 * (losses - losses.mean())
        return honest.model_copy(update={"losses": tuple(turned.tolist())})
    before, after = (from_wire(one).astype(float) for one in (work.alpha, honest.alpha))
    alpha = game.machine.method.project(before - 10 * (after - before))
    return honest.model_copy(update={"alpha": to_wire(alpha)})


def play(game: Game, attackers: tuple[int, ...] = (), until: int = 10_000) -> None:
    """Play on with some attackers, to the end or until so many rounds are done."""
    while game.state.running and game.state.round < until:
        game.seat(CLIENTS)
        for seat in game.state.seats:
            work = game.claim(seat.client) if seat.phase == "offered" else None
            if work is not None:
                attacks = seat.client in attackers
                game.send(work, ascent(game, work) if attacks else answer_to(game, work))


def records(game: Game) -> list[dict[str, Any]]:
    return [dict(one.record) for one in game.rounds]


@both
def test_the_default_changes_nothing(exchange: str) -> None:
    plain, off = (Game(defended(exchange, defence=kind, rounds=6)) for kind in ("none", {}))
    for game in (plain, off):
        play(game)
        assert ledger(game.state.defence) == []
        assert "defence" not in records(game)[0]
    assert plain.spec == off.spec
    assert alpha_sha256(plain.state.method.alpha) == alpha_sha256(off.state.method.alpha)


def test_both_exchanges_agree_while_nothing_is_held_back() -> None:
    """Only the trust region: it depends on steps, which are the same in both."""
    found = []
    for exchange in ("alpha", "losses"):
        defence = {"kind": "standard", "loss_clip": None, "outliers": None}
        game = Game(defended(exchange, defence=defence, rounds=12))
        play(game)
        assert any(line["scale"] < 1 for one in records(game) for line in one["defence"])
        found.append(alpha_sha256(game.state.method.alpha))
    assert found[0] == found[1]


@both
def test_an_attacker_is_held_back_and_quarantined_and_the_others_continue(exchange: str) -> None:
    game = Game(defended(exchange))
    play(game, attackers=(ATTACKER,))
    assert game.state.status == "completed"
    assert game.state.quarantined == {ATTACKER}
    (one,) = [record for record in records(game) if record["quarantined"]]
    by_client = {line.client: line for line in ledger(game.state.defence)}
    reason = (
        f"{by_client[ATTACKER].outliers} of its {by_client[ATTACKER].rounds} updates were rejected"
    )
    assert one["quarantined"] == [{"client": ATTACKER, "reason": reason}]
    after = [r["seats"][0]["client"] for r in records(game) if r["round"] > one["round"]]
    assert after
    assert ATTACKER not in after
    assert by_client[ATTACKER].outliers >= 2
    assert not any(line.outliers for client, line in by_client.items() if client != ATTACKER)


def test_a_released_client_returns_to_quarantine_only_at_the_next_attack() -> None:
    game = Game(defended(rounds=20))
    play(game, attackers=(ATTACKER,))
    resumed = Game(defended(rounds=200))
    resumed.state = dataclasses.replace(game.state, status="running")
    resumed.apply(lift_quarantine, client=ATTACKER)
    before = resumed.state.round
    play(resumed, until=before + 20)
    assert ATTACKER in {record["seats"][0]["client"] for record in records(resumed)}
    assert resumed.state.quarantined == frozenset()
    play(resumed, attackers=(ATTACKER,), until=before + 60)
    assert resumed.state.quarantined == {ATTACKER}


def test_a_rollback_keeps_the_ledger_and_when_merges_are_due() -> None:
    game = Game(defended())
    play(game, until=20)
    game.state = dataclasses.replace(game.state, merged_at=18)
    before = dict(game.state.defence)
    game.apply(roll_back, method=game.machine.initial_state().method, to_round=0, reason="test")
    assert game.state.round == game.state.merged_at == 0
    assert dict(game.state.defence).keys() == before.keys()
    assert all(game.state.defence[name] is before[name] for name in before)


def test_a_search_drops_held_back_losses() -> None:
    raw = spec_of(participation={"exchange": "losses"}, name="random", num_samples=20, rounds=20)
    game = Game(RunSpec.model_validate({**raw.model_dump(), "defence": "standard"}))
    play(game, attackers=(ATTACKER,))
    assert game.state.quarantined == {ATTACKER}


# Losses


def test_losses_are_clipped_where_they_are_learnt_from_and_logged_as_they_came() -> None:
    game = Game(defended(defence={"loss_clip": 1.0}, rounds=1))
    work = game.take(CLIENTS)
    losses = tuple([-5.0, 500.0] + [0.5] * 18)
    game.send(work, game.update_for(work, losses=losses))
    (record,) = records(game)
    assert record["seats"][0]["losses"] == [list(losses)]
    assert game.reports[0].mean_loss == pytest.approx((0 + 1 + 9) / 20)
    other = Game(defended(defence={"loss_clip": 1.0}, rounds=1))
    work = other.take(CLIENTS)
    other.send(work, other.update_for(work, losses=(0.0, 1.0, *losses[2:])))
    assert alpha_sha256(game.state.method.alpha) == alpha_sha256(other.state.method.alpha)


# Many clients


def test_the_aggregate_of_many() -> None:
    part = {"clients_per_round": 4, "aggregation": "plain"}
    game = Game(defended("alpha", defence="none", participation=part, rounds=1))
    game.seat(CLIENTS)
    works = {seat.client: game.claim(seat.client) for seat in game.state.seats}
    alphas = []
    for _, work in sorted(works.items()):
        assert work is not None
        update = answer_to(game, work)
        assert isinstance(update, AlphaUpdate)
        alphas.append(from_wire(update.alpha))
        game.send(work, update)
    feasible = game.machine.method.project(aggregate(alphas))
    assert game.state.method.alpha.tobytes() == State(alpha=feasible).alpha.tobytes()


@both
def test_a_step_of_sgd_is_bounded_without_a_defence(exchange: str) -> None:
    game = Game(defended(exchange, defence="none", rounds=12))
    before = [game.state.method.alpha]
    for until in range(1, 9):
        play(game, until=until)
        before.append(game.state.method.alpha)
    usual = np.median(np.linalg.norm(np.diff(before, axis=0), axis=(1, 2)))
    work = game.take(CLIENTS)
    changes: dict[str, Any] = {"losses": (0.0, *[1e6] * 19)}
    if isinstance(work, AlphaAssignment):
        changes = {"alpha": to_wire(before[-1] + np.eye(*before[-1].shape, dtype=np.float32))}
    game.send(work, game.update_for(work, **changes))
    step = np.linalg.norm(game.state.method.alpha - before[-1])
    assert 0 < step <= game.spec.defence.widest_region * usual * 1.01


@pytest.mark.parametrize("name", ["gs-bdpl", "bdpl"])
def test_a_step_of_adamw_is_bounded_without_a_defence(name: str) -> None:
    """Honest devices never meet the bound; nothing beyond it is accepted."""
    options = {"optimizer": "adamw", "local_steps": 3, "rounds": 10}
    game = Game(defended("alpha", defence="none", name=name, **options))
    play(game, until=9)
    work, before = game.take(CLIENTS), game.state.method.alpha
    for far in (1e30, 1.0):
        alpha = game.machine.method.project(np.where(np.eye(*before.shape) == 1, far, before))
        refused = refusal(game.send(work, game.update_for(work, alpha=to_wire(alpha))))
        assert refused.code == "invalid_message"
    game.send(work, answer_to(game, work))
    assert game.state.status == "completed"


@both
def test_a_quarantined_client_holds_no_seat(exchange: str) -> None:
    """Two per round: `Game` checks the seats at every step."""
    part = {"clients_per_round": 2, "aggregation": "plain"}
    game = Game(defended(exchange, participation=part))
    while game.state.running:
        game.seat(CLIENTS)
        works = {seat.client: game.claim(seat.client) for seat in game.state.seats}
        for client, work in works.items():
            if work is not None and game.state.seat_with(work.assignment_id) is not None:
                game.send(work, ascent(game, work) if client == ATTACKER else answer_to(game, work))
    assert game.state.status == "completed"
    assert game.state.quarantined == {ATTACKER}
    (put_out,) = [one["round"] for one in records(game) if one["quarantined"]]
    later = [record for record in records(game) if record["round"] > put_out]
    assert later
    assert ATTACKER not in {seat["client"] for record in later for seat in record["seats"]}


@both
def test_quarantine_leaves_enough_for_a_round(exchange: str) -> None:
    part = {"clients_per_round": 4, "aggregation": "plain"}
    game = Game(defended(exchange, participation=part, rounds=12))
    play(game, attackers=(ATTACKER,))
    assert game.state.status == "completed"
    assert {line.client: line.outliers for line in ledger(game.state.defence)}[ATTACKER] >= 2
    assert game.state.quarantined == frozenset()


def test_a_majority_is_never_put_out() -> None:
    game = Game(defended())
    play(game, attackers=(1, 2, 3))
    assert game.state.status == "completed"
    assert len(game.state.quarantined) <= 1


# Specs


def test_the_standard_fills_in_what_is_not_named() -> None:
    spec = defended(defence={"kind": "standard", "outliers": None}).defence
    assert (spec.loss_clip, spec.trust_region, spec.outliers) == (20.0, 1.5, None)
    again = RunSpec.model_validate_json(defended(defence=spec.model_dump()).model_dump_json())
    assert again.defence == spec


# Privacy


def noised(**changes: Any) -> RunSpec:
    privacy = {"clip": 1.0, "noise_multiplier": 2.0, **changes.pop("privacy", {})}
    return defended(defence="none", privacy=privacy, **changes)


def test_work_counts_when_it_is_given_out() -> None:
    pytest.importorskip("dp_accounting")
    game = Game(noised(rounds=3))
    work = game.take(CLIENTS)
    (client,) = game.state.releases
    assert dict(game.state.releases) == {client: 1}
    assert game.claim(client) == work  # the same work, asked for again
    assert dict(game.state.releases) == {client: 1}
    game.advance(1000)  # lost: what it did with it is not known
    assert dict(game.state.releases) == {client: 1}


@pytest.mark.parametrize(
    ("exchange", "target", "each"),
    [("losses", "losses", 3), ("alpha", "losses", 3), ("alpha", "alpha", 1)],
)
def test_each_local_step_is_a_release_of_losses(exchange: str, target: str, each: int) -> None:
    pytest.importorskip("dp_accounting")
    game = Game(noised(exchange=exchange, privacy={"target": target}, rounds=2, local_steps=3))
    play(game)
    assert sum(game.state.releases.values()) == 2 * each
    assert game.machine.releases is not None
    report = game.machine.releases.report(game.state.releases)
    assert report.unit == ("example" if target == "losses" else "device")
    assert report.releases == max(game.state.releases.values())
    assert report.epsilon == game.machine.releases.accountant.epsilon(report.releases)


def test_a_device_whose_budget_is_used_up_gets_no_more_seats() -> None:
    pytest.importorskip("dp_accounting")
    game = Game(noised(privacy={"max_epsilon": 4.0}, rounds=50))
    releases = game.machine.releases
    assert releases is not None
    assert releases.limit == 3
    play(game, until=4 * 3)
    assert dict(game.state.releases) == dict.fromkeys(CLIENTS, 3)
    assert game.seat(CLIENTS) == []
    assert game.seat((*CLIENTS, 9)) == [9]
    report = releases.report(game.state.releases)
    assert report.spent_up == 4
    assert report.epsilon <= 4.0


def test_a_run_ends_when_every_device_has_spent_its_epsilon() -> None:
    pytest.importorskip("dp_accounting")
    game = Game(noised(privacy={"max_epsilon": 4.0}, rounds=50))
    play(game, until=4 * 3)
    there = dict.fromkeys(CLIENTS, 5)
    for enrolled in (None, len(CLIENTS) + 1):  # Another client may come.
        game.apply(fill, available=there, enrolled=enrolled)
        assert game.state.running
    game.apply(fill, available={}, enrolled=len(CLIENTS))
    assert game.state.status == "stopped"
    assert game.state.reason == (
        "privacy.max_epsilon: 4 devices have reached it, and no other device is left; "
        "enrol more devices, then resume the run"
    )
    game.apply(resume)
    game.apply(fill, available={**there, 9: 5}, enrolled=len(CLIENTS) + 1)
    assert [seat.client for seat in game.state.seats] == [9]


def test_no_work_is_lost_when_epsilon_is_spent() -> None:
    """Three of four may take part once, two a round: the third one's work counts."""
    pytest.importorskip("dp_accounting")
    part = {"clients_per_round": 2, "min_clients": 3}
    game = Game(noised(privacy={"max_epsilon": 2.2}, rounds=50, participation=part))
    assert game.machine.releases is not None
    assert game.machine.releases.limit == 1
    three = (0, 1, 2)
    for _ in range(2):
        assert game.state.running
        game.apply(fill, available=dict.fromkeys(three, 5), enrolled=3)
        for seat in game.state.seats:
            work = game.claim(seat.client)
            assert work is not None
            game.apply(fill, available=dict.fromkeys(three, 5), enrolled=3)
            assert game.state.running
            game.send(work)
    game.apply(fill, available={}, enrolled=3)
    assert game.state.status == "stopped"
    assert game.state.round == 2
    seats = [len(record["seats"]) for record in records(game)]
    assert seats == [2, 1]


def test_a_run_that_the_budget_cannot_pay_is_refused() -> None:
    pytest.importorskip("dp_accounting")
    data = {"train": "train.jsonl", "num_clients": 4}
    with pytest.raises(ValueError, match=r"privacy\.max_epsilon: 4 clients may take part 12 times"):
        Game(noised(privacy={"max_epsilon": 4.0}, rounds=13, data=data))
    Game(noised(privacy={"max_epsilon": 4.0}, rounds=12, data=data))


def test_noised_losses_are_not_clipped_again() -> None:
    pytest.importorskip("dp_accounting")
    privacy = {"clip": 1.0, "noise_multiplier": 2.0}
    assert Game(defended(privacy=privacy)).machine.loss_clip is None
    assert Game(defended()).machine.loss_clip == 20.0


def test_the_ledger_for_people() -> None:
    pytest.importorskip("dp_accounting")
    privacy = {"clip": 1.0, "noise_multiplier": 2.0}
    game = Game(defended(privacy=privacy, rounds=30))
    play(game, attackers=(ATTACKER,))
    found = client_influences(game.machine, game.state)
    assert set(found) == set(CLIENTS)
    assert sum(line.share for line in found.values()) == pytest.approx(1.0)
    assert {client for client, line in found.items() if line.quarantined} == game.state.quarantined
    for client, line in found.items():
        assert line.releases == line.rounds == game.state.releases[client]
        assert line.epsilon is not None
        assert line.epsilon > 0
    assert client_influences(Game(defended()).machine, Game(defended()).state) == {}
