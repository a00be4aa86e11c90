"""Sets of label words: JSON candidates, shipped sets, validation."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedone_paper.glue import GLUE_TASKS, glue_task
from fedone_sdk.candidates import label_sets
from fedone_sdk.errors import SpecError

SST2 = {"0": " terrible", "1": " great"}


def test_the_tasks_own_words_are_the_first() -> None:
    sets = label_sets.LabelsSource.model_validate(
        {
            "kind": "labels",
            "sets": [{1: " good", 0: " bad"}, ["\u5dee", "\u597d"], [" terrible", " great"]],
        }
    ).sets
    assert label_sets.label_candidates(SST2, sets) == (
        '[" terrible", " great"]',
        '[" bad", " good"]',
        '["\u5dee", "\u597d"]',
    )


@pytest.mark.parametrize("name", [*GLUE_TASKS, "mnli-reversed"])
def test_each_built_in_task_has_several(name: str) -> None:
    task = glue_task(name)
    candidates = label_sets.label_candidates(task.labels)
    assert candidates[0] == json.dumps(task.label_words)
    assert len(candidates) >= 4
    for candidate in candidates:
        words = label_sets.label_words(candidate, len(task.labels))
        assert all(word.startswith(" ") for word in words)


def test_the_order_of_a_tasks_labels_is_kept() -> None:
    # Entailment is label 0 in MNLI and QNLI; equivalence is label 1 in QQP and MRPC.
    assert label_sets.shipped_label_sets(glue_task("mnli").labels)[1] == (
        " true",
        " unknown",
        " false",
    )
    reversed_labels = glue_task("mnli-reversed").labels
    assert label_sets.shipped_label_sets(reversed_labels)[1] == (" false", " unknown", " true")
    assert (" true", " false") in label_sets.shipped_label_sets(glue_task("qnli").labels)
    assert (" false", " true") in label_sets.shipped_label_sets(glue_task("qqp").labels)


def test_shipped_sets_are_written_as_the_tasks_words() -> None:
    assert label_sets.shipped_label_sets({"p": "Positive", "n": "Negative"})[0] == (
        "Great",
        "Terrible",
    )
    assert label_sets.shipped_label_sets({"n": "bad", "p": "good"})[0] == ("terrible", "great")
    assert label_sets.shipped_label_sets({"n": " bad", "p": " good"})[0] == (" terrible", " great")


@pytest.mark.parametrize("sets", label_sets.label_families(), ids=lambda sets: sets[0][0])
def test_shipped_sets_are_sound(sets: list[list[str]]) -> None:
    assert len({*map(tuple, sets)}) == len(sets) >= 4
    for words in sets:
        assert len(words) == len(sets[0]) == len(set(words))
        assert all(word.isalpha() and word.islower() and word.isascii() for word in words)


def test_unknown_words_need_sets() -> None:
    with pytest.raises(
        SpecError, match=r"sets: needs sets of label words, .* \(a, b\), in addition"
    ):
        label_sets.label_candidates({"a": " spam", "b": " ham"})
    with pytest.raises(SpecError, match="needs sets"):
        label_sets.label_candidates(SST2, [(" terrible", " great")])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"0": " bad", "2": " good"}, "number 2: has words for the labels 0, 2; the task has"),
        ((" bad", " so", " good"), "has 3 label words, needs 2"),
        ((" bad", " "), "' ' is blank"),
        (("bad", " bad"), "share one label word"),
        (("bad", "go\nod"), "unprintable character"),
        (("bad", "\ud800"), "unprintable character"),
        (("bad", "b" * 201), "more than 200 characters"),
    ],
)
def test_a_wrong_set_is_named(words: dict[str, str] | tuple[str, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        label_sets.label_candidates(SST2, [(" bad", " good"), words])


@pytest.mark.parametrize(
    ("candidate", "message"),
    [("", "not a JSON array"), ("terrible, great", "not a JSON array"),
     ('{"0": "a"}', "not a JSON array"), ('["a", 1]', "not a JSON array"),
     ("[" * 100_000, "not a JSON array"), ('["a"]', "has 1 label words, needs 2"),
     ('["a", "b", "c"]', "has 3 label words, needs 2"), ('["a", ""]', "blank")],
)  # fmt: skip
def test_a_candidate_is_checked(candidate: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        label_sets.label_words(candidate, 2)


def test_without_a_count_at_least_two() -> None:
    assert label_sets.label_words('["a", "b", "c"]') == ("a", "b", "c")
    with pytest.raises(ValueError, match="needs at least 2"):
        label_sets.label_words("[]")


@given(st.text(max_size=40))
def test_only_value_errors(candidate: str) -> None:
    try:
        words = label_sets.label_words(candidate)
    except ValueError:
        return
    assert label_sets.label_words(json.dumps(words)) == words
