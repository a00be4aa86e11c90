"""Label bias: a task's losses over a grid of biases.

Pure Python: devices without NumPy report these numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from fedone_sdk.task import Bias, LogProbs, TaskSpec, label_loss

__all__ = [
    "ByClass",
    "MAX_LABELS",
    "bias_grid",
    "class_losses",
]

_OFFSETS: dict[int, tuple[float, ...]] = {
    2: (-4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0),
    3: (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0),
    4: (-2.0, -1.0, 0.0, 1.0, 2.0),
}
# Biases of a label after the first, nats, by the number of labels. A paraboloid fits badly if they
# are more than 1 apart. Grids of more labels have a smaller range, so that an update stays within
# some kilobytes.

MAX_LABELS = max(_OFFSETS)
"""The largest number of labels with a grid."""


class ByClass(NamedTuple):
    """One prompt's losses on a mini-batch, per class and bias.

    Attributes:
        means: Shape (C, G): the mean loss over the examples of a class at a grid point; 0.0 for a
            class without examples.
        counts: Shape (C,): examples of each class.
    """

    means: tuple[tuple[float, ...], ...]
    counts: tuple[int, ...]


def bias_grid(num_labels: int) -> tuple[Bias, ...]:
    """Return the G biases at which losses are reported.

    A constant added to all labels has no effect, so the first label's bias is always 0. The
    others run through all combinations of a few offsets; the last label's varies fastest:

    >>> len(bias_grid(2)), bias_grid(2)[0], bias_grid(3)[1]
    (9, (0.0, -4.0), (0.0, -3.0, -2.0))

    Returns:
        Shape (G, C), nats: G is 9 for 2 labels, 49 for 3, 125 for 4. The middle one is zero.
    """
    if num_labels not in _OFFSETS:
        raise ValueError(f"biases exist for 2 to {MAX_LABELS} labels, not for {num_labels}")
    offsets = _OFFSETS[num_labels]
    return tuple((0.0, *others) for others in itertools.product(offsets, repeat=num_labels - 1))


def class_losses(task: TaskSpec, rows: Sequence[LogProbs], targets: Sequence[int]) -> ByClass:
    """Return one prompt's mean losses per class, at each bias of the grid."""
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
