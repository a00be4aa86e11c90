"""Metrics against values computed by hand, and scikit-learn if installed."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedone_sdk.metrics import METRICS, accuracy, evaluate, f1, matthews

# TP 3, TN 4, FP 2, FN 1.
PREDICTIONS = [1, 1, 1, 0, 0, 0, 0, 1, 1, 0]
TARGETS = [1, 1, 1, 0, 0, 0, 0, 0, 0, 1]


def test_by_hand() -> None:
    assert accuracy(PREDICTIONS, TARGETS) == 7 / 10
    assert f1(PREDICTIONS, TARGETS) == 6 / (6 + 2 + 1)
    assert matthews(PREDICTIONS, TARGETS) == pytest.approx(
        (3 * 4 - 2 * 1) / math.sqrt((3 + 2) * (3 + 1) * (4 + 2) * (4 + 1))
    )


def test_ends_of_the_scale() -> None:
    wrong = [1 - target for target in TARGETS]
    assert [evaluate(name, TARGETS, TARGETS) for name in METRICS] == [1.0, 1.0, 1.0]
    assert [evaluate(name, wrong, TARGETS) for name in METRICS] == [0.0, 0.0, -1.0]


@pytest.mark.parametrize("name", METRICS)
def test_nothing_to_measure(name: str) -> None:
    assert evaluate(name, [], []) == 0.0


def test_degenerate_cases() -> None:
    assert f1([0, 0], [0, 0]) == 0.0
    assert matthews([1, 1, 1], [0, 1, 1]) == 0.0
    assert matthews([0, 1, 1], [1, 1, 1]) == 0.0
    assert matthews([1, 1], [1, 1]) == 0.0


def test_bad_calls() -> None:
    with pytest.raises(ValueError, match="no metric 'auc'; metrics: accuracy, f1, matthews"):
        evaluate("auc", [0], [0])
    for name in METRICS:
        with pytest.raises(ValueError, match=r"shorter|longer"):
            evaluate(name, [0], [0, 1])


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1))
def test_binary_matthews_is_the_textbook_form(pairs: list[tuple[int, int]]) -> None:
    count = {cell: pairs.count(cell) for cell in ((0, 0), (0, 1), (1, 0), (1, 1))}
    tn, fn, fp, tp = count[0, 0], count[0, 1], count[1, 0], count[1, 1]
    below = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    expected = (tp * tn - fp * fn) / below if below else 0.0
    assert matthews([p for p, _ in pairs], [t for _, t in pairs]) == pytest.approx(expected)


@pytest.mark.filterwarnings("ignore:A single label was found")
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=2))
def test_against_sklearn(pairs: list[tuple[int, int]]) -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    predictions, targets = [p for p, _ in pairs], [t for _, t in pairs]
    assert accuracy(predictions, targets) == pytest.approx(
        sklearn.accuracy_score(targets, predictions)
    )
    assert matthews(predictions, targets) == pytest.approx(
        sklearn.matthews_corrcoef(targets, predictions)
    )
    positive = ([p == 1 for p in predictions], [t == 1 for t in targets])
    assert f1(predictions, targets) == pytest.approx(
        sklearn.f1_score(positive[1], positive[0], zero_division=0.0)
    )
