"""Programs that use a prompt, to be copied out of a report."""

from __future__ import annotations

import json
import string
from dataclasses import dataclass
from functools import partial
from pprint import pformat
from urllib.parse import urlsplit

from jinja2 import Environment, PackageLoader, StrictUndefined

from fedone_sdk.messages import PromptReport
from fedone_sdk.reports.forms import ready_messages
from fedone_sdk.spec import BackendSpec, OpenAISpec, RunSpec, VllmSpec
from fedone_sdk.task import TaskSpec

__all__ = ["Snippet", "snippets"]

_TOP = 20
"""The most tokens that OpenAI shows."""


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
_PROGRAMS.filters["literal"] = partial(pformat, sort_dicts=False, width=96)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snippet:
    """A program.

    Attributes:
        title: What it uses.
        code: Python.
    """

    title: str
    code: str


def snippets(
    spec: RunSpec, prompt: PromptReport, model: str | None = None
) -> tuple[list[Snippet], str]:
    """Programs that ask the model that the prompt was tuned for.

    A server with OpenAI's API is asked by the `openai` client and by plain HTTP, all other models
    by the SDK. They send what the run's model was sent; those without the SDK do not shorten texts
    that are too long for the model.

    Args:
        spec: The run; its ``backend`` is the model.
        prompt: Its prompt.
        model: Fingerprint of the model that scored, where it is known.

    Returns:
        The programs, and a word about them; none where there is no such program.
    """
    task, backend = spec.task, spec.backend
    if prompt.labels is not None:
        task = task.with_labels(prompt.labels)
    if spec.method.domain != "tokens":
        return [], "The prompt is vectors: no program takes it as text."
    if task.loss == "nll":
        return [], "The task scores a text that is given; there is nothing to ask for."
    if model is not None and not _is_of(backend, model):
        return [], f"The run does not say how to ask the model that scored, {model}."
    messages = ready_messages(task, prompt.prompt)
    masked = any("mask" in _names(message["content"]) for message in messages)
    if not isinstance(backend, (OpenAISpec, VllmSpec)) or masked:
        return [_local(task, spec, prompt)], ""
    note = ""
    if isinstance(backend, OpenAISpec) and not backend.log_probs and backend.structured:
        note = "The run held answers to the label words by a JSON schema; these programs do not."
    chat = task.chat is not None or getattr(backend, "api", "chat") == "chat"
    if isinstance(backend, VllmSpec):
        chat = task.chat is not None
    if messages[-1]["role"] == "assistant":
        note = (
            f"{note} The last message begins the answer: llama.cpp's server goes on with it, vLLM "
            "where continue_final_message is sent too; most services do not."
        ).strip()
    facts = {
        "messages": messages,
        "fields": task.fields,
        "labels": {label: word.strip().casefold() for label, word in task.labels.items()},
        "bias": dict(zip(task.labels, prompt.bias, strict=True)) if prompt.bias else None,
        "model": backend.model,
        "url": _url(backend),
        "key": backend.api_key_env,
        "chat": chat,
        "top": _shown(task, spec),
        "max_name": _max_name(spec),
        "max_tokens": task.max_written or 64,
        "effort": getattr(backend, "reasoning_effort", None),
    }
    return [
        Snippet(title=title, code=_PROGRAMS.get_template(name).render(facts))
        for title, name in (
            ("The openai client", "snippet_openai.py.j2"),
            ("Plain HTTP", "snippet_http.py.j2"),
        )
    ], note


def _local(task: TaskSpec, spec: RunSpec, prompt: PromptReport) -> Snippet:
    """A program that asks any backend by the SDK."""
    asked = task.with_bias(prompt.bias) if prompt.bias else task
    settings = spec.backend.model_dump(
        mode="json", exclude_defaults=True, exclude={"cache", "record"}
    )
    settings["kind"] = spec.backend.kind
    text = prompt.prompt
    code = _PROGRAMS.get_template("snippet_sdk.py.j2").render(
        backend=type(spec.backend).__name__,
        settings=settings,
        task=asked.model_dump(mode="json", exclude_defaults=True, exclude={"description"}),
        prompt=text if isinstance(text, str) else None,
        filling=None if isinstance(text, str) else text,
        generates=task.generates,
        fields=task.fields,
    )
    return Snippet(title="The model of the run, by fedone-sdk", code=code)


def _is_of(backend: BackendSpec, model: str) -> bool:
    """Whether a fingerprint may be of this backend."""
    return model.partition(":")[0] == backend.kind


def _url(backend: BackendSpec) -> str | None:
    """Where OpenAI's API is asked; None is where its clients ask by themselves."""
    url: str | None = getattr(backend, "base_url", None)
    if isinstance(backend, VllmSpec) and url is not None and not url.endswith("/v1"):
        return f"{url}/v1"
    return url


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
