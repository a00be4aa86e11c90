"""Forms of an artefact: plain text, template, and those of DSPy, MLflow, Langfuse, promptfoo."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Mapping
from typing import Any

from fedone_sdk.reports.artefact import PromptArtefact
from fedone_sdk.reports.prompt_tools import langfuse_prompt, mlflow_prompt, promptfoo_config
from fedone_sdk.task import TaskSpec, TextPrompt, placed


def ready_messages(task: TaskSpec, prompt: TextPrompt) -> list[dict[str, str]]:
    """The task's messages with the prompt inserted, and fields for ``str.format``.

    A template becomes one user message. System and assistant messages without content are omitted.
    Braces in the prompt are doubled.
    """
    texts = placed(task, prompt)
    filled = [(role or "user", _filled(template, texts)) for role, template in task.messages]
    return [{"role": role, "content": text} for role, text in filled if text or role == "user"]


def ready_text(task: TaskSpec, prompt: TextPrompt) -> str:
    """The task's template with the prompt inserted; for a chat its messages, as JSON.

    Braces in the prompt are doubled for ``str.format``.
    """
    if task.template is not None:
        return _filled(task.template, placed(task, prompt))
    return json.dumps(ready_messages(task, prompt), indent=2, ensure_ascii=False) + "\n"


def _filled(template: str, texts: Mapping[str, str]) -> str:
    parts = []
    for text, name, _, _ in string.Formatter().parse(template):
        parts.append(_plain(text))
        if name is not None:
            parts.append(_plain(texts[name]) if name in texts else f"{{{name}}}")
    return "".join(parts)


def dspy_state(artefact: PromptArtefact) -> dict[str, Any]:
    """The state for `dspy.Predict("FIELD, ... -> LABEL_FIELD").load(FILE)`.

    DSPy puts its own frame around an input, so the prompt's measurement does not apply, and a label
    bias is not supported.
    """
    task = artefact.asked
    words = ", ".join(word.strip() for word in task.label_words)
    answer = f"Exactly one of: {words}." if words else "The text that follows."
    instructions = artefact.prompt.text.strip()
    if words:
        instructions = f"{instructions}\n\nAnswer with exactly one of: {words}.".lstrip()
    fields = [(name, f"${{{name}}}") for name in task.fields] + [(task.label_field, answer)]
    return {
        "traces": [],
        "train": [],
        "demos": [],
        "signature": {
            "instructions": instructions,
            "fields": [
                {"prefix": f"{name.replace('_', ' ').title()}:", "description": description}
                for name, description in fields
            ],
        },
        "lm": None,
        "metadata": {"dependency_versions": {}},
    }


FORMS: Mapping[str, Callable[[PromptArtefact], str]] = {
    "text": lambda artefact: artefact.prompt.text,
    "template": lambda artefact: ready_text(artefact.task, artefact.prompt.prompt),
    "dspy": lambda artefact: _document(dspy_state(artefact)),
    "mlflow": lambda artefact: _document(mlflow_prompt(artefact)),
    "langfuse": lambda artefact: _document(langfuse_prompt(artefact)),
    "promptfoo": lambda artefact: _document(promptfoo_config(artefact)),
}
"""The forms by their names."""


def in_form(artefact: PromptArtefact, form: str) -> str:
    """An artefact in another form.

    Args:
        artefact: The artefact.
        form: One of `FORMS`: ``text`` is the prompt's exact text; ``template`` is `ready_text`;
            ``dspy``, ``mlflow``, ``langfuse`` and ``promptfoo`` are the JSON of `dspy_state`,
            `mlflow_prompt`, `langfuse_prompt` and `promptfoo_config`.

    Raises:
        SpecError: The prompt does not go into that form.
        ValueError: There is no such form.
    """
    if form not in FORMS:
        raise ValueError(f"no form {form!r}; forms: {', '.join(FORMS)}")
    return FORMS[form](artefact)


def _document(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _plain(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
