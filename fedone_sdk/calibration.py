"""What a device reports of its losses so that the server can fit label biases.

Pure Python: devices without NumPy compute these numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedone_sdk.task import LogProbs, TaskSpec, biased, label_loss

__all__ = [
    "MAX_CLASSES",
    "PROBABILITY_WIDTH",
    "class_means",
    "loss_terms",
    "num_groups",
    "probability_noise",
    "sensitivity",
]

MAX_CLASSES = 4
"""The largest number of labels whose examples are reported apart."""

PROBABILITY_WIDTH = 4.0
"""Width of a label probability in a release with noise, in units of its range: its noise is this
much larger than a loss's, relative to the clip, and adds little to that of the losses."""


def sensitivity(num_prompts: int) -> float:
    """Return how far one example moves the sums of a release, in units of the values' widths.

    Those of I prompts' losses by at most sqrt(I). Two points of a simplex are at most sqrt(2)
    apart; so one example moves each prompt's probabilities, and the counts of the labels, whose
    width is that of the probabilities / sqrt(I), by as much.
    """
    return math.sqrt(num_prompts * (1.0 + 4.0 / PROBABILITY_WIDTH**2))


def probability_noise(noise_multiplier: float, num_prompts: int, batch_size: int) -> float:
    """Return the standard deviation of the noise on a mean label probability."""
    return noise_multiplier * PROBABILITY_WIDTH * sensitivity(num_prompts) / batch_size


def num_groups(num_labels: int, *, private: bool) -> int:
    """Return K, the number of groups of examples that losses are reported for.

    One per class for up to `MAX_CLASSES` labels, else one of all examples. Under privacy it is one,
    because the noise on each class would hide the losses.
    """
    return 1 if private or num_labels > MAX_CLASSES else num_labels


def loss_terms(task: TaskSpec, row: LogProbs, target: int) -> list[float]:
    """Return one example's loss with what its derivatives over the label bias depend on.

    Args:
        task: Its loss is ``cross_entropy``, at its bias.
        row: Log-probabilities of the labels.
        target: The true label.

    Returns:
        Shape (2 + C,): the loss, nats; the trace of its Hessian, 1 - sum_k p_k^2; the probability
        p_k of each label. The gradient is p minus the indicator of the true label.
    """
    values = biased(task, row)
    highest = max(values)
    odds = [math.exp(value - highest) for value in values]
    total = math.fsum(odds)
    probabilities = [value / total for value in odds]
    trace = 1.0 - math.fsum(value * value for value in probabilities)
    return [label_loss(task, row, target), max(trace, 0.0), *probabilities]


def class_means(
    terms: Sequence[Sequence[float]], targets: Sequence[int], groups: int
) -> list[list[float]]:
    """Return the mean `loss_terms` of each group of examples, shape (K, 2 + C); 0 for none."""
    means = []
    for group in range(groups):
        pairs = zip(terms, targets, strict=True)
        own = [term for term, target in pairs if groups == 1 or target == group]
        columns = zip(*own, strict=True) if own else [()] * len(terms[0])
        means.append([math.fsum(column) / max(len(own), 1) for column in columns])
    return means
