"""Programs that use a prompt, to be copied out of a report."""

from __future__ import annotations

import json
import string
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

from jinja2 import Environment, PackageLoader, StrictUndefined

from fedone_sdk.messages import PromptReport
from fedone_sdk.reports.forms import ready_messages
from fedone_sdk.spec import OpenAISpec, RunSpec, VllmSpec
from fedone_sdk.task import TaskSpec

__all__ = ["Snippet", "snippets"]

_TOP = 20
"""The most tokens that OpenAI shows."""

_MODEL = "gpt-6-luna"
"""Stands in a program where the run names no model; it shows log-probabilities with
``reasoning_effort="none"``."""


# Programs are no HTML: what stands in them is written as Python's literals. A page that shows them
# escapes them as a whole.
_PROGRAMS = Environment(
    loader=PackageLoader("fedone_sdk.reports"),
    autoescape=False,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
# JSON's texts, numbers, lists and objects are Python's too.
_PROGRAMS.filters["py"] = partial(json.dumps, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snippet:
    """A program.

    Attributes:
        title: What it uses.
        code: Python.
    """

    title: str
    code: str


def snippets(spec: RunSpec, prompt: PromptReport) -> tuple[list[Snippet], str]:
    """Programs that ask an OpenAI-compatible model, by the `openai` client and by plain HTTP.

    They send what the run's model was sent, but do not shorten texts that are too long for it.

    Args:
        spec: The run.
        prompt: Its prompt.

    Returns:
        The programs, and a word about them; none where such a model cannot be asked this way.
    """
    task, note = spec.task, ""
    if prompt.labels is not None:
        task = task.with_labels(prompt.labels)
    if spec.method.domain != "tokens":
        return [], "The prompt is vectors: no interface of this kind takes it."
    if task.loss == "nll":
        return [], "The task scores a text that is given, which this interface does not."
    messages = ready_messages(task, prompt.prompt)
    if "mask" in _names(messages[0]["content"]):
        messages[0]["content"], rest = _to_the_mask(messages[0]["content"])
        if _names(rest):
            return [], "The template asks amid the text, which only a masked model can answer."
        note = (
            "The run asked a masked model at {mask}. These programs end there and let the model go "
            "on, so the figures above do not hold for them."
        )
    backend = spec.backend
    if isinstance(backend, OpenAISpec) and not backend.log_probs and backend.structured:
        note = "The run held answers to the label words by a JSON schema; these programs do not."
    chat = task.chat is not None or (
        not isinstance(backend, VllmSpec) and getattr(backend, "api", "chat") == "chat"
    )
    if messages[-1]["role"] == "assistant":
        note = (
            f"{note} The last message begins the answer: llama.cpp's server goes on with it, vLLM "
            "where continue_final_message is sent too; most services do not."
        ).strip()
    named = getattr(backend, "model", None)
    facts = {
        "messages": messages,
        "fields": task.fields,
        "labels": {label: word.strip().casefold() for label, word in task.labels.items()},
        "bias": dict(zip(task.labels, prompt.bias, strict=True)) if prompt.bias else None,
        "model": named or _MODEL,
        "chat": chat,
        "top": _shown(task, spec),
        "max_name": _max_name(spec),
        "max_tokens": task.max_written or 64,
        "effort": getattr(backend, "reasoning_effort", None if named else "none"),
    }
    return [
        Snippet(title=title, code=_PROGRAMS.get_template(name).render(facts))
        for title, name in (
            ("The openai client", "snippet_openai.py.j2"),
            ("Plain HTTP", "snippet_http.py.j2"),
        )
    ], note


def _shown(task: TaskSpec, spec: RunSpec) -> int:
    """How many tokens are looked at; 0 where the answer's text is."""
    silent = isinstance(spec.backend, OpenAISpec) and not spec.backend.log_probs
    return 0 if task.generates or silent else _TOP


def _max_name(spec: RunSpec) -> str:
    """How the server calls the limit of completion tokens: OpenAI has a name of its own."""
    url = getattr(spec.backend, "base_url", None)
    host = urlsplit(url or "").netloc
    ours = url is None or host == "openai.com" or host.endswith(".openai.com")
    return "max_completion_tokens" if ours else "max_tokens"


def _names(template: str) -> list[str]:
    return [name for _, name, _, _ in string.Formatter().parse(template) if name]


def _to_the_mask(template: str) -> tuple[str, str]:
    before, _, after = template.partition("{mask}")
    return before.rstrip(), after
