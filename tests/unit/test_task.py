"""The task: templates, the GLUE table, and losses against independent formulas."""

import json
import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fedone_paper.glue import GLUE_TASKS, glue_task
from fedone_sdk.backends import Answer, LLMBackend, Query, query_for, rows_of
from fedone_sdk.budget import NOTHING
from fedone_sdk.candidates import prompt_of
from fedone_sdk.errors import DataError
from fedone_sdk.losses import (
    class_means,
    example_loss,
    label_loss,
    loss_terms,
    num_groups,
    predicted,
)
from fedone_sdk.messages import RunTask, Tensor
from fedone_sdk.reports.artefact import load_prompt
from fedone_sdk.task import (
    LOG_ZERO,
    MAX_BIAS,
    Example,
    Score,
    TaskSpec,
    form_of,
    label_index,
    references_of,
    render,
    target_of,
    words_of,
)
from fedone_sdk.testing import ScriptedBackend
from fedone_sdk.vocabulary import Vocabulary

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
    words = {2: " x", 1: " y"}
    spec = task("{b} {prompt} {a} {b}", labels=words)
    assert spec == task(
        "{b} {prompt} {a} {b}", labels=[{"value": v, "word": word} for v, word in words.items()]
    )
    assert spec != task("{b} {prompt} {a} {b}", labels=dict(sorted(words.items())))
    assert TaskSpec.model_validate_json(json.dumps(spec.model_dump(), sort_keys=True)) == spec
    assert spec.fields == ("b", "a")
    assert spec.label_words == (" x", " y")
    assert list(spec.labels) == ["2", "1"]


@pytest.mark.parametrize(
    "change",
    [
        {"labels": {1: " y", 0: " x"}}, {"labels": {0: " y", 1: " x"}},
        {"template": "{b} {prompt} {a}"}, {"loss": "hinge"},
        {"label_field": "c"}, {"bias": (0.0, 0.5)},
    ],
    ids=str,
)  # fmt: skip
def test_a_task_that_is_read_otherwise_is_refused(change: dict[str, Any]) -> None:
    base = {"template": "{a} {prompt} {b}", "labels": {0: " x", 1: " y"}}
    sent, read = TaskSpec.model_validate(base), TaskSpec.model_validate(base | change)
    rest = {"prompt_len": 1, "vocab_size": 2, "vocabulary_sha256": "", "gateway": True}
    run = {"task": read, "method": {"name": "gs-bdpl"}, **rest}
    assert RunTask.model_validate(run | {"task_crc32": read.crc32}).task == read
    with pytest.raises(ValueError, match=f"task_crc32: must be {read.crc32}"):
        RunTask.model_validate(run | {"task_crc32": sent.crc32})


@given(st.text(), st.text())
def test_render_keeps_every_text(prompt: str, text: str) -> None:
    assert text_of(task(), prompt, {"text": text}) == f"{prompt} {text} <mask>"


@pytest.mark.parametrize("example", [{}, {"text": 3}, {"text": None}])
def test_render_needs_text(example: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="'text'"):
        render(task(), "", example)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"template": "{prompt"}, "not a template"),
        ({"template": "{text} {mask}"}, r"needs \{prompt\} exactly once"),
        ({"template": "{prompt} {prompt} {text}"}, r"needs \{prompt\} exactly once"),
        ({"template": "{prompt} {text} {mask} {mask}"}, "at most once"),
        ({"template": "{prompt} {mask}"}, "at least one text field"),
        ({"template": "{prompt} {text!r}"}, "may have a length"),
        ({"template": "{prompt} {text.x}"}, "plain name"),
        ({"template": "{prompt} {0}"}, "plain name"),
        ({"template": "{prompt} {text} {label}"}, "must not contain the label field"),
        ({"labels": [{"value": 1, "word": "a"}, {"value": "1", "word": "b"}]}, "same value"),
        ({"labels": [{"1": "a"}, {"0": "b"}]}, "a list of {value: VALUE, word: WORD}, or a map"),
        ({"labels": [["1", "a"], ["0", "b"]]}, "a list of {value: VALUE, word: WORD}, or a map"),
        ({"labels": {"0": " x"}}, "at least 2"),
        ({"labels": {"0": " x", "1": " x"}}, "share one label word"),
        ({"labels": {"0": " x", "1": " "}}, "'1' has no label word"),
        ({"labels": {"0": " x", "1": " y", "2": " z"}, "metric": "f1"}, "exactly 2 labels"),
        ({"labels": {"0": " x", "1": " y", "2": " z"}, "metric": "matthews"}, "exactly 2 labels"),
    ],
)
def test_bad_tasks(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        task(**more)


@pytest.mark.parametrize(
    ("labels", "value", "index"),
    [(("0", "1"), "1.0", 1), (("0", "1"), 1.0, 1), (("1.5", "1"), 1.5, 0),
     (("ham", "spam"), " SPAM", 1), (("Ru\u0308ckgabe", "b"), "R\u00fcckgabe", 0),
     (("True", "False"), "false", 1), (("US", "us"), "us", 1), (("US", "us"), "Us", None),
     (("a", "b"), "", None)],
)  # fmt: skip
def test_spellings_of_a_label(labels: tuple[str, ...], value: object, index: int | None) -> None:
    words = {label: f" {number}" for number, label in enumerate(labels)}
    task = TaskSpec(template="{prompt} {a}", labels=words)
    assert label_index(task, value) == index


def test_targets() -> None:
    spec = task(labels={"neg": " bad", "pos": " good"})
    assert [target_of(spec, {"label": label}) for label in ("neg", "pos")] == [0, 1]
    assert [target_of(task(), {"label": label}) for label in (0, "0", 1, "1")] == [0, 0, 1, 1]
    with pytest.raises(DataError, match="'2' is not one of 0, 1"):
        target_of(task(), {"label": 2})
    with pytest.raises(DataError, match="no 'label'"):
        target_of(task(), {})


class TestChat:
    CHAT: ClassVar[dict[str, str]] = {"system": "{prompt}", "user": "{a}, {b}?", "assistant": "It"}

    def spec(self, **chat: Any) -> TaskSpec:
        return TaskSpec(chat={**self.CHAT, **chat}, labels=LABELS)

    def test_a_role_opens_each_message(self) -> None:
        parts = render(self.spec(), "hint", {"a": "one", "b": "two"})
        assert [tuple(part) for part in parts] == [
            ("role", "system"), ("prompt", "hint"), ("role", "user"), ("field", "one"),
            ("text", ", "), ("field", "two"), ("text", "?"), ("role", "assistant"), ("text", "It"),
        ]  # fmt: skip
        assert self.spec().fields == ("a", "b")

    def test_the_last_message_is_the_answers(self) -> None:
        spec = self.spec(system=None, user="{prompt}{text}", assistant=None)
        assert [part.text for part in form_of(spec) if part.kind == "role"] == ["user", "assistant"]

    def test_comes_back_from_json_and_leaves_templates_as_they_were(self) -> None:
        spec = self.spec()
        assert TaskSpec.model_validate_json(spec.model_dump_json()) == spec
        assert "template" not in spec.model_dump()
        assert "chat" not in task().model_dump()

    @pytest.mark.parametrize(
        ("chat", "message"),
        [
            ({"system": None}, r"chat: needs \{prompt\} exactly once"),
            ({"user": "{prompt} {a}"}, r"chat: needs \{prompt\} exactly once"),
            ({"user": "{a} {mask}"}, r"takes no \{mask\}"),
            ({"user": "so"}, "at least one text field"),
            ({"user": "{a!r}"}, "may have a length"),
            ({"assistant": "{label}"}, "must not contain the label field"),
        ],
    )
    def test_bad_chats(self, chat: dict[str, Any], message: str) -> None:
        with pytest.raises(ValidationError, match=message):
            self.spec(**chat)

    def test_is_in_the_place_of_a_template(self) -> None:
        for both in ({"template": "{prompt} {text}", "chat": self.CHAT}, {}):
            with pytest.raises(ValidationError, match="needs either template or chat"):
                TaskSpec(**both, labels=LABELS)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("name", GLUE_TASKS)
def test_glue_chat_asks_the_same_without_a_mask(name: str) -> None:
    cloze, chat = glue_task(name), glue_task(name, "chat")
    assert chat.chat is not None
    assert chat.template is None
    assert (chat.labels, chat.metric, chat.fields) == (cloze.labels, cloze.metric, cloze.fields)
    assert chat.chat.user.startswith("{prompt} ")
    assert glue_task(f"{name}/chat") == chat


@pytest.mark.parametrize("name", GLUE_TASKS)
def test_glue_causal_ends_where_the_label_word_follows(name: str) -> None:
    cloze, causal = glue_task(name), glue_task(f"{name}/causal")
    assert causal.template is not None
    assert "{mask}" not in causal.template
    assert causal.template.endswith((" It was", ":"))
    assert causal.model_copy(update={"template": cloze.template}) == cloze


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


def test_cross_entropy_where_a_probability_would_underflow() -> None:
    assert label_loss(task(), [-5000.0, -5001.0], 1) == pytest.approx(math.log1p(math.e))


@given(scored())
def test_brier_is_the_squared_distance_of_the_probabilities(case: tuple[list[float], int]) -> None:
    log_probs, target = case
    odds = np.exp(np.array(log_probs) - max(log_probs))
    distance = odds / odds.sum() - np.eye(len(odds))[target]
    loss = label_loss(spec_of(len(log_probs), "brier"), log_probs, target)
    assert loss == pytest.approx(distance @ distance, abs=1e-12)
    assert 0 <= loss <= 2 + 1e-12


def test_hinge_is_an_exact_sum() -> None:
    # A sum from left to right gives 0.6199999999999999, and Python's own from 3.12 on gives this.
    log_probs = [-0.6, -0.9, -0.8, -0.8, -0.8]
    assert label_loss(spec_of(len(log_probs), "hinge"), log_probs, 0) == 0.62


@given(scored())
def test_hinge_is_the_multi_margin_loss(case: tuple[list[float], int]) -> None:
    log_probs, target = case
    # torch.nn.MultiMarginLoss: sum over all classes, less the target's own margin of 1, over C.
    margins = [max(0.0, 1.0 - (log_probs[target] - value)) for value in log_probs]
    expected = (math.fsum(margins) - 1.0) / len(log_probs)
    loss = label_loss(spec_of(len(log_probs), "hinge"), log_probs, target)
    assert loss == pytest.approx(expected, rel=1e-9, abs=1e-12)


def generation(loss: str = "nll", template: str = "{prompt} {text}", **more: Any) -> TaskSpec:
    return TaskSpec.model_validate({"template": template, "loss": loss, **more})


@pytest.mark.parametrize("loss", ["nll", "score"])
def test_generation_has_no_labels_and_is_measured_by_its_loss(loss: str) -> None:
    spec = generation(loss)
    assert spec.generates
    assert (spec.metric, spec.labels, spec.label_words) == ("loss", {}, ())
    assert TaskSpec.model_validate(spec.model_dump()) == spec
    assert not task().generates
    assert not task(loss="zero_one").generates


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": LABELS}, "loss nll takes no labels"),
        ({"metric": "accuracy"}, "loss nll allows only metric loss"),
        ({"template": "{prompt} {text} {mask}"}, r"loss nll takes no \{mask\}"),
        ({"template": "{prompt} {label}"}, "must not contain the label field"),
        ({"template": "{prompt} {answer}", "label_field": "answer"}, "must not contain the label"),
        ({"score": "a:b"}, "score: needs loss score"),
        ({"loss": "score", "score": "a:b.c"}, "score"),
        ({"loss": "score", "score": "/a/b.py:c"}, "score"),
        ({"loss": "score", "max_tokens": 4097}, "max_tokens"),
        ({"loss": "cross_entropy"}, "labels: needs at least 2"),
        ({"loss": "zero_one"}, "labels: needs at least 2"),
    ],
)
def test_bad_generation_tasks(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        generation(**change)


@given(scored())
def test_zero_one_is_the_wrongness_of_the_first_of_the_likeliest(
    case: tuple[list[float], int],
) -> None:
    log_probs, target = case
    best = min(i for i, value in enumerate(log_probs) if not any(v > value for v in log_probs))
    loss = label_loss(spec_of(len(log_probs), "zero_one"), log_probs, target)
    assert loss == (0.0 if best == target else 1.0)


class TestBias:
    @given(scored(), st.sampled_from(["cross_entropy", "brier", "hinge", "zero_one"]), st.data())
    def test_is_added_to_the_log_probabilities(
        self, case: tuple[list[float], int], loss: str, data: st.DataObject
    ) -> None:
        log_probs, target = case
        numbers = st.floats(-MAX_BIAS, MAX_BIAS)
        bias = data.draw(st.lists(numbers, min_size=len(log_probs), max_size=len(log_probs)))
        spec = spec_of(len(log_probs), loss)
        shifted = [value + more for value, more in zip(log_probs, bias, strict=True)]
        assert label_loss(spec.with_bias(bias), log_probs, target) == label_loss(
            spec, shifted, target
        )
        assert predicted(spec.with_bias(bias), log_probs) == predicted(spec, shifted)

    def test_a_label_that_was_not_written_stays_impossible(self) -> None:
        spec = task(loss="zero_one", bias=(0.0, MAX_BIAS))
        assert predicted(spec, [-950.0, LOG_ZERO]) == 0
        assert predicted(spec.with_bias((-MAX_BIAS, 0.0)), [-950.0, LOG_ZERO]) == 0
        assert predicted(spec, [LOG_ZERO, LOG_ZERO]) == -1
        surely = task().with_bias((-MAX_BIAS, MAX_BIAS))
        assert label_loss(surely, [0.0, LOG_ZERO], 1) == pytest.approx(900.0)

    def test_a_task_has_one_or_none(self) -> None:
        spec = task().with_bias([0, -2])
        assert spec.bias == (0.0, -2.0)
        assert spec.with_bias(None) == task()
        assert TaskSpec.model_validate_json(spec.model_dump_json()) == spec

    @pytest.mark.parametrize("bias", [(), (1.0,), (0.0,) * 3, (0.0, 101.0), (math.nan, 0.0)])
    def test_what_is_none(self, bias: tuple[float, ...]) -> None:
        with pytest.raises(ValueError, match="bias"):
            task().with_bias(bias)

    @pytest.mark.parametrize("loss", ["nll", "score"])
    def test_without_labels_there_is_none(self, loss: str) -> None:
        with pytest.raises(ValidationError, match=f"loss {loss} has no labels"):
            generation(loss, bias=(0.0, 1.0))


def test_references_are_the_label_column_for_nll_alone() -> None:
    rows = [{"text": "a", "label": " one"}, {"text": "b", "label": " two"}]
    assert references_of(generation(), rows) == (" one", " two")
    assert references_of(generation("score"), rows) == ()
    assert references_of(task(), [{"label": 0}]) == ()
    spec = generation(label_field="answer")
    assert references_of(spec, [{"text": "a", "answer": " x"}]) == (" x",)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, "no 'label'"), ({"label": 3}, "'label' is int"),
        ({"label": None}, "'label' is NoneType"), ({"label": ""}, "'label' is empty"),
    ],
)  # fmt: skip
def test_a_reference_is_text(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        references_of(generation(), [row])


@given(st.floats(-1e4, 0))
def test_nll_is_in_nats_of_the_whole_reference(log_prob: float) -> None:
    assert example_loss(generation(), [log_prob], {"label": " a"}) == -log_prob


@pytest.mark.parametrize(
    ("form", "stop"),
    [
        ({"template": "{prompt}Question: {q}\nAnswer:"}, ("\nQuestion:",)),
        ({"template": "{prompt} {q}"}, ()),
        ({"chat": {"system": "{prompt}", "user": "Question: {q}"}}, ()),
    ],
)
def test_a_generated_text_ends_where_another_example_begins(
    form: dict[str, Any], stop: tuple[str, ...]
) -> None:
    task = TaskSpec.model_validate({**form, "loss": "score"})
    backend = ScriptedBackend()
    backend.answers = frozenset({"text"})
    query = query_for(task, "", [{"q": "What?"}], backend=backend)
    assert query.stop == stop
    answer = Answer(log_probs=((),), texts=(" This.\nQuestion: Who?\nAnswer: Me.",), usage=NOTHING)
    assert rows_of(query, answer) == ((" This.",) if stop else answer.texts)


FOLDER = Path(__file__).parents[1] / "vectors"
VECTORS = json.loads((FOLDER / "losses.json").read_text(encoding="utf-8"))
ARTEFACTS = json.loads((FOLDER / "artefacts.json").read_text(encoding="utf-8"))["artefacts"]


def row_of(answer: Any, example: Example) -> Any:
    """Return the answer; of a written one, whether it is a keyword."""
    return Score(float(answer in example["keywords"])) if isinstance(answer, str) else answer


@pytest.mark.parametrize("vector", VECTORS["losses"], ids=lambda vector: vector["name"])
def test_losses(vector: dict[str, Any]) -> None:
    task = RunTask.model_validate_json(vector["run"]).task
    pairs = list(zip(vector["answers"], vector["examples"], strict=True))
    losses = [example_loss(task, row_of(answer, example), example) for answer, example in pairs]
    tolerance = 1e-15 if task.loss == "cross_entropy" else 0.0
    assert losses == pytest.approx(vector["losses"], rel=tolerance, abs=tolerance)
    assert math.fsum(vector["losses"]) / len(losses) == vector["mean"]
    if "by_class" in vector:
        targets = [target for _, row in pairs if isinstance(target := target_of(task, row), int)]
        at = task.with_bias(vector["bias"])
        terms = [loss_terms(at, row, label) for (row, _), label in zip(pairs, targets, strict=True)]
        means = class_means(terms, targets, num_groups(len(task.labels), private=False))
        expected = Tensor.model_validate(vector["by_class"])
        assert expected.shape == (1, len(means), len(means[0]))
        flat = [value for row in means for value in row]
        assert flat == pytest.approx(expected.values().tolist(), rel=1e-6, abs=1e-9)
        assert [targets.count(label) for label in range(len(task.labels))] == vector["class_counts"]


@pytest.mark.parametrize("vector", VECTORS["prompts"], ids=lambda vector: vector["name"])
def test_prompts(vector: dict[str, Any]) -> None:
    task = RunTask.model_validate_json(vector["run"]).task
    vocabulary = Vocabulary.model_validate(vector["vocabulary"])
    prompt = prompt_of(task, vocabulary, vector["indices"])
    rendered = render(task, prompt, vector["example"])
    assert [list(part) for part in rendered] == vector["input"]
    assert list(words_of(task, prompt)) == vector["label_words"]


def test_sums() -> None:
    for vector in VECTORS["sums"]:
        assert math.fsum(vector["values"]) == vector["sum"]


class OneAnswer(LLMBackend):
    """Gives one answer to everything, and keeps what it was asked."""

    answers = frozenset({"labels", "text"})
    fingerprint = "m"
    asked: Query

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def score(self, query: Query) -> Answer:
        self.asked = query
        if isinstance(self._answer, str):
            return Answer(log_probs=((),), texts=(self._answer,), usage=NOTHING)
        return Answer(log_probs=(tuple(self._answer),), usage=NOTHING)


@pytest.mark.parametrize("vector", ARTEFACTS, ids=lambda vector: vector["name"])
async def test_artefacts(vector: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "prompt.json").write_text(vector["artefact"], encoding="utf-8")
    prompt, backend = load_prompt(tmp_path / "prompt.json"), OneAnswer(vector["answer"])
    found = await prompt.predict(vector["row"], backend)
    (asked,) = backend.asked.inputs
    assert [list(part) for part in asked] == vector["input"]
    assert list(backend.asked.label_words) == vector["label_words"]
    for key in ("label", "scores", "text"):
        assert getattr(found, key) == vector[key]
    assert prompt.render(vector["row"]) == vector["rendered"]
    assert prompt.messages(vector["row"]) == vector["messages"]
