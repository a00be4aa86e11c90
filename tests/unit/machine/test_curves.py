"""Runs that calibrate by labels: what the machine takes of losses by class, and does with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedone_sdk.aggregator.rounds import MIN_SAMPLES
from fedone_sdk.aggregator.rounds.curves import Curves, check_curves, check_possible
from fedone_sdk.algorithms import ClassLosses
from fedone_sdk.calibration import bias_grid, class_losses
from fedone_sdk.messages import (
    AlphaAssignment,
    Array,
    LossesAssignment,
    LossesUpdate,
    Scored,
)
from fedone_sdk.messages.array import from_wire
from fedone_sdk.spec import RunSpec
from fedone_sdk.task import TaskSpec
from tests.benchmarks.attacks import ATTACKS
from tests.unit.machine.game import Game, plain, refusal, spec_of

GRID = bias_grid(2)
ZERO = GRID.index((0.0, 0.0))


def calibrated(*, defence: Any = "none", clients: int = 1, **more: Any) -> RunSpec:
    spec = spec_of(
        participation={"exchange": "losses", "clients_per_round": clients, "aggregation": "plain"},
        **{"name": "random", "race": 0, "batch_size": 4, **more},
    )
    document = {**spec.model_dump(), "calibration": "labels", "defence": defence}
    return RunSpec.model_validate(document)


def update_for(
    game: Game, work: AlphaAssignment | LossesAssignment, counts: Sequence[int] = (1, 1)
) -> LossesUpdate:
    """What a device answers whose losses depend on prompt, class and bias only."""
    assert isinstance(work, LossesAssignment)
    rows = from_wire(work.prompts).astype(np.float64)
    means = curves_of(0.2 + (3 * rows.sum(axis=1) + rows[:, 0]) / 10)
    means[:, np.array(counts) == 0] = 0.0
    return update_of(game, work, means, counts)


def curves_of(level: NDArray[np.float64]) -> NDArray[np.float64]:
    """Losses of an example of each label, whose true label is `level` nats behind the other."""
    offset = np.array([bias[1] for bias in GRID])
    return np.stack(
        [
            np.logaddexp(0.0, np.add.outer(level, offset)),
            np.logaddexp(0.0, level[:, None] - offset),
        ],
        axis=1,
    )


def update_of(
    game: Game, work: AlphaAssignment | LossesAssignment, means: Any, counts: Sequence[int]
) -> LossesUpdate:
    by_class = Array.pack(means.ravel().tolist(), means.shape, "float32")
    mixed = np.tensordot(from_wire(by_class).astype(float), np.array(counts), axes=(1, 0))
    update = game.update_for(
        work,
        losses=tuple((mixed[:, ZERO] / sum(counts)).tolist()),
        by_class=by_class,
        class_counts=tuple(counts),
        scored=Scored(scored=sum(counts)),
    )
    assert isinstance(update, LossesUpdate)
    return update


def play(game: Game, rounds: int) -> None:
    for _ in range(rounds):
        work = game.take()
        game.send(work, update_for(game, work, counts=(3, 1)))


class TestBadCurves:
    def refused(self, change: dict[str, Any]) -> str:
        game = Game(calibrated())
        work = game.take()
        good = update_for(game, work)
        before = game.state
        refused = refusal(game.send(work, good.model_copy(update=change)))
        assert refused.code == "invalid_message"
        assert game.state is before
        game.send(work, good)  # and the right one is still welcome
        assert game.state.round == 1
        return refused.detail

    @pytest.mark.parametrize(
        ("shape", "dtype"),
        [
            ((4, 2, 8), "float32"),
            ((3, 2, 9), "float32"),
            ((4, 3, 9), "float32"),
            ((4, 9, 2), "float32"),
            ((4, 18), "float32"),
            ((4, 2, 9), "uint16"),
        ],
    )
    def test_shapes(self, shape: tuple[int, ...], dtype: Any) -> None:
        by_class = Array.pack([1] * int(np.prod(shape)), shape, dtype)
        wanted = f"by_class: is {dtype} {list(shape)}, must be float32 [4, 2, 9]"
        assert self.refused({"by_class": by_class}) == wanted

    @pytest.mark.parametrize(
        ("counts", "detail"),
        [
            ((), "add up to 0, scored is 2"),
            ((2,), "1 were sent for 2 labels"),
            ((1, 1, 0), "3 were sent for 2 labels"),
            ((2, 1), "add up to 3, scored is 2"),
            ((0, 2), "must be 0 for a class without examples"),
        ],
    )
    def test_counts(self, counts: tuple[int, ...], detail: str) -> None:
        assert detail in self.refused({"class_counts": counts})

    def test_no_more_than_were_asked_for(self) -> None:
        """Each example weighs: who says a billion would outweigh all others."""
        change = {"class_counts": (3, 2), "scored": Scored(scored=5)}
        assert self.refused(change) == "scored: 5 examples, a mini-batch has at most 4"

    def test_none_at_all(self) -> None:
        change = {"by_class": None, "class_counts": ()}
        assert self.refused(change) == "by_class: this run calibrates by labels"

    @pytest.mark.parametrize("sign", [1, -1])
    def test_beyond_all_bounds(self, sign: int) -> None:
        by_class = Array.pack([sign * 2e6] * 72, (4, 2, 9), "float32")
        assert self.refused({"by_class": by_class}) == "by_class: a loss is beyond 1e+06"

    @pytest.mark.parametrize("losses", [(0.5, 0.5, 0.5, 0.5), (-1e6, 1e6, 0.0, 0.0)])
    def test_losses_that_say_something_else(self, losses: tuple[float, ...]) -> None:
        assert self.refused({"losses": losses}) == "by_class: contradicts losses at bias 0"

    @pytest.mark.parametrize("attack", ["amplified", "random"])
    def test_losses_of_no_log_probabilities(self, attack: str) -> None:
        game = Game(calibrated())
        work = game.take()
        honest = update_for(game, work)
        assert honest.by_class is not None
        means = from_wire(honest.by_class).astype(np.float64)
        changed = ATTACKS[attack](means, np.random.default_rng(0))
        refused = refusal(game.send(work, update_of(game, work, changed, (1, 1))))
        assert refused.code == "invalid_message"
        assert refused.detail.startswith("by_class: is not the losses of any log-probabilities")

    def test_a_large_loss_elsewhere_excuses_nothing(self) -> None:
        game = Game(calibrated())
        work = game.take()
        honest = update_for(game, work)
        assert honest.by_class is not None
        means = from_wire(honest.by_class).astype(np.float64)
        means[0] += 1e5
        means[1] = ATTACKS["random"](means[1:], np.random.default_rng(0))[0]
        refused = refusal(game.send(work, update_of(game, work, means, (1, 1))))
        assert refused.detail.startswith("by_class: is not the losses of any log-probabilities")

    @pytest.mark.parametrize("loss", ["cross_entropy", "hinge", "zero_one"])
    @pytest.mark.parametrize("labels", [2, 3, 4])
    def test_every_loss_of_any_log_probabilities_is_possible(self, loss: Any, labels: int) -> None:
        names = [str(label) for label in range(labels)]
        task = TaskSpec(
            template="{prompt}{text} {mask}", labels={one: f"w{one}" for one in names}, loss=loss
        )
        rng = np.random.default_rng(labels)
        biases = bias_grid(labels)
        for scale in (0.1, 3.0, 300.0):
            rows = (-np.abs(rng.normal(0.0, scale, (5, labels)))).tolist()
            targets = rng.integers(labels, size=5).tolist()
            means, counts = class_losses(task, rows, targets)
            by_class = Array.pack(np.ravel(means).tolist(), (1, *np.shape(means)), "float32")
            zero = biases.index((0.0,) * labels)
            mean = sum(count * one[zero] for count, one in zip(counts, means, strict=True)) / 5
            check_curves(Curves(by_class, counts), (mean,), biases)
            check_possible(Curves(by_class, counts), biases)

    def test_a_run_that_does_not_calibrate_takes_none(self) -> None:
        spec = calibrated().model_dump() | {"calibration": "none"}
        game = Game(RunSpec.model_validate(spec))
        work = game.take()
        refused = refusal(game.send(work, update_for(game, work)))
        assert refused.detail == "by_class: this run does not calibrate by labels"
        game.send(work)
        assert game.state.round == 1


def test_the_method_is_told_them() -> None:
    game = Game(calibrated(rounds=2))
    work = game.take()
    (seat,) = game.state.seats
    asked, start = game.machine.candidates(game.state, seat), game.state.method
    update = update_for(game, work, counts=(3, 1))
    game.send(work, update)
    assert update.by_class is not None
    means = from_wire(update.by_class).astype(np.float64)
    losses = ClassLosses(means=means, counts=np.array([3, 1]))
    by_hand = game.machine.method.tell(start, asked, losses)
    assert plain(game.state.method) == plain(by_hand)
    bias = game.machine.method.bias(by_hand)
    assert bias is not None
    assert game.machine.bias(game.state) == tuple(bias.tolist())
    assert game.machine.bias(game.machine.initial_state()) is None


def test_a_client_of_one_class_is_welcome() -> None:
    game = Game(calibrated(rounds=2))
    for counts in ((4, 0), (0, 4)):
        work = game.take()
        game.send(work, update_for(game, work, counts=counts))
    assert game.state.status == "completed"


def test_the_log_and_the_history() -> None:
    game = Game(calibrated(rounds=1))
    work = game.take()
    update = update_for(game, work)
    game.send(work, update)
    (finished,) = game.rounds
    (seat,) = json.loads(json.dumps(finished.record))["seats"]
    assert seat["losses"] == [list(update.losses)]
    assert finished.report.mean_loss == pytest.approx(np.mean(update.losses))


def test_local_steps_and_several_clients() -> None:
    """The state is saved and loaded at each event, also between a seat's steps, by the game."""
    steps = Game(calibrated(local_steps=2))
    work = steps.take()
    steps.send(work, update_for(steps, work))
    (seat,) = steps.state.seats
    assert (seat.step, len(seat.curves), len(seat.losses)) == (1, 1, 1)
    work = steps.take()
    steps.send(work, update_for(steps, work))
    assert steps.state.round == 1

    several = Game(calibrated(clients=2, rounds=1))
    one, other = several.seat()
    works = [several.claim(client) for client in (one, other)]
    seats = {seat.client: seat for seat in several.state.seats}
    updates, asked = {}, {}
    for client, given in zip((one, other), works, strict=True):
        assert given is not None
        asked[client] = several.machine.candidates(several.state, seats[client])
        updates[client] = update_for(several, given, counts=(1, 1) if client == one else (3, 0))
        several.send(given, updates[client])
    # In order of enrolment, not of arrival.
    expected = several.machine.initial_state().method
    for client in sorted((one, other)):
        by_class = updates[client].by_class
        assert by_class is not None
        losses = ClassLosses(
            means=from_wire(by_class).astype(np.float64),
            counts=np.array(updates[client].class_counts),
        )
        expected = several.machine.method.tell(expected, asked[client], losses)
    assert plain(several.state.method) == plain(expected)


def test_they_are_clipped_as_losses_are() -> None:
    game = Game(calibrated(defence={"loss_clip": 1.5}))
    work = game.take()
    update = update_for(game, work)
    assert update.by_class is not None
    updated = game.machine.as_losses(update.losses, Curves(update.by_class, update.class_counts))
    assert isinstance(updated, ClassLosses)
    assert np.array_equal(updated.means, np.clip(from_wire(update.by_class), 0, 1.5))
    assert updated.means.max() == 1.5 < from_wire(update.by_class).max()


class TestDefence:
    def test_prompts_are_compared_at_their_best_bias(self) -> None:
        game = Game(calibrated(rounds=1))
        work = game.take()
        update = update_for(game, work, counts=(1, 3))
        assert update.by_class is not None
        (seat,) = game.state.seats
        brought = replace(seat, losses=(update.losses,), curves=(Curves(update.by_class, (1, 3)),))
        (compared,) = game.machine.compared_losses(brought)
        means = from_wire(update.by_class).astype(np.float64)
        by_hand = [min((one[0] + 3 * one[1]).tolist()) / 4 for one in means]
        assert compared.tolist() == pytest.approx(by_hand)
        assert (compared < np.array(update.losses)).all()

    def test_a_client_with_possible_but_false_curves_is_held_back(self) -> None:
        game = Game(calibrated(rounds=100, num_samples=40, defence="standard"))
        for _ in range(20):
            play(game, 1)
        before = game.state.method
        work = game.take()
        honest = update_for(game, work)
        assert honest.by_class is not None
        best = from_wire(honest.by_class).mean(axis=1).min(axis=1).astype(np.float64)
        lying = curves_of(20.0 * (best.max() - best))  # the worst prompts look best by far
        game.send(work, update_of(game, work, lying, (1, 1)))
        verdicts = [one.record["defence"] for one in game.rounds]
        assert [one["outlier"] for (one,) in verdicts] == [False] * 20 + [True]
        assert plain(game.state.method) == plain(before)


class TestSearchThatEnds:
    def spec(self, **more: Any) -> RunSpec:
        return calibrated(**{"rounds": 100, "race": 0.1, **more})

    def test_a_run_ends_with_its_search(self) -> None:
        """A race asks for fewer prompts, so that a run ends below its cap."""
        game = Game(self.spec())
        play_to_the_end(game)
        assert game.state.status == "completed"
        assert game.state.round == 100
        spent = game.spent.queries
        assert spent < 400 == game.machine.planned_queries
        assert game.state.reason == (
            f"the search ended by itself; {400 - spent} queries were not needed"
        )

    def test_a_race_asks_for_fewer_prompts(self) -> None:
        game = Game(self.spec())
        play_to_the_end(game)
        queries = [report.queries for report in game.reports]
        assert queries[0] == 4
        assert min(queries) == MIN_SAMPLES
        assert queries == sorted(queries, reverse=True)

    def test_without_a_race_all_is_spent(self) -> None:
        game = Game(self.spec(race=0, rounds=5))
        play_to_the_end(game)
        assert (game.state.reason, game.spent.queries) == (None, 20)

    def test_what_is_planned(self) -> None:
        def planned(**more: Any) -> tuple[int, int]:
            machine = Game(self.spec(**more)).machine
            return machine.planned_asks, machine.planned_queries

        assert planned() == (100, 400)
        assert planned(budget={"queries": 90}) == (22, 90)
        assert planned(budget={"requests": 9}) == (100, 400)
        assert planned(rounds=5, clients=2, num_samples=6, budget={"queries": 90}) == (10, 60)
        assert planned(rounds=5, local_steps=3) == (15, 60)


def play_to_the_end(game: Game) -> None:
    for _ in range(200):
        if not game.state.running:
            return
        play(game, 1)
    pytest.fail("the run did not end")
