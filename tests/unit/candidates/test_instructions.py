"""Shipped instructions: enough, unique, filled, and fit to precede a text."""

from __future__ import annotations

import re

import pytest
from pydantic import ValidationError

from fedone_paper.glue import GLUE_TASKS, glue_task
from fedone_sdk.candidates import fill
from fedone_sdk.candidates.instructions import code_candidates, instruction_candidates
from fedone_sdk.task import Description

SST2 = glue_task("sst2").description


@pytest.mark.parametrize("name", [*GLUE_TASKS, "mnli-reversed", None])
def test_each_task_has_many(name: str | None) -> None:
    description = glue_task(name).description if name else Description()
    labels = glue_task(name).labels if name else {"a": "x", "b": "y"}
    texts = instruction_candidates(description=description, labels=labels)
    assert texts[0] == ""
    assert len(texts) == len(set(texts)) > 40
    for text in texts[1:]:
        line = text.removesuffix("\n")
        assert text == f"{line}\n"
        assert line == line.strip()
        assert line.isprintable()
        assert 5 <= len(line) <= 300
        assert line[-1] in ".?:"
        placeholders = re.findall(r"\{[^{}]*\}", line)
        assert placeholders in ([], [f"{{label:{key}}}" for key in labels])
        assert re.sub(r"\{label:\w+\}", "", line).isascii()
        assert "  " not in line
        filled = fill({"i": text}, labels)["i"]
        assert "{" not in filled
        assert "  " not in filled


def test_label_words_are_listed_in_english() -> None:
    description = Description(text="article", aspect="topic")
    labels = {"w": " world", "s": " sports", "t": " science"}
    texts = instruction_candidates(description=description, labels=labels)
    filled = [fill({"i": text}, labels)["i"] for text in texts]
    assert "Classify the article as world, sports or science.\n" in filled
    assert "Choose between world, sports and science.\n" in filled
    assert "world, sports or science?\n" in filled
    assert "An article and its topic.\n" in filled
    assert "Topic?\n" in filled


def test_sentiment_of_a_review() -> None:
    texts = instruction_candidates(description=SST2, labels=["0", "1"])
    assert texts[:4] == (
        "",
        "Movie review:\n",
        "Classify the sentiment of the movie review.\n",
        "What is the sentiment of the movie review?\n",
    )
    assert "You are a classifier. Answer {label:0} or {label:1}, and nothing else.\n" in texts


def test_a_question_replaces_the_default_one() -> None:
    texts = instruction_candidates(description=glue_task("cola").description, labels=["0", "1"])
    assert "Question: Is the sentence grammatically correct?\n" in texts


def test_size_keeps_the_first() -> None:
    texts = instruction_candidates(description=SST2, labels=["0", "1"])
    assert instruction_candidates(description=SST2, labels=["0", "1"], size=9) == texts[:9]


def test_codes_are_explained() -> None:
    names = {"card_fee": "card_fee", "7": "lost card!"}
    labels = {"card_fee": " A", "7": " B"}
    texts = dict(enumerate(code_candidates(names)))
    lines, listed, _ = fill({str(key): text for key, text in texts.items()}, labels).values()
    assert lines == "A: card fee\nB: lost card\n"
    assert listed == "Answer A for card fee or B for lost card.\n"


def test_a_task_without_labels() -> None:
    texts = instruction_candidates(description=Description(aspect="summary"), labels=[])
    assert len(texts) > 20
    assert not [text for text in texts if "{" in text or "label:" in text]


def test_a_description_with_odd_characters_is_taken_verbatim() -> None:
    texts = instruction_candidates(description=Description(text=r"\1 \g<0>"), labels=[])
    assert "\\1 \\g<0>:\n" in texts


@pytest.mark.parametrize("name", [*GLUE_TASKS, "mnli-reversed"])
def test_each_built_in_task_is_described(name: str) -> None:
    assert glue_task(name).description.asked.endswith("?")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"text": ""}, "at least 1 character"), ({"text": " review"}, "white space"),
        ({"aspect": "a\nb"}, "one line"), ({"question": "{label:0}?"}, "must not contain braces"),
        ({"noun": "x"}, "Extra inputs"),
    ],
)  # fmt: skip
def test_a_description_is_checked(values: dict[str, str], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Description(**values)
