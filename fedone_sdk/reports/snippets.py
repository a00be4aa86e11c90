"""Example programs of a report that use the prompt."""

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
from fedone_sdk.spec import BackendSpec, RunSpec
from fedone_sdk.task import TaskSpec

_TOP = 20
"""OpenAI's maximum of ``top_logprobs``."""


# Values are inserted as Python literals, not as HTML. The page escapes the whole program.
_PROGRAMS = Environment(
    loader=PackageLoader("fedone_sdk.reports"),
    autoescape=False,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
# Strings, numbers, lists and objects of JSON are valid Python.
_PROGRAMS.filters["py"] = partial(json.dumps, ensure_ascii=False)
_PROGRAMS.filters["literal"] = partial(pformat, sort_dicts=False, width=96)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snippet:
    """A program."""

    title: str
    code: str


def snippets(
    spec: RunSpec, prompt: PromptReport, model: str | None = None
) -> tuple[list[Snippet], str]:
    """Programs that call the model that the prompt was tuned for.

    For a server with OpenAI's API they use the `openai` client and plain HTTP, for other models the
    SDK. Their requests equal those of the run; those without the SDK do not truncate texts that are
    too long for the model.

    Returns:
        The programs, and a note about them; no programs if the run does not support any.
    """
    task, backend = spec.task, spec.backend
    if prompt.labels is not None:
        task = task.with_labels(prompt.labels)
    if task.loss == "nll":
        return [], "The task scores given texts, so there is nothing to predict."
    if model is not None and model.partition(":")[0] != backend.kind:
        return [], f"The run does not describe how to call the model that scored, {model}."
    messages = ready_messages(task, prompt.prompt)
    masked = any("mask" in _names(message["content"]) for message in messages)
    if backend.kind not in ("openai", "vllm") or masked:
        return [_local(task, spec, prompt)], ""
    note = ""
    if not backend.log_probs and backend.structured:
        note = "The run restricted answers to label words by a JSON schema; these programs do not."
    chat = task.chat is not None or backend.api == "chat"
    if backend.kind == "vllm":
        chat = task.chat is not None
    if messages[-1]["role"] == "assistant":
        note = (
            f"{note} The last message begins the answer: llama.cpp's server continues it, vLLM "
            "with continue_final_message; most services do not."
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
        "effort": backend.reasoning_effort,
    }
    return [
        Snippet(title=title, code=_PROGRAMS.get_template(name).render(facts))
        for title, name in (
            ("The openai client", "snippet_openai.py.j2"),
            ("Plain HTTP", "snippet_http.py.j2"),
        )
    ], note


def _local(task: TaskSpec, spec: RunSpec, prompt: PromptReport) -> Snippet:
    """Return a program that calls any backend by the SDK."""
    asked = task.with_bias(prompt.bias) if prompt.bias else task
    settings = spec.backend.model_dump(mode="json", exclude_defaults=True, exclude={"cache"})
    settings["kind"] = spec.backend.kind
    text = prompt.prompt
    code = _PROGRAMS.get_template("snippet_sdk.py.j2").render(
        settings=settings,
        task=asked.model_dump(mode="json", exclude_defaults=True, exclude={"description"}),
        prompt=text if isinstance(text, str) else None,
        filling=None if isinstance(text, str) else text,
        generates=task.generates,
        fields=task.fields,
    )
    return Snippet(title="The model of the run, by fedone-sdk", code=code)


def _url(backend: BackendSpec) -> str | None:
    """Return the URL of OpenAI's API; None is the clients' default."""
    url = backend.base_url
    if backend.kind == "vllm" and url is not None and not url.endswith("/v1"):
        return f"{url}/v1"
    return url


def _shown(task: TaskSpec, spec: RunSpec) -> int:
    """Return the number of ``top_logprobs``; 0 if the program reads the answer's text."""
    return 0 if task.generates or not spec.backend.log_probs else _TOP


def _max_name(spec: RunSpec) -> str:
    """Return the server's name of the limit of completion tokens, which differs for OpenAI."""
    url = spec.backend.base_url
    host = urlsplit(url or "").netloc
    ours = url is None or host == "openai.com" or host.endswith(".openai.com")
    return "max_completion_tokens" if ours else "max_tokens"


def _names(template: str) -> list[str]:
    return [name for _, name, _, _ in string.Formatter().parse(template) if name]
