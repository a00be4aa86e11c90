"""Predictions under a task's label bias."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from fedone_sdk.backends import predict
from fedone_sdk.task import Rendered, TaskSpec
from fedone_sdk.testing import ScriptedBackend

TASK = TaskSpec(template="{prompt} {a} / {b} {mask}", labels={"0": " no", "1": " yes"})
# How much likelier " yes" is than " no", nats: the model likes " yes" too well by about 2.
ODDS = {"bad": 0.5, "poor": 1.5, "fair": 3.0, "good": 3.5}
ROWS = [{"a": text, "b": "x", "label": int(odds > 2)} for text, odds in ODDS.items()]


def answer(inputs: Rendered, words: Sequence[str]) -> tuple[float, ...] | None:
    """As a table says."""
    first, _ = (part.text for part in inputs if part.kind == "field")
    return None if first == "lost" else (-ODDS[first] - 0.1, -0.1)


async def test_a_task_s_bias_is_in_what_is_predicted_and_in_the_loss() -> None:
    plain = await predict(ScriptedBackend(answer), TASK, "", ROWS, 3)
    biased = await predict(ScriptedBackend(answer), TASK.with_bias((2.0, 0.0)), "", ROWS, 3)
    assert (plain.metric, biased.metric) == (0.5, 1.0)
    assert biased.rows == plain.rows
    by_hand = [math.log1p(math.exp(-abs(odds - 2))) for odds in ODDS.values()]
    assert biased.mean_loss == pytest.approx(math.fsum(by_hand) / 4)
    assert biased.usage == plain.usage


async def test_examples_that_the_model_fails_on_do_not_count() -> None:
    lost = {"a": "lost", "b": "x", "label": 0}
    found = await predict(ScriptedBackend(answer), TASK, "", [*ROWS, lost], 2)
    assert (len(found.rows), len(found.scored), found.metric) == (5, 4, 0.5)
    none = await predict(ScriptedBackend(answer), TASK, "", [lost], 2)
    assert (none.metric, none.mean_loss) == (None, None)
