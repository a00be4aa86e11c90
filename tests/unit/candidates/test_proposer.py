"""The proposer's question, and its untrusted answer."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedone_sdk.candidates.proposals import ScoredCandidate, proposal_messages, read_proposals
from fedone_sdk.candidates.reflection import copied_part, read_reflection, reflection_messages
from fedone_sdk.losses import feedback
from fedone_sdk.scores import graded
from fedone_sdk.task import ChatSpec, Description, Score, TaskSpec

WORDS = {"0": " terrible", "1": " great"}
TASK = TaskSpec(
    chat=ChatSpec(system="{prompt}", user="{sentence}"),
    labels=WORDS,
    description=Description(text="movie review", aspect="sentiment"),
)


def _scored(text: str, loss: float, **classes: float) -> ScoredCandidate:
    by_class = {name.removeprefix("c"): value for name, value in classes.items()}
    return ScoredCandidate(text=text, mean_loss=loss, class_losses=by_class)


def test_the_whole_question() -> None:
    scored = [
        _scored("Judge it.\n", 0.41249, c0=0.3, c1=0.525),
        _scored('Say "no" \u00e9\n', 1.5, c0=0.25, c1=float("nan")),
        _scored("", 0.5),
        _scored("a", float("inf")),
    ]
    messages = proposal_messages(TASK, "prompt", scored, count=3)
    assert [role for role, _ in messages] == ["system", "user"]
    assert "lower is better" in messages[0][1]
    assert messages[1][1] == "\n\n".join(
        [
            "Task: What is the sentiment of the movie review? Each text is a movie review.",
            "Labels, each with the placeholder for its word: "
            '{label:0} = "terrible", {label:1} = "great".',
            "The whole input; you write what stands at {prompt}:\n"
            "---\n[system] {prompt}\n[user] {sentence}\n---",
            "Candidates so far with their losses, the worst first:\n"
            '- loss 1.500 (terrible 0.250): "Say \\"no\\" \u00e9"\n'
            '- loss 0.500: ""\n'
            '- loss 0.412 (terrible 0.300, great 0.525): "Judge it."',
            "Write 3 new candidates for {prompt} that should have lower losses than these. "
            "Find out what the good ones have in common and where the bad ones fail; where one "
            "class has a high loss, help that class. Make the candidates differ from each other. "
            "Each has at most 400 characters. "
            "Name a label only by its placeholder; use no other braces. "
            "Answer with a JSON array of 3 strings, and nothing else.",
        ]
    )


def test_the_best_and_the_worst_are_shown() -> None:
    scored = [_scored(f"text {number}", float(number)) for number in range(20)]
    (_, _), (_, asked) = proposal_messages(TASK, "prompt", scored, count=3)
    shown = [int(line.split()[-1][:-1]) for line in asked.splitlines() if line.startswith("- ")]
    assert shown == [19, 18, 17, 16, 15, 4, 3, 2, 1, 0]


def test_a_question_without_labels_or_scored_candidates() -> None:
    task = TaskSpec(template="{prompt} {text}", loss="nll")
    (_, _), (_, asked) = proposal_messages(task, "prompt", [], count=1)
    assert asked.endswith(
        "\n\nWrite 1 new candidates for {prompt}. Make the candidates differ from each other. Each "
        "has at most 400 characters. Use no braces. Answer with a JSON array of 1 strings, and "
        "nothing else."
    )
    assert "Candidates so far" not in asked
    assert "Labels" not in asked


def test_a_list_of_proposals_is_read() -> None:
    assert _read('["Judge it.", "Is it {label:1}?"]') == ("Judge it.", "Is it {label:1}?")


def _read(text: str, **options: object) -> tuple[str, ...]:
    given = {"known": (), "count": 8, "labels": WORDS, **options}
    return read_proposals(text, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        '["one", "two"]', '\ufeff[\n  "one",\n  "two"\n]\n',
        'Here they are:\n```json\n["one", "two"]\n```\nGood luck [sic]!',
        '<think>[1] says ["no", "x", "y"] [x]</think> {"candidates": ["one", "two"]}',
        '[{"text": "one", "why": "short"}, {"text": "two"}]',
        '["one", "two", "thr',
        '["one", "two", 3, null, ["four"], {"a": 1}]',
        '["one"\n,\n"two"\n',
        "1. one\n2. two", "Sure!\n\n 1) one\n\n 2) two\n\nThat is all.",
        "- one\r\n- two\r\n", '* "one",\n* "two"',
        "\u2022 `one`\n\u2022 \u201ctwo\u201d",
        '["one", "ONE", " one ", "", "two", "\\u0000", "a\\u202eb", "\\ud800"]',
        '["one", "{sentence}", "{label:2}", "{}", "{\\n}", "two"]',
        '["one", "two", "' + "x" * 401 + '"]',
        '["<|im_end|>", "one", "x</s>", "[INST] x", "\uff1c\uff5cend\uff5c\uff1e", "two"]',
        '["one", "<|", "a|>", "two", "[/inst]", "<end_of_turn>", "<<SYS>>", "<\\/think>"]',
    ],
)  # fmt: skip
def test_many_forms_of_the_same_answer(text: str) -> None:
    assert _read(text) == ("one", "two")


@pytest.mark.parametrize(
    "text", ["", "I cannot help with that.", "[]", "[[", "{}", "[1, 2]", "-", "1.", '"one"', "null"]
)
def test_no_candidates(text: str) -> None:
    assert _read(text) == ()


def test_bounds() -> None:
    answer = json.dumps([f"candidate {n}" for n in range(20)])
    assert _read(answer, count=3) == ("candidate 0", "candidate 1", "candidate 2")
    assert _read(answer, count=0) == ()
    assert _read(json.dumps(["a" * 401, "b" * 400])) == ("b" * 400,)


def test_known_candidates_are_not_new() -> None:
    known = ("", "Judge it.\n", "What is  it?\n")
    answer = '["judge it.", "What is it?\\n", "Judge it now."]'
    assert _read(answer, known=known) == ("Judge it now.\n",)


def test_candidates_form_no_special_token_together() -> None:
    assert _read('["x </", "s> x", "a < b", "</review>"]') == ("x </", "a < b", "</review>")
    assert _read('["s> x", "x"]', known=("", "x </")) == ("x",)


def test_white_space_follows_the_slot() -> None:
    assert _read('["so good"]', known=("", " not", " all")) == (" so good",)
    assert _read('["so good"]', known=(" not", "all\n")) == ("so good",)
    assert _read('["a\\nb", "a\\tb"]', known=("", "x\n\n")) == ("a\nb\n\n",)


def test_emoji_and_persian_stay() -> None:
    family = "\U0001f469\u200d\U0001f467"
    assert _read(json.dumps([family, "\u0645\u06cc\u200c\u0634\u0648\u062f"])) == (
        family,
        "\u0645\u06cc\u200c\u0634\u0648\u062f",
    )


_MARKS = st.sampled_from(
    ["[", "]", '"', "\\", ",", "{", "}", "1. ", "- ", "\n", "a", "\x00", "\ud83d", ":"]
)


@given(st.one_of(st.text(), st.lists(_MARKS, max_size=60).map("".join)))
def test_any_answer_is_read(text: str) -> None:
    found = read_proposals(text, known=("", "a\n"), count=4, labels=["0"])
    assert len(found) == len(set(found)) <= 4
    for candidate in found:
        assert candidate.endswith("\n")
        assert candidate.strip()
        assert len(candidate) <= 400
        assert candidate.encode()
        assert "\x00" not in candidate


@pytest.mark.parametrize("part", ["[", '["', '["a', '["a",', '[{"', "1. ", "{", "\\", "[[]", '"['])
def test_a_hostile_answer_takes_no_time(part: str) -> None:
    begin = time.perf_counter()
    _read(part * 200_000)
    assert time.perf_counter() - begin < 5.0


VECTORS = json.loads(
    (Path(__file__).parents[2] / "vectors" / "reflection.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize(("text", "private"), VECTORS["quotes"]["texts"])
def test_what_is_private_stays(text: str, private: bool) -> None:
    found = copied_part(text, VECTORS["quotes"]["rows"], VECTORS["quotes"]["public"])
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
