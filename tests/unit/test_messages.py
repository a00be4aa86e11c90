"""The wire contract: golden messages, messages that must be refused, arrays, JSON Schemas."""

from __future__ import annotations

import json
import math
import struct
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import fedone_sdk.messages as messages
from fedone_sdk.aggregator.http.application import ROUTES, device_document
from fedone_sdk.aggregator.http.openapi import openapi_document
from fedone_sdk.errors import PROBLEMS, ProblemError
from fedone_sdk.messages import MAX_ELEMENTS, Enrolled, Message, Problem, Tensor
from fedone_sdk.messages import tensor as tensor_module
from tests.wire_vectors import UNIONS, name_of, parser, vectors

ROOT = Path(__file__).parents[2]
GOLDEN, BAD = vectors("messages.json"), vectors("bad_messages.json")
DOCUMENT = openapi_document(ROUTES)
FORMATS = {"float32": "f", "uint8": "B", "uint16": "H"}


class TestGoldenMessages:
    @pytest.mark.parametrize("vector", GOLDEN, ids=name_of)
    def test_come_back_byte_for_byte_are_frozen_and_have_no_further_key(
        self, vector: dict[str, Any]
    ) -> None:
        message = parser(vector["type"]).validate_json(vector["body"].encode())
        assert type(message).__name__ == vector["type"]
        assert message.model_dump_json() == vector["body"]
        with pytest.raises(ValidationError, match="frozen"):
            setattr(message, next(iter(type(message).model_fields)), None)
        body = json.dumps({**json.loads(vector["body"]), "extra": 1})
        with pytest.raises(ValidationError, match="extra"):
            parser(vector["type"]).validate_json(body)

    @pytest.mark.parametrize("vector", [v for v in GOLDEN if "arrays" in v], ids=name_of)
    def test_arrays(self, vector: dict[str, Any]) -> None:
        """Read as a client in another language would: base64 and fixed little-endian types."""
        message = parser(vector["type"]).validate_json(vector["body"])
        for key, elements in vector["arrays"].items():
            array: Tensor = getattr(message, key)
            assert array.values().tolist() == elements
            form = f"<{len(elements)}{FORMATS[array.dtype]}"
            assert array.data == struct.pack(form, *elements)

    def test_every_message_has_a_vector(self) -> None:
        parts = {"Tensor", "CacheReport", "Cap", "CensoringReport", "Check", "ClientInfluence",
                 "LostWork", "Message", "MetricReport", "PositionProbabilities", "Preference",
                 "PrivacyReport", "PromptReport", "ProposerReport", "Judged", "Proposal",
                 "Reflection", "RoundReport", "RunDevices", "Scored", "SeatReport", "Spread",
                 "Standing", "Step", "TokenProbability", "Traffic", "UnfitDevices",
                 "Verdict", "Written"}  # fmt: skip
        classes = {
            name
            for name in messages.__all__
            if isinstance(value := getattr(messages, name), type) and issubclass(value, Message)
        }
        assert {vector["type"] for vector in GOLDEN} == classes - parts


class TestBadMessages:
    @pytest.mark.parametrize("vector", BAD, ids=name_of)
    def test_are_refused_for_their_one_mistake(self, vector: dict[str, Any]) -> None:
        with pytest.raises(ValidationError) as excinfo:
            parser(vector["type"]).validate_json(vector["body"])
        # A vector that is wrong twice would hide that one of its mistakes is let through.
        error, *others = excinfo.value.errors()
        # A list that is left at its first wrong element may be counted as too short, too.
        assert all(other["loc"] == error["loc"][: len(other["loc"])] for other in others)
        union = vector["type"] in UNIONS
        place = [str(step) for step in error["loc"][union:]]
        assert vector["key"] in place if vector["key"] else not place


@pytest.mark.parametrize("kind", ["LossesUpdate", "Score"])
def test_a_list_is_left_at_its_first_wrong_element(kind: str) -> None:
    """Each mistake is an object in memory: a body of commas must not make millions."""
    wrong: list[object] = [None] * 1000
    vector = next(vector for vector in GOLDEN if vector["type"] == kind)
    lists = {"LossesUpdate": ("losses", "class_counts"), "Score": ("examples", "references")}[kind]
    body = {**json.loads(vector["body"]), **dict.fromkeys(lists, wrong)}
    with pytest.raises(ValidationError) as excinfo:
        parser(kind).validate_json(json.dumps(body))
    assert excinfo.value.error_count() <= 2 * len(lists)


@pytest.mark.parametrize(
    ("kind", "key"), [("Enrol", "name"), ("Decline", "reason"), ("RollBack", "reason")]
)
def test_what_moves_a_cursor_becomes_a_blank(kind: str, key: str) -> None:
    sent = {"to_round": 0} if kind == "RollBack" else {}
    body = json.dumps({**sent, key: "a\nb\x00c\x1b[2Jd\u202ee \u00e9\U0001f642"})
    message = parser(kind).validate_json(body)
    assert getattr(message, key) == "a b c [2Jd e \u00e9\U0001f642"


class TestArray:
    @given(st.data())
    def test_round_trip(self, data: st.DataObject) -> None:
        dtype = data.draw(st.sampled_from(["float32", "uint8", "uint16"]))
        shape = data.draw(st.lists(st.integers(0, 4), max_size=4))
        most = {"uint8": 255, "uint16": 65535}.get(dtype)
        element: st.SearchStrategy[float] = (
            st.floats(width=32, allow_nan=False, allow_infinity=False)
            if most is None
            else st.integers(0, most)
        )
        count = math.prod(shape)
        elements = data.draw(st.lists(element, min_size=count, max_size=count))
        array = Tensor.pack(elements, shape, dtype)
        raw = struct.pack(f"<{count}{FORMATS[dtype]}", *elements)
        assert array.data == raw
        assert array == Tensor.from_bytes(raw, shape, dtype)
        again = Tensor.model_validate_json(array.model_dump_json())
        assert again.values().tolist() == elements
        assert again.shape == tuple(shape)
        numbers = np.frombuffer(array.data, np.dtype(dtype).newbyteorder("<"))
        assert numbers.tolist() == elements

    @given(st.lists(st.integers(0, 65535), min_size=1, max_size=5))
    def test_a_big_endian_machine_swaps_bytes(self, elements: list[int]) -> None:
        """As if this machine stored numbers the other way round: both directions swap."""
        with pytest.MonkeyPatch.context() as patch:
            other = "big" if sys.byteorder == "little" else "little"
            patch.setattr(tensor_module.sys, "byteorder", other)
            swapped = Tensor.pack(elements, [len(elements)], "uint16")
            assert swapped.values().tolist() == elements
        # Swapped once too often for this machine, so big-endian.
        assert swapped.data == struct.pack(f">{len(elements)}H", *elements)

    @pytest.mark.parametrize(
        ("vocab_size", "dtype"), [(2, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16")]
    )
    def test_indices_take_the_smallest_type(self, vocab_size: int, dtype: str) -> None:
        array = Tensor.of_indices([0, vocab_size - 1], [1, 2], vocab_size)
        assert array.dtype == dtype
        assert array.rows() == [[0, vocab_size - 1]]

    @given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), max_size=4))
    def test_rows(self, rows: list[list[int]]) -> None:
        flat = [element for row in rows for element in row]
        assert Tensor.pack(flat, (len(rows), 3), "uint8").rows() == rows

    def test_the_largest_array_fits_and_no_more(self) -> None:
        largest = Tensor.from_bytes(bytes(MAX_ELEMENTS), [MAX_ELEMENTS], "uint8")
        assert len(largest.data) == MAX_ELEMENTS
        with pytest.raises(ValidationError):
            Tensor.from_bytes(bytes(MAX_ELEMENTS + 1), [MAX_ELEMENTS + 1], "uint8")

    @given(st.floats(width=32), st.integers(0, 5))
    def test_only_finite_floats(self, value: float, position: int) -> None:
        elements = [1.0] * 6
        elements[position] = value
        raw = struct.pack("<6f", *elements)
        for array in (
            partial(Tensor.from_bytes, raw, [2, 3], "float32"),
            partial(Tensor.pack, elements, [2, 3], "float32"),
        ):
            if math.isfinite(value):
                assert array().data == raw
            else:
                with pytest.raises(ValidationError, match="NaN or infinity"):
                    array()


class TestSchemas:
    def test_the_committed_copy_is_current(self) -> None:
        committed = ROOT / "docs" / "reference" / "device.openapi.json"
        assert committed.read_text(encoding="utf-8") == device_document(), (
            "write it again: application.device_document() is docs/reference/device.openapi.json"
        )

    @pytest.mark.parametrize("vector", GOLDEN, ids=name_of)
    def test_golden_messages_fit_their_schema(self, vector: dict[str, Any]) -> None:
        jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
        schemas, name = DOCUMENT["components"]["schemas"], vector["type"]
        name = name if name in schemas else f"{name}-Output"
        schema = {"$ref": f"#/components/schemas/{name}", **DOCUMENT}
        jsonschema.Draft202012Validator.check_schema(schemas[name])
        jsonschema.Draft202012Validator(schema).validate(json.loads(vector["body"]))


class TestProblem:
    @pytest.mark.parametrize("code", PROBLEMS)
    def test_round_trip(self, code: str) -> None:
        problem = Problem.of(ProblemError(code, "what happened"))
        error = Problem.model_validate_json(problem.model_dump_json()).error()
        assert (error.code, error.detail, error.status) == (code, "what happened", problem.status)
        assert 400 <= problem.status < 600

    def test_a_code_of_a_newer_server(self) -> None:
        error = ProblemError("teapot", "short and stout")
        assert error.status == 500


def test_a_credential_is_not_shown() -> None:
    enrolled = Enrolled(client_id="client-1", credential="fedone_secret")
    assert "secret" not in f"{enrolled!r} {enrolled}"
