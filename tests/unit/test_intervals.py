"""Intervals over examples, against the metrics themselves and against theory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from fedone_sdk.evaluation.intervals import Interval, confusion, difference, interval
from fedone_sdk.evaluation.outcomes import Outcomes
from fedone_sdk.metrics import METRICS, evaluate


def outcomes(predicted: Sequence[int | None], targets: Sequence[int]) -> Outcomes:
    return Outcomes(which="after", predicted=tuple(predicted), targets=tuple(targets))


def losses(values: Sequence[float | None]) -> Outcomes:
    return Outcomes(which="after", losses=tuple(values))


def sure(found: Interval | None) -> Interval:
    assert found is not None
    return found


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("seed", range(5))
def test_the_value_is_the_metric(metric: str, seed: int) -> None:
    rng, num_labels = np.random.default_rng(seed), 2 + seed
    targets = rng.integers(num_labels, size=60).tolist()
    predicted = rng.integers(-1, num_labels, size=60).tolist()  # -1: the model wrote no label
    found = sure(interval(metric, outcomes(predicted, targets), num_labels))
    assert found.value == pytest.approx(evaluate(metric, predicted, targets), abs=1e-12)
    assert found.low <= found.value <= found.high


def test_matthews_without_variety_is_zero() -> None:
    same = outcomes([1] * 8, [0, 1] * 4)
    assert difference("matthews", [same], [same], 2) == (0.0, 0.0, 0.0, 1, 0.0, 0.5)
    found = sure(interval("matthews", same, 2))
    assert found.low < found.value == 0.0 < found.high


def test_the_ends_are_those_of_the_binomial() -> None:
    """With 400 examples the normal approximation is good to a third of an example."""
    right, count = 300, 400
    answers = [0] * right + [1] * (count - right)
    found = sure(interval("accuracy", outcomes(answers, [0] * count), 2))
    half = 1.96 * math.sqrt(0.75 * 0.25 / count)
    assert found.low == pytest.approx(0.75 - half, abs=0.004)
    assert found.high == pytest.approx(0.75 + half, abs=0.004)


def test_the_mean_loss_has_the_ends_of_its_standard_error() -> None:
    values = np.random.default_rng(1).normal(2.0, 0.5, size=500)
    found = sure(interval("loss", losses(values.tolist()), 0))
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert found.value == pytest.approx(values.mean())
    assert (found.low, found.high) == pytest.approx(
        (values.mean() - half, values.mean() + half), abs=0.004
    )


@pytest.mark.parametrize("metric", ["f1", "matthews"])
def test_a_prompt_differs_from_itself_by_nothing(metric: str) -> None:
    one = outcomes([0, 1, 1, -1, 0, 1], [0, 1, 0, 1, 0, 0])
    assert difference(metric, [one], [one], 2) == (0.0, 0.0, 0.0, 1, 0.0, 0.5)


def test_pairs_take_out_what_both_find_hard() -> None:
    targets = [0] * 200
    first = [0] * 120 + [1] * 80
    second = [0] * 110 + [1] * 90  # wrong wherever the first is, and ten times more
    found = sure(difference("accuracy", [outcomes(first, targets)], [outcomes(second, targets)], 2))
    alone = sure(interval("accuracy", outcomes(first, targets), 2))
    assert found.value == pytest.approx(0.05)
    assert 0.0 < found.low < found.high < 0.1
    assert found.high - found.low < (alone.high - alone.low) / 2


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 5, 20])
def test_few_rows_show_no_difference_between_equal_prompts(size: int, seeds: int) -> None:
    pairs = np.random.default_rng(size).exponential(size=(200, 2, size)).tolist()
    found = [difference("loss", [losses(a)] * seeds, [losses(b)] * seeds, 0) for a, b in pairs]
    assert sum(one is not None and one.verdict != "open" for one in found) <= 14  # of 10 expected


def test_few_disagreements_count_as_in_the_exact_test() -> None:
    """Of n examples on which one of both is right, with k wins, as a binomial with p = 1/2."""
    size = 60
    for wins in range(12):
        for losses in range(wins):
            n = wins + losses
            exact = 2 * sum(math.comb(n, k) for k in range(losses + 1)) / 2**n
            first = outcomes([0] * wins + [1] * losses + [0] * (size - n), [0] * size)
            second = outcomes([1] * wins + [0] * losses + [0] * (size - n), [0] * size)
            found = sure(difference("accuracy", [first], [second], 2))
            assert found.value == pytest.approx((wins - losses) / size)
            assert (found.low > 0) <= (exact < 0.1), (wins, losses)
            assert (found.low > 0) >= (exact < 0.02), (wins, losses)
            assert found.low <= 0 or found.above > 0.975


def test_all_right_is_not_surely_right() -> None:
    for metric, low in (("accuracy", 0.8), ("f1", 0.6), ("matthews", 0.5)):
        found = sure(interval(metric, outcomes([0, 1] * 10, [0, 1] * 10), 2))
        assert (found.value, found.high) == (1.0, 1.0)
        assert low < found.low < 0.9
    found = interval("accuracy", outcomes([0] * 20, [0] * 20), 2)
    assert interval("loss", losses([1.0] * 20), 0) == pytest.approx(found, abs=0.01)
    rare = sure(interval("f1", outcomes([0] * 30, [0] * 30), 2))  # No row has the second label.
    assert rare.low == rare.value == 0.0 < 0.9 < rare.high


def test_what_failed_does_not_count() -> None:
    some = outcomes([0, None, 1, 1], [0, 0, 1, 0])
    found = sure(interval("accuracy", some, 2))
    assert found.value == pytest.approx(2 / 3)
    assert confusion(some, 2) == [[1, 1, 0], [0, 1, 0]]
    assert interval("accuracy", outcomes([None], [0]), 2) is None
    assert interval("loss", losses([None]), 0) is None
    assert interval("loss", losses([3.0, None]), 0) == (3.0, 3.0, 3.0, 1, 0.0, 1.0)
    others = outcomes([None, 0, None, None], [0, 0, 1, 0])
    assert difference("accuracy", [some], [others], 2) is None
    assert confusion(outcomes([0, -1, 1], [0, 0, 1]), 2) == [[1, 0, 1], [0, 1, 0]]  # no label


def test_two_dev_splits_and_a_metric_of_ones_own_have_no_difference() -> None:
    assert difference("accuracy", [outcomes([0], [0])], [outcomes([0], [1])], 2) is None
    assert difference("loss", [losses([1.0])], [losses([1.0, 2.0])], 0) is None
    one = outcomes([0, 1], [0, 1])
    assert interval("costs:saved", one, 2) is None
    assert difference("costs:saved", [one], [one], 2) is None


def test_as_many_predictions_as_targets() -> None:
    with pytest.raises(ValueError, match="not as many predictions"):
        outcomes([0], [0, 1])
