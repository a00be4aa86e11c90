"""Forms of a tuned prompt: the model's input, a Python program, and MLflow's arguments."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from functools import partial
from itertools import chain
from pprint import pformat
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fedone_sdk.backends.request_form import response_format
from fedone_sdk.errors import SpecError, needs_extra
from fedone_sdk.messages import PromptReport
from fedone_sdk.reports.artefact import PromptArtefact
from fedone_sdk.spec import BackendSpec
from fedone_sdk.task import TaskSpec, TextPrompt, placed

if TYPE_CHECKING:
    from jinja2 import Environment

_TOP = 20
"""OpenAI's maximum of ``top_logprobs``."""


def _messages(
    task: TaskSpec, prompt: TextPrompt, escape: Callable[[str], str], field: str
) -> list[dict[str, str]]:
    """Return the messages; `escape` changes fixed text, `field` is the format of placeholders."""
    texts = placed(task, prompt)

    def fill(template: str) -> str:
        parts, fields = [""], []
        for text, name, cut, _ in string.Formatter().parse(template):
            parts[-1] += text
            if name in texts:
                parts[-1] += texts[name]
            elif name is not None:
                fields.append(field % {"name": name, "cut": cut and f":{cut}"})
                parts.append("")
        pairs = zip(map(escape, parts), [*fields, ""], strict=True)
        return "".join(chain.from_iterable(pairs))

    messages = [(role or "user", fill(text)) for role, text in task.messages]
    return [{"role": role, "content": text} for role, text in messages if text or role == "user"]


def _ready_messages(task: TaskSpec, prompt: TextPrompt) -> list[dict[str, str]]:
    """Return the task's messages with the prompt, for ``str.format``; literal braces are doubled.

    A template becomes a user message. Empty system and assistant messages are omitted.
    """
    return _messages(
        task, prompt, lambda text: text.replace("{", "{{").replace("}", "}}"), "{%(name)s%(cut)s}"
    )


def ready_text(task: TaskSpec, prompt: TextPrompt) -> str:
    """Return the task's template with the prompt, for ``str.format``; for a chat, JSON messages."""
    messages = _ready_messages(task, prompt)
    if task.template is not None:
        return messages[0]["content"]
    return json.dumps(messages, indent=2, ensure_ascii=False) + "\n"


def mlflow_prompt(artefact: PromptArtefact) -> dict[str, Any]:
    """Return the arguments of ``mlflow.genai.register_prompt``.

    The template has ``{{name}}`` for a text field. MLflow does not apply the task's limits on
    the length of texts, nor the label bias, which is in the tags.

    Raises:
        SpecError: A text contains what MLflow parses as a variable or a statement.
    """

    def check(text: str) -> str:
        for mark in ("{{", "{%"):
            if mark in text:
                raise SpecError(f"the prompt contains {mark!r}, which MLflow would interpret")
        return text

    messages = _messages(artefact.tuned_task, artefact.prompt.prompt, check, "{{%(name)s}}")
    metric, task, bias = artefact.evaluation.metric, artefact.tuned_task, artefact.prompt.bias
    words = {label: word.strip() for label, word in task.labels.items()}
    commit_message = f"FedOne run {artefact.run_id}, {artefact.rounds} rounds"
    if metric.after is not None:
        before = "" if metric.no_prompt is None else f"{metric.no_prompt:.3f} -> "
        commit_message += f": {metric.name} {before}{metric.after:.3f}"
    facts = {
        "run_id": artefact.run_id,
        "sha256": artefact.sha256,
        "model": artefact.model,
        "method": artefact.method,
        "rounds": artefact.rounds,
        "label_words": json.dumps(words, ensure_ascii=False) if task.label_words else None,
        "label_bias": None if bias is None else json.dumps(bias),
        "metric": metric.name,
        "metric_no_prompt": metric.no_prompt,
        "metric_after": metric.after,
        "examples": artefact.evaluation.examples,
        "sdk_version": artefact.sdk_version,
    }
    return {
        "name": artefact.name,
        "template": messages if artefact.task.template is None else messages[0]["content"],
        "commit_message": commit_message,
        "tags": {
            f"fedone.{name}": str(value) for name, value in facts.items() if value is not None
        },
    }


def program_of(
    task: TaskSpec, prompt: PromptReport, backend: BackendSpec, model: str | None = None
) -> tuple[str, str]:
    """Return a Python program that uses the prompt, and a note on its restrictions.

    For a server with OpenAI's API the program uses the `openai` client, for other models the SDK.
    It sends the same requests as the run, except that the `openai` client does not truncate long
    texts. If there is no program, the note is the reason.
    """
    if prompt.labels is not None:
        task = task.with_labels(prompt.labels)
    if task.loss == "nll":
        return "", "The task scores given texts, so there is nothing to predict."
    if model is not None and model.partition(":")[0] != backend.kind:
        return "", f"The backend section does not describe the model of the run, {model}."
    messages = _ready_messages(task, prompt.prompt)
    parse = string.Formatter().parse
    masked = any(name == "mask" for one in messages for _, name, *_ in parse(one["content"]))
    if backend.kind not in ("openai", "vllm") or masked:
        return _sdk_program(task, backend, prompt), ""
    notes = []
    if backend.log_probs is not True:
        notes.append("The run restricted answers by a JSON schema; this program does not.")
    if messages[-1]["role"] == "assistant":
        notes.append(
            "The last message is the beginning of the answer. llama.cpp's server continues it, as "
            "does vLLM if continue_final_message is set. Most services do not."
        )
    url = backend.base_url
    host = urlsplit(url or "").netloc
    is_openai = url is None or host == "openai.com" or host.endswith(".openai.com")
    chat = task.chat is not None
    if backend.kind == "vllm":
        url = url if url is None or url.endswith("/v1") else f"{url}/v1"
    else:
        chat = chat or backend.api == "chat"
    code = _rendered(
        "snippet_openai.py.j2",
        messages=messages,
        labels={label: word.strip().casefold() for label, word in task.labels.items()},
        bias=dict(zip(task.labels, prompt.bias, strict=True)) if prompt.bias else None,
        model=backend.model,
        url=url,
        key=backend.api_key_env,
        chat=chat,
        top=_TOP if backend.log_probs and not task.generates else 0,
        max_name="max_completion_tokens" if is_openai else "max_tokens",
        max_tokens=task.max_written or 64,
        effort=backend.reasoning_effort,
        stop=list(task.stop),
        form=None if task.answer_schema is None else response_format(task.answer_schema),
    )
    return code, " ".join(notes)


def _sdk_program(task: TaskSpec, backend: BackendSpec, prompt: PromptReport) -> str:
    biased = task.with_bias(prompt.bias) if prompt.bias else task
    unused = {"description"} | ({"score"} if task.answer_schema is None else set())
    settings = backend.model_dump(mode="json", exclude_defaults=True, exclude={"cache"})
    text = prompt.prompt
    return _rendered(
        "snippet_sdk.py.j2",
        settings={**settings, "kind": backend.kind},
        task=biased.model_dump(mode="json", exclude_defaults=True, exclude=unused),
        prompt=text if isinstance(text, str) else None,
        filling=None if isinstance(text, str) else text,
        generates=task.generates,
        fields=task.fields,
    )


def _rendered(template: str, **facts: Any) -> str:
    # Values are inserted as Python literals, not as HTML. The page escapes the whole program.
    environment = templates(autoescape=False)
    # Strings, numbers, lists and objects of JSON are valid Python.
    environment.filters["py"] = partial(json.dumps, ensure_ascii=False)
    environment.filters["literal"] = partial(pformat, sort_dicts=False, width=96)
    return environment.get_template(template).render(facts)


def templates(*, autoescape: bool) -> Environment:
    """Return an environment of this package's templates; an undefined variable is an error."""
    with needs_extra("a report or a program", extra="report"):
        from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("fedone_sdk.reports"),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
