"""Scores of generated texts: ready functions, and the calls of a function for many texts."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, JsonValue, TypeAdapter, ValidationError, validate_call
from typing_extensions import TypedDict  # pydantic takes that of typing from Python 3.12 on

from fedone_sdk.clock import answer_of
from fedone_sdk.errors import BackendError, BackendRefused, BudgetError, ProblemError, SpecError
from fedone_sdk.task import Example, LogProbs, Score, ScoreFunction, TaskSpec, in_unicode

__all__ = [
    "SCORES",
    "contains",
    "exact_match",
    "graded",
    "json_fields",
    "number",
    "object_in",
    "ready_score",
    "regex",
    "rouge_l",
    "token_f1",
]

SCORE_TIMEOUT_S = 60.0
"""Time limit of one call of a score function, seconds."""

AT_ONCE = 8
"""Number of concurrent calls of a score function for the answers to one prompt."""

_MOST_FAILED = 0.2
"""Share of texts without a score from which the function counts as broken."""


async def graded(
    task: TaskSpec,
    rows: Sequence[LogProbs | str | None],
    examples: Sequence[Example],
    score: ScoreFunction | None,
    *,
    most_failed: float = _MOST_FAILED,
) -> tuple[LogProbs | Score | None, ...]:
    """Return model answers with the score of each text in its place.

    A synchronous function runs in threads. Its feedback follows what was expected and answered.

    Args:
        task: The task, with the column of the expected answer.
        rows: Answers, one per example; None if the model failed.
        examples: The examples.
        score: The function, for loss ``score``.
        most_failed: Largest share of texts that may fail: the function raised an exception, took
            longer than `SCORE_TIMEOUT_S`, or returned a value outside [0, 1]. These become None.

    Raises:
        SpecError: The function is missing, or failed on more texts; the cause is its exception.
        BackendError: The function's model is unavailable.
        BudgetError: A cap is reached.
    """
    free = asyncio.Semaphore(AT_ONCE)

    async def one(written: str, example: Example) -> Score | SpecError:
        async with free:
            try:
                return await _called(task, score, written, example)
            except SpecError as exc:
                return exc

    texts = {index: row for index, row in enumerate(rows) if isinstance(row, str)}
    if not texts:
        return tuple(row for row in rows if not isinstance(row, str))
    calls = [one(text, examples[index]) for index, text in texts.items()]
    scores = dict(zip(texts, await asyncio.gather(*calls), strict=True))
    failures = [one for one in scores.values() if isinstance(one, SpecError)]
    if len(failures) > most_failed * len(texts):
        raise failures[0]
    answers = [scores.get(index, row) for index, row in enumerate(rows)]
    return tuple(None if isinstance(one, (SpecError, str)) else one for one in answers)


async def _called(
    task: TaskSpec, score: ScoreFunction | None, written: str, example: Example
) -> Score:
    if score is None:
        raise SpecError("task.score: loss score needs a score function")
    try:
        async with asyncio.timeout(SCORE_TIMEOUT_S):
            returned = await asyncio.to_thread(score, written, example)
            given = await answer_of(returned)
        given = given if isinstance(given, Score) else Score(float(given))
        value, said = float(given.value), in_unicode(str(given.feedback))
    except Exception as exc:
        refused = type(exc) in (BackendError, BackendRefused)  # This text only.
        if isinstance(exc, (BackendError, BudgetError, ProblemError)) and not refused:
            raise  # Of a model that scores.
        late = f"no result in {SCORE_TIMEOUT_S:g} s" if isinstance(exc, TimeoutError) else ""
        reason = f"{type(exc).__name__}: {str(exc) or late}"
        raise SpecError(f"task.score: the score function failed with {reason}") from exc
    if not 0.0 <= value <= 1.0:  # Also refuses NaN.
        raise SpecError(f"task.score: the score function returned {value!r}; it must be in [0, 1]")
    expected = example.get(task.label_field)
    wanted = "" if expected is None else f"expected {expected!r}, "
    more = f": {said}" if said else ""
    return Score(value, f"{wanted}answered {written!r}, score {value:.2f} of 1{more}")


def _references(example: Example, column: str) -> list[str]:
    """Return the expected texts of an example: one, or any of several."""
    given = example[column]
    return [str(one) for one in given] if isinstance(given, (list, tuple)) else [str(given)]


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def exact_match(column: str) -> ScoreFunction:
    """Score 1 for an expected text, apart from case and white space."""

    def score(generated: str, example: Example) -> float:
        return float(_plain(generated) in map(_plain, _references(example, column)))

    return score


def contains(column: str) -> ScoreFunction:
    """Score the share of the expected texts that the answer contains, apart from case."""

    def score(generated: str, example: Example) -> Score:
        wanted, text = _references(example, column), _plain(generated)
        missing = [one for one in wanted if _plain(one) not in text]
        said = f"does not contain {', '.join(map(repr, missing))}" if missing else ""
        return Score(1 - len(missing) / len(wanted), said)

    return score


_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|[-+]?\.\d+")


def _last_number(text: str) -> float | None:
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


@validate_call
def number(column: str, tolerance: Annotated[float, Field(ge=0)] = 0.0) -> ScoreFunction:
    """Score 1 if the answer's last number differs from the expected one by at most `tolerance`."""

    def score(generated: str, example: Example) -> Score:
        found = _last_number(generated)
        if found is None:
            return Score(0.0, "the answer has no number")
        wanted = [_last_number(one) for one in _references(example, column)]
        known = [one for one in wanted if one is not None]
        if not known:
            raise ValueError(f"column {column!r} has no number")
        near = any(math.isclose(found, one, rel_tol=1e-9, abs_tol=tolerance) for one in known)
        return Score(float(near), f"the number is {found:g}")

    return score


def token_f1(column: str) -> ScoreFunction:
    """Score the F1 of the answer's words, without order and articles (SQuAD).

    Source: Rajpurkar et al. 2016, "SQuAD: 100,000+ Questions for Machine Comprehension of Text".
    """

    def bag(text: str) -> Counter[str]:
        return Counter(word for word in _words(text) if word not in ("a", "an", "the"))

    def f1(generated: str, reference: str) -> float:
        found, wanted = bag(generated), bag(reference)
        total = found.total() + wanted.total()
        return 2 * (found & wanted).total() / total if total else 1.0

    return _best(column, f1)


def rouge_l(column: str) -> ScoreFunction:
    """Score the F1 of the longest common subsequence of words.

    Source: Lin 2004, "ROUGE: A Package for Automatic Evaluation of Summaries".
    """

    def f1(generated: str, reference: str) -> float:
        found, wanted = _words(generated), _words(reference)
        total = len(found) + len(wanted)
        return 2 * _common(found, wanted) / total if total else 1.0

    return _best(column, f1)


def _best(column: str, measure: Callable[[str, str], float]) -> ScoreFunction:
    return lambda generated, example: max(
        measure(generated, one) for one in _references(example, column)
    )


def _common(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the length of the longest common subsequence, by bits (Hyyro 2004)."""
    places: dict[str, int] = defaultdict(int)
    for index, word in enumerate(first):
        places[word] |= 1 << index
    whole = (1 << len(first)) - 1
    row = whole
    for word in second:
        matched = row & places.get(word, 0)
        row = ((row + matched) | (row - matched)) & whole
    return len(first) - row.bit_count()


@validate_call
def json_fields(
    column: str, fields: tuple[str, ...] = (), schema: Mapping[str, JsonValue] | None = None
) -> ScoreFunction:
    """Score the share of fields of a JSON object that have their expected values.

    Args:
        column: The column with the expected object, as JSON or a mapping.
        fields: The fields to compare; empty for all of the expected object. Texts are compared
            apart from case and white space, numbers by value.
        schema: JSON Schema of the object. The model's engine is held to it (`Query.schema`); an
            object that breaks its `type`, `enum`, `required`, `properties`, `items` or
            ``additionalProperties: false`` scores 0. Other keywords are the engine's alone.
    """
    form: TypeAdapter[Any] | None = None
    if schema is not None:
        try:
            form = TypeAdapter(_form(schema))
        except (KeyError, TypeError, AttributeError) as exc:
            raise ValueError(f"schema: {exc}; its types are {', '.join(_TYPES)}") from None

    def score(generated: str, example: Example) -> Score:
        wanted = example[column]
        wanted = wanted if isinstance(wanted, Mapping) else json.loads(str(wanted))
        found = object_in(generated)
        if found is None:
            return Score(0.0, "the answer has no JSON object")
        try:
            if form is not None:
                form.validate_python(found)
        except ValidationError as exc:
            problem = exc.errors()[0]
            return Score(0.0, f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}")
        names = fields or tuple(wanted)
        wrong = [name for name in names if _value(found.get(name)) != _value(wanted.get(name))]
        said = [
            f"{name}: expected {wanted.get(name)!r}, answered {found.get(name)!r}"
            if name in found
            else f"{name}: expected {wanted.get(name)!r}, is missing"
            for name in wrong
        ]
        return Score(1 - len(wrong) / len(names) if names else 1.0, "; ".join(said))

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
    """Return the type of the values that fit a JSON Schema, as far as `json_fields` checks it."""
    if "enum" in schema:
        if not schema["enum"]:
            raise TypeError("an enum is empty")
        return Literal[tuple(schema["enum"])]
    implied = "array" if "items" in schema else "object" if "properties" in schema else []
    kinds = schema.get("type", implied)
    found = [_of_kind(kind, schema) for kind in ([kinds] if isinstance(kinds, str) else kinds)]
    return reduce(or_, found) if found else Any


def _of_kind(kind: str, schema: Mapping[str, Any]) -> Any:
    if kind == "array" and "items" in schema:
        return list[_form(schema["items"])]  # type: ignore[misc]
    if kind != "object":
        return _TYPES[kind]
    needed, named = schema.get("required", ()), schema.get("properties", {})
    fields = dict.fromkeys(needed, Any) | {
        name: _form(of) if name in needed else NotRequired[_form(of)] for name, of in named.items()
    }
    closed = schema.get("additionalProperties") is False
    make: Any = TypedDict  # A type checker takes a literal only.
    form = make("form", fields)
    form.__pydantic_config__ = ConfigDict(strict=True, extra="forbid" if closed else "allow")
    return form


def object_in(text: str) -> Mapping[str, Any] | None:
    """Return the first JSON object in a text, which may be in a fence or between sentences."""
    decoder = json.JSONDecoder(strict=False)
    for start in (found.start() for found in re.finditer(r"\{", text[:20_000])):
        try:
            found = decoder.raw_decode(text, start)[0]
        except (ValueError, RecursionError):
            continue
        return found if isinstance(found, Mapping) else None
    return None


def _value(value: object) -> object:
    if isinstance(value, list):
        return [_value(one) for one in value]
    if isinstance(value, Mapping):
        return {name: _value(one) for name, one in value.items()}
    return _plain(value) if isinstance(value, str) else value


@validate_call
def regex(column: str, pattern: str) -> ScoreFunction:
    """Score 1 if a regular expression is found in the answer; the column is not used."""
    try:
        compiled = re.compile(pattern)
    except re.error as exc:
        raise ValueError(f"pattern: {exc}") from None

    def score(generated: str, example: Example) -> Score:
        found = compiled.search(generated) is not None
        return Score(float(found), "" if found else f"does not match {pattern!r}")

    return score


SCORES: dict[str, Callable[..., ScoreFunction]] = {
    make.__name__: make
    for make in (exact_match, contains, number, token_f1, rouge_l, json_fields, regex)
}
"""Ready scores by name; each takes the column of the expected answer, and options."""


def ready_score(name: str, column: str, options: Mapping[str, Any]) -> ScoreFunction:
    """Return a ready score.

    Raises:
        SpecError: The name or an option is not known, or a value is not allowed.
    """
    if name not in SCORES:
        raise SpecError(f"task.score: {name!r} is not one of {', '.join(SCORES)}")
    try:
        return SCORES[name](column, **options)
    except ValidationError as exc:
        problem = exc.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise SpecError(f"task.score.{name}.{where}: {problem['msg']}") from None
    except (TypeError, ValueError) as exc:
        raise SpecError(f"task.score.{name}: {exc}") from None
