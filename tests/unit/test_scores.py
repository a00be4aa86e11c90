"""Score functions: their calls, and the ready ones."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedone_sdk import scores
from fedone_sdk.backends import query_for
from fedone_sdk.errors import BackendUnavailable, SpecError
from fedone_sdk.local import load_score
from fedone_sdk.losses import example_loss, feedback
from fedone_sdk.metrics import METRICS, accuracy, evaluate, f1, matthews
from fedone_sdk.scores import SCORES, built_in_score, graded
from fedone_sdk.task import Example, Score, ScoreFunction, TaskSpec
from fedone_sdk.testing import ScriptedBackend


def task_of(score: object = None) -> TaskSpec:
    task = {"template": "{prompt} {text}", "loss": "score", "score": score, "label_field": "answer"}
    return TaskSpec.model_validate(task)


async def sees_a_number(generated: str, example: Example) -> Score:
    await asyncio.sleep(0)
    return Score(float(generated == example["answer"]), "look again")


ROWS: tuple[Example, ...] = tuple({"text": "t", "answer": str(number)} for number in range(10))
WRITTEN = [str(number % 5) for number in range(10)]


@pytest.mark.parametrize(
    "score",
    [
        sees_a_number,
        lambda generated, example: sees_a_number(generated, example),
        lambda text, row: Score((text == row["answer"]) * (1 + 1e-7), "look again"),
        lambda generated, example: generated == dict.pop(example, "answer"),  # type: ignore[arg-type]
    ],
)
async def test_a_score_may_be_a_number_or_have_a_reason_now_or_later(score: ScoreFunction) -> None:
    task = task_of()
    found = await graded(task, [*WRITTEN[:-1], None], ROWS, score)
    assert found[-1] is None
    losses = [example_loss(task, row, ROWS[0]) for row in found if row is not None]
    assert losses == [0.0] * 5 + [1.0] * 4
    said = feedback(task, found[7] or (), ROWS[7])
    assert said.removesuffix(": look again") == "expected '7', answered '2', score 0.00 of 1"


async def test_a_synchronous_score_leaves_the_event_loop_free() -> None:
    """The function returns only after the loop has run."""
    turned = threading.Event()

    def score(generated: str, example: Example) -> float:
        return float(turned.wait(20) and threading.current_thread().daemon)

    asyncio.get_running_loop().call_soon(lambda: asyncio.get_running_loop().call_soon(turned.set))
    (found,) = await graded(task_of(), ["a"], ROWS[:1], score)
    assert found == Score(1.0, "expected '0', answered 'a', score 1.00 of 1")


async def _never(generated: str, example: Example) -> float:
    await asyncio.sleep(1000)
    return 1.0


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda *_: "high", "failed with ValueError: could not convert"),
        (lambda *_: None, "failed with TypeError: "),
        (lambda _, example: example["missing"], "failed with KeyError: 'missing'"),
        (lambda *_: Score(1.01), r"returned 1.01; it must be in \[0, 1\]"),
        (lambda *_: math.nan, r"returned nan; it must be in \[0, 1\]"),
        (lambda *_: next(iter(())), r"failed with RuntimeError: StopIteration\(\)"),
        (lambda *_: sys.exit("x"), r"failed with RuntimeError: SystemExit\('x'\)"),
        (_never, "failed with TimeoutError: no result in 1 s"),
        (None, "loss score needs a score function"),
    ],
)
async def test_a_row_without_a_score_fails_alone_and_many_fail_together(
    broken: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken is _never:
        monkeypatch.setattr(scores, "SCORE_TIMEOUT_S", 1.0)

    def breaks_at(numbers: set[int]) -> ScoreFunction:
        def score(generated: str, example: Example) -> Any:
            return broken(generated, example) if int(example["answer"]) in numbers else 0.5

        return score

    if broken is not None:
        found = await graded(task_of(), WRITTEN, ROWS, breaks_at({2, 4}))
        assert [index for index, row in enumerate(found) if row is None] == [2, 4]
        everything = await graded(task_of(), WRITTEN, ROWS, breaks_at({*range(10)}), most_failed=1)
        assert everything == (None,) * 10
    with pytest.raises(SpecError, match=message):
        await graded(task_of(), WRITTEN, ROWS, breaks_at({2, 4, 6}) if broken else None)


async def test_a_scoring_model_that_is_down_is_no_fault_of_a_row() -> None:
    async def score(generated: str, example: Example) -> float:
        if example == ROWS[0]:
            raise BackendUnavailable("down")
        await asyncio.sleep(0.01)
        return completed.append(example) or 0.0

    completed = list[Example]()
    with pytest.raises(BackendUnavailable, match="down"):
        await graded(task_of(), WRITTEN, ROWS, score)
    assert completed == list(ROWS[1:8])  # Pending calls complete, and no further call starts.


SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "enum": ["x", "z"]},
        "n": {"type": "array", "items": {"type": ["integer", "null"]}},
    },
    "required": ["a"],
    "additionalProperties": False,
}


NULLABLE = {
    "type": "object",
    "properties": {
        "o": {"type": ["object", "null"], "required": ["b"]},
        "l": {"type": ["array", "null"], "items": {"type": "string"}},
    },
}


def value_of(name: str, generated: str, answer: object, **options: Any) -> Score:
    score = built_in_score(task_of({name: options}))
    found = score and score(generated, {"answer": answer})
    assert isinstance(found, (float, Score))
    return found if isinstance(found, Score) else Score(found)


@pytest.mark.parametrize(
    ("name", "generated", "answer", "options", "value"),
    [
        ("exact_match", " The  LAMP\n", ["a lamp", "the lamp"], {}, 1.0),
        ("exact_match", "the lamp.", "the lamp", {}, 0.0),
        ("token_f1", "cafe\u0301", "caf\u00e9", {}, 1.0),
        ("contains", "A wet lamp", ["LAMP", "rain"], {}, 0.5),
        ("number", "3 + 4 makes 1,234.50", 1234.5, {}, 1.0),
        ("number", "so it is -2", "#### 2", {}, 0.0),
        ("number", "so it is 2.01", "2", {"tolerance": 0.011}, 1.0),
        ("number", "none", "2", {}, 0.0),
        ("token_f1", "the cat sat", "a cat sat down", {}, 0.8),
        ("rouge_l", "police killed the gunman", "police kill the gunman", {}, 0.75),
        ("json_fields", '```json\n{"a": " X ", "b": 2.0}\n```', {"a": "x", "b": 2}, {}, 1.0),
        ("json_fields", 'so {"a": 1, "c": 9}', '{"a": 1, "b": 2}', {}, 0.5),
        ("json_fields", '{"a": 1}', {"a": 1, "b": 2}, {"fields": ["a"]}, 1.0),
        ("json_fields", '{"a": 1', {"a": 1}, {}, 0.0),
        ("json_fields", '<think>{"a": 1}?</think>\n{"a": 2}', {"a": 2}, {}, 1.0),
        ("exact_match", "[THINK]no[/THINK] yes</s>", "yes", {}, 1.0),
        ("exact_match", "analysisIs it no?assistantfinalyes<|return|>\n", "yes", {}, 1.0),
        ("exact_match", "no<|channel|>final <|constrain|>json<|message|>yes", "yes", {}, 1.0),
        ("contains", "<|channel|>analysis<|message|>yes", "yes", {}, 0.0),
        ("contains", "<think>a lamp or rain", "lamp", {}, 0.0),
        ("json_fields", '{"a": 1, "b": true}', {"a": True, "b": True}, {}, 0.5),
        ("json_fields", '{"a": "x", "n": [1]}', {"a": "X"}, {"schema": SCHEMA}, 1.0),
        ("json_fields", '{"a": "y"}', {"a": "y"}, {"schema": SCHEMA}, 0.0),
        ("json_fields", '{"n": [1]}', {"n": [1]}, {"schema": SCHEMA}, 0.0),
        ("json_fields", '{"a": "x", "n": [true]}', {"a": "x"}, {"schema": SCHEMA}, 0.0),
        ("json_fields", '{"a": "x", "b": 1}', {"a": "x"}, {"schema": SCHEMA}, 0.0),
        ("json_fields", '{"o": null}', {"o": None}, {"schema": NULLABLE}, 1.0),
        ("json_fields", '{"o": {"c": 1}}', {"o": {"c": 1}}, {"schema": NULLABLE}, 0.0),
        ("json_fields", '{"l": null, "o": {"b": 1}}', {"l": None}, {"schema": NULLABLE}, 1.0),
        ("regex", "on 2024-05-01", "", {"pattern": r"\d{4}-\d\d"}, 1.0),
        ("regex", "a" * 50_000 + "!", "", {"pattern": "(a+)+$"}, 0.0),  # hours with `re`
    ],
)
def test_ready_scores(
    name: str, generated: str, answer: object, options: Any, value: float
) -> None:
    found = value_of(name, generated, answer, **options)
    assert found.value == pytest.approx(value)


def test_the_reason_names_each_wrong_field() -> None:
    said = value_of("json_fields", '{"a": 1, "b": 3}', {"a": 1, "b": 2, "c": "x"}).feedback
    assert said == "b: expected 2, answered 3; c: expected 'x', is missing"


words = st.lists(st.sampled_from(["a", "b", "c", "dog"]), max_size=12)


@given(words, words)
def test_rouge_l_is_the_longest_common_subsequence(first: list[str], second: list[str]) -> None:
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, one in enumerate(first):
        for j, other in enumerate(second):
            table[i + 1][j + 1] = (
                table[i][j] + 1 if one == other else max(table[i][j + 1], table[i + 1][j])
            )
    total = len(first) + len(second)
    expected = 2 * table[-1][-1] / total if total else 1.0
    assert value_of("rouge_l", " ".join(first), " ".join(second)).value == pytest.approx(expected)


@given(st.text(max_size=30), st.text(max_size=30))
def test_every_ready_score_is_in_range_and_best_for_its_own_reference(
    generated: str, reference: str
) -> None:
    for name in ("exact_match", "contains", "token_f1", "rouge_l"):
        assert 0.0 <= value_of(name, generated, reference).value <= 1.0
        assert value_of(name, reference, reference).value == 1.0


@pytest.mark.parametrize(
    ("score", "message"),
    [
        ({"number": {"tolerance": -1}}, "task.score.number.tolerance: .*greater than or equal"),
        ({"number": {"near": 1}}, "task.score.number.near: Unexpected keyword"),
        ({"regex": {}}, "task.score.regex.pattern: Missing required"),
        ({"regex": {"pattern": "("}}, "task.score.regex: pattern: unclosed group"),
        ({"rouge_l": {"n": 2}}, "task.score.rouge_l: .*unexpected keyword argument 'n'"),
        ({"json_fields": {"schema": {"type": "list"}}}, "json_fields: .*schema: 'list'; the known"),
        ({"json_fields": {"schema": {"enum": []}}}, "json_fields: .*schema: an enum is empty"),
        ({"bleu": {}}, "task.score: 'bleu' is not one of exact_match, contains, number"),
        ("bleu", "'bleu' must be package.module:object or one of exact_match, contains, number"),
    ],
)
def test_a_wrong_option_is_told_before_any_query(score: object, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load_score(task_of(score))


def test_a_run_names_a_ready_score_and_its_column() -> None:
    for name in SCORES:
        options = {"pattern": "7"} if name == "regex" else {}
        assert load_score(task_of({name: options})) is not None
        answer = '{"a": 7}' if name == "json_fields" else "7"
        assert value_of(name, answer, answer, **options).value == 1.0
    assert load_score(task_of("exact_match")) is not None


def test_a_backend_without_schemas_is_refused_before_any_query() -> None:
    task = task_of({"json_fields": {"schema": SCHEMA}})
    with pytest.raises(SpecError, match="cannot enforce a JSON schema: use kind llama_cpp"):
        query_for(task, "", [{"text": "a"}], backend=ScriptedBackend(write=lambda *_: ""))


# TP 3, TN 4, FP 2, FN 1.
PREDICTIONS = [1, 1, 1, 0, 0, 0, 0, 1, 1, 0]
TARGETS = [1, 1, 1, 0, 0, 0, 0, 0, 0, 1]


def test_by_hand() -> None:
    assert accuracy(PREDICTIONS, TARGETS) == 7 / 10
    assert f1(PREDICTIONS, TARGETS) == 6 / (6 + 2 + 1)
    assert f1([0, 0], [0, 0]) == 0.0
    wrong = [1 - target for target in TARGETS]
    assert [evaluate(name, TARGETS, TARGETS) for name in METRICS] == [1.0, 1.0, 1.0]
    assert [evaluate(name, wrong, TARGETS) for name in METRICS] == [0.0, 0.0, -1.0]
    assert [evaluate(name, [], []) for name in METRICS] == [0.0, 0.0, 0.0]


def test_bad_calls() -> None:
    with pytest.raises(ValueError, match="no metric 'auc'; metrics: accuracy, f1, matthews"):
        evaluate("auc", [0], [0])
    for name in METRICS:
        with pytest.raises(ValueError, match=r"shorter|longer"):
            evaluate(name, [0], [0, 1])


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1))
def test_binary_matthews_is_the_textbook_form(pairs: list[tuple[int, int]]) -> None:
    count = {cell: pairs.count(cell) for cell in ((0, 0), (0, 1), (1, 0), (1, 1))}
    tn, fn, fp, tp = count[0, 0], count[0, 1], count[1, 0], count[1, 1]
    below = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    expected = (tp * tn - fp * fn) / below if below else 0.0
    assert matthews([p for p, _ in pairs], [t for _, t in pairs]) == pytest.approx(expected)


@pytest.mark.filterwarnings("ignore:A single label was found")
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=2))
def test_against_sklearn(pairs: list[tuple[int, int]]) -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    predictions, targets = [p for p, _ in pairs], [t for _, t in pairs]
    for own, theirs in ((accuracy, sklearn.accuracy_score), (matthews, sklearn.matthews_corrcoef)):
        assert own(predictions, targets) == pytest.approx(theirs(targets, predictions))
    positive = ([t == 1 for t in targets], [p == 1 for p in predictions])
    expected = sklearn.f1_score(*positive, zero_division=0.0)
    assert f1(predictions, targets) == pytest.approx(expected)
