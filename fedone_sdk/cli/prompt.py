"""`fedone prompt`: use of a prompt artefact."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedone_sdk.cli._failures import naming
from fedone_sdk.cli._options import BackendFile, group
from fedone_sdk.cli._output import check_target, money, plural, say, terminal, write_file
from fedone_sdk.cli._process import quiet_logs
from fedone_sdk.cli._run_file import backend_of
from fedone_sdk.data import load_examples
from fedone_sdk.errors import ArgumentError, DataError

if TYPE_CHECKING:
    from fedone_sdk.reports import Labelled
    from fedone_sdk.task import Example, TaskSpec

app = group(
    "Use a tuned prompt.",
    example="fedone prompt use sst2.prompt.json --data texts.jsonl",
)

Artefact = Annotated[
    Path,
    typer.Argument(
        metavar="ARTEFACT", help="A prompt artefact, written by `fedone runs export --as prompt`."
    ),
]


class FormName(StrEnum):
    """Forms in which a prompt is printed."""

    text = "text"
    template = "template"
    dspy = "dspy"
    mlflow = "mlflow"
    langfuse = "langfuse"
    promptfoo = "promptfoo"


@app.command(
    epilog="Example: fedone prompt use sst2.prompt.json --backend run.yaml --data texts.jsonl"
)
def use(
    path: Artefact,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Label these: JSONL, CSV ..., or a .txt with a text a line; - is standard input "
            "(JSON objects or texts).",
        ),
    ] = None,
    form: Annotated[
        FormName,
        typer.Option(
            "--as",
            help="Without --data: print the prompt's exact text, the input with it, a program for "
            "DSPy, a prompt for MLflow or Langfuse, or a configuration of promptfoo.",
        ),
    ] = FormName.template,
    backend_path: BackendFile = None,
    any_model: Annotated[
        bool,
        typer.Option(
            "--any-model", help="Allow another model than the one the prompt was tuned for."
        ),
    ] = False,
    target: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write to this file instead of standard output."
        ),
    ] = None,
) -> None:
    """Label texts with a tuned prompt, or print it.

    The output is JSON lines with the label and each label's log-probability. Without --backend the
    embedded model is used.
    """
    from fedone_sdk.reports import in_form, label_examples, read_artefact

    quiet_logs()
    artefact = read_artefact(path)
    if target is not None:
        check_target("--output", target)
    if data is None:
        if backend_path is not None or any_model:
            raise ArgumentError("--data: is required to use a model")
        with naming(str(path)):
            _say(in_form(artefact, form.value), target)
        return
    examples = _examples(data, artefact.task)
    backend = backend_of(backend_path)

    async def labelled() -> Labelled:
        async with backend:
            return await label_examples(backend, artefact, examples, any_model=any_model)

    with naming(str(path)):
        found = asyncio.run(labelled())
    rows: Iterable[dict[str, Any]] = (
        {"text": text} if text is not None else {"label": label, "scores": scores}
        for label, scores, text in zip(found.labels, found.scores, found.texts, strict=True)
    )
    _say("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), target)
    usage = found.usage
    terminal(stderr=True).print(
        f"{len(examples)} labelled, {plural(usage.requests, 'request')}, "
        f"{usage.prompt_tokens} prompt tokens, USD {money(usage, priced='usd' in backend.bounds)}"
    )


def _say(text: str, target: Path | None) -> None:
    if target is not None:
        write_file("--output", target, text)
    else:
        # A terminal gets a final line break, a program the exact text.
        end = "\n" if os.isatty(1) and not text.endswith("\n") else ""
        say(f"{text}{end}")


def _examples(data: str, task: TaskSpec) -> list[Example]:
    source = "standard input" if data == "-" else data
    if data == "-":
        examples = [*_lines(sys.stdin.buffer, source, task)]
    elif data.endswith(".txt"):
        try:
            with open(data, "rb") as file:
                examples = [*_lines(file, data, task)]
        except OSError as exc:
            raise DataError(f"{data}: cannot be read: {exc}") from exc
    else:
        examples = [*load_examples(data, split="test")]
    for number, example in enumerate(examples, 1):
        for name in task.fields:
            text = example.get(name)
            if not isinstance(text, str):
                raise DataError(f"{source}: example {number} has no text {name!r}")
            if any("\ud800" <= one <= "\udfff" for one in text):  # JSON can spell it
                raise DataError(f"{source}: example {number}: {name!r} is no valid Unicode text")
    return examples


def _lines(lines: Iterable[bytes], source: str, task: TaskSpec) -> Iterable[Example]:
    """Return a JSON object or a text from each line that is not blank."""
    for number, line in enumerate(lines, 1):
        try:
            text = line.decode().strip("\r\n")
        except UnicodeDecodeError as exc:
            raise DataError(f"{source}: line {number} is not UTF-8 text") from exc
        if not text.strip():
            continue
        if text.lstrip().startswith("{"):
            try:
                yield json.loads(text)
            except (ValueError, RecursionError) as exc:  # text, or a nesting beyond Python's limits
                raise DataError(f"{source}: line {number} is no JSON: {exc}") from exc
        elif len(task.fields) == 1:
            yield {task.fields[0]: text}
        else:
            wanted = ", ".join(task.fields)
            raise DataError(f"{source}: line {number} must be a JSON object with {wanted}")
