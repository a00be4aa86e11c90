"""Other forms of an artefact: the plain text, the input that it makes, DSPy's."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Mapping
from typing import Any

from fedone_sdk.reports.artefact import PromptArtefact
from fedone_sdk.task import TaskSpec

__all__ = ["FORMS", "dspy_state", "in_form", "ready_text"]


def ready_text(task: TaskSpec, prompt: str) -> str:
    """The task's template with the prompt in its place: what the model is sent, but the fields.

    Braces in the prompt are doubled, as ``str.format`` wants it.
    """
    parts = []
    for text, name, _, _ in string.Formatter().parse(task.template):
        parts.append(_plain(text))
        if name is not None:
            parts.append(_plain(prompt) if name == "prompt" else f"{{{name}}}")
    return "".join(parts)


def dspy_state(artefact: PromptArtefact) -> dict[str, Any]:
    """What `dspy.Predict("FIELD, ... -> LABEL_FIELD").load(FILE)` reads.

    DSPy puts its own frame around an input, so what the prompt was measured at does not hold for
    it, and a label bias has no place there.
    """
    task = artefact.task
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
    "template": lambda artefact: ready_text(artefact.task, artefact.prompt.text),
    "dspy": lambda artefact: json.dumps(dspy_state(artefact), indent=2, ensure_ascii=False) + "\n",
}
"""The forms by their names."""


def in_form(artefact: PromptArtefact, form: str) -> str:
    """An artefact in another form.

    Args:
        artefact: The artefact.
        form: One of `FORMS`: ``text`` is the prompt alone, to the letter; ``template`` is
            `ready_text`; ``dspy`` is the JSON of `dspy_state`.

    Raises:
        ValueError: There is no such form.
    """
    if form not in FORMS:
        raise ValueError(f"no form {form!r}; forms: {', '.join(FORMS)}")
    return FORMS[form](artefact)


def _plain(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
