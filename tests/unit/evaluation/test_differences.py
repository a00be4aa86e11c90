from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from fedone_sdk.evaluation.intervals import difference
from fedone_sdk.evaluation.results import TrialRecord
from fedone_sdk.metrics import evaluate
from tests.unit.evaluation.records import record


def trials(
    rng: np.random.Generator, count: int, targets: Sequence[int], skill: float
) -> list[TrialRecord]:
    found = []
    for seed in range(count):
        right = rng.random(len(targets)) < skill
        predicted = [t if ok else 1 - t for t, ok in zip(targets, right, strict=True)]
        losses = rng.normal(1.0 - skill, 0.1, len(targets)).tolist()
        found.append(record("any", seed, predicted=predicted, targets=targets, losses=losses))
    return found


@pytest.mark.parametrize("metric", ["accuracy", "f1", "matthews", "loss"])
def test_the_mean_is_that_of_the_pairs(metric: str) -> None:
    rng = np.random.default_rng(0)
    targets = rng.integers(2, size=60).tolist()
    first, second = trials(rng, 4, targets, 0.9), trials(rng, 4, targets, 0.6)
    found = difference(metric, first, second, 2)
    assert found is not None
    assert found.pairs == 4

    def value(one: TrialRecord) -> float:
        if metric == "loss":
            return math.fsum(x for x in one.losses if x is not None) / 60
        return evaluate(metric, [p for p in one.predicted if p is not None], one.targets)

    expected = np.mean([value(a) - value(b) for a, b in zip(first, second, strict=True)])
    assert found.value == pytest.approx(expected)
    assert found.low < found.value < found.high
    assert found.verdict == ("less" if metric == "loss" else "more")


def test_the_spread_is_that_of_theory() -> None:
    # Only the examples differ: the interval of one seed is that of a mean of 400.
    rng = np.random.default_rng(1)
    losses = rng.normal(0.0, 1.0, 400)
    first, second = record(losses=losses.tolist()), record(losses=[0.0] * 400)
    found = difference("loss", [first], [second], 0)
    assert found is not None
    error = losses.std() / math.sqrt(400)
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * error, rel=0.06)

    # Only the seeds differ: Student's t of five.
    shifts = np.array([-0.3, -0.1, 0.0, 0.2, 0.5])
    first_five = [record(seed=n, losses=[shift] * 50) for n, shift in enumerate(shifts)]
    second_five = [record(seed=n, losses=[0.0] * 50) for n in range(5)]
    found = difference("loss", first_five, second_five, 0)
    assert found is not None
    error = shifts.std(ddof=1) / math.sqrt(5)
    assert (found.high - found.low) / 2 == pytest.approx(2.776 * error, rel=0.1)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng, hits, tries = np.random.default_rng(2), 0, 150
    for _ in range(tries):
        apart = (
            rng.normal(0, 0.05, (5, 1)) + rng.normal(0, 0.1, (1, 40)) + rng.normal(0, 0.1, (5, 40))
        )
        first = [record(seed=n, losses=row.tolist()) for n, row in enumerate(apart)]
        second = [record(seed=n, losses=[0.0] * 40) for n in range(5)]
        found = difference("loss", first, second, 0)
        assert found is not None
        hits += found.low <= 0.0 <= found.high
    # Three standard errors of 95 % in 150 tries; above it, the interval is too wide.
    assert 0.95 - 3 * math.sqrt(0.95 * 0.05 / tries) <= hits / tries <= 1.0


def test_the_same_trials_give_the_same_interval() -> None:
    rng = np.random.default_rng(3)
    targets = rng.integers(2, size=30).tolist()
    first, second = trials(rng, 3, targets, 0.8), trials(rng, 3, targets, 0.7)
    assert difference("f1", first, second, 2) == difference("f1", first, second, 2)
    same = difference("accuracy", first, first, 2)
    assert same == (0.0, 0.0, 0.0, 3, 0.0, 0.5)


def test_what_one_of_both_has_not_answered_counts_for_neither() -> None:
    first = record(predicted=[0, None, 1], targets=[0, 1, 1], losses=[0.1, None, 0.2])
    second = record(predicted=[1, 1, None], targets=[0, 1, 1], losses=[0.3, 0.1, None])
    for metric in "accuracy", "loss":
        found = difference(metric, [first], [second], 2)
        assert found is not None
        assert found.value == pytest.approx(1.0 if metric == "accuracy" else -0.2)
    table = difference("f1", [first], [second], 2)
    assert table is not None


def test_nothing_to_compare() -> None:
    nothing = record(losses=[None], predicted=[None], targets=[0])
    assert difference("accuracy", [], [], 2) is None
    assert difference("mine:metric", [record()], [record()], 2) is None
    for metric in "accuracy", "f1", "loss":
        assert difference(metric, [nothing], [nothing], 2) is None
