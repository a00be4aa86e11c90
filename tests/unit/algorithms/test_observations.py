from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedone_sdk.algorithms import ClassLosses
from fedone_sdk.algorithms.method import Holder
from fedone_sdk.algorithms.observations import Observations, clusters
from fedone_sdk.algorithms.space import Space

SPACE = Space.of([(1, 5, None), (1, 3, 0)])


def losses_of(count: int, classes: int = 2) -> ClassLosses:
    means = np.arange(count * classes * 4, dtype=float).reshape(count, classes, 4)
    return ClassLosses(
        means=means,
        counts=np.arange(1, classes + 1),
        targets=np.full((classes, 2), 0.5),
        biases=np.tile([0.0, 0.5], (count, 1)),
    )


def rows(*prompts: tuple[int, int]) -> np.ndarray:
    return np.array(prompts)


def several() -> Observations:
    observed = Observations.empty(2, 2, 2)
    for prompts in (rows((0, 0), (1, 1)), rows((0, 0), (2, 1), (3, 2)), rows((4, 0), (1, 1))):
        observed = observed.with_batch(prompts, losses_of(len(prompts)))
    return observed


def test_equal_prompts_share_a_row_and_count_once() -> None:
    observed = Observations.empty(2, 2, 2).with_batch(rows((1, 1), (1, 1), (2, 0)), losses_of(3))
    assert observed.prompts.tolist() == [[1, 1], [2, 0]]
    assert observed.rows.tolist() == [0, 1]
    assert observed.means[1].tolist() == losses_of(3).means[2].tolist()


def test_the_same_rows_are_counted_once() -> None:
    """In the evidence for a prompt, and in the shares of the classes."""
    observed = Observations.empty(2, 2, 2)
    whole, part = Holder(3, all_rows=True), Holder(4, all_rows=False)
    for prompts, holder in (
        (rows((0, 0), (1, 1)), whole),
        (rows((0, 0), (1, 1)), part),
        (rows((2, 1), (0, 0)), whole),
        (rows((0, 0), (1, 1)), part),
    ):
        observed = observed.with_batch(prompts, losses_of(2), holder)
    assert observed.trusted_evaluations.tolist() == [[3.0, 3.0], [3.0, 3.0], [1.0, 1.0]]
    one = replace(losses_of(1), counts=np.array([0, 9]))
    once = observed.with_batch(rows((0, 0)), one, Holder(5, all_rows=True))
    again = once.with_batch(rows((0, 0)), one, Holder(5, all_rows=True))
    assert again.class_share.tolist() == once.class_share.tolist()
    assert once.with_batch(rows((0, 0)), one, part).class_share[1] > once.class_share[1]


def test_the_oldest_losses_are_dropped_with_their_prompts() -> None:
    observed = several()
    assert observed.last_batches().tolist() == [1, 2, 1, 1, 2]
    few = observed.remembering(np.array([1, 0, 2, 4]), 3)
    assert few.prompts.tolist() == [[1, 1], [2, 1], [4, 0]]
    assert few.rows.tolist() == [1, 0, 2]
    assert few.batches.tolist() == [0, 1, 1]
    assert few.examples.tolist() == [[1, 2]] * 2


def test_the_latest_mini_batches_stay_whole() -> None:
    observed = several()
    assert observed.latest(9) is observed
    assert observed.latest(4).prompts.tolist() == [[1, 1], [4, 0]]
    assert observed.latest(1).prompts.tolist() == [[1, 1], [4, 0]]


def test_class_shares_of_uneven_clients_are_believed_less() -> None:
    def share(*positive: float) -> float:
        observed = Observations.empty(2, 2, 2)
        for part in positive:
            counts = np.round(np.array([1.0 - part, part]) * 200).astype(int)
            losses = replace(losses_of(1), counts=counts)
            observed = observed.with_batch(rows((0, 0)), losses)
        return float(observed.class_share[1])

    alike, apart = [0.8] * 100, [0.0, 1.0, 1.0, 1.0, 1.0] * 20
    assert share(*alike) == pytest.approx(0.8, abs=0.04)
    assert 0.65 < share(*apart) < share(*alike) - 0.03
    # Five who by chance are alike, or one: next to nothing.
    assert 0.5 < share(*[1.0] * 5) < 0.6
    assert 0.5 < share(1.0) < share(*[1.0] * 5)


def test_prompts_are_scored_at_their_bias_and_new_ones_at_the_mean() -> None:
    observed = several()
    assert observed.biases.tolist() == [[0.0, 0.5]] * 5
    biases = observed.biases + np.arange(5.0)[:, None]
    found = replace(observed, biases=biases).biases_for(rows((4, 0), (4, 1)))
    assert found.tolist() == [[4.0, 4.5], np.average(biases, 0, [2, 2, 1, 1, 1]).tolist()]
    assert Observations.empty(2, 1, 3).biases_for(rows((4, 0))).tolist() == [[0.0] * 3]


def test_a_memory_is_read_back_or_refused() -> None:
    observed = several()
    again = Observations.remembered(observed.memory(), SPACE, 2, 2)
    for name, array in observed.memory().items():
        assert np.array_equal(again.memory()[name], array)
    for name, value in (
        ("prompts", np.zeros((5, 3), np.int64)),
        ("prompts", np.zeros((5, 2), np.int64)),  # one prompt five times
        ("prompts", observed.prompts + np.array([0, 1])),  # no such candidate
        ("rows", np.array([0, 1, 0, 2, 3, 9, 1])),
        ("rows", np.array([0, 0, 0, 2, 3, 4, 1])),  # a prompt twice
        ("rows", observed.rows.astype(float)),
        *((name, array.flat[0]) for name, array in observed.memory().items()),
        ("batches", observed.batches[::-1]),
        ("means", np.zeros((7, 1, 4), np.float32)),
        ("means", np.full((7, 2, 4), np.inf, np.float32)),
        ("examples", -observed.examples),
        ("examples", np.zeros((3, 2), np.int64)),
        ("trust", np.zeros(3)),
        ("trust", np.full(3, 1.5)),
        ("biases", np.full((5, 2), np.nan)),
        ("clients", np.zeros(3)),
    ):
        with pytest.raises(ValueError, match="memory"):
            Observations.remembered({**observed.memory(), name: np.asarray(value)}, SPACE, 2, 2)
    with pytest.raises(ValueError, match="memory"):
        Observations.remembered({"m": np.zeros(3)}, SPACE)
    with pytest.raises(ValueError, match="fit"):
        Observations.remembered(observed.memory(), SPACE)
    with pytest.raises(ValueError, match="shape"):
        observed.with_batch(rows((0, 0)), losses_of(1, 3))


def test_clients_with_the_same_best_candidate_are_a_cluster() -> None:
    """Where another candidate than the deployed one is better on the same rows, clearly."""
    observed = Observations.empty(2, 1, 1)
    deployed, other, third = (0, 0), (1, 0), (2, 0)
    batches = [(client, other, 0.5, 0.9) for client in (0, 0, 1, 1, 2, 2)]
    batches += [(client, other, 0.5, 0.2) for client in (3, 3, 4, 4)]
    batches += [(5, third, 0.5, 0.1)]  # Once may be luck.
    batches += [(6, third, 0.6, loss) for loss in (0.1, 1.0)]  # So may be this.
    for client, prompt, loss, of_prompt in batches:
        losses = ClassLosses.plain(np.array([loss, of_prompt]))
        held = Holder(client, all_rows=client == 4)
        observed = observed.with_batch(rows(deployed, prompt), losses, held)
    assert clusters(observed.memory(), 0) == {0: 5, 1: 2}
    assert clusters({}, 0) == {}
