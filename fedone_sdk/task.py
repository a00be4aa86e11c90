"""The task: how an example becomes a question for the model, and its answer a number."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from fedone_sdk.errors import DataError, SpecError
from fedone_sdk.metrics import METRICS

__all__ = [
    "Bias",
    "Example",
    "GLUE_TASKS",
    "LOG_ZERO",
    "LogProbs",
    "Loss",
    "MAX_BIAS",
    "Part",
    "Rendered",
    "ScoreFunction",
    "TaskSpec",
    "biased",
    "example_loss",
    "glue_task",
    "label_loss",
    "predicted",
    "references_of",
    "render",
    "target_of",
]

Example = Mapping[str, Any]
"""One labelled row: the text fields that the template names, and the label."""

LogProbs = Sequence[float]
"""Log-probabilities in nats, one per label word, in the task's label order."""

Bias = tuple[float, ...]
"""What is added to the label words' log-probabilities, nats, in the task's label order."""

MAX_BIAS = 100.0
"""The largest bias of a label, nats: far beyond what any model's preference for a word takes."""

Loss = Literal["cross_entropy", "hinge", "zero_one", "nll", "score"]

LOG_ZERO = -1000.0
"""Stands for the logarithm of probability zero: a label that the model did not write."""

ScoreFunction = Callable[[str, Example], float]
"""A user's own ``score(generated, example)``, from 0 (useless) to 1 (perfect)."""


class Part(NamedTuple):
    """A stretch of a rendered input.

    Only ``field`` parts may be shortened to fit the model: the prompt and the mask must survive.
    """

    kind: Literal["text", "prompt", "field", "mask"]
    text: str


Rendered = tuple[Part, ...]
"""One model input: its parts, in order."""


_FUNCTION = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"


def _known_metric(name: str) -> str:
    if name not in (*METRICS, "loss") and not re.fullmatch(_FUNCTION, name):
        known = ", ".join(METRICS)
        raise ValueError(f"{name!r} is none of {known}, loss, and no package.module:function")
    return name


def _label_key(value: object) -> object:
    return str(value) if isinstance(value, (int, bool)) else value


class TaskSpec(BaseModel):
    """A task put to a language model as a cloze, a question, or a beginning to be continued.

    Attributes:
        template: Text with ``{prompt}``, one ``{field}`` per text column, and (for masked models)
            one ``{mask}``; a causal model answers at the end.
        labels: The verbaliser: label value -> label word, a single token of the model. Empty for
            generation (the losses ``nll`` and ``score``).
        metric: What evaluation reports: ``accuracy``, ``f1``, ``matthews``; ``loss``, the mean
            loss, where less is better, and the only one for generation; or a function of one's
            own, ``package.module:function``, called with the true and the predicted label indices
            (`MetricFunction`) and imported as `score` is.
        loss: What training minimises: ``cross_entropy`` over the label words, a multi-class
            ``hinge`` with margin 1 on their log-probabilities, ``zero_one`` for a wrong label (for
            models that show no log-probabilities), ``nll``, the negative log-likelihood of the
            reference text in nats, or ``score``, 1 minus a user's own score of what was generated.
        label_field: The column that holds the label, or the reference text. For ``score`` it is
            not looked at: the function gets the whole example.
        max_tokens: The longest text that is generated for ``score``, tokens.
        score: ``package.module:function`` for ``score``: imported by `fedone tune` and
            `fedone score`, never because a message says so.
        bias: What is added to the label words' log-probabilities before anything else, one number
            per label, nats: it is in every loss and in what is predicted. A label that the model
            did not write stays impossible. Null is none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    template: str = Field(max_length=4000)
    labels: dict[Annotated[str, BeforeValidator(_label_key)], str] = Field(
        default={}, max_length=64
    )
    metric: Annotated[str, Field(max_length=200), AfterValidator(_known_metric)] = "accuracy"
    loss: Loss = "cross_entropy"
    label_field: str = "label"
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 64
    score: Annotated[str, Field(pattern=_FUNCTION)] | None = None
    bias: tuple[Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)], ...] | None = None

    @model_validator(mode="before")
    @classmethod
    def _default_metric(cls, value: object) -> object:
        if isinstance(value, dict) and value.get("loss") in ("nll", "score"):
            return {"metric": "loss", **value}
        return value

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
        if self.generates:
            if self.labels:
                raise ValueError(f"loss {self.loss} takes no labels")
            if self.metric != "loss":
                raise ValueError(f"loss {self.loss} is measured by metric loss")
            if "mask" in self._names:
                raise ValueError(f"loss {self.loss} takes no {{mask}}")
        elif len(self.labels) < 2:
            raise ValueError("labels: needs at least 2")
        if self.score is not None and self.loss != "score":
            raise ValueError("score: goes with loss score")
        for label, word in self.labels.items():
            if not word.strip():
                raise ValueError(f"label {label!r} has no label word")
        if len(set(self.labels.values())) < len(self.labels):
            raise ValueError("two labels share one label word")
        if self.metric in ("f1", "matthews") and len(self.labels) != 2:
            raise ValueError(f"metric {self.metric} needs exactly 2 labels")
        if self.label_field in self.fields:
            raise ValueError("the template must not contain the label field")
        if self.bias is not None and len(self.bias) != len(self.labels):
            allowed = (
                f"needs {len(self.labels)} numbers, one per label"
                if self.labels
                else (f"loss {self.loss} has no labels to add it to")
            )
            raise ValueError(f"bias: {allowed}")
        return self

    def with_bias(self, bias: Sequence[float] | None) -> TaskSpec:
        """The same task with this bias in place of its own.

        Args:
            bias: One number per label, nats; None for none.

        Raises:
            ValueError: It does not fit the labels.
        """
        given = None if bias is None else tuple(bias)
        return TaskSpec.model_validate({**self.model_dump(), "bias": given})

    @property
    def generates(self) -> bool:
        """Whether the model continues the text, instead of choosing among labels."""
        return self.loss in ("nll", "score")

    @property
    def max_written(self) -> int:
        """The longest text that is generated per input, tokens; 0 where none is."""
        return self.max_tokens if self.loss == "score" else 0

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(n for _, n, _, _ in string.Formatter().parse(self.template) if n)

    @property
    def fields(self) -> tuple[str, ...]:
        """The text columns that the template uses, in order of appearance."""
        return tuple(dict.fromkeys(n for n in self._names if n not in ("prompt", "mask")))

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


def target_of(task: TaskSpec, example: Example) -> int | str:
    """The index of an example's label among the task's labels, or its reference text.

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
    label = str(example[task.label_field])
    try:
        return list(task.labels).index(label)
    except ValueError:
        raise DataError(f"label {label!r} is not one of {', '.join(task.labels)}") from None


def references_of(task: TaskSpec, examples: Iterable[Example]) -> tuple[str, ...]:
    """The reference texts that a model must be shown for loss ``nll``; none for another loss.

    Raises:
        DataError: An example has no reference text.
    """
    if task.loss != "nll":
        return ()
    return tuple(str(target_of(task, example)) for example in examples)


def biased(task: TaskSpec, log_probs: LogProbs) -> LogProbs:
    """Label log-probabilities with the task's bias; a label that was not written stays so."""
    if task.bias is None:
        return log_probs
    return tuple(
        value if value <= LOG_ZERO else value + more
        for value, more in zip(log_probs, task.bias, strict=True)
    )


def predicted(task: TaskSpec, log_probs: LogProbs) -> int:
    """The index of the likeliest label under the task's bias, the first of several.

    Returns:
        The index; -1 where the model wrote none.
    """
    written = [index for index, value in enumerate(log_probs) if value > LOG_ZERO]
    values = biased(task, log_probs)
    return max(written, key=lambda index: values[index], default=-1)


def label_loss(task: TaskSpec, log_probs: LogProbs, target: int) -> float:
    """The training loss of one example.

    Args:
        task: Names the loss, and the bias that the log-probabilities get.
        log_probs: Label log-probabilities, nats, as the model gave them.
        target: Index of the true label.

    Returns:
        ``cross_entropy``: nats, over the label words only (their log-probs are renormalised, as
        the paper's code does by a softmax over the label logits). ``hinge``: the sum over the
        other labels of ``max(0, 1 - (log p_target - log p_other))``, divided by the label count
        (torch's ``MultiMarginLoss``). ``zero_one``: 0.0 where `predicted` is the true label, else
        1.0.
    """
    if task.loss == "zero_one":
        return float(predicted(task, log_probs) != target)
    values = biased(task, log_probs)
    if task.loss == "hinge":
        others = (value for index, value in enumerate(values) if index != target)
        return sum(max(0.0, 1.0 - values[target] + value) for value in others) / len(values)
    highest = max(values)
    total = math.log(math.fsum(math.exp(value - highest) for value in values)) + highest
    return total - values[target]


def example_loss(
    task: TaskSpec, row: LogProbs | str, example: Example, score: ScoreFunction | None = None
) -> float:
    """The training loss of one example, whatever the task's loss is.

    Args:
        task: Names the loss.
        row: What the model answered: label log-probabilities, the log-probability of the reference
            text, or (``score``) the text that it wrote.
        example: The example, with its label.
        score: The user's function, for ``score``.

    Returns:
        As `label_loss`; nats for ``nll``; ``1 - score`` for ``score``.

    Raises:
        DataError: The label is missing or unknown to the task.
        SpecError: The score function is missing, raised something (its cause), or gave something
            outside [0, 1].
    """
    if isinstance(row, str):
        return 1.0 - _score(row, example, score)
    if task.loss == "nll":
        return -row[0]
    target = target_of(task, example)
    assert isinstance(target, int)
    return label_loss(task, row, target)


def _score(written: str, example: Example, score: ScoreFunction | None) -> float:
    if score is None:
        raise SpecError("task.score: loss score needs a score function")
    try:
        value = float(score(written, example))
    except Exception as exc:
        reason = f"{type(exc).__name__}: {exc}"
        raise SpecError(f"task.score: the score function failed with {reason}") from exc
    if not 0.0 <= value <= 1.0:  # NaN is refused too.
        raise SpecError(f"task.score: the score function gave {value!r}; it must be from 0 to 1")
    return value


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

# The paper's code gives entailment " no" and contradiction " yes": offered to compare with it.
_QUIRKS = {"mnli-reversed": ("mnli", {"0": " no", "1": " maybe", "2": " yes"})}


def glue_task(name: str, style: Literal["roberta", "chat"] = "roberta") -> TaskSpec:
    """A GLUE task with its template and label words.

    Args:
        name: One of `GLUE_TASKS`; or ``mnli-reversed``, with the label words in the order of the
            paper's code.
        style: ``roberta`` asks at a mask; ``chat`` closes with a question.

    Raises:
        ValueError: There is no such task or style.
    """
    name, quirk = _QUIRKS.get(name, (name, None))
    if name not in _GLUE or style not in ("roberta", "chat"):
        raise ValueError(
            f"no built-in task {name!r} in style {style!r}; tasks: {', '.join(_GLUE)}; "
            "styles: roberta, chat"
        )
    cloze, question, labels, metric = _GLUE[name]
    return TaskSpec(
        template=cloze if style == "roberta" else question, labels=quirk or labels, metric=metric
    )
