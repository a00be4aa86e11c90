"""What a device reports for the fit of label biases: losses, traces and probabilities."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedone_sdk.losses import MAX_CLASSES, class_means, label_loss, loss_terms, num_groups
from fedone_sdk.task import LOG_ZERO, TaskSpec


def task_of(num_labels: int) -> TaskSpec:
    labels = {str(label): f" w{label}" for label in range(num_labels)}
    return TaskSpec(template="{prompt} {text} {mask}", labels=labels)


def test_by_hand() -> None:
    """p(0) is 3/4 for two examples of class 0, and 1/2 for one of class 1."""
    sure, torn = [math.log(0.75), math.log(0.25)], [math.log(0.5), math.log(0.5)]
    targets = [0, 1, 0]
    terms = [
        loss_terms(task_of(2), row, target)
        for row, target in zip([sure, torn, sure], targets, strict=True)
    ]
    zero, one = class_means(terms, targets, 2)
    assert zero == pytest.approx([-math.log(0.75), 3 / 8, 0.75, 0.25])
    assert one == pytest.approx([math.log(2), 0.5, 0.5, 0.5])
    assert class_means(terms, targets, 1)[0] == pytest.approx(
        [(2 * a + b) / 3 for a, b in zip(zero, one, strict=True)]
    )
    assert class_means(terms[:1], [0], 2)[1] == [0.0] * 4


@pytest.mark.parametrize(
    ("labels", "private", "groups"),
    [(2, False, 2), (MAX_CLASSES, False, MAX_CLASSES), (MAX_CLASSES + 1, False, 1), (2, True, 1)],
)
def test_groups(labels: int, private: bool, groups: int) -> None:
    assert num_groups(labels, private=private) == groups


@given(st.data())
def test_gradient_and_trace_are_the_derivatives_of_the_loss(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 6))
    row = data.draw(st.lists(st.floats(-30, 0) | st.just(LOG_ZERO), min_size=size, max_size=size))
    bias = data.draw(st.lists(st.floats(-5, 5), min_size=size, max_size=size))
    target = data.draw(st.integers(0, size - 1))

    def loss_at(label: int, shift: float) -> float:
        moved = [value + shift * (at == label) for at, value in enumerate(bias)]
        return label_loss(task_of(size).with_bias(moved), row, target)

    loss, trace, *probabilities = loss_terms(task_of(size).with_bias(bias), row, target)
    assert loss == loss_at(0, 0.0)
    bent = 0.0
    for label, probability in enumerate(probabilities):
        if row[label] == LOG_ZERO:  # A bias does not move it.
            continue
        ahead, behind = loss_at(label, 1e-3), loss_at(label, -1e-3)
        slope = (ahead - behind) / 2e-3
        assert slope == pytest.approx(probability - (label == target), abs=1e-5)
        bent += (ahead - 2 * loss + behind) / 1e-6
    assert sum(probabilities) == pytest.approx(1.0)
    if LOG_ZERO not in row:
        assert trace == pytest.approx(bent, abs=1e-4)
