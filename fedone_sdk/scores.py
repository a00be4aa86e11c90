"""Scores of generated texts: the built-in score functions, and the call of a score function."""

from __future__ import annotations

import asyncio
import json
import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from copy import deepcopy
from functools import partial, reduce
from operator import or_
from threading import Thread
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, JsonValue, TypeAdapter, ValidationError, validate_call
from pydantic_core import SchemaError
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from fedone_sdk.clock import answer_of, is_async
from fedone_sdk.errors import BackendError, BackendRefused, BudgetError, ProblemError, SpecError
from fedone_sdk.task import Example, LogProbs, Score, ScoreFunction, TaskSpec, in_unicode

__all__ = [
    "SCORES",
    "contains",
    "exact_match",
    "json_fields",
    "number",
    "regex",
    "rouge_l",
    "token_f1",
]

SCORE_TIMEOUT_S = 60.0
"""Time limit of one call of a score function, seconds."""

_ROUNDING = 1e-6
"""A score may be outside [0, 1] by this much, the rounding error of a mean in float32."""

AT_ONCE = 8
"""Number of concurrent calls of a score function for the answers to one prompt."""


async def graded(
    task: TaskSpec,
    rows: Sequence[LogProbs | str | None],
    examples: Sequence[Example],
    score: ScoreFunction | None,
    *,
    most_failed: float = 0.2,
) -> tuple[LogProbs | Score | None, ...]:
    """Return model answers, with scores in place of generated texts.

    A score function without ``async`` runs in threads. A score is None if the function
    raised an exception, took longer than `SCORE_TIMEOUT_S`, or returned a value outside [0, 1].

    Args:
        task: The task; its `label_field` is the column of the expected answer.
        rows: Answers, one per example; None if the model failed.
        examples: The examples.
        score: The score function, for loss ``score``.
        most_failed: Maximum share of texts whose score may be None.

    Raises:
        SpecError: The function is missing, or failed on a larger share of texts than `most_failed`.
        BackendError: The model that the function calls, such as a judge, is unavailable.
        BudgetError: The budget of that model is exhausted.
    """
    limit = asyncio.Semaphore(AT_ONCE)
    errors: list[Exception] = []

    async def score_or_error(text: str, example: Example) -> Score | SpecError | None:
        async with limit:
            if errors:
                return None
            try:
                return await _score(task, score, text, example)
            except SpecError as exc:
                return exc
            except Exception as exc:
                # No further call starts; pending calls complete, because they are paid.
                errors.append(exc)
                return None

    texts = {index: row for index, row in enumerate(rows) if isinstance(row, str)}
    if not texts:
        return tuple(row for row in rows if not isinstance(row, str))
    calls = [score_or_error(text, examples[index]) for index, text in texts.items()]
    scores = dict(zip(texts, await asyncio.gather(*calls), strict=True))
    if errors:
        raise errors[0]
    failures = [error for error in scores.values() if isinstance(error, SpecError)]
    if len(failures) > most_failed * len(texts):
        raise failures[0]
    answers = [scores.get(index, row) for index, row in enumerate(rows)]
    return tuple(None if isinstance(a, (SpecError, str)) else a for a in answers)


async def _score(task: TaskSpec, score: ScoreFunction | None, text: str, example: Example) -> Score:
    if score is None:
        raise SpecError("task.score: loss score needs a score function")
    try:
        async with asyncio.timeout(SCORE_TIMEOUT_S):
            # Async functions are called here, other functions in a thread.
            call = partial(score, text, deepcopy(dict(example)))  # It may change its example.
            result = await answer_of(call() if is_async(score) else await _in_thread(call))
        result = result if isinstance(result, Score) else Score(float(result))
        value, feedback = float(result.value), in_unicode(str(result.feedback))
    except Exception as exc:
        only_this_text = type(exc) in (BackendError, BackendRefused)
        if isinstance(exc, (BackendError, BudgetError, ProblemError)) and not only_this_text:
            raise  # The model that the function calls is unavailable, or its budget is exhausted.
        late = f"no result in {SCORE_TIMEOUT_S:g} s" if isinstance(exc, TimeoutError) else ""
        reason = f"{type(exc).__name__}: {str(exc) or late}"
        raise SpecError(f"task.score: the score function failed with {reason}") from exc
    if not -_ROUNDING <= value <= 1 + _ROUNDING:  # Also refuses NaN.
        raise SpecError(f"task.score: the score function returned {value!r}; it must be in [0, 1]")
    value = min(max(value, 0.0), 1.0)
    expected = example.get(task.label_field)
    expectation = "" if expected is None else f"expected {expected!r}, "
    more = f": {feedback}" if feedback else ""
    return Score(value, f"{expectation}answered {text!r}, score {value:.2f} of 1{more}")


async def _in_thread(call: Callable[[], Any]) -> Any:
    """Return the result of a call in a thread of its own; the process may end before the call."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # From here on, a cancelled caller cannot cancel it.

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as exc:
            # A future cannot raise StopIteration, and SystemExit would end the process.
            is_usual = isinstance(exc, Exception) and not isinstance(exc, StopIteration)
            future.set_exception(exc if is_usual else RuntimeError(repr(exc)))

    Thread(target=copy_context().run, args=(work,), name="fedone-score", daemon=True).start()
    return await asyncio.wrap_future(future)


def _references(example: Example, column: str) -> list[str]:
    """Return the expected texts of an example: the column has one text, or a list of texts."""
    value = example.get(column)
    texts = value if isinstance(value, (list, tuple)) else [value]
    if not texts or any(text is None or isinstance(text, (Mapping, list)) for text in texts):
        raise ValueError(f"column {column!r} must have the expected text, or a list of them")
    return [str(text) for text in texts]


_REASONING = re.compile(
    r"(?is)^.*(?:</think(?:ing)?>|\[/think\]|<\|channel\|>final.{0,40}?<\|message\|>)"
    r"|^\s*analysis.*assistantfinal|^\s*(?:<think|\[think\]|<\|channel\|>analysis).*"
    r"|(?:<\|\w{1,30}\|>|</s>)\s*$"
)


def answer_in(text: str) -> str:
    """Return a generated text without the reasoning at its beginning and the end token."""
    return _REASONING.sub("", text)


def _folded(text: str) -> str:
    return unicodedata.normalize("NFC", text).casefold()


def _plain(text: str) -> str:
    return " ".join(_folded(text).split())


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", _folded(text))


def exact_match(column: str) -> ScoreFunction:
    """Score 1 if the answer equals an expected text, apart from case and white space."""

    def score(generated: str, example: Example) -> float:
        return float(_plain(answer_in(generated)) in map(_plain, _references(example, column)))

    return score


def contains(column: str) -> ScoreFunction:
    """Score the share of the expected texts that the answer contains; ignores case."""

    def score(generated: str, example: Example) -> Score:
        expected, text = _references(example, column), _plain(answer_in(generated))
        missing = [part for part in expected if _plain(part) not in text]
        feedback = f"does not contain {', '.join(map(repr, missing))}" if missing else ""
        return Score(1 - len(missing) / len(expected), feedback)

    return score


_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|[-+]?\.\d+")


def _last_number(text: str) -> float | None:
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


@validate_call
def number(column: str, tolerance: Annotated[float, Field(ge=0)] = 0.0) -> ScoreFunction:
    """Score 1 if the answer's last number differs from the expected one by at most `tolerance`."""

    def score(generated: str, example: Example) -> Score:
        numbers = [_last_number(text) for text in _references(example, column)]
        expected = [number for number in numbers if number is not None]
        if not expected:
            raise ValueError(f"column {column!r} has no number")
        answer = _last_number(answer_in(generated))
        if answer is None:
            return Score(0.0, "the answer has no number")
        is_close = any(math.isclose(answer, x, rel_tol=1e-9, abs_tol=tolerance) for x in expected)
        return Score(float(is_close), f"the number is {answer:g}")

    return score


def token_f1(column: str) -> ScoreFunction:
    """Score the F1 of the answer's words; ignores their order and articles (SQuAD).

    Source: Rajpurkar et al. 2016, "SQuAD: 100,000+ Questions for Machine Comprehension of Text".
    """

    def bag(text: str) -> Counter[str]:
        return Counter(word for word in _words(text) if word not in ("a", "an", "the"))

    def f1(generated: str, reference: str) -> float:
        answer, expected = bag(generated), bag(reference)
        total = answer.total() + expected.total()
        return 2 * (answer & expected).total() / total if total else 1.0

    return _best(column, f1)


def rouge_l(column: str) -> ScoreFunction:
    """Score the F1 of the longest common subsequence of words.

    Source: Lin 2004, "ROUGE: A Package for Automatic Evaluation of Summaries".
    """

    def f1(generated: str, reference: str) -> float:
        answer, expected = _words(generated), _words(reference)
        total = len(answer) + len(expected)
        return 2 * _common(answer, expected) / total if total else 1.0

    return _best(column, f1)


def _best(column: str, measure: Callable[[str, str], float]) -> ScoreFunction:
    return lambda generated, example: max(
        measure(answer_in(generated), expected) for expected in _references(example, column)
    )


def _common(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the length of the longest common subsequence, by bit operations (Hyyro 2004)."""
    places: dict[str, int] = defaultdict(int)
    for index, word in enumerate(first):
        places[word] |= 1 << index
    mask = (1 << len(first)) - 1
    row = mask
    for word in second:
        matched = row & places.get(word, 0)
        row = ((row + matched) | (row - matched)) & mask
    return len(first) - row.bit_count()


@validate_call
def json_fields(
    column: str, fields: tuple[str, ...] = (), schema: Mapping[str, JsonValue] | None = None
) -> ScoreFunction:
    """Score the share of fields of a JSON object that have their expected values.

    Args:
        column: The column with the expected object, as JSON or a mapping.
        fields: The fields to compare; if empty, all fields of the expected object. Case and white
            space of texts are ignored; numbers are compared by value.
        schema: A JSON Schema that constrains the model's output (`Query.schema`). An object that
            violates the schema's `type`, `enum`, `required`, `properties`, `items` or
            ``additionalProperties: false`` scores 0. Other keywords are not checked.
    """
    form: TypeAdapter[Any] | None = None
    if schema is not None:
        try:
            form = TypeAdapter(_form(schema))
        except (KeyError, TypeError, AttributeError) as exc:
            raise ValueError(f"schema: {exc}; the known types are {', '.join(_TYPES)}") from None

    def score(generated: str, example: Example) -> Score:
        expected = example.get(column)
        if isinstance(expected, str):
            with suppress(ValueError):
                expected = json.loads(expected)
        if not isinstance(expected, Mapping):
            raise ValueError(f"column {column!r} must have the expected JSON object")
        answer = object_in(generated)
        if answer is None:
            return Score(0.0, "the answer has no JSON object")
        try:
            if form is not None:
                form.validate_python(answer)
        except ValidationError as exc:
            problem = exc.errors()[0]
            return Score(0.0, f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}")
        names, lines = fields or tuple(expected), []
        for name in names:
            if _value(answer.get(name)) != _value(expected.get(name)):
                actual = f"answered {answer[name]!r}" if name in answer else "is missing"
                lines.append(f"{name}: expected {expected.get(name)!r}, {actual}")
        return Score(1 - len(lines) / len(names) if names else 1.0, "; ".join(lines))

    return score


_TYPES: Mapping[str, Any] = {
    "object": dict[str, Any],
    "array": list[Any],
    "string": str,
    "number": float,
    "integer": int,
    "boolean": bool,
    "null": None,
}


def _form(schema: Mapping[str, Any]) -> Any:
    """Return a type that checks a JSON Schema, as far as `json_fields` supports it."""
    if "enum" in schema:
        if not schema["enum"]:
            raise TypeError("an enum is empty")
        return Literal[tuple(schema["enum"])]
    implied = "array" if "items" in schema else "object" if "properties" in schema else []
    names = schema.get("type", implied)
    types = [_type_of(name, schema) for name in ([names] if isinstance(names, str) else names)]
    return reduce(or_, types) if types else Any


def _type_of(name: str, schema: Mapping[str, Any]) -> Any:
    if name == "array" and "items" in schema:
        return list[_form(schema["items"])]  # type: ignore[misc]
    if name != "object":
        return _TYPES[name]
    required, properties = schema.get("required", ()), schema.get("properties", {})
    fields = dict.fromkeys(required, Any) | {
        key: _form(inner) if key in required else NotRequired[_form(inner)]
        for key, inner in properties.items()
    }
    is_closed = schema.get("additionalProperties") is False
    make: Any = TypedDict  # Type checkers accept only literal fields.
    form = make("form", fields)
    form.__pydantic_config__ = ConfigDict(strict=True, extra="forbid" if is_closed else "allow")
    return form


def object_in(text: str, *names: str) -> Mapping[str, Any] | None:
    """Return a text's first JSON object with these names; other text may be around it."""
    text, decoder = answer_in(text), json.JSONDecoder(strict=False)
    for brace in re.finditer(r"\{", text[:20_000]):
        try:
            value: Mapping[str, Any] = decoder.raw_decode(text, brace.start())[0]
        except (ValueError, RecursionError):
            continue
        if value.keys() >= {*names}:
            return value
    return None


def _value(value: object) -> object:
    if isinstance(value, list):
        return [_value(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _value(item) for name, item in value.items()}
    if isinstance(value, bool):  # In Python, True equals 1.
        return (value,)
    return _plain(value) if isinstance(value, str) else value


@validate_call
def regex(column: str, pattern: str) -> ScoreFunction:
    """Score 1 if a regular expression matches a part of the answer; `column` is not used.

    The expression has the syntax of Rust's regex crate, whose search takes linear time.
    """
    # A server chooses the pattern. In Python's `re` it could block a device for hours.
    try:
        text: TypeAdapter[str] = TypeAdapter(Annotated[str, Field(pattern=pattern)])
    except SchemaError as exc:  # Its message ends with "error: " or "Error: ", and the cause.
        raise ValueError(f"pattern: {str(exc).rpartition('rror: ')[2]}") from None

    def score(generated: str, example: Example) -> Score:
        matches = True
        try:
            text.validate_python(generated)
        except ValidationError:
            matches = False
        return Score(float(matches), "" if matches else f"does not match {pattern!r}")

    return score


SCORES: dict[str, Callable[..., ScoreFunction]] = {
    make.__name__: make
    for make in (exact_match, contains, number, token_f1, rouge_l, json_fields, regex)
}
"""Built-in scores by name. Each takes the column of the expected answer, and its options."""


def built_in_score(task: TaskSpec) -> ScoreFunction | None:
    """Return the built-in score that a task names; None for other scores.

    Raises:
        SpecError: An option is unknown, or its value is invalid.
    """
    named = task.score if isinstance(task.score, dict) else {task.score or "": {}}
    ((name, options),) = named.items()
    if name not in SCORES:
        return None
    try:
        return SCORES[name](task.label_field, **options)
    except ValidationError as exc:
        problem = exc.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise SpecError(f"task.score.{name}.{where}: {problem['msg']}") from None
    except (TypeError, ValueError) as exc:
        raise SpecError(f"task.score.{name}: {exc}") from None
