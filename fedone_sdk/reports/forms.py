"""Forms of an artefact: plain text, template, and those of DSPy, MLflow, Langfuse, promptfoo.

The templates of the last three have ``{{name}}`` for a text field. MLflow, Langfuse and promptfoo
send only the text: they do not apply a label bias, which is in the metadata.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Mapping
from typing import Any

from fedone_sdk.errors import SpecError
from fedone_sdk.reports.artefact import PromptArtefact
from fedone_sdk.task import TaskSpec, TextPrompt, placed

_MAX_WRITTEN = 16
"""Tokens that promptfoo lets a model write for a label."""


def _messages(
    task: TaskSpec, prompt: TextPrompt, plain: Callable[[str], str], field: str
) -> list[dict[str, str]]:
    """Return the messages of `ready_messages`, with other escapes and fields.

    Args:
        task: The task.
        prompt: The prompt.
        plain: Escapes the text between two fields, the prompt's included.
        field: Marks the place of a text field ``%s``.
    """
    texts = placed(task, prompt)

    def filled(template: str) -> str:
        parts, fields = [""], []
        for text, name, _, _ in string.Formatter().parse(template):
            parts[-1] += text
            if name in texts:
                parts[-1] += texts[name]
            elif name is not None:
                fields.append(field % name)
                parts.append("")
        pairs = zip(map(plain, parts), [*fields, ""], strict=True)
        return "".join(each for pair in pairs for each in pair)

    said = [(role or "user", filled(text)) for role, text in task.messages]
    return [{"role": role, "content": text} for role, text in said if text or role == "user"]


def ready_messages(task: TaskSpec, prompt: TextPrompt) -> list[dict[str, str]]:
    """Return the task's messages with the prompt inserted, and fields for ``str.format``.

    A template becomes one user message. System and assistant messages without content are omitted.
    Braces in the prompt are doubled.
    """
    return _messages(task, prompt, _doubled, "{%s}")


def ready_text(task: TaskSpec, prompt: TextPrompt) -> str:
    """Return the task's template with the prompt inserted; for a chat its messages, as JSON.

    Braces in the prompt are doubled for ``str.format``.
    """
    messages = ready_messages(task, prompt)
    return messages[0]["content"] if task.template is not None else _document(messages)


def dspy_state(artefact: PromptArtefact) -> dict[str, Any]:
    """Return the state for `dspy.Predict("FIELD, ... -> LABEL_FIELD").load(FILE)`.

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


def mlflow_prompt(artefact: PromptArtefact) -> dict[str, Any]:
    """Return the arguments of ``mlflow.genai.register_prompt``.

    Raises:
        SpecError: A text contains what MLflow parses as a variable or a statement.
    """
    facts = _facts(artefact)
    return {
        "name": artefact.name,
        "template": _template(artefact, _refusing("MLflow", "{{", "{%")),
        "commit_message": _message(artefact),
        "tags": {f"fedone.{name}": str(value) for name, value in facts.items()},
    }


def langfuse_prompt(artefact: PromptArtefact) -> dict[str, Any]:
    """Return the body of Langfuse's ``POST /api/public/v2/prompts``.

    No label is set, so that no deployment uses the prompt before a person sets one.

    Raises:
        SpecError: A text contains what Langfuse parses as a variable.
    """
    template = _template(artefact, _refusing("Langfuse", "{{"))
    return {
        "type": "text" if isinstance(template, str) else "chat",
        "name": artefact.name,
        "prompt": template,
        "config": {
            "label_words": _words(artefact),
            "label_bias": artefact.prompt.bias,
            "fedone": _facts(artefact),
        },
        "labels": [],
        "tags": ["fedone"],
        "commitMessage": _message(artefact),
    }


def promptfoo_config(artefact: PromptArtefact) -> dict[str, Any]:
    """Return a configuration of promptfoo, without tests: ``promptfoo eval -c FILE -t ROWS.csv``.

    Rows have the text fields and, for label words, the label field. promptfoo calls the model by
    OpenAI's API, at ``OPENAI_BASE_URL`` with ``OPENAI_API_KEY``. An answer is correct if it begins
    with the label word of the row's label.

    Raises:
        SpecError: The model fills a mask.
    """
    task = artefact.asked
    if "{mask}" in "".join(text for _, text in task.messages):
        raise SpecError("the prompt is for a model that fills {mask}; promptfoo asks for answers")
    template = _template(artefact, _raw)
    messages = [{"role": "user", "content": template}] if isinstance(template, str) else template
    config: dict[str, Any] = {
        "description": _message(artefact),
        "prompts": [{"id": artefact.name, "label": artefact.name, "raw": _json(messages)}],
        "providers": [
            {
                "id": f"openai:chat:{_model(artefact)}",
                "config": {"temperature": 0, "max_tokens": task.max_written or _MAX_WRITTEN},
            }
        ],
        "metadata": {f"fedone.{name}": value for name, value in _facts(artefact).items()},
    }
    if task.label_words:
        config["defaultTest"] = {"assert": [{"type": "javascript", "value": _right(task)}]}
    return config


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
    """Return an artefact in another form.

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


def _document(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _doubled(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _right(task: TaskSpec) -> str:
    """Return JavaScript: whether an answer begins with the row's label word, the longest one."""
    words = {label: word.strip().lower() for label, word in task.labels.items()}
    return (
        f"Object.entries({_json(words)})"
        ".filter(([, word]) => output.trim().toLowerCase().startsWith(word))"
        ".sort(([, one], [, other]) => other.length - one.length)"
        f".map(([label]) => label)[0] === String(context.vars[{_json(task.label_field)}])"
    )


def _template(artefact: PromptArtefact, plain: Callable[[str], str]) -> str | list[dict[str, str]]:
    """Return the task's text or messages with the prompt, and ``{{name}}`` for a field."""
    messages = _messages(artefact.asked, artefact.prompt.prompt, plain, "{{%s}}")
    return messages if artefact.task.template is None else messages[0]["content"]


def _refusing(tool: str, *marks: str) -> Callable[[str], str]:
    def plain(text: str) -> str:
        for mark in marks:
            if mark in text:
                raise SpecError(f"the prompt holds {mark!r}, which {tool} does not keep as text")
        return text

    return plain


def _raw(text: str) -> str:
    """Escape a text for Nunjucks."""
    if not any(mark in text for mark in ("{{", "{%", "{#")):
        return text
    if "endraw" in text:
        raise SpecError("the prompt holds 'endraw', which promptfoo does not keep as text")
    return f"{{% raw %}}{text}{{% endraw %}}"


def _words(artefact: PromptArtefact) -> dict[str, str]:
    return {label: word.strip() for label, word in artefact.asked.labels.items()}


def _model(artefact: PromptArtefact) -> str:
    """Return the provider's name of the model, else the SDK's."""
    return artefact.models[0] if artefact.models else artefact.model or "model"


def _facts(artefact: PromptArtefact) -> dict[str, Any]:
    """Return the known facts about the prompt's origin."""
    measured = artefact.evaluation
    facts: dict[str, Any] = {
        "run_id": artefact.run_id,
        "sha256": artefact.sha256,
        "model": artefact.model,
        "method": artefact.method,
        "rounds": artefact.rounds,
        "label_words": _json(_words(artefact)) if artefact.asked.label_words else None,
        "label_bias": None if artefact.prompt.bias is None else _json(artefact.prompt.bias),
        "metric": measured.metric.name,
        "metric_no_prompt": measured.metric.no_prompt,
        "metric_after": measured.metric.after,
        "examples": measured.examples,
        "sdk_version": artefact.sdk_version,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _message(artefact: PromptArtefact) -> str:
    metric = artefact.evaluation.metric
    found = f"FedOne run {artefact.run_id}, {artefact.rounds} rounds"
    if metric.after is None:
        return found
    before = "" if metric.no_prompt is None else f"{metric.no_prompt:.3f} -> "
    return f"{found}: {metric.name} {before}{metric.after:.3f}"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
