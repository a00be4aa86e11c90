"""Which rows of a device take part in a run, by the vectors that all clients share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedone_sdk.client.rows import Consent
from fedone_sdk.errors import SpecError
from fedone_sdk.messages import RunTask
from fedone_sdk.task import TaskSpec

VECTORS = json.loads(
    (Path(__file__).parents[1] / "vectors" / "consent.json").read_text(encoding="utf-8")
)


def run_of(task: dict[str, Any]) -> RunTask:
    rest = {"prompt_len": 1, "vocab_size": 2, "vocabulary_sha256": "", "gateway": True}
    rest["task_crc32"] = TaskSpec.model_validate(task).crc32
    return RunTask.model_validate({"task": task, "method": {"name": "gs-bdpl"}, **rest})


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["name"])
@pytest.mark.parametrize("private", [False, True])
def test_the_vectors(case: dict[str, Any], private: bool) -> None:
    case = {**VECTORS["defaults"], **case}
    if private and case["fields"] is None:
        pytest.skip("private devices name their columns")
    consent = Consent.of(case["label"], case["fields"], case["labels"], private=private)
    found = consent.admit(run_of(case["task"]), case["rows"], gateway=case["gateway"])
    assert list(found.rows) == [case["rows"][place] for place in case["admitted"]]
    assert (found.refusal is None) is bool(case["admitted"])
    assert (found.reason is None) is (len(found.rows) == len(case["rows"]))


@pytest.mark.parametrize(
    ("arguments", "private", "output"),
    [
        ((None, ("text",), None), True, "label, fields: policy.privacy needs both"),
        (("label", None, None), True, "label, fields: policy.privacy needs both"),
        (("label", "text", None), False, "fields: is 'text'; it must be a collection of names"),
        (("label", (), None), False, r"fields: is \(\); it must be a collection of names"),
        (("label", None, "ill"), False, "labels: is 'ill'; it must be a collection of names"),
    ],
)
def test_arguments(arguments: Any, private: bool, output: str) -> None:
    with pytest.raises(SpecError, match=output):
        Consent.of(*arguments, private=private)
