"""`fedone score`: measurement of one prompt on one data file."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedone_sdk.cli._failures import naming
from fedone_sdk.cli._options import BackendFile, JsonFile
from fedone_sdk.cli._output import Output, money, plural
from fedone_sdk.cli._process import quiet_logs
from fedone_sdk.cli._report import bias_text
from fedone_sdk.cli._run_file import RunFile, backend_of
from fedone_sdk.data import check_examples, load_examples
from fedone_sdk.errors import ArgumentError
from fedone_sdk.glue import glue_task
from fedone_sdk.messages.bill import bill
from fedone_sdk.task import MAX_BIAS, Filling, TaskSpec, TextPrompt, form_of, words_of
from fedone_sdk.vocabulary import LABELS

if TYPE_CHECKING:
    from fedone_sdk.backends import Prediction
    from fedone_sdk.reports import PromptArtefact
    from fedone_sdk.task import Example

_BATCH_SIZE = 32


def score(
    run_path: Annotated[
        Path | None, typer.Argument(metavar="RUN.yaml", help="Its task, model and dev data.")
    ] = None,
    prompt: Annotated[str, typer.Option(help="The prompt's exact text; empty is no prompt.")] = "",
    slot: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=TEXT",
            help="Content of a slot of the task, once per slot; others are empty. labels=bad,good "
            "uses these label words, in the order of the task's labels.",
        ),
    ] = None,
    artefact_path: Annotated[
        Path | None,
        typer.Option(
            "--artefact",
            metavar="FILE",
            help="A prompt artefact with task and label bias, written by `tune --artefact`; "
            "RUN.yaml then only provides the model and the dev data.",
        ),
    ] = None,
    task_name: Annotated[
        str | None,
        typer.Option(
            "--task", metavar="NAME", help="A built-in task (sst2 ...), without RUN.yaml."
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="FILE", help="Labelled examples, or hf:NAME.")
    ] = None,
    backend_path: BackendFile = None,
    batch_size: Annotated[
        int | None, typer.Option(metavar="B", min=1, max=1024, help="Examples per query.")
    ] = None,
    bias: Annotated[
        str | None,
        typer.Option(
            metavar="B,B",
            help="Add this to the label words' log-probabilities: one number per label, nats.",
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Measure one prompt on one data file."""
    from fedone_sdk.backends import predict
    from fedone_sdk.backends.label_words import check_label_words
    from fedone_sdk.local import load_measure, load_score

    output = Output(json_file)
    quiet_logs()
    run = None if run_path is None else RunFile.load(run_path)
    artefact = None if artefact_path is None else _artefact(artefact_path, task_name, prompt, slot)
    task = _task(run, task_name) if artefact is None else artefact.asked
    if bias is not None:
        task = _with_bias(task, bias)
    asked = _asked(task, prompt, slot or []) if artefact is None else artefact.prompt.prompt
    source, examples = _examples(run, data, task)
    backend = backend_of(backend_path) if backend_path or run is None else run.backend()
    size = batch_size or (run.spec.method.batch_size if run else _BATCH_SIZE)

    async def predicted() -> Prediction:
        async with backend:
            await check_label_words(backend, words_of(task, asked), form_of(task))
            return await predict(
                backend,
                task,
                asked,
                examples,
                size,
                score=score,
                measure=measure,
            )

    with naming(str(run_path or "arguments")):
        folder = run.folder if run else "."
        score, measure = load_score(task, folder), load_measure(task, folder)
        found = asyncio.run(predicted())
        metric, mean_loss = found.metric, found.mean_loss
        priced = "usd" in backend.bounds
    report = {
        "prompt": asked if isinstance(asked, str) else asked.text,
        "data": source,
        "model": backend.fingerprint,
        "metric": {"name": task.metric, "value": metric},
        "mean_loss": mean_loss,
        "bias": found.task.bias,
        "examples": len(examples),
        "failed": len(examples) - len(found.scored),
        "censored": found.censored,
        "usage": bill(found.usage, priced=priced),
    }
    facts = {
        **({} if task.metric == "loss" else {task.metric: _number(metric)}),
        "mean loss": f"{_number(mean_loss)} ({task.loss})",
        **({} if found.task.bias is None else {"label bias": bias_text(found.task.bias)}),
        "examples": f"{report['examples']} ({report['failed']} failed)",
        "queries": f"{found.usage.queries} ({plural(found.usage.requests, 'request')}, "
        f"{found.usage.prompt_tokens} prompt tokens, USD {money(found.usage, priced=priced)})",
    }
    try:
        output.write_json(report)
    finally:  # paid for: printed even if the file cannot be written
        output.heading(f"{report['prompt']!r} on {source}")
        output.facts(facts)


def _artefact(
    path: Path, task_name: str | None, prompt: str, slot: list[str] | None
) -> PromptArtefact:
    from fedone_sdk.reports import read_artefact

    given = {"--task": task_name, "--prompt": prompt, "--slot": slot}
    for option in (option for option, value in given.items() if value):
        raise ArgumentError(f"{option}: does not go with --artefact")
    return read_artefact(path)


def _task(run: RunFile | None, name: str | None) -> TaskSpec:
    if (run is None) == (name is None):
        raise ArgumentError("give either RUN.yaml or --task")
    if run is not None:
        return run.spec.task
    try:
        return glue_task(name or "")
    except ValueError as exc:
        raise ArgumentError(f"--task: {exc}") from exc


def _asked(task: TaskSpec, prompt: str, slots: list[str]) -> TextPrompt:
    """Return the prompt to measure: a text, or the contents of the task's slots."""
    if not slots:
        if prompt and task.slots:
            names = ", ".join(task.slots)
            raise ArgumentError(f"--prompt: the task has slots ({names}): --slot")
        return prompt
    given = dict(each.partition("=")[::2] for each in slots)
    allowed = (*task.slots, LABELS)
    for name in given:
        if name not in allowed:
            known = ", ".join(allowed)
            raise ArgumentError(f"--slot: {name!r} is no slot; allowed: {known}")
    words = tuple(given[LABELS].split(",")) if LABELS in given else ()
    if words and len(words) != len(task.labels):
        raise ArgumentError(f"--slot: labels needs {len(task.labels)} words with commas")
    if not task.slots:
        return Filling((prompt,), words)
    if prompt:
        raise ArgumentError("--prompt: does not go with --slot")
    return Filling(tuple(given.get(name, "") for name in task.slots), words)


def _with_bias(task: TaskSpec, text: str) -> TaskSpec:
    try:
        return task.with_bias([float(part) for part in text.split(",")])
    except ValueError as exc:
        allowed = f"needs {len(task.labels)} numbers with commas, each from -{MAX_BIAS:g} to"
        raise ArgumentError(f"--bias: {allowed} {MAX_BIAS:g}") from exc


def _examples(run: RunFile | None, data: str | None, task: TaskSpec) -> tuple[str, list[Example]]:
    if data is None:
        if run is None or run.spec.data is None or run.spec.data.dev is None:
            raise ArgumentError("--data: is required without a run that has dev data")
        dev = run.spec.data.dev
        data = dev if dev.startswith("hf:") else str(run.folder / dev)
    examples: list[Example] = [*load_examples(data, split="validation")]
    check_examples(task, examples, data)
    return data, examples


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
