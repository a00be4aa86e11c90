"""The task: its templates, labels and loss, and the rendering of examples as model inputs."""

from __future__ import annotations

import operator
import re
import string
import struct
import unicodedata
import zlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field, JsonValue

from fedone_sdk._values import Frozen
from fedone_sdk.errors import DataError, SpecError
from fedone_sdk.metrics import METRICS

__all__ = [
    "Bias",
    "ChatSpec",
    "Description",
    "Example",
    "Filling",
    "LOG_ZERO",
    "LogProbs",
    "Loss",
    "MAX_BIAS",
    "Part",
    "Rendered",
    "Role",
    "Score",
    "ScoreFunction",
    "TaskSpec",
    "TextPrompt",
    "form_of",
    "render",
    "target_of",
]

Example = Mapping[str, Any]
"""One labelled row: the text fields that the template names, and the label."""

LogProbs = Sequence[float]
"""Log-probabilities in nats, one per label word, in the task's label order."""

Bias = tuple[float, ...]
"""Offsets of the label words' log-probabilities, nats, in the task's label order."""

MAX_BIAS = 100.0
"""Maximum absolute value of a label's bias, nats."""

Loss = Literal["cross_entropy", "brier", "hinge", "zero_one", "nll", "score"]

LOG_ZERO = -1000.0
"""Log-probability of a label that the model did not write, in place of the logarithm of 0."""


@dataclass(frozen=True, slots=True)
class Score:
    """The score of a generated text.

    Attributes:
        value: From 0 (useless) to 1 (perfect).
        feedback: What a better answer needs, for a model that improves the prompt.
    """

    value: float
    feedback: str = ""


ScoreFunction = Callable[[str, Example], float | Score | Awaitable[float | Score]]
"""A user's ``score(generated, example)``; a returned number is the `Score.value`."""

Role = Literal["system", "user", "assistant"]


class Part(NamedTuple):
    """A part of a rendered input.

    Only ``field`` parts may be truncated to fit the model. In a chat, each message begins with a
    ``role`` part, whose text is a `Role`. The last message is the ``assistant``'s, which the model
    continues. Only backends use ``special`` parts, the special tokens of a chat template.
    """

    kind: Literal["text", "prompt", "field", "mask", "role", "special"]
    text: str


Rendered = tuple[Part, ...]
"""One model input."""


class Filling(NamedTuple):
    """A prompt for a task with slots. If `labels` is empty, the task's label words are used."""

    texts: tuple[str, ...]
    labels: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The texts of all slots in order."""
        return "".join(self.texts)


TextPrompt = str | Filling
"""A text prompt: one text, or the contents of its slots."""

_FUNCTION = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
_NAMED = r"^([A-Za-z_][\w.]*:[A-Za-z_]\w*|[A-Za-z_][\w-]*)$"
"""Matches the name of a function or of an entry point."""
_Named = Annotated[str, Field(pattern=_NAMED, max_length=200)]
_WithOptions = Annotated[dict[_Named, dict[str, JsonValue]], Field(min_length=1, max_length=1)]


def _known_metric(name: str) -> str:
    if name not in (*METRICS, "loss") and not re.fullmatch(_FUNCTION, name):
        known = ", ".join(METRICS)
        raise ValueError(f"{name!r} is not one of {known}, loss, or a package.module:function")
    return name


_WHOLE_NUMBER = re.compile(r"-?\d+\.0")
_MAX_CHARS = re.compile(r"(?:\.([1-9]\d{0,6}))?")
"""Matches the format of a template's field: its maximum length, such as ``.400`` characters."""

LabelValue = Annotated[
    str, BeforeValidator(lambda value: str(value) if isinstance(value, int) else value)
]
"""A label's value; a number or a truth value, as YAML may read it, becomes text."""


class Label(Frozen):
    """A label value and its label word."""

    value: LabelValue
    word: str


def _label_pairs(value: object) -> object:
    if not isinstance(value, list | tuple):
        return value
    try:
        labels = [Label.model_validate(label) for label in value]
    except ValueError:
        raise ValueError("must be a list of {value: VALUE, word: WORD}, or a mapping") from None
    pairs = OrderedDict((label.value, label.word) for label in labels)
    if len(pairs) < len(labels):
        raise ValueError("two labels have the same value")
    return pairs


Labels = Annotated[
    OrderedDict[LabelValue, str],
    BeforeValidator(_label_pairs, json_schema_input_type=list[Label]),
    pydantic.PlainSerializer(
        lambda labels: [Label(value=v, word=w) for v, w in labels.items()], return_type=list[Label]
    ),
]
"""The label word of each label value, in order. In JSON this is a list, because the keys of a JSON
object have no order."""

_Template = Annotated[str, Field(max_length=4000), AfterValidator(lambda text: _parsed(text))]


def _parsed(template: str) -> str:
    try:
        fields = list(string.Formatter().parse(template))
    except ValueError as exc:
        raise ValueError(f"not a template: {exc}") from None
    if any(conversion or not _MAX_CHARS.fullmatch(spec or "") for _, _, spec, conversion in fields):
        raise ValueError("a {field} may have a length, such as {text:.400}, and no other format")
    if any(not name.isidentifier() for _, name, _, _ in fields if name is not None):
        raise ValueError("every {field} must be a plain name")
    return template


def _phrase(text: str) -> str:
    if text != text.strip():
        raise ValueError("must not begin or end with white space")
    if any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in text):
        raise ValueError("must be one line of plain text")
    if "{" in text or "}" in text:
        raise ValueError("must not contain braces")
    return text


_Phrase = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_phrase)]


class Description(Frozen):
    """Words for the task in the built-in instructions.

    Attributes:
        text: Kind of example, a singular noun without an article: ``movie review``.
        aspect: What the label says about the text, a noun without an article: ``sentiment``.
        question: The question that the label answers. Null means "What is the ASPECT of the TEXT?".
    """

    text: _Phrase = "text"
    aspect: _Phrase = "label"
    question: _Phrase | None = None

    @property
    def asked(self) -> str:
        """The question, with its question mark."""
        return self.question or f"What is the {self.aspect} of the {self.text}?"


class ChatSpec(Frozen):
    """The messages of a task for an instruct model; each is a template.

    Attributes:
        system: The system message. If null or empty, the model's chat template inserts its default.
        user: The user's message.
        assistant: The beginning of the answer, which the model continues.
    """

    system: _Template | None = None
    user: _Template
    assistant: _Template | None = None


class TaskSpec(Frozen):
    """A task for a language model, as a cloze, a question, a text to continue, or a chat.

    Attributes:
        template: Text with ``{prompt}`` and the names of text columns, such as ``{sentence}``. For
            a masked model it also has one ``{mask}``; a causal model answers at the end.
            ``{sentence:.400}`` inserts the first 400 characters. Null if there is a `chat`.
        chat: Instead of a template: messages for an instruct model, rendered through its chat
            template. All messages together contain ``{prompt}`` once, and no ``{mask}``.
        slots: Names of the prompt's slots (its parts). The templates contain each name once, in
            place of ``{prompt}``. The run sets this key from its ``prompt.slots``.
        description: Words for the built-in instructions, and for models that write new ones.
        labels: The label word that stands for each label value, as ``{value: word}`` or a list of
            ``{value, word}``. A label word is one token, unless the backend allows several.
            Log-probabilities and biases have the order of the labels. Empty for generation (the
            losses ``nll`` and ``score``).
        metric: The metric of evaluation: ``accuracy``, ``f1``, ``matthews``, ``loss`` (the mean
            loss), or your own function ``package.module:function``.
            Generation has only ``loss``.
        loss: The training loss. ``cross_entropy``, ``brier`` and ``hinge`` (with margin 1) are
            computed from the label words' log-probabilities. ``zero_one`` is 1 for a wrong label;
            it suits models without log-probabilities. ``nll`` is the negative log-likelihood of
            the reference text in nats. ``score`` is 1 minus the score of the generated text.
        label_field: The column with the label or the reference text.
        max_tokens: Maximum length of a generated text for ``score``, tokens.
        score: The score function for loss ``score``: a name in `scores.SCORES`, an entry point of
            the group ``fedone.scores``, ``package.module:function``, or a name with options, such
            as ``{number: {tolerance: 0.01}}``. A device imports no function that a server names.
        bias: Added to the label words' log-probabilities before losses and predictions, one number
            per label, nats. If the model did not write a label, its `LOG_ZERO` is not changed.
    """

    # Omitted if null or empty, to keep messages short.
    template: _Template | None = Field(default=None, exclude_if=operator.not_)
    chat: ChatSpec | None = Field(default=None, exclude_if=operator.not_)
    slots: tuple[str, ...] = Field(default=(), max_length=64, exclude_if=operator.not_)
    labels: Labels = Field(default_factory=OrderedDict, max_length=64)
    metric: Annotated[str, Field(max_length=200), AfterValidator(_known_metric)] = "accuracy"
    loss: Loss = "cross_entropy"
    label_field: str = "label"
    description: Description | None = Field(default=None, exclude_if=operator.not_)
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 64
    score: _Named | _WithOptions | None = None
    bias: tuple[Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)], ...] | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _default_metric(cls, value: object) -> object:
        if isinstance(value, dict) and value.get("loss") in ("nll", "score"):
            return {"metric": "loss", **value}
        return value

    @pydantic.model_validator(mode="after")
    def _check_form(self) -> TaskSpec:
        if (self.template is None) is (self.chat is None):
            raise ValueError("needs either template or chat")
        names = self._names
        if self.slots and "prompt" in names:
            raise ValueError(f"{self._form}: must have either {{prompt}} or the names of slots")
        for name in self.slots or ("prompt",):
            if names.count(name) != 1:
                raise ValueError(f"{self._form}: needs {{{name}}} exactly once")
        if self.chat is not None and "mask" in names:
            raise ValueError("chat: takes no {mask}; a chat model answers at the end")
        if names.count("mask") > 1:
            raise ValueError("template: must contain {mask} at most once")
        if not self.fields:
            raise ValueError(f"{self._form}: needs at least one text field, such as {{text}}")
        return self

    @pydantic.model_validator(mode="after")
    def _check_labels(self) -> TaskSpec:
        if self.generates:
            if self.labels:
                raise ValueError(f"loss {self.loss} takes no labels")
            if self.metric != "loss":
                raise ValueError(f"loss {self.loss} allows only metric loss")
            if "mask" in self._names:
                raise ValueError(f"loss {self.loss} takes no {{mask}}")
        elif len(self.labels) < 2:
            raise ValueError("labels: needs at least 2")
        if self.score is not None and self.loss != "score":
            raise ValueError("score: needs loss score")
        for label, word in self.labels.items():
            if not word.strip():
                raise ValueError(f"label {label!r} has no label word")
        if len(set(self.labels.values())) < len(self.labels):
            raise ValueError("two labels share one label word")
        if self.metric in ("f1", "matthews") and len(self.labels) != 2:
            raise ValueError(f"metric {self.metric} needs exactly 2 labels")
        if self.label_field in self.fields:
            raise ValueError(f"{self._form}: must not contain the label field")
        if self.bias is not None and len(self.bias) != len(self.labels):
            if self.generates:
                raise ValueError(f"bias: loss {self.loss} has no labels")
            raise ValueError(f"bias: needs {len(self.labels)} numbers, one per label")
        return self

    def with_bias(self, bias: Sequence[float] | None) -> TaskSpec:
        """Return the task with another bias."""
        return TaskSpec.model_validate({**self.model_dump(), "bias": bias and tuple(bias)})

    def with_labels(self, labels: Mapping[str, str]) -> TaskSpec:
        """Return the task with other label words."""
        if set(labels) != set(self.labels):
            raise ValueError(f"labels: needs one word for each of {', '.join(self.labels)}")
        ordered = {label: labels[label] for label in self.labels}
        return TaskSpec.model_validate({**self.model_dump(), "labels": ordered})

    @property
    def crc32(self) -> int:
        """CRC-32 of the keys that affect a loss; clients compare it with the server's.

        It is computed over these texts in UTF-8, each followed by a zero byte: loss, label column,
        template (of a chat: system, user and assistant), slots, each label's value and word. A null
        counts as an empty text. The biases follow as little-endian float64.
        """
        messages = self.chat and (self.chat.system, self.chat.user, self.chat.assistant)
        labels = (text for pair in self.labels.items() for text in pair)
        texts = (*(messages or (self.template,)), *self.slots, *labels)
        texts = (self.loss, self.label_field, *(text or "" for text in texts))
        packed = "".join(f"{text}\0" for text in texts).encode()
        bias = self.bias or ()
        return zlib.crc32(packed + struct.pack(f"<{len(bias)}d", *bias))

    @property
    def generates(self) -> bool:
        """Whether the model continues the text instead of choosing a label."""
        return self.loss in ("nll", "score")

    @property
    def max_written(self) -> int:
        """Maximum length of a generated text, tokens; 0 without generation."""
        return self.max_tokens if self.loss == "score" else 0

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop sequences: texts with which a model begins another example; they end the generation.

        The only text is a line break plus the template's text before its first column. A chat has
        none, because chat models end their answers.
        """
        if self.loss != "score" or self.template is None:
            return ()
        before = next(text for text, name, _ in pieces_of(self.template) if name in self.fields)
        return (f"\n{before.strip()}",) if before.strip() else ()

    @property
    def answer_schema(self) -> Mapping[str, Any] | None:
        """The JSON Schema of generated texts, if the score ``json_fields`` has one."""
        options = self.score if isinstance(self.score, dict) else {}
        schema = options.get("json_fields", {}).get("schema")
        return schema if isinstance(schema, dict) else None

    @property
    def _form(self) -> str:
        return "template" if self.chat is None else "chat"

    @property
    def messages(self) -> tuple[tuple[Role | None, str], ...]:
        """The templates of an input, each with its role; the role is None outside a chat."""
        if self.chat is None:
            return ((None, self.template or ""),)
        system: tuple[tuple[Role, str], ...] = ()
        if self.chat.system is not None:
            system = (("system", self.chat.system),)
        return (*system, ("user", self.chat.user), ("assistant", self.chat.assistant or ""))

    @property
    def _names(self) -> tuple[str, ...]:
        pieces = (piece for _, template in self.messages for piece in pieces_of(template))
        return tuple(name for _, name, _ in pieces if name)

    @property
    def fields(self) -> tuple[str, ...]:
        """The text columns that the task uses, in order of appearance."""
        others = ("prompt", "mask", *self.slots)
        return tuple(dict.fromkeys(name for name in self._names if name not in others))

    @property
    def label_words(self) -> tuple[str, ...]:
        """The label words in label order."""
        return tuple(self.labels.values())


def placed(task: TaskSpec, prompt: TextPrompt) -> dict[str, str]:
    """Return a prompt's texts by their names in the templates; for the prompt "" all are empty."""
    if not task.slots:
        return {"prompt": prompt if isinstance(prompt, str) else prompt.text}
    if isinstance(prompt, Filling):
        return dict(zip(task.slots, prompt.texts, strict=True))
    if prompt:
        raise SpecError("task: has slots, so a prompt must have a text for each slot")
    return dict.fromkeys(task.slots, "")


def words_of(task: TaskSpec, prompt: TextPrompt) -> tuple[str, ...]:
    """Return the label words of a prompt; if it has none, the task's label words."""
    chosen = prompt.labels if isinstance(prompt, Filling) else ()
    return chosen or task.label_words


def render(task: TaskSpec, prompt: TextPrompt, example: Example) -> Rendered:
    """Fill the task's templates with a prompt and an example."""
    texts = placed(task, prompt)
    parts: list[Part] = []
    for role, template in task.messages:
        if role is not None:
            parts.append(Part("role", role))
        for text, name, most in pieces_of(template):
            if text:
                parts.append(Part("text", text))
            if name in texts:
                parts.append(Part("prompt", texts[name]))
            elif name == "mask":
                parts.append(Part("mask", ""))
            elif name is not None:
                parts.append(Part("field", _field(example, name)[:most]))
        if role in ("system", "user") and parts[-1].kind == "prompt":
            # A final line feed separates a candidate from more text; here no text follows.
            parts[-1] = Part("prompt", parts[-1].text.rstrip("\n"))
    return tuple(parts)


@lru_cache(maxsize=256)
def pieces_of(template: str) -> tuple[tuple[str, str | None, int | None], ...]:
    """Return a template's parts: a text, the field after it, and the field's maximum length."""
    return tuple(
        (text, name, int(spec[1:]) if spec else None)
        for text, name, spec, _ in string.Formatter().parse(template)
    )


def form_of(task: TaskSpec, prompt: TextPrompt = "") -> Rendered:
    """Return an input of the task with empty fields, with which a backend checks the task."""
    return render(task, prompt, dict.fromkeys(task.fields, ""))


def answer_word(word: str, before: str) -> str:
    """Return a label word as a chat model writes it after the text `before`.

    The word gets a leading space, except at the beginning of an answer and after white space.
    `before` is empty if the word follows a special token.
    """
    bare = word.lstrip()
    return bare if not before or before[-1].isspace() else f" {bare}"


def _field(example: Example, name: str) -> str:
    if not hasattr(example, "get"):  # A row of pandas has this method, too.
        raise DataError(f"an example is {type(example).__name__}; it must map fields to values")
    value = example.get(name)
    if not isinstance(value, str):
        problem = "is missing" if name not in example else f"is {type(value).__name__}"
        raise DataError(f"example field {name!r} {problem}; it must be text")
    return value


def in_unicode(text: str) -> str:
    """Return a text with ``?`` in place of unpaired surrogates, which no message can contain."""
    return text.encode(errors="replace").decode()


def target_of(task: TaskSpec, example: Example) -> int | str:
    """Return the index of an example's label among the task's labels, or its reference text.

    Raises:
        DataError: The label is missing or unknown to the task.
    """
    if task.label_field not in example:
        raise DataError(f"example has no {task.label_field!r}")
    if task.generates:
        reference = _field(example, task.label_field)
        if not reference:
            raise DataError(f"example field {task.label_field!r} is empty; it must be a text")
        return reference
    label = example[task.label_field]
    if (index := label_index(task, label)) is None:
        raise DataError(f"label {str(label)!r} is not one of {', '.join(task.labels)}")
    return index


def label_index(task: TaskSpec, value: object) -> int | None:
    """Return the index of the label that a row's value names; None if it names no label.

    If no label has exactly this text, the value names the only label with the same `label_key`.
    """
    exact, alike = _label_indices(tuple(task.labels))
    return exact.get(str(value), alike.get(label_key(value)))


def label_key(value: object) -> str:
    """Return a label in NFC and lower case, without outer spaces; ``1.0`` becomes ``1``."""
    text = unicodedata.normalize("NFC", str(value)).strip().lower()
    return text[:-2] if _WHOLE_NUMBER.fullmatch(text) else text


@lru_cache(maxsize=256)
def _label_indices(labels: tuple[str, ...]) -> tuple[dict[str, int], dict[str, int]]:
    keys = [label_key(label) for label in labels]
    alike = {key: index for index, key in enumerate(keys) if keys.count(key) == 1}
    return {label: index for index, label in enumerate(labels)}, alike


def references_of(task: TaskSpec, examples: Iterable[Example]) -> tuple[str, ...]:
    """Return the reference texts of loss ``nll``; empty for other losses."""
    if task.loss != "nll":
        return ()
    return tuple(str(target_of(task, example)) for example in examples)
