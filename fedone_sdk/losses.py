"""Losses and predictions from a model's answers, and the statistics for fitting label biases.

A label bias is added to the log-probability of a label. Devices may lack NumPy: it is not used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedone_sdk.task import LOG_ZERO, Example, LogProbs, Score, TaskSpec, target_of

__all__ = ["biased", "example_loss", "feedback", "label_loss", "predicted"]


def biased(task: TaskSpec, log_probs: LogProbs) -> LogProbs:
    """Add the task's bias; `LOG_ZERO`, for a label that the model did not write, stays as it is."""
    if task.bias is None:
        return log_probs
    return tuple(
        value if value <= LOG_ZERO else value + offset
        for value, offset in zip(log_probs, task.bias, strict=True)
    )


def predicted(task: TaskSpec, log_probs: LogProbs) -> int:
    """Return the index of the likeliest label after the bias; -1 if the model wrote no label."""
    written = [index for index, value in enumerate(log_probs) if value > LOG_ZERO]
    values = biased(task, log_probs)
    return max(written, key=lambda index: values[index], default=-1)


def _normalised(values: LogProbs) -> tuple[list[float], float]:
    """Return the labels' probabilities divided by their sum, and the logarithm of the sum."""
    highest = max(values)
    odds = [math.exp(value - highest) for value in values]
    total = math.fsum(odds)
    return [value / total for value in odds], math.log(total) + highest


def label_loss(task: TaskSpec, log_probs: LogProbs, target: int) -> float:
    """Return the training loss of one example.

    Here p are the label words' probabilities, divided by their sum as in the paper's code.

    - ``cross_entropy``: ``-log p_target``, nats.
    - ``brier``: the squared distance of p from the true label, 0 to 2 (Brier 1950).
    - ``hinge``: the sum over the other labels of ``max(0, 1 - (log p_target - log p_other))``,
      divided by the number of labels (torch's ``MultiMarginLoss``).
    - ``zero_one``: 0.0 if `predicted` is the true label, else 1.0.
    """
    if task.loss == "zero_one":
        return float(predicted(task, log_probs) != target)
    values = biased(task, log_probs)
    if task.loss == "hinge":
        others = (value for index, value in enumerate(values) if index != target)
        return math.fsum(max(0.0, 1.0 - values[target] + value) for value in others) / len(values)
    probabilities, log_total = _normalised(values)
    if task.loss == "brier":
        return math.fsum((p - (label == target)) ** 2 for label, p in enumerate(probabilities))
    return log_total - values[target]


def example_loss(task: TaskSpec, answer: LogProbs | Score, example: Example) -> float:
    """Return the loss of a model's answer to an example, as the task's loss defines it.

    Raises:
        DataError: The label is missing or unknown to the task.
    """
    if isinstance(answer, Score):
        return 1.0 - answer.value
    if task.loss == "nll":
        return -answer[0]
    target = target_of(task, example)
    assert isinstance(target, int)
    return label_loss(task, answer, target)


def feedback(task: TaskSpec, answer: LogProbs | Score, example: Example) -> str:
    """Return a sentence with the expected and the actual answer to an example."""
    if isinstance(answer, Score):
        return answer.feedback
    if task.loss == "nll":
        return f"expected {example[task.label_field]!r}, probability {math.exp(answer[0]):.3f}"
    target, values = target_of(task, example), biased(task, answer)
    best = max(range(len(values)), key=values.__getitem__)
    words = [word.strip() for word in task.label_words]
    assert isinstance(target, int)
    answered = f"answered {words[best]!r} with probability {_normalised(values)[0][best]:.2f}"
    return answered if best == target else f"expected {words[target]!r}, {answered}"


MAX_CLASSES = 4
"""The largest number of labels for which a device reports a mean loss per class."""

PROBABILITY_WIDTH = 4.0
"""Ratio of the noise on a label probability to the noise on a loss, each divided by its value's
range. With a larger ratio, the same epsilon needs less noise on the losses."""


def sensitivity(num_prompts: int) -> float:
    """Return the L2 sensitivity of a device's sums over a mini-batch, each divided by its width.

    A width is the scale of a sum's noise. Let I be the number of prompts, W `PROBABILITY_WIDTH`. If
    an example is replaced, the squares of the changes add up to at most:

    - Losses, width = maximum loss: I, because each loss changes by at most its width.
    - Label probabilities, width W: 2 I / W^2, because each prompt's change has a norm <= sqrt(2).
    - Label counts, width W / sqrt(I): 2 I / W^2, because their change has a norm <= sqrt(2).
    """
    return math.sqrt(num_prompts * (1.0 + 4.0 / PROBABILITY_WIDTH**2))


def probability_noise(noise_multiplier: float, num_prompts: int, batch_size: int) -> float:
    """Return the standard deviation of the noise on a mean label probability."""
    return noise_multiplier * PROBABILITY_WIDTH * sensitivity(num_prompts) / batch_size


def num_groups(num_labels: int, *, private: bool) -> int:
    """Return the number of groups of examples; a device reports the mean loss of each group.

    Up to `MAX_CLASSES` labels have one group per class. All examples are one group if there are
    more labels, or if noise (`private`) would hide the loss of a single class.
    """
    return 1 if private or num_labels > MAX_CLASSES else num_labels


def loss_terms(task: TaskSpec, log_probs: LogProbs, target: int) -> list[float]:
    """Return one example's cross-entropy, and what its derivatives by the label bias need.

    Returns:
        The loss at the task's bias, nats; the trace of its Hessian, 1 - sum_k p_k^2; and the
        probability p_k of each of the C labels: shape (2 + C,). The gradient is p minus the
        indicator of the true label.
    """
    values = biased(task, log_probs)
    probabilities, log_total = _normalised(values)
    trace = 1.0 - math.fsum(value * value for value in probabilities)
    return [log_total - values[target], max(trace, 0.0), *probabilities]


def class_means(
    terms: Sequence[Sequence[float]], targets: Sequence[int], groups: int
) -> list[list[float]]:
    """Return the mean `loss_terms` of each group, shape (groups, 2 + C); 0 for an empty group."""
    means = []
    for group in range(groups):
        pairs = zip(terms, targets, strict=True)
        members = [term for term, target in pairs if groups == 1 or target == group]
        columns = zip(*members, strict=True) if members else [()] * len(terms[0])
        means.append([math.fsum(column) / max(len(members), 1) for column in columns])
    return means
