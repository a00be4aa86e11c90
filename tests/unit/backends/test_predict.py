"""Predictions under a label bias: the task's, or one found without labels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from fedone_sdk.backends import predict
from fedone_sdk.calibration import CONTENT_FREE, LabelFree
from fedone_sdk.errors import SpecError
from fedone_sdk.task import Rendered, TaskSpec
from fedone_sdk.testing import ScriptedBackend

TASK = TaskSpec(template="{prompt} {a} / {b} {mask}", labels={"0": " no", "1": " yes"})
# How much likelier " yes" is than " no", nats: the model likes " yes" too well by about 2.
ODDS = {"bad": 0.5, "poor": 1.5, "fair": 3.0, "good": 3.5}
ROWS = [{"a": text, "b": "x", "label": int(odds > 2)} for text, odds in ODDS.items()]


def answer(inputs: Rendered, words: Sequence[str]) -> tuple[float, ...] | None:
    """As a table says; what has no content looks like " yes" by 2 nats, and "" not at all."""
    first, second = (part.text for part in inputs if part.kind == "field")
    if first == "lost":
        return None
    if first in CONTENT_FREE:
        assert second == first
        odds = {"N/A": 1.0, "": 1.5, "[MASK]": 3.5}[first]
    else:
        odds = ODDS[first]
    return (-odds - 0.1, -0.1)


async def test_a_task_s_bias_is_in_what_is_predicted_and_in_the_loss() -> None:
    plain = await predict(ScriptedBackend(answer), TASK, "", ROWS, 3)
    biased = await predict(ScriptedBackend(answer), TASK.with_bias((2.0, 0.0)), "", ROWS, 3)
    assert (plain.metric, biased.metric) == (0.5, 1.0)
    assert biased.rows == plain.rows
    by_hand = [math.log1p(math.exp(-abs(odds - 2))) for odds in ODDS.values()]
    assert biased.mean_loss == pytest.approx(math.fsum(by_hand) / 4)
    assert biased.usage == plain.usage


async def test_contextual_needs_one_additional_query() -> None:
    backend = ScriptedBackend(answer)
    found = await predict(backend, TASK, "p", ROWS, 2, calibration="contextual")
    assert found.task.bias == pytest.approx((0.0, -2.0))
    assert found.metric == 1.0
    assert found.usage.queries == len(backend.asked) == 3
    last = backend.asked[-1]
    assert [part.text for part in last.inputs[1]] == ["p", " ", "", " / ", "", " ", ""]
    assert len(last.inputs) == len(CONTENT_FREE)
    assert len(found.rows) == len(found.scored) == 4


async def test_batch_needs_no_additional_query() -> None:
    """The mean of the odds is 2.125; it is that of all examples, however they are batched."""
    for size in (1, 3, 4):
        backend = ScriptedBackend(answer)
        found = await predict(backend, TASK, "", ROWS, size, calibration="batch")
        assert found.task.bias == pytest.approx((0.0, -2.125))
        assert found.metric == 1.0
        assert found.usage.queries == len(backend.asked) == math.ceil(4 / size)


@pytest.mark.parametrize("calibration", ["contextual", "batch"])
async def test_it_takes_the_place_of_the_task_s_own_bias(calibration: LabelFree) -> None:
    options = {"calibration": calibration}
    plain = await predict(ScriptedBackend(answer), TASK, "", ROWS, 2, **options)
    biased = TASK.with_bias((9.0, 0.0))
    assert (await predict(ScriptedBackend(answer), biased, "", ROWS, 2, **options)) == plain


async def test_examples_that_the_model_fails_on_say_nothing() -> None:
    rows = [*ROWS, {"a": "lost", "b": "x", "label": 0}]
    found = await predict(ScriptedBackend(answer), TASK, "", rows, 2, calibration="batch")
    assert found.task.bias == pytest.approx((0.0, -2.125))
    assert (len(found.rows), len(found.scored)) == (5, 4)
    lost = await predict(ScriptedBackend(answer), TASK, "", rows[4:], 2, calibration="batch")
    assert (lost.task.bias, lost.metric) == (None, None)


async def test_a_model_that_only_chooses_is_not_moved() -> None:
    """The probability of what it did not write is unknown."""
    task = TaskSpec.model_validate({**TASK.model_dump(), "loss": "zero_one"})
    backend = ScriptedBackend(answer, answers=["choice"])
    found = await predict(backend, task, "", ROWS, 4, calibration="batch")
    assert found.task.bias == (0.0, 0.0)
    assert found.metric == 0.5


@pytest.mark.parametrize("calibration", ["contextual", "batch"])
async def test_nothing_to_calibrate(calibration: LabelFree) -> None:
    task = TaskSpec(template="{prompt} {a}", loss="nll", label_field="b")
    with pytest.raises(SpecError, match=f"{calibration} needs a task with label words"):
        await predict(ScriptedBackend(), task, "", ROWS, 4, calibration=calibration)
    empty = await predict(ScriptedBackend(), TASK, "", [], 4, calibration=calibration)
    assert (empty.metric, empty.usage.queries) == (None, 0)
