"""Runs that calibrate by labels: what the machine takes of losses by class, and does with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedone_sdk.aggregator.rounds.by_class import ByClass
from fedone_sdk.algorithms import ClassLosses
from fedone_sdk.losses import class_means, loss_terms, num_groups
from fedone_sdk.messages import AlphaAssignment, LossesAssignment, LossesUpdate, Scored, Tensor
from fedone_sdk.messages.tensor import from_wire
from fedone_sdk.spec import RunSpec
from fedone_sdk.task import TaskSpec
from tests.benchmarks.attacks import ATTACKS
from tests.unit.machine.game import Game, plain, refusal, spec_of


def calibrated(*, defence: Any = "none", clients: int = 1, **more: Any) -> RunSpec:
    spec = spec_of(
        participation={"exchange": "losses", "clients_per_round": clients, "aggregation": "plain"},
        **{"name": "random", "halving": 0, "batch_size": 4, **more},
    )
    document = {**spec.model_dump(), "calibration": "labels", "defence": defence}
    return RunSpec.model_validate(document)


def update_for(
    game: Game, work: AlphaAssignment | LossesAssignment, counts: Sequence[int] = (1, 1)
) -> LossesUpdate:
    """What a device answers whose losses depend on prompt, class and bias only."""
    assert isinstance(work, LossesAssignment)
    rows = from_wire(work.prompts).astype(np.float64)
    means = means_of(work, 0.2 + (3 * rows.sum(axis=1) + rows[:, 0]) / 10)
    means[:, np.array(counts) == 0] = 0.0
    return update_of(game, work, means, counts)


def means_of(work: LossesAssignment, level: NDArray[np.float64]) -> NDArray[np.float64]:
    """Numbers of an example of each label, whose true label is `level` nats behind the other."""
    assert work.biases is not None
    task = TaskSpec(template="{prompt}{text} {mask}", labels={"0": " a", "1": " b"})
    rows = zip(level.tolist(), work.biases.rows(), strict=True)
    return np.array(
        [
            [loss_terms(task.with_bias(bias), row, label) for label, row in enumerate(pair)]
            for behind, bias in rows
            for pair in [((-behind, 0.0), (0.0, -behind))]
        ]
    )


def update_of(
    game: Game, work: AlphaAssignment | LossesAssignment, means: Any, counts: Sequence[int]
) -> LossesUpdate:
    by_class = Tensor.pack(means.ravel().tolist(), means.shape, "float32")
    mixed = np.tensordot(from_wire(by_class)[..., 0].astype(float), np.array(counts), axes=(1, 0))
    update = game.update_for(
        work,
        losses=tuple((mixed / sum(counts)).tolist()),
        by_class=by_class,
        class_counts=tuple(map(float, counts)),
        scored=Scored(scored=sum(counts)),
    )
    assert isinstance(update, LossesUpdate)
    return update


def losses_of(update: LossesUpdate, biases: Any) -> ClassLosses:
    assert update.by_class is not None
    return ClassLosses(
        means=from_wire(update.by_class).astype(np.float64),
        counts=np.array(update.class_counts, dtype=np.int64),
        targets=np.eye(2),
        biases=biases,
    )


def play(game: Game, rounds: int) -> None:
    for _ in range(rounds):
        work = game.take()
        game.send(work, update_for(game, work, counts=(3, 1)))


class TestBadNumbers:
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
        [((4, 2, 3), "float32"), ((3, 2, 4), "float32"), ((4, 1, 4), "float32"),
         ((4, 8), "float32"), ((4, 2, 4), "uint16")],
    )  # fmt: skip
    def test_shapes(self, shape: tuple[int, ...], dtype: Any) -> None:
        by_class = Tensor.pack([1] * int(np.prod(shape)), shape, dtype)
        wanted = f"by_class: is {dtype} {list(shape)}, must be float32 [4, 2, 4]"
        assert self.refused({"by_class": by_class}) == wanted

    @pytest.mark.parametrize(
        ("counts", "detail"),
        [((), "0 were sent for 2 labels"), ((2,), "1 were sent for 2 labels"),
         ((1, 1, 0), "3 were sent for 2 labels"), ((2, 1), "add up to 2, the scored examples"),
         ((0.5, 1.5), "must be whole numbers"), ((-1, 3), "must be whole numbers"),
         ((0, 2), "must be 0 for a class without examples")],
    )  # fmt: skip
    def test_counts(self, counts: tuple[float, ...], detail: str) -> None:
        assert detail in self.refused({"class_counts": counts})

    def test_no_more_than_were_asked_for_and_not_none(self) -> None:
        """Each example weighs: who says a billion would outweigh all others."""
        change: dict[str, Any] = {"class_counts": (3, 2), "scored": Scored(scored=5)}
        assert self.refused(change) == "scored: 5 examples, a mini-batch has at most 4"
        change = {"by_class": None, "class_counts": ()}
        assert self.refused(change) == "by_class: is missing; the run's calibration is labels"

    @pytest.mark.parametrize("sign", [1, -1])
    def test_beyond_all_bounds(self, sign: int) -> None:
        by_class = Tensor.pack([sign * 2e6] * 32, (4, 2, 4), "float32")
        assert self.refused({"by_class": by_class}) == "by_class: an absolute value is above 1e+06"

    @pytest.mark.parametrize("losses", [(0.5, 0.5, 0.5, 0.5), (-1e6, 1e6, 0.0, 0.0)])
    def test_losses_that_say_something_else(self, losses: tuple[float, ...]) -> None:
        assert self.refused({"losses": losses}) == "by_class: its mean losses differ from losses"

    @pytest.mark.parametrize("attack", ["amplified", "random"])
    @pytest.mark.parametrize("column", [slice(0, 1), slice(None)], ids=["losses", "all"])
    def test_losses_of_no_log_probabilities(self, attack: str, column: slice) -> None:
        game = Game(calibrated())
        work = game.take()
        means = from_wire(update_for(game, work).by_class).astype(np.float64)
        means[..., column] = ATTACKS[attack](means[..., column], np.random.default_rng(0))
        refused = refusal(game.send(work, update_of(game, work, means, (1, 1))))
        assert refused.code == "invalid_message"
        assert refused.detail == "by_class: no log-probabilities can give these numbers"

    @pytest.mark.parametrize(
        ("place", "value"), [(0, 0.1), (1, -0.1), (1, 0.9), (2, 0.9), (3, -0.1)]
    )
    def test_one_number_that_cannot_be(self, place: int, value: float) -> None:
        game = Game(calibrated())
        work = game.take()
        means = from_wire(update_for(game, work).by_class).astype(np.float64)
        means[1, 1, place] = value
        refused = refusal(game.send(work, update_of(game, work, means, (1, 1))))
        assert refused.detail == "by_class: no log-probabilities can give these numbers"

    @pytest.mark.parametrize("labels", [2, 3, 4, 7, 64])
    def test_the_losses_of_any_log_probabilities_are_possible(self, labels: int) -> None:
        names = [str(label) for label in range(labels)]
        task = TaskSpec(template="{prompt}{text} {mask}", labels={one: f"w{one}" for one in names})
        rng, groups = np.random.default_rng(labels), num_groups(labels, private=False)
        for scale in (0.1, 3.0, 300.0):
            at = task.with_bias(rng.normal(0.0, 3.0, labels).tolist())
            rows = (-np.abs(rng.normal(0.0, scale, (5, labels)))).tolist()
            targets = rng.integers(labels, size=5).tolist()
            terms = [loss_terms(at, row, target) for row, target in zip(rows, targets, strict=True)]
            means = np.array([class_means(terms, targets, groups)])
            packed = Tensor.pack(means.ravel().tolist(), means.shape, "float32")
            counts = tuple(float(targets.count(label)) for label in range(labels))
            mean = float(np.mean([term[0] for term in terms]))
            ByClass(packed, counts, 5).check([mean], groups=groups, private=False)

    def test_a_run_that_does_not_calibrate_takes_none(self) -> None:
        spec = calibrated().model_dump() | {"calibration": "none"}
        game = Game(RunSpec.model_validate(spec))
        work = game.take()
        refused = refusal(game.send(work, update_of(game, work, np.zeros((4, 2, 4)), (1, 1))))
        assert refused.detail == "by_class: must be left out; the run's calibration is none"
        game.send(work)
        assert game.state.round == 1


def test_the_method_is_told_them() -> None:
    game = Game(calibrated(rounds=2))
    work = game.take()
    (seat,) = game.state.seats
    asked, start = game.machine.candidates(game.state, seat), game.state.method
    update = update_for(game, work, counts=(3, 1))
    game.send(work, update)
    by_hand = game.machine.method.tell(start, asked, losses_of(update, asked.biases))
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
    assert (seat.step, len(seat.by_class), len(seat.losses)) == (1, 1, 1)
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
        losses = losses_of(updates[client], asked[client].biases)
        expected = several.machine.method.tell(expected, asked[client], losses)
    assert plain(several.state.method) == plain(expected)


def test_losses_are_clipped_and_probabilities_are_not() -> None:
    game = Game(calibrated(defence={"loss_clip": 1.0}))
    work = game.take()
    (seat,) = game.state.seats
    update = update_for(game, work)
    assert update.by_class is not None
    by_class = ByClass(update.by_class, update.class_counts, 2)
    asked = game.machine.candidates(game.state, seat)
    updated = game.machine.as_losses(asked, update.losses, by_class)
    assert isinstance(updated, ClassLosses)
    given = from_wire(update.by_class)
    assert np.array_equal(updated.means[..., 0], np.clip(given[..., 0], 0, 1.0))
    assert np.array_equal(updated.means[..., 1:], given[..., 1:])
    assert updated.means[..., 0].max() == 1.0 < given[..., 0].max()


@pytest.mark.parametrize("private", [False, True])
def test_many_labels_and_private_ones_are_one_group(private: bool) -> None:
    """The next work has the biases that were found; noise may take numbers anywhere."""
    document = calibrated(rounds=2).model_dump()
    labels = {str(label): f" w{label}" for label in range(3 if private else 6)}
    document["task"] |= {"labels": labels, "metric": "loss"}
    document["privacy"] = {"clip": 5.0, "noise_multiplier": 1.0} if private else None
    game = Game(RunSpec.model_validate(document))
    work = game.take()
    assert isinstance(work, LossesAssignment)
    assert work.biases is not None
    assert not any(work.biases.values())
    size = len(labels)
    shares = [0.5 / (size - 1)] * (size - 1) + [0.5]
    row = [-0.3, 1.0, 0.9, 0.4, -0.2] if private else [2.0, 0.6, *shares]
    by_class = Tensor.pack(row * 4, (4, 1, 2 + size), "float32")
    counts = (1.7, -0.4, 2.2) if private else (1.0, 1.0, 1.0, 1.0, 0.0, 0.0)
    game.send(
        work,
        game.update_for(
            work,
            losses=(row[0],) * 4,
            by_class=by_class,
            class_counts=counts,
            scored=Scored(scored=4),
        ),
    )
    bias = game.machine.bias(game.state)
    assert bias is not None
    # The label whose probability is too low gets the largest bias.
    assert max(range(size), key=bias.__getitem__) == (2 if private else 0)
    work = game.take()
    assert isinstance(work, LossesAssignment)
    assert work.biases is not None
    assert any(work.biases.values())


class TestDefence:
    def test_a_client_with_possible_but_false_losses_is_held_back(self) -> None:
        game = Game(calibrated(rounds=100, num_samples=40, defence="standard"))
        for _ in range(20):
            play(game, 1)
        before = game.state.method
        work = game.take()
        assert isinstance(work, LossesAssignment)
        losses = np.array(update_for(game, work).losses)
        lying = means_of(work, 20.0 * (losses.max() - losses))  # the worst look best by far
        game.send(work, update_of(game, work, lying, (1, 1)))
        verdicts = [one.record["defence"] for one in game.rounds]
        assert [one["outlier"] for (one,) in verdicts] == [False] * 20 + [True]
        assert plain(game.state.method) == plain(before)


class TestSearchThatEnds:
    def spec(self, **more: Any) -> RunSpec:
        return calibrated(**{"rounds": 100, "halving": 0.1, **more})

    def test_a_run_ends_with_its_search(self) -> None:
        """The halving asks for fewer prompts, so that a run ends below its cap."""
        game = Game(self.spec())
        play_to_the_end(game)
        assert game.state.status == "completed"
        assert game.state.round == 100
        spent = game.spent.queries
        assert spent < 400 == game.machine.planned_queries
        assert game.state.reason == (
            f"the search ended by itself; {400 - spent} of 400 queries are left"
        )

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
