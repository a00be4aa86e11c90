"""The task: how an example becomes a question for the model, and its answer a number."""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from fedone_sdk.errors import DataError

__all__ = [
    "Example",
    "GLUE_TASKS",
    "Part",
    "Rendered",
    "TaskSpec",
    "glue_task",
    "label_loss",
    "render",
    "target_of",
]

Example = Mapping[str, Any]
"""One labelled row: the text fields that the template names, and the label."""

LogProbs = Sequence[float]
"""Log-probabilities in nats, one per label word, in the task's label order."""


class Part(NamedTuple):
    """A stretch of a rendered input.

    Only ``field`` parts may be shortened to fit the model: the prompt and the mask must survive.
    """

    kind: Literal["text", "prompt", "field", "mask"]
    text: str


Rendered = tuple[Part, ...]
"""One model input: its parts, in order."""


def _label_key(value: object) -> object:
    return str(value) if isinstance(value, (int, bool)) else value


class TaskSpec(BaseModel):
    """A classification task put to a language model as a cloze or a question.

    Attributes:
        template: Text with ``{prompt}``, one ``{field}`` per text column, and (for masked models)
            one ``{mask}``; a causal model answers at the end.
        labels: The verbaliser: label value -> label word, a single token of the model.
        metric: What evaluation reports.
        loss: What training minimises: ``cross_entropy`` over the label words, or a multi-class
            ``hinge`` with margin 1 on their log-probabilities.
        label_field: The column that holds the label.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    template: str = Field(max_length=4000)
    labels: dict[Annotated[str, BeforeValidator(_label_key)], str] = Field(
        min_length=2, max_length=64
    )
    metric: Literal["accuracy", "f1", "matthews"] = "accuracy"
    loss: Literal["cross_entropy", "hinge"] = "cross_entropy"
    label_field: str = "label"

    @field_validator("template")
    @classmethod
    def _check_template(cls, template: str) -> str:
        try:
            parsed = list(string.Formatter().parse(template))
        except ValueError as exc:
            raise ValueError(f"not a template: {exc}") from None
        names = [name for _, name, _, _ in parsed if name is not None]
        if any(spec or conversion for _, _, spec, conversion in parsed):
            raise ValueError("a {field} takes no format or conversion")
        if any(not name.isidentifier() for name in names):
            raise ValueError("every {field} must be a plain name")
        if names.count("prompt") != 1:
            raise ValueError("needs {prompt} exactly once")
        if names.count("mask") > 1:
            raise ValueError("takes {mask} at most once")
        if not set(names) - {"prompt", "mask"}:
            raise ValueError("needs at least one text field besides {prompt} and {mask}")
        return template

    @model_validator(mode="after")
    def _check_labels(self) -> TaskSpec:
        for label, word in self.labels.items():
            if not word.strip():
                raise ValueError(f"label {label!r} has no label word")
        if len(set(self.labels.values())) < len(self.labels):
            raise ValueError("two labels share one label word")
        if self.metric in ("f1", "matthews") and len(self.labels) != 2:
            raise ValueError(f"metric {self.metric} needs exactly 2 labels")
        if self.label_field in self.fields:
            raise ValueError("the template must not contain the label field")
        return self

    @property
    def fields(self) -> tuple[str, ...]:
        """The text columns that the template uses, in order of appearance."""
        names = (name for _, name, _, _ in string.Formatter().parse(self.template))
        return tuple(dict.fromkeys(n for n in names if n and n not in ("prompt", "mask")))

    @property
    def label_words(self) -> tuple[str, ...]:
        """The label words in label order."""
        return tuple(self.labels.values())


def render(task: TaskSpec, prompt: str, example: Example) -> Rendered:
    """Puts a prompt and an example into the task's template.

    Raises:
        DataError: A text field is missing or is no text.
    """
    parts: list[Part] = []
    for text, name, _, _ in string.Formatter().parse(task.template):
        if text:
            parts.append(Part("text", text))
        if name == "prompt":
            parts.append(Part("prompt", prompt))
        elif name == "mask":
            parts.append(Part("mask", ""))
        elif name is not None:
            parts.append(Part("field", _field(example, name)))
    return tuple(parts)


def _field(example: Example, name: str) -> str:
    value = example.get(name)
    if not isinstance(value, str):
        found = "is missing" if name not in example else f"is {type(value).__name__}"
        raise DataError(f"example field {name!r} {found}; it must be text")
    return value


def target_of(task: TaskSpec, example: Example) -> int:
    """The index of an example's label among the task's labels.

    Raises:
        DataError: The label is missing or unknown to the task.
    """
    if task.label_field not in example:
        raise DataError(f"example has no {task.label_field!r}")
    label = str(example[task.label_field])
    try:
        return list(task.labels).index(label)
    except ValueError:
        raise DataError(f"label {label!r} is not one of {', '.join(task.labels)}") from None


def label_loss(task: TaskSpec, log_probs: LogProbs, target: int) -> float:
    """The training loss of one example.

    Args:
        task: Names the loss.
        log_probs: Label log-probabilities, nats.
        target: Index of the true label.

    Returns:
        ``cross_entropy``: nats, over the label words only (their log-probs are renormalised, as
        the paper's code does by a softmax over the label logits). ``hinge``: the sum over the
        other labels of ``max(0, 1 - (log p_target - log p_other))``, divided by the label count
        (torch's ``MultiMarginLoss``).
    """
    if task.loss == "hinge":
        others = (value for index, value in enumerate(log_probs) if index != target)
        return sum(max(0.0, 1.0 - log_probs[target] + value) for value in others) / len(log_probs)
    highest = max(log_probs)
    total = math.log(math.fsum(math.exp(value - highest) for value in log_probs)) + highest
    return total - log_probs[target]


_NO_YES = {"0": " no", "1": " yes"}
_YES_NO = {"0": " yes", "1": " no"}
_NLI = {"0": " yes", "1": " maybe", "2": " no"}

# (RoBERTa-style template, chat-style template, labels, metric); field names as in GLUE.
_GLUE: dict[str, tuple[str, str, dict[str, str], Literal["accuracy", "f1", "matthews"]]] = {
    "mnli": (
        "{prompt} {premise}? {mask}, {hypothesis}",
        "{prompt} {premise} {hypothesis} entailment? yes, maybe, or no:",
        _NLI,
        "accuracy",
    ),
    "qqp": (
        "{prompt} {question1}? {mask}, {question2}",
        "{prompt} {question1} {question2} equivalent? yes or no:",
        _NO_YES,
        "f1",
    ),
    "sst2": (
        "{prompt} {sentence} It was {mask}.",
        "{prompt} {sentence} great or terrible?",
        {"0": " terrible", "1": " great"},
        "accuracy",
    ),
    "mrpc": (
        "{prompt} {sentence1}? {mask}, {sentence2}",
        "{prompt} {sentence1} {sentence2} equivalent? yes or no:",
        _NO_YES,
        "f1",
    ),
    "cola": (
        "{prompt} {sentence} correct? {mask}.",
        "{prompt} {sentence} correct? yes or no:",
        _NO_YES,
        "matthews",
    ),
    "qnli": (
        "{prompt} {question}? {mask}, {sentence}",
        "{prompt} {question} {sentence} entailment? yes or no:",
        _YES_NO,
        "accuracy",
    ),
    "rte": (
        "{prompt} {sentence1}? {mask}, {sentence2}",
        "{prompt} {sentence1} {sentence2} entailment? yes or no:",
        _YES_NO,
        "accuracy",
    ),
}

GLUE_TASKS: tuple[str, ...] = tuple(_GLUE)
"""The seven GLUE tasks of the paper."""


def glue_task(name: str, style: Literal["roberta", "chat"] = "roberta") -> TaskSpec:
    """A GLUE task with its template and label words.

    Args:
        name: One of `GLUE_TASKS`.
        style: ``roberta`` asks at a mask; ``chat`` closes with a question.

    Raises:
        ValueError: There is no such task or style.
    """
    if name not in _GLUE or style not in ("roberta", "chat"):
        raise ValueError(
            f"no built-in task {name!r} in style {style!r}; tasks: {', '.join(_GLUE)}; "
            "styles: roberta, chat"
        )
    cloze, question, labels, metric = _GLUE[name]
    return TaskSpec(
        template=cloze if style == "roberta" else question, labels=labels, metric=metric
    )
