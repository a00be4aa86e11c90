"""The seven GLUE tasks of the paper."""

from __future__ import annotations

from fedone_paper.settings import declared
from fedone_sdk.task import ChatSpec, TaskSpec

GLUE_TASKS = tuple(declared()["task_columns"])


def glue_task(name: str, style: str = "roberta") -> TaskSpec:
    """Return a GLUE task with its template and label words.

    Args:
        name: A task of ``studies.yaml``, optionally with its style (``sst2/chat``).
        style: ``roberta``: a template with a mask; ``causal``: a text that the model continues;
            ``chat``: one user message.
    """
    name, _, suffix = name.partition("/")
    given = dict(declared()["glue"][name])
    forms = {form: given.pop(form) for form in ("roberta", "causal", "chat")}
    style = suffix or style
    if style == "chat":
        return TaskSpec(chat=ChatSpec(user=forms[style]), **given)
    return TaskSpec(template=forms[style], **given)
