"""Messages as JSON and as files of tensors: equal, and refused alike."""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import fedone_sdk.messages as messages
from fedone_sdk.aggregator.http.requests import load_json
from fedone_sdk.budget import Usage
from fedone_sdk.messages import (
    JSON,
    MAX_ELEMENTS,
    TENSORS,
    UPDATE,
    AlphaAssignment,
    AlphaUpdate,
    Array,
    Claim,
    LossesAssignment,
    LossesUpdate,
    Message,
    Parse,
    Score,
    Scored,
    Scores,
    Step,
    decode,
    encode,
    has_arrays,
)
from fedone_sdk.messages.tensors import MAX_HEADER_BYTES, load_tensors
from tests.wire_vectors import name_of, parser, vectors

GOLDEN, BAD = vectors("tensors.json"), vectors("bad_tensors.json")


def reader(name: str) -> Parse[Any]:
    """What reads a message at the other end."""
    return parser(name).validate_json


def update_of(alpha: Array, **changes: Any) -> AlphaUpdate:
    given: dict[str, Any] = {
        "num_examples": 32,
        "scored": Scored(scored=32),
        "usage": Usage(),
        "model": "m",
        "alpha": alpha,
        "mean_loss": 0.5,
        **changes,
    }
    return AlphaUpdate(**given)


def floats(count: int) -> Array:
    return Array.pack([0.5] * count, [count], "float32")


class TestGoldenFiles:
    @pytest.mark.parametrize("vector", GOLDEN, ids=name_of)
    def test_are_written_as_the_library_does(self, vector: dict[str, Any]) -> None:
        message = reader(vector["type"])(vector["body"].encode())
        body = encode(message, TENSORS)
        assert body.content_type == TENSORS
        assert body.content == base64.b64decode(vector["file"])
        assert len(body.content) < len(vector["body"].encode())

    @pytest.mark.parametrize("vector", GOLDEN, ids=name_of)
    def test_hold_the_same_message_as_the_json(self, vector: dict[str, Any]) -> None:
        parse = reader(vector["type"])
        message = decode(
            parser(vector["type"]).validate_python,
            base64.b64decode(vector["file"]),
            TENSORS,
            load=load_json,
        )
        assert message == parse(vector["body"].encode())
        assert encode(message) == (JSON, vector["body"].encode())

    @pytest.mark.parametrize("vector", GOLDEN, ids=name_of)
    def test_are_read_by_the_library(self, vector: dict[str, Any]) -> None:
        """As an owner of a file would read it: by the library, without this SDK."""
        numpy = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
        found = numpy.load(base64.b64decode(vector["file"]))
        document = json.loads(vector["document"])
        whole = json.loads(vector["body"])
        for name, tensor in found.items():
            mine, stands = whole, document
            for step in name.split("."):
                mine, stands = mine[step], stands[step]
            assert stands == {"tensor": name}
            assert tensor.dtype.name == mine["dtype"]
            assert list(tensor.shape) == mine["shape"]
            assert base64.b64encode(tensor.tobytes()).decode() == mine["data"]

    def test_every_message_with_arrays_has_one(self) -> None:
        carrying = {
            name
            for name in messages.__all__
            if isinstance(kind := getattr(messages, name), type)
            and issubclass(kind, Message)
            and kind is not Array
            and has_arrays(kind)
        }
        assert {vector["type"] for vector in GOLDEN} == carrying


class TestBadFiles:
    @pytest.mark.parametrize("vector", BAD, ids=name_of)
    def test_are_refused_for_their_mistake(self, vector: dict[str, Any]) -> None:
        content = base64.b64decode(vector["file"])
        with pytest.raises(ValueError, match=re.escape(vector["detail"])):
            decode(parser(vector["type"]).validate_python, content, TENSORS, load=load_json)

    def test_a_file_is_no_json(self) -> None:
        for vector in GOLDEN:
            content = base64.b64decode(vector["file"])
            with pytest.raises(ValidationError):
                decode(reader(vector["type"]), content, JSON)

    def test_a_reference_is_none_in_json(self) -> None:
        for vector in GOLDEN:
            with pytest.raises(ValidationError):
                reader(vector["type"])(vector["document"].encode())

    def test_what_is_checked_is_the_text(self) -> None:
        seen: list[bytes] = []

        def load(text: bytes) -> bytes:
            seen.append(text)
            return text

        for vector in GOLDEN:
            content = base64.b64decode(vector["file"])
            decode(reader(vector["type"]), content, TENSORS, load=load)
        assert seen == [vector["document"].encode() for vector in GOLDEN]


ARRAYS = st.one_of(
    [
        st.lists(elements, max_size=600).map(lambda v, d=dtype: Array.pack(v, [len(v)], d))
        for dtype, elements in (
            ("float32", st.floats(width=32, allow_nan=False, allow_infinity=False)),
            ("float64", st.floats(allow_nan=False, allow_infinity=False)),
            ("int64", st.integers(-(2**63), 2**63 - 1)),
            ("uint8", st.integers(0, 255)),
            ("uint16", st.integers(0, 65535)),
        )
    ]
).map(lambda a: Array.from_bytes(a.to_bytes() * 4, (2, 2, *a.shape), a.dtype))
MEMORIES = st.dictionaries(st.from_regex(r"\A[a-z_]{1,32}\Z"), ARRAYS, max_size=8)
IDS = st.from_regex(r"\A[A-Za-z0-9_-]{1,64}\Z")
RUNS = st.just("sst2.v1")
SEEDS = st.integers(0, 2**53 - 1)
SECONDS = st.floats(0.1, 1e9)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
STEPS = st.builds(Step, num_samples=st.integers(2, 99), minibatch_seed=SEEDS, prompt_seed=SEEDS)
WORK = {
    "assignment_id": IDS,
    "run_id": RUNS,
    "round": st.integers(0, 2**40),
    "deadline_s": SECONDS,
    "leased_queries": st.integers(2, 999),
}
MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        AlphaAssignment,
        **WORK,
        alpha=ARRAYS,
        memory=MEMORIES,
        steps=st.lists(STEPS, min_size=1, max_size=3).map(tuple),
    ),
    st.builds(LossesAssignment, **WORK, prompts=ARRAYS, minibatch_seed=SEEDS),
    st.builds(
        update_of,
        ARRAYS,
        memory=MEMORIES,
        model=TEXTS,
        mean_loss=st.floats(-1e6, 1e6),
        num_examples=st.integers(1, 2**31),
    ),
    st.builds(
        Score,
        assignment_id=IDS,
        prompts=st.none() | ARRAYS,
        examples=st.lists(st.dictionaries(TEXTS, TEXTS, max_size=2), min_size=1, max_size=3).map(
            tuple
        ),
        references=st.lists(TEXTS, max_size=2).map(tuple),
    ),
    st.builds(Scores, log_probs=st.none() | ARRAYS, model=TEXTS),
)


@settings(max_examples=200)
@given(MESSAGES)
def test_both_forms_give_the_message_back(message: Message) -> None:
    plain, short = encode(message), encode(message, f"{TENSORS}, {JSON}")
    for body in (plain, short):
        found = decode(
            parser(type(message).__name__).validate_python,
            body.content,
            body.content_type,
            load=load_json,
        )
        assert found == message
        assert type(found) is type(message)
        # What waits on a device and is read again is sent as the same bytes.
        assert encode(found, TENSORS) == short
        assert encode(found) == plain
    assert len(short.content) <= len(plain.content)


class TestChoice:
    @pytest.mark.parametrize(
        ("accept", "form"),
        [
            ("", JSON),
            ("*/*", JSON),
            ("application/*", JSON),
            (JSON, JSON),
            (TENSORS, TENSORS),
            (f"{JSON}, {TENSORS}", TENSORS),
            (f"text/html;q=0.9,{TENSORS.upper()} ; q=0.5, */*;q=0.1", TENSORS),
            (f"{TENSORS};q=0", JSON),
            (f"{TENSORS};q=nan", JSON),
            (f"{TENSORS};q=x", JSON),
            (f"{TENSORS};q=0.5, {JSON}", JSON),
            (f"{TENSORS};q=0.5;v=1, {JSON};q=0.4", TENSORS),
            (f"{TENSORS}x", JSON),
            (";;,,=", JSON),
        ],
    )
    def test_the_reader_selects_the_form(self, accept: str, form: str) -> None:
        assert encode(update_of(floats(500)), accept).content_type == form

    def test_the_shorter_one_is_taken(self) -> None:
        sizes = {}
        for count in (1, 30, 100, 150, 200, 1000):
            update = update_of(floats(count))
            body = encode(update, TENSORS)
            sizes[count] = body.content_type
            assert len(body.content) <= len(encode(update).content)
        assert sizes[1] == sizes[30] == JSON
        assert sizes[200] == sizes[1000] == TENSORS

    def test_without_arrays_it_is_json(self) -> None:
        for message in (
            Claim(num_examples=1),
            Scores(model="m" * 1000),
            LossesUpdate(
                num_examples=1, scored=Scored(scored=1), usage=Usage(), model="m", losses=(1.0, 2.0)
            ),
        ):
            assert encode(message, TENSORS) == (JSON, message.model_dump_json().encode())

    def test_a_long_text_stays_json(self) -> None:
        """It would be in the header, which is bounded."""
        texts = tuple({"text": "x" * 20_000} for _ in range(MAX_HEADER_BYTES // 20_000 + 1))
        prompts = Array.pack([0] * (1 << 20), [1 << 20], "uint8")
        score = Score(assignment_id="a", prompts=prompts, examples=texts)
        assert encode(score, TENSORS).content_type == JSON

    def test_many_texts_cost_more_than_they_save(self) -> None:
        score = Score(assignment_id="a", prompts=floats(50), examples=({"text": '"' * 200},))
        assert encode(score, TENSORS).content_type == JSON

    def test_an_array_that_stands_twice_is_sent_twice(self) -> None:
        shared = floats(300)
        update = update_of(shared, memory={"total": shared})
        content = encode(update, TENSORS).content
        assert set(load_tensors(content)[0]) == {"alpha", "memory.total"}
        assert decode(UPDATE.validate_json, content, TENSORS) == update

    def test_types_with_arrays(self) -> None:
        assert has_arrays(messages.Update)
        assert has_arrays(messages.Assignment)
        assert not has_arrays(Claim)
        assert not has_arrays(messages.RunTask)

    def test_a_message_describes_itself_as_its_schema(self) -> None:
        """An encoder does not use the schema, which takes long to build."""
        kinds = [getattr(messages, name) for name in messages.__all__]
        kinds = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Message)]
        kinds.remove(messages.Array)
        assert len(kinds) > 40
        for kind in kinds:
            assert kind.holds_arrays == has_arrays(kind), kind


class TestLimits:
    def test_the_largest_array(self) -> None:
        update = update_of(Array.from_bytes(bytes(4 * MAX_ELEMENTS), [2048, 2048], "float32"))
        body = encode(update, TENSORS)
        assert decode(UPDATE.validate_json, body.content, body.content_type) == update
        assert len(body.content) < 4 * MAX_ELEMENTS + 1024

    def test_one_element_more(self) -> None:
        body = encode(update_of(floats(1000)), TENSORS).content
        (length,) = struct.unpack_from("<Q", body)
        header = json.loads(body[8 : 8 + length])
        count = MAX_ELEMENTS + 1
        header["alpha"] = {"dtype": "U8", "shape": [count], "data_offsets": [0, count]}
        text = json.dumps(header).encode()
        file = struct.pack("<Q", len(text)) + text + bytes(count)
        with pytest.raises(ValidationError, match="4194304"):
            decode(UPDATE.validate_json, file, TENSORS)

    def test_both_forms_hold_the_same_bytes_at_most(self) -> None:
        """Else a message could arrive that no reader of JSON could be sent."""
        count = MAX_ELEMENTS * 6 // 4 * 3 // 8
        largest = Array.from_bytes(bytes(count * 8), [count], "float64")
        assert Array.model_validate_json(largest.model_dump_json()) == largest
        with pytest.raises(ValidationError, match="data"):
            Array.from_bytes(bytes((count + 1) * 8), [count + 1], "float64")

    def test_more_tensors_than_any_message_has(self) -> None:
        entries = {
            str(n): {"dtype": "U8", "shape": [1], "data_offsets": [n, n + 1]} for n in range(65)
        }
        text = json.dumps(entries).encode()
        with pytest.raises(ValueError, match="more than 64"):
            load_tensors(struct.pack("<Q", len(text)) + text + bytes(65))


class TestArrays:
    @given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=9))
    def test_text_and_bytes_make_the_same_array(self, values: list[float]) -> None:
        raw = np.array(values, "<f4").tobytes()
        text = base64.b64encode(raw).decode()
        document = {"dtype": "float32", "shape": [len(values)], "data": text}
        array = Array.from_bytes(raw, [len(values)], "float32")
        assert Array.model_validate(document) == array
        assert array.model_dump() == {**document, "shape": (len(values),)}
        assert array.model_dump_json() == json.dumps(document, separators=(",", ":"))
        assert hash(Array.model_validate(document)) == hash(array)

    def test_bytes_are_not_copied(self) -> None:
        raw = bytes(4000)
        assert Array.from_bytes(raw, [1000], "float32").to_bytes() is raw

    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    @pytest.mark.parametrize("position", [0, 1, 6])
    def test_huge_numbers_are_finite(self, dtype: Any, position: int) -> None:
        values = [1.0] * 7
        huge = float(np.finfo(dtype).max)
        for value in (huge, -huge, math.inf, -math.inf, math.nan):
            values[position] = value
            if math.isfinite(value):
                assert Array.pack(values, [7], dtype).values()[position] == value
            else:
                with pytest.raises(ValidationError, match="NaN or infinity"):
                    Array.pack(values, [7], dtype)

    def test_its_picture_is_short(self) -> None:
        assert len(repr(floats(10_000))) < 100
