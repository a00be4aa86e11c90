"""Label bias: what a task's losses would be under other biases, and what a bias is found from.

Pure Python: devices without NumPy report these numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from fedone_sdk.task import LOG_ZERO, MAX_BIAS, Bias, LogProbs, TaskSpec, label_loss

__all__ = [
    "ByClass",
    "CONTENT_FREE",
    "LabelFree",
    "MAX_LABELS",
    "bias_grid",
    "class_losses",
    "neutral_bias",
]

LabelFree = Literal["contextual", "batch"]
"""Ways to a bias without labels: from what a model says of content-free inputs (Zhao et al. 2021),
or of the examples that are predicted together (Zhou et al. 2023)."""

CONTENT_FREE = ("N/A", "", "[MASK]")
"""The texts without content of Zhao et al. (2021); each stands in all text fields of an input."""

_OFFSETS: dict[int, tuple[float, ...]] = {
    2: (-4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0),
    3: (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0),
    4: (-2.0, -1.0, 0.0, 1.0, 2.0),
}
# What a label after the first may get, nats, by the number of labels. Between points further apart
# than 1 a paraboloid is no good guess any more; the more labels, the nearer ends the grid, so that
# an update stays some kilobytes.

MAX_LABELS = max(_OFFSETS)
"""The most labels that there is a grid for."""


class ByClass(NamedTuple):
    """One prompt's losses on a mini-batch by class and bias.

    Attributes:
        means: Shape (C, G): the mean loss over the examples of a class at a grid point; 0.0 for a
            class of which there is none.
        counts: Shape (C,): examples of each class.
    """

    means: tuple[tuple[float, ...], ...]
    counts: tuple[int, ...]


def bias_grid(num_labels: int) -> tuple[Bias, ...]:
    """The biases that losses are reported at, G of them.

    A bias that adds the same to all labels changes nothing, so the first label's is always 0. The
    others' run through all combinations of a few offsets, the last label's fastest:

    >>> len(bias_grid(2)), bias_grid(2)[0], bias_grid(3)[1]
    (9, (0.0, -4.0), (0.0, -3.0, -2.0))

    Args:
        num_labels: C, from 2 to `MAX_LABELS`.

    Returns:
        Shape (G, C), nats: G is 9 for 2 labels, 49 for 3, 125 for 4. The middle one is zero.

    Raises:
        ValueError: There is no grid for so many labels.
    """
    if num_labels not in _OFFSETS:
        raise ValueError(f"there are biases for 2 to {MAX_LABELS} labels, not for {num_labels}")
    offsets = _OFFSETS[num_labels]
    return tuple((0.0, *others) for others in itertools.product(offsets, repeat=num_labels - 1))


def class_losses(task: TaskSpec, rows: Sequence[LogProbs], targets: Sequence[int]) -> ByClass:
    """One prompt's mean losses by class, at each bias of the grid.

    Args:
        task: The task; the grid takes the place of its own bias.
        rows: The label log-probabilities of each example, nats.
        targets: The index of each example's label.

    Raises:
        ValueError: The task has too many labels, or there are not as many targets as rows.
    """
    num_labels = len(task.labels)
    tasks = [task.with_bias(bias) for bias in bias_grid(num_labels)]
    held: list[list[LogProbs]] = [[] for _ in range(num_labels)]
    for row, target in zip(rows, targets, strict=True):
        held[target].append(row)
    means = tuple(
        tuple(
            math.fsum(label_loss(one, row, target) for row in held[target]) / len(held[target])
            if held[target]
            else 0.0
            for one in tasks
        )
        for target in range(num_labels)
    )
    return ByClass(means=means, counts=tuple(map(len, held)))


def neutral_bias(rows: Sequence[LogProbs]) -> Bias:
    """The bias under which a model prefers no label on average over some inputs.

    That is minus the mean log-probability of each label, less the first label's: to add the same
    to all changes nothing. What a label got that was not written does not count.

    Args:
        rows: Label log-probabilities of each input, at least one, nats.

    Returns:
        Shape (C,), at most `MAX_BIAS`; the first label's is 0.
    """
    means = []
    for values in zip(*rows, strict=True):
        written = [value for value in values if value > LOG_ZERO]
        means.append(math.fsum(written) / len(written) if written else 0.0)
    return tuple(min(max(means[0] - mean, -MAX_BIAS), MAX_BIAS) for mean in means)
