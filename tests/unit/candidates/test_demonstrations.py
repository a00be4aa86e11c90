"""Blocks of solved examples: in the template's form, balanced, reproducible."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedone_paper.glue import glue_task
from fedone_sdk.candidates import demonstrations, fill
from fedone_sdk.candidates.demonstrations import demonstration_candidates
from fedone_sdk.errors import DataError, SpecError
from fedone_sdk.task import ChatSpec, TaskSpec, render
from fedone_sdk.vocabulary import MAX_CANDIDATE_CHARS

WORDS = {"0": " terrible", "1": " great"}
ROWS = [
    {"sentence": f"{word} {number}", "label": label}
    for label, word in enumerate(("bad", "good"))
    for number in range(8)
]


def _task(
    template: str | None = None, *, labels: dict[str, str] | None = None, **chat: Any
) -> TaskSpec:
    """A task whose template names slots, without the checks of one that names ``{prompt}``."""
    return TaskSpec.model_construct(
        template=template, chat=ChatSpec(**chat) if chat else None, labels=labels or WORDS
    )


CHAT = _task(system="{instruction}", user="{demonstrations}Review: {sentence}", assistant="Label:")


def _blocks(rows: list[dict[str, Any]], **options: Any) -> tuple[str, ...]:
    """Blocks of the chat."""
    return demonstration_candidates(CHAT, "demonstrations", rows, slots=["instruction"], **options)


def _labels(block: str) -> list[str]:
    return re.findall(r"\{label:(\w+)\}", block)


def test_a_cloze_is_answered_at_the_mask() -> None:
    rows = [{"sentence": "dull", "label": 0}, {"sentence": "fine", "label": "1"}]
    blocks = demonstration_candidates(glue_task("sst2"), "demonstrations", rows, shots=[0, 2])
    assert blocks[0] == ""
    assert set(blocks[1:]) == {
        " dull It was {label:0}.\n fine It was {label:1}.\n",
        " fine It was {label:1}.\n dull It was {label:0}.\n",
    }
    texts = {fill({"d": block}, WORDS)["d"] for block in blocks[1:]}
    assert " dull It was terrible.\n fine It was great.\n" in texts


def test_a_causal_template_is_answered_at_the_end() -> None:
    task = _task("{instruction}{demonstrations}Review: {sentence} Verdict:")
    rows = [{"sentence": "a {b} {sentence} {{", "label": 0}, {"sentence": "c", "label": 1}]
    block = demonstration_candidates(
        task, "demonstrations", rows, shots=[2], blocks=1, slots=["instruction", "demonstrations"]
    )[0]
    lines = sorted(fill({"d": block}, WORDS)["d"].split("\n"))
    assert lines == [
        "",
        "Review: a {b} {sentence} {{ Verdict: terrible",
        "Review: c Verdict: great",
    ]


def test_a_chat_continues_through_its_messages() -> None:
    slots = ["instruction", "demonstrations"]
    block = demonstration_candidates(CHAT, "demonstrations", ROWS, shots=[1], slots=slots)[0]
    assert re.fullmatch(r"Review: (bad|good) \d\nLabel:\{label:[01]\}\n\n", block)


def test_a_chat_without_a_prefilled_answer() -> None:
    task = _task(system="Rate.\n{demonstrations}", user="{sentence}\n{closing}")
    block = demonstration_candidates(
        task, "demonstrations", ROWS, shots=[1], slots=["demonstrations", "closing"]
    )[0]
    assert re.fullmatch(r"(bad|good) \d\n\{closing\}\n\{label:[01]\}\n\n", block)
    text = fill({"d": block, "closing": "It is"}, WORDS)["d"]
    assert re.fullmatch(r"(bad|good) \d\nIt is\n(terrible|great)\n\n", text)


def test_a_shot_reads_as_the_question_does() -> None:
    """What stands behind the block is the same text, up to the answer."""
    block = demonstration_candidates(glue_task("sst2"), "prompt", ROWS, shots=[1])[0]
    shot, label = re.fullmatch(r"(.*)\{label:(.)\}\.\n", block).groups()  # type: ignore[union-attr]
    example = next(row for row in ROWS if row["sentence"] in shot and str(row["label"]) == label)
    asked = "".join(part.text for part in render(glue_task("sst2"), "", example))
    assert f"{shot}." == asked


def test_braces_of_a_template_are_single() -> None:
    task = _task("{demonstrations}{{{sentence}}} ->")
    block = demonstration_candidates(task, "demonstrations", ROWS, shots=[1], blocks=1)[0]
    assert re.fullmatch(r"\{(bad|good) \d\} ->\{label:[01]\}\n", block)


@settings(max_examples=40, deadline=None)
@given(
    classes=st.integers(2, 7),
    shots=st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True),
    blocks=st.integers(1, 9),
)
def test_blocks_are_balanced(classes: int, shots: list[int], blocks: int) -> None:
    labels = {str(label): f" word{label}" for label in range(classes)}
    task = _task("{prompt} {text}:", labels=labels)
    rows = [{"text": f"row {n}", "label": n % classes} for n in range(classes * 9)]
    found = demonstration_candidates(task, "demonstrations", rows, shots=shots, blocks=blocks)
    assert len(set(found)) == len(found)
    assert ("" in found) is (found[:1] == ("",)) is (0 in shots)
    sizes = Counter(len(_labels(block)) for block in found)
    assert all(sizes[count] == blocks for count in shots if count)
    for block in found[1:] if 0 in shots else found:
        counts = Counter(_labels(block))
        if len(_labels(block)) >= classes:
            assert max(counts.values()) - min(counts[label] for label in labels) <= 1
        else:
            assert max(counts.values()) == 1
        lines = block.splitlines()
        assert len(set(lines)) == len(lines)  # no row twice
    for count in filter(None, shots):
        mine = [block for block in found if len(_labels(block)) == count]
        for even, odd in zip(mine[::2], mine[1::2], strict=False):
            if count % classes == 0:
                assert _labels(odd) == _labels(even)[::-1]


def test_blocks_are_reproducible() -> None:
    made = partial(_blocks, ROWS)
    assert made() == made()
    assert len(made()) == 9
    # What else is made does not matter to the blocks of one size.
    assert made(shots=[4]) == made()[5:]
    assert made(shots=[4, 0, 2]) == ("", *made(shots=[4]), *made(shots=[2]))
    assert made(shots=[2], blocks=2) == made(shots=[2])[:2]


def test_fewer_blocks_where_there_are_no_more() -> None:
    rows = [ROWS[0], ROWS[0], ROWS[8]]
    assert len(_blocks(rows, shots=[2], blocks=64)) == 2


def test_short_rows_are_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demonstrations, "LONG_SHOT", 60)
    long = [{"sentence": f"{n} " + "x" * 200 * n, "label": n % 2} for n in range(1, 7)]
    options: dict[str, Any] = {"shots": [2], "blocks": 16}
    blocks = _blocks([*long, *ROWS], **options)
    assert not any("x" in block for block in blocks)
    # A class without a short one gets the shortest that it has.
    rows = [*long, *(row for row in ROWS if row["label"] == 0)]
    blocks = _blocks(rows, **options)
    assert all(f"1 {'x' * 200}\n" in block for block in blocks)


def test_too_long_for_a_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demonstrations, "LONG_SHOT", 4000)
    rows = [{"sentence": f"{n} " + "x" * 2500, "label": n % 2} for n in range(4)]
    with pytest.raises(DataError, match=r"2 shots takes 50\d\d characters .* at most 4000"):
        _blocks(rows, shots=[2])
    mixed = [*rows, *({"sentence": f"s{n}" + "y" * 1400, "label": n % 2} for n in range(4))]
    blocks = _blocks(mixed, shots=[2])
    assert blocks
    assert all(len(block) <= MAX_CANDIDATE_CHARS for block in blocks)


def test_rows_that_hold_a_placeholder_are_left_out() -> None:
    odd = [
        {"sentence": text, "label": label}
        for text in ("{label:1}", "see {instruction}")
        for label in (0, 1)
    ]
    blocks = _blocks([*odd, *ROWS], blocks=32)
    assert not any("see" in block or "Review: {" in block for block in blocks)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (ROWS[:9], r"4 shots need 2 different rows of each class; class 1 has 1$"),
        (ROWS[:1] * 9, r"need 2 .*; class 0 has 1, class 1 has 0"),
        ([], "class 0 has 0, class 1 has 0"),
        ([*ROWS, {"label": 0}], "row 17: field 'sentence' is missing"),
        ([{"sentence": 3, "label": 0}], "row 1: field 'sentence' is int; it must be text"),
        ([{"sentence": "\ud800", "label": 0}], "row 1: field 'sentence' has half of a surrogate"),
        ([{"sentence": "a"}], "row 1: field 'label' is missing"),
        ([{"sentence": "a", "label": 2}], "row 1: field 'label' is 2, not one of: 0, 1"),
    ],
)
def test_rows_are_checked(rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        _blocks(rows)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (_task("{instruction} {sentence}"), r"neither \{demonstrations\} nor \{prompt\}"),
        (_task("{sentence} {demonstrations}"), r"\{sentence\} must follow \{demonstrations\}"),
        (_task("{a} {mask} {prompt} {sentence}"), r"\{a\}, \{mask\} must follow \{prompt\}"),
        (_task("It is {prompt}"), r"a text field must follow"),
    ],
)
def test_a_template_without_a_place(task: TaskSpec, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        demonstration_candidates(task, "demonstrations", ROWS, slots=["instruction"])


@pytest.mark.parametrize("loss", ["nll", "score"])
def test_reference_texts_are_the_answers_of_generation(loss: Literal["nll", "score"]) -> None:
    task = TaskSpec(
        template="{instruction}{demonstrations}Q: {question}\nA:",
        slots=("instruction", "demonstrations"),
        loss=loss,
        label_field="answer",
    )
    rows = [{"question": f"What is {n} + 1?", "answer": f"{n + 1}"} for n in range(6)]
    rows.append({"question": "skipped {instruction}", "answer": "7"})
    found = demonstration_candidates(
        task,
        "demonstrations",
        rows,
        slots=["instruction", "demonstrations"],
        shots=[0, 2],
        blocks=2,
    )
    assert found[0] == ""
    for block in found[1:]:
        assert re.fullmatch(r"(Q: What is \d \+ 1\?\nA: \d\n\n){2}", block)
    with pytest.raises(DataError, match=r"8 shots need 8 different rows; the file has 6"):
        demonstration_candidates(task, "demonstrations", rows, slots=["instruction"], shots=[8])
    with pytest.raises(DataError, match=r"row 1: field 'answer' is missing"):
        demonstration_candidates(
            task, "demonstrations", [{"question": "?"}], slots=["instruction"], shots=[1]
        )
