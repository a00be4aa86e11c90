"""Sources of candidates in a run file."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import Field, TypeAdapter, ValidationError

from fedone_sdk.candidates import DemonstrationsSource, InstructionsSource, LabelsSource

SOURCE: TypeAdapter[Any] = TypeAdapter(
    Annotated[InstructionsSource | DemonstrationsSource | LabelsSource, Field(discriminator="kind")]
)


@pytest.mark.parametrize(
    ("value", "source"),
    [
        ({"kind": "instructions"}, InstructionsSource()),
        ({"kind": "instructions", "size": 12}, InstructionsSource(size=12)),
        ({"kind": "codes"}, InstructionsSource(kind="codes")),
        (
            {"kind": "demonstrations", "file": "public.jsonl", "shots": [0, 2, 4]},
            DemonstrationsSource(file="public.jsonl", shots=(0, 2, 4), blocks=4),
        ),
        ({"kind": "labels"}, LabelsSource()),
        (
            {"kind": "labels", "sets": [{0: " bad", True: " good"}, [" no", " yes"]]},
            LabelsSource(sets=({"0": " bad", "True": " good"}, (" no", " yes"))),
        ),
    ],
)
def test_a_source_is_read(value: dict[str, Any], source: Any) -> None:
    assert SOURCE.validate_python(value) == source
    assert SOURCE.validate_json(source.model_dump_json()) == source


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"kind": "instructions", "size": 1}, "greater than or equal to 2"),
        ({"kind": "instructions", "file": "x"}, "Extra inputs"),
        ({"kind": "demonstrations"}, "file\n.*Field required"),
        ({"kind": "demonstrations", "file": "x", "shots": []}, "at least 1 item"),
        ({"kind": "demonstrations", "file": "x", "shots": [2, 2]}, "is repeated"),
        ({"kind": "demonstrations", "file": "x", "shots": [-1]}, "greater than or equal to 0"),
        ({"kind": "labels", "sets": [3]}, "valid dictionary"),
    ],
)
def test_a_wrong_source_is_refused(value: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SOURCE.validate_python(value)
