"""Metrics over predicted and true label indices."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from fedone_sdk.errors import SpecError

__all__ = ["METRICS", "MetricFunction", "accuracy", "evaluate", "f1", "matthews", "metric_text"]

MetricFunction = Callable[[Sequence[int], Sequence[int]], float]
"""A user's ``metric(true, predicted)``, with the arguments in scikit-learn's order.

Both are lists of label indices in the task's order; -1 means that the model wrote no label.
"""


def accuracy(predictions: Sequence[int], targets: Sequence[int]) -> float:
    """Return the share of correct predictions, in [0, 1]; 0.0 if there are none."""
    return _num_right(predictions, targets) / len(targets) if len(targets) else 0.0


def f1(predictions: Sequence[int], targets: Sequence[int]) -> float:
    """Return ``2 TP / (2 TP + FP + FN)`` of the second label, in [0, 1]; 0.0 without positives."""
    hits = sum(p == t == 1 for p, t in zip(predictions, targets, strict=True))
    positives = Counter(predictions)[1] + Counter(targets)[1]  # 2 TP + FP + FN
    return 2 * hits / positives if positives else 0.0


def matthews(predictions: Sequence[int], targets: Sequence[int]) -> float:
    """Return the Matthews correlation, in [-1, 1]; 0.0 if predictions or targets do not vary.

    By Gorodkin's formula for several labels (2004). With N rows, c of them correct, and ``p_k``
    predictions and ``t_k`` targets of label k, it is
    ``(c N - sum p_k t_k) / sqrt((N^2 - sum p_k^2) (N^2 - sum t_k^2))``.
    """
    right, n = _num_right(predictions, targets), len(targets)
    predicted, true = Counter(predictions), Counter(targets)
    covariance = right * n - sum(count * true[label] for label, count in predicted.items())
    spread = math.prod(n * n - sum(c * c for c in counts.values()) for counts in (predicted, true))
    return covariance / math.sqrt(spread) if spread else 0.0


def _num_right(predictions: Sequence[int], targets: Sequence[int]) -> int:
    return sum(p == t for p, t in zip(predictions, targets, strict=True))


def metric_text(value: float | None, digits: int = 3) -> str:
    """Return a metric or a loss as text; ``-`` for None."""
    return "-" if value is None else f"{value:.{digits}f}"


METRICS = {metric.__name__: metric for metric in (accuracy, f1, matthews)}
"""The built-in metrics by name: functions of (predictions, targets)."""


def evaluate(
    name: str,
    predictions: Sequence[int],
    targets: Sequence[int],
    measure: MetricFunction | None = None,
) -> float:
    """Return the value of a metric; `measure` is the function if `name` names a user's function.

    Raises:
        SpecError: The function is missing, failed, or returned no finite number.
    """
    if ":" not in name:
        if name not in METRICS:
            raise ValueError(f"no metric {name!r}; metrics: {', '.join(METRICS)}")
        return METRICS[name](predictions, targets)
    if measure is None:
        raise SpecError(f"task.metric: pass the function {name} as the argument measure")
    try:
        value = float(measure(targets, predictions))
    except Exception as exc:
        reason = f"{type(exc).__name__}: {exc}"
        raise SpecError(f"task.metric: {name} failed with {reason}") from exc
    if not math.isfinite(value):
        raise SpecError(f"task.metric: {name} returned {value!r}; it must be a finite number")
    return value
