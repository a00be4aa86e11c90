"""Messages and filters of a reflection, by the vectors that all clients share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedone_sdk.candidates import quotes, read_reflection, reflection_messages
from fedone_sdk.losses import feedback
from fedone_sdk.scores import graded
from fedone_sdk.task import Score, TaskSpec

VECTORS = json.loads(
    (Path(__file__).parents[2] / "vectors" / "reflection.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize(("text", "private"), VECTORS["quotes"]["texts"])
def test_what_is_private_stays(text: str, private: bool) -> None:
    found = quotes(text, VECTORS["quotes"]["rows"], VECTORS["quotes"]["public"])
    assert (found is not None) == private, found


def test_a_candidate_is_read_from_an_answer() -> None:
    given = VECTORS["reads"]
    for answer, candidate in given["answers"]:
        found = read_reflection(answer, known=given["known"], labels=given["labels"])
        assert found == candidate, answer


def test_the_messages_have_the_task_the_text_and_the_cases() -> None:
    given = VECTORS["messages"]
    cases = [(case["fields"], case["feedback"]) for case in given["cases"]]
    task = TaskSpec.model_validate(given["task"])
    found = reflection_messages(task, given["slot"], given["parent"], cases)
    assert [list(message) for message in found] == given["expected"]


@pytest.mark.parametrize("case", VECTORS["feedback"])
async def test_feedback_says_what_was_expected_and_answered(case: dict[str, Any]) -> None:
    task, answer, example = TaskSpec.model_validate(case["task"]), case["answer"], case["example"]
    if isinstance(answer, str):
        (answer,) = await graded(task, [answer], [example], lambda *_: Score(**case["score"]))
    assert feedback(task, answer, example) == case["expected"]
