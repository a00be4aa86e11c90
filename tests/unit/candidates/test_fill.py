"""Placeholders: replacement, and the space before a label word."""

from __future__ import annotations

import time
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, TypeAdapter, ValidationError

from fedone_sdk.candidates import fill
from fedone_sdk.candidates.demonstrations import DemonstrationsSource
from fedone_sdk.candidates.instructions import InstructionsSource
from fedone_sdk.candidates.label_sets import LabelsSource
from fedone_sdk.candidates.placeholders import label_placeholder

WORDS = {"0": " terrible", "1": " great"}


def _one(text: str, labels: dict[str, str] = WORDS) -> str:
    return fill({"x": text}, labels)["x"]


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("It was{label:1}.\nIt was{label:0}.\n", "It was great.\nIt was terrible.\n"),
        ("It was {label:1}.", "It was great."),
        ("{label:0} or {label:1}?", "terrible or great?"),
        ("Sentiment:\n{label:1}", "Sentiment:\ngreat"),
        ('"{label:0}" or "{label:1}"', '"terrible" or "great"'),
        ("({label:0}, '{label:1}')", "(terrible, 'great')"),
        ('The review "so so"{label:0}', 'The review "so so" terrible'),
        ("{label:1}{label:0}", "great terrible"),
        ("{label:2} {label: 1} {Label:1} {{label:1}}", "{label:2} {label: 1} {Label:1} {great}"),
        ("{sentence} {} {0} }{", "{sentence} {} {0} }{"),
    ],
)
def test_label_words(text: str, filled: str) -> None:
    assert _one(text) == filled


def test_a_word_without_a_space_is_taken_as_it_is() -> None:
    assert _one("\u5f88{label:1}\u3002", {"1": "\u597d"}) == "\u5f88\u597d\u3002"


def test_any_label_value_can_stand_in_a_placeholder() -> None:
    labels = {"sci/tech": " science", "a.b|c": " other", "a": " one", "a}": " two"}
    text = "".join(map(label_placeholder, labels))
    assert _one(text, labels) == "science other one two"


def test_slots_stand_for_each_other_once() -> None:
    texts = {
        "instruction": "{demonstrations}",
        "demonstrations": "good\n{closing}{label:1}\n",
        "closing": " All in all, {label:0} {instruction} {closing}",
    }
    assert fill(texts, WORDS) == {
        "instruction": "good\n{closing} great\n",
        "demonstrations": "good\n All in all, terrible {instruction} {closing} great\n",
        "closing": " All in all, terrible {demonstrations} {closing}",
    }


def test_the_space_follows_what_a_slot_put_there() -> None:
    shot = "{closing}{label:1}"
    assert fill({"d": f"a\n{shot}", "closing": ""}, WORDS)["d"] == "a\ngreat"
    assert fill({"d": f"a\n{shot}", "closing": "It was"}, WORDS)["d"] == "a\nIt was great"
    assert fill({"d": shot, "closing": ""}, WORDS)["d"] == "great"


def test_nothing_to_replace() -> None:
    assert fill({}, WORDS) == {}
    assert fill({"a": "{b}", "b": "{label:1}"}, {}) == {"a": "{label:1}", "b": "{label:1}"}


def test_a_backslash_is_no_escape() -> None:
    assert _one("{label:1}", {"1": r" \1\g<0>"}) == r"\1\g<0>"
    assert fill({"a": "{b}", "b": r"\n\1"}, {})["a"] == r"\n\1"


_BRACED = st.text(st.sampled_from("{}:ab01 label\n"), max_size=60)


@given(_BRACED)
def test_unknown_braces_are_never_touched(text: str) -> None:
    labels = {"7": " seven"}
    assert fill({"x": text, "y": "z"}, labels)["x"] == text.replace("{y}", "z")


@given(st.lists(st.sampled_from(["{label:0}", "{label:1}", "{b}", "{a}", "{", "}", "w", " "])))
def test_the_same_as_replacing_piece_by_piece(pieces: list[str]) -> None:
    known = {"{label:0}": "T", "{label:1}": "G", "{b}": "B{a}"}
    got = fill({"a": "".join(pieces), "b": "B{a}"}, {"0": "T", "1": "G"})
    # Single braces next to a placeholder do not make another one.
    assert got["a"] == "".join(known.get(piece, piece) for piece in pieces)


def test_long_texts_take_no_time() -> None:
    labels = {str(number): f" word{number}" for number in range(64)}
    texts = {"a": "{label:" * 600, "b": "{" * 4000, "c": "{label:63}" * 400, "d": "{a}{b}" * 600}
    begin = time.perf_counter()
    filled = fill(texts, labels)
    assert time.perf_counter() - begin < 2.0
    assert filled["a"] == texts["a"]
    assert filled["b"] == texts["b"]
    assert filled["c"] == "word63" + " word63" * 399
    assert filled["d"] == (texts["a"] + texts["b"]) * 600


SOURCE: TypeAdapter[Any] = TypeAdapter(
    Annotated[InstructionsSource | DemonstrationsSource | LabelsSource, Field(discriminator="kind")]
)


@pytest.mark.parametrize(
    ("value", "source"),
    [({"kind": "instructions"}, InstructionsSource()),
     ({"kind": "instructions", "size": 12}, InstructionsSource(size=12)),
     ({"kind": "codes"}, InstructionsSource(kind="codes")), ({"kind": "labels"}, LabelsSource()),
     ({"kind": "demonstrations", "file": "public.jsonl", "shots": [0, 2, 4]},
      DemonstrationsSource(file="public.jsonl", shots=(0, 2, 4), blocks=4)),
     ({"kind": "labels", "sets": [{0: " bad", True: " good"}, [" no", " yes"]]},
      LabelsSource(sets=({"0": " bad", "True": " good"}, (" no", " yes"))))],
)  # fmt: skip
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
