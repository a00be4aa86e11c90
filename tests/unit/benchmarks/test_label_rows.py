from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from fedone_sdk.backends import predict
from fedone_sdk.comparison.bias import fitted_bias
from fedone_sdk.errors import BackendError
from fedone_sdk.task import Rendered, TaskSpec
from fedone_sdk.testing import ScriptedBackend
from tests.benchmarks.queries.label_rows import LabelRows

TASK = TaskSpec(template="{prompt} {text} {mask}", labels={"0": " no", "1": " maybe", "2": " yes"})
ROWS = [{"text": f"row {number}", "label": number % 3} for number in range(40)]


def asked(backend: ScriptedBackend) -> LabelRows:
    return asyncio.run(LabelRows.ask(backend, TASK, " hm", ROWS))


@pytest.mark.parametrize("bias", [None, (0.0, 1.5, -0.7)])
def test_says_what_a_prediction_says(bias: tuple[float, ...] | None) -> None:
    rows = asked(ScriptedBackend())
    found = asyncio.run(predict(ScriptedBackend(), TASK.with_bias(bias), " hm", ROWS, 16))
    assert rows.loss(bias) == pytest.approx(found.mean_loss)
    assert rows.metric(bias) == rows.accuracy(bias) == found.metric


def test_fitted_bias_is_the_best_one() -> None:
    rng = np.random.default_rng(0)
    rows = LabelRows(
        metric_name="accuracy",
        log_probs=rng.normal(size=(200, 3)) * 3.0,
        targets=rng.choice(3, size=200, p=[0.7, 0.2, 0.1]),
    )
    bias = rows.fitted()
    assert bias[0] == 0.0
    for step in np.eye(3)[1:] * 1e-3:
        assert rows.loss(bias) < min(rows.loss(bias + step), rows.loss(bias - step))


def test_balanced_bias_does_not_follow_how_many_rows_a_class_has() -> None:
    rng = np.random.default_rng(0)
    log_probs = rng.normal(size=(200, 2))
    log_probs[np.arange(200), np.arange(200) % 2] += 1.0
    rows = LabelRows(metric_name="accuracy", log_probs=log_probs, targets=np.arange(200) % 2)
    more = np.repeat(np.arange(200), np.where(rows.targets == 0, 5, 1))
    uneven = LabelRows(
        metric_name="accuracy", log_probs=log_probs[more], targets=rows.targets[more]
    )
    assert uneven.fitted(balanced=True) == pytest.approx(rows.fitted())
    assert uneven.fitted()[1] < rows.fitted()[1] - 1.0


def test_fitted_bias_stays_finite_without_a_class() -> None:
    log_probs = np.log(np.full((10, 2), 0.5))
    bias = fitted_bias(log_probs, np.zeros(10, dtype=np.int64))
    assert bias[1] < -5.0
    assert np.isfinite(bias).all()


def test_fitted_bias_undoes_a_shift() -> None:
    targets = np.array([0, 1] * 20)
    shifted = np.where(np.eye(2)[targets] == 1, 0.0, -10.0) + np.array([0.0, 15.0])
    rows = LabelRows(metric_name="accuracy", log_probs=shifted, targets=targets)
    assert (rows.accuracy(), rows.accuracy(rows.fitted())) == (0.5, 1.0)
    assert rows.loss() > 2.0
    assert rows.loss(rows.fitted()) == pytest.approx(math.log1p(math.exp(-10.0)))
    assert rows.fitted() == pytest.approx([0.0, -15.0])


def test_a_row_that_failed_is_an_error() -> None:
    def answer(rendered: Rendered, words: object) -> tuple[float, ...] | None:
        return None if "row 7" in "".join(part.text for part in rendered) else (-1.0, -1.0, -1.0)

    with pytest.raises(BackendError, match="failed on 1 of 40 rows"):
        asked(ScriptedBackend(answer))
