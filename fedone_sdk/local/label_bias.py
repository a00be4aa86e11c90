"""The label bias that fits a model's label log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedone_sdk.algorithms.calibration import fitted_bias
from fedone_sdk.task import Bias, Example, LogProbs, TaskSpec, target_of


def label_bias(
    task: TaskSpec, rows: Sequence[LogProbs | str | None], examples: Sequence[Example]
) -> Bias:
    """Return the bias that minimises the examples' mean cross-entropy, nats.

    It has one number per label; zeros if no example has log-probabilities. Other answers in `rows`
    are skipped.
    """
    scored = [
        (row, int(target_of(task, example)))
        for row, example in zip(rows, examples, strict=True)
        if row is not None and not isinstance(row, str)
    ]
    if not scored:
        return (0.0,) * len(task.labels)
    log_probs = np.array([row for row, _ in scored], dtype=np.float64)
    targets = np.array([target for _, target in scored], dtype=np.int64)
    return tuple(fitted_bias(log_probs, targets).tolist())
