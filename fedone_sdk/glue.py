"""The seven GLUE tasks of the paper: templates, chat forms, label words, metrics."""

from __future__ import annotations

from typing import Any, Literal

from fedone_sdk.description import PRESET_DESCRIPTIONS
from fedone_sdk.task import ChatSpec, TaskSpec

__all__ = ["GLUE_TASKS", "glue_task"]

_NO_YES = {"0": " no", "1": " yes"}
_YES_NO = {"0": " yes", "1": " no"}
_NLI = {"0": " yes", "1": " maybe", "2": " no"}

# (RoBERTa-style template, question for a chat, labels, metric); field names as in GLUE.
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

# The paper's code maps entailment to " no" and contradiction to " yes"; kept for comparison.
_QUIRKS = {"mnli-reversed": ("mnli", {"0": " no", "1": " maybe", "2": " yes"})}


def glue_task(name: str, style: Literal["roberta", "chat", "causal"] = "roberta") -> TaskSpec:
    """Return a GLUE task with its template and label words.

    Args:
        name: One of `GLUE_TASKS`, optionally with its style (``sst2/chat``); or ``mnli-reversed``,
            with the label words in the order of the paper's code.
        style: ``roberta`` uses a mask; ``chat`` puts a question into one user message. The paper
            prints that of QQP (section 4.4); the others follow it. The paper's code adds "Reply me
            with one word" and the label words. ``causal`` is a template that a model without a
            mask continues: the question, for SST-2 the sentence and "It was".
    """
    if "/" in name:
        name, _, style = name.partition("/")  # type: ignore[assignment]
    name, quirk = _QUIRKS.get(name, (name, None))
    if name not in _GLUE or style not in ("roberta", "chat", "causal"):
        raise ValueError(
            f"no built-in task {name!r} in style {style!r}; tasks: {', '.join(_GLUE)}; "
            "styles: roberta, chat, causal"
        )
    cloze, question, labels, metric = _GLUE[name]
    common: dict[str, Any] = {
        "labels": quirk or labels,
        "metric": metric,
        "description": PRESET_DESCRIPTIONS[name],
    }
    if style == "roberta":
        return TaskSpec(template=cloze, **common)
    if style == "causal":
        # The one cloze whose text before the mask asks for the label word.
        template = cloze.split(" {mask}")[0] if name == "sst2" else question
        return TaskSpec(template=template, **common)
    return TaskSpec(chat=ChatSpec(user=question), **common)
