"""The task: templates, the GLUE table, and losses against independent formulas."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fedone_sdk.errors import DataError
from fedone_sdk.task import GLUE_TASKS, TaskSpec, glue_task, label_loss, render, target_of

LABELS = {"0": " no", "1": " yes"}


def task(template: str = "{prompt} {text} {mask}", **more: Any) -> TaskSpec:
    return TaskSpec(**{"template": template, "labels": LABELS, **more})


def text_of(spec: TaskSpec, prompt: str, example: dict[str, Any]) -> str:
    return "".join(
        "<mask>" if part.kind == "mask" else part.text for part in render(spec, prompt, example)
    )


def test_render_parts() -> None:
    spec = task("{prompt} {a}, {{b}} {b}? {mask}.")
    parts = render(spec, "hint", {"a": "{b}", "b": "two", "label": 0})
    assert [tuple(part) for part in parts] == [
        ("prompt", "hint"), ("text", " "), ("field", "{b}"), ("text", ", {"), ("text", "b}"),
        ("text", " "), ("field", "two"), ("text", "? "), ("mask", ""), ("text", "."),
    ]  # fmt: skip


def test_fields_and_words() -> None:
    spec = task("{b} {prompt} {a} {b}", labels={2: " x", 1: " y"})
    assert spec.fields == ("b", "a")
    assert spec.label_words == (" x", " y")
    assert list(spec.labels) == ["2", "1"]


@given(st.text(), st.text())
def test_render_keeps_every_text(prompt: str, text: str) -> None:
    assert text_of(task(), prompt, {"text": text}) == f"{prompt} {text} <mask>"


@pytest.mark.parametrize("example", [{}, {"text": 3}, {"text": None}])
def test_render_needs_text(example: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="'text'"):
        render(task(), "", example)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{prompt", "not a template"),
        ("{text} {mask}", r"needs \{prompt\} exactly once"),
        ("{prompt} {prompt} {text}", r"needs \{prompt\} exactly once"),
        ("{prompt} {text} {mask} {mask}", "at most once"),
        ("{prompt} {mask}", "at least one text field"),
        ("{prompt} {text!r}", "no format or conversion"),
        ("{prompt} {text:>3}", "no format or conversion"),
        ("{prompt} {text.x}", "plain name"),
        ("{prompt} {0}", "plain name"),
        ("{prompt} {}", "plain name"),
        ("{prompt} {text} {label}", "must not contain the label field"),
    ],
)
def test_bad_templates(template: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        task(template)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"labels": {"0": " x"}}, "at least 2"),
        ({"labels": {"0": " x", "1": " x"}}, "share one label word"),
        ({"labels": {"0": " x", "1": " "}}, "'1' has no label word"),
        ({"labels": {"0": " x", "1": " y", "2": " z"}, "metric": "f1"}, "exactly 2 labels"),
        ({"labels": {"0": " x", "1": " y", "2": " z"}, "metric": "matthews"}, "exactly 2 labels"),
        ({"metric": "auc"}, "metric"),
        ({"verbaliser": {}}, "Extra inputs"),
    ],
)
def test_bad_tasks(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        task(**more)


def test_targets() -> None:
    spec = task(labels={"neg": " bad", "pos": " good"})
    assert [target_of(spec, {"label": label}) for label in ("neg", "pos")] == [0, 1]
    assert [target_of(task(), {"label": label}) for label in (0, "0", 1, "1")] == [0, 0, 1, 1]
    with pytest.raises(DataError, match="'2' is not one of 0, 1"):
        target_of(task(), {"label": 2})
    with pytest.raises(DataError, match="no 'label'"):
        target_of(task(), {})


SINGLE = {"sentence": "S", "sentence1": "A", "sentence2": "B", "question": "Q", "question1": "A",
          "question2": "B", "premise": "P", "hypothesis": "H"}  # fmt: skip
NO_YES, YES_NO = (" no", " yes"), (" yes", " no")


@pytest.mark.parametrize(
    ("name", "text", "words", "metric"),
    [
        ("sst2", "* S It was <mask>.", (" terrible", " great"), "accuracy"),
        ("cola", "* S correct? <mask>.", NO_YES, "matthews"),
        ("mrpc", "* A? <mask>, B", NO_YES, "f1"),
        ("qqp", "* A? <mask>, B", NO_YES, "f1"),
        ("mnli", "* P? <mask>, H", (" yes", " maybe", " no"), "accuracy"),
        ("qnli", "* Q? <mask>, S", YES_NO, "accuracy"),
        ("rte", "* A? <mask>, B", YES_NO, "accuracy"),
    ],
)
def test_glue_cloze(name: str, text: str, words: tuple[str, ...], metric: str) -> None:
    spec = glue_task(name)
    assert text_of(spec, "*", SINGLE) == text
    assert spec.label_words == words
    assert list(spec.labels) == [str(index) for index in range(len(words))]
    assert spec.metric == metric
    assert spec.loss == "cross_entropy"


@pytest.mark.parametrize("name", GLUE_TASKS)
def test_glue_chat_asks_the_same_without_a_mask(name: str) -> None:
    cloze, chat = glue_task(name), glue_task(name, "chat")
    assert "{mask}" not in chat.template
    assert (chat.labels, chat.metric, chat.fields) == (cloze.labels, cloze.metric, cloze.fields)
    assert chat.template.startswith("{prompt} ")


def test_glue_names() -> None:
    assert set(GLUE_TASKS) == {"mnli", "qqp", "sst2", "mrpc", "cola", "qnli", "rte"}
    with pytest.raises(ValueError, match="no built-in task 'wnli'"):
        glue_task("wnli")
    with pytest.raises(ValueError, match="styles: roberta, chat"):
        glue_task("sst2", "gpt")  # type: ignore[arg-type]


@st.composite
def scored(draw: st.DrawFn) -> tuple[list[float], int]:
    values = draw(st.lists(st.floats(-60, 0), min_size=2, max_size=6))
    return values, draw(st.integers(0, len(values) - 1))


def spec_of(size: int, loss: str) -> TaskSpec:
    return task(labels={str(i): f" w{i}" for i in range(size)}, loss=loss)


@given(scored())
def test_cross_entropy_is_the_softmax_over_label_words(case: tuple[list[float], int]) -> None:
    log_probs, target = case
    # The odds against the target; no log-sum-exp, nothing shared with the code.
    expected = math.log1p(
        math.fsum(math.exp(v - log_probs[target]) for i, v in enumerate(log_probs) if i != target)
    )
    loss = label_loss(spec_of(len(log_probs), "cross_entropy"), log_probs, target)
    assert loss == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert loss >= 0


def test_cross_entropy_by_hand() -> None:
    # Label words hold 0.3 and 0.1 of the mass: renormalised 0.75 and 0.25.
    values = [math.log(0.3), math.log(0.1)]
    assert label_loss(task(), values, 0) == pytest.approx(math.log(4 / 3))
    assert label_loss(task(), values, 1) == pytest.approx(math.log(4))
    # Far down, where a probability would underflow.
    assert label_loss(task(), [-5000.0, -5001.0], 1) == pytest.approx(math.log1p(math.e))


@given(scored())
def test_hinge_is_the_multi_margin_loss(case: tuple[list[float], int]) -> None:
    log_probs, target = case
    # torch.nn.MultiMarginLoss: sum over all classes, less the target's own margin of 1, over C.
    margins = [max(0.0, 1.0 - (log_probs[target] - value)) for value in log_probs]
    expected = (math.fsum(margins) - 1.0) / len(log_probs)
    loss = label_loss(spec_of(len(log_probs), "hinge"), log_probs, target)
    assert loss == pytest.approx(expected, rel=1e-9, abs=1e-12)


@settings(deadline=None)  # the first example imports it
@given(scored())
def test_hinge_against_torch(case: tuple[list[float], int]) -> None:
    torch = pytest.importorskip("torch")
    log_probs, target = case
    expected = torch.nn.MultiMarginLoss()(
        torch.tensor([log_probs], dtype=torch.float64), torch.tensor([target])
    )
    loss = label_loss(spec_of(len(log_probs), "hinge"), log_probs, target)
    assert loss == pytest.approx(float(expected), rel=1e-9, abs=1e-12)
