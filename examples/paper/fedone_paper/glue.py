"""The seven GLUE tasks of the paper (`glue.yaml`)."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from fedone_sdk.task import ChatSpec, TaskSpec


@cache
def _all() -> dict[str, dict[str, Any]]:
    text = (files("fedone_paper") / "glue.yaml").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = yaml.safe_load(text)
    # The paper's code maps entailment to " no" and contradiction to " yes"; kept for comparison.
    reversed_words = {0: " no", 1: " maybe", 2: " yes"}
    return {**found, "mnli-reversed": {**found["mnli"], "labels": reversed_words}}


GLUE_TASKS: tuple[str, ...] = tuple(name for name in _all() if name != "mnli-reversed")


def glue_task(name: str, style: str = "roberta") -> TaskSpec:
    """Return a GLUE task with its template and label words.

    Args:
        name: One of `GLUE_TASKS`, optionally with its style (``sst2/chat``); or ``mnli-reversed``,
            with the label words in the order of the paper's code.
        style: ``roberta`` has a mask; ``chat`` puts the question into one user message. ``causal``
            is a template that a model without a mask continues: the question, for SST-2 the
            sentence and "It was".
    """
    if "/" in name:
        name, _, style = name.partition("/")
    if name not in _all() or style not in ("roberta", "chat", "causal"):
        raise ValueError(f"no task {name!r} in style {style!r}; tasks: {', '.join(GLUE_TASKS)}")
    common = dict(_all()[name])
    template, question = common.pop("template"), common.pop("question")
    if style == "chat":
        return TaskSpec(chat=ChatSpec(user=question), **common)
    if style == "causal":
        # The one template whose text before the mask asks for the label word.
        template = template.split(" {mask}")[0] if name == "sst2" else question
    return TaskSpec(template=template, **common)
