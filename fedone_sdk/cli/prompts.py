"""`fedone score` and `fedone prompt use`: measurement and use of a prompt."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedone_sdk.cli._options import BackendFile, JsonFile, RunPath, command, group
from fedone_sdk.cli._output import (
    Output,
    bias_text,
    check_target,
    cost_text,
    money,
    note,
    plural,
    say,
    terminal,
    write_file,
)
from fedone_sdk.cli._process import naming, quiet_logs
from fedone_sdk.cli._run_file import RunFile, backend_of
from fedone_sdk.data import check_examples, load_examples
from fedone_sdk.errors import ArgumentError, DataError, SpecError, system_errors
from fedone_sdk.messages.run import bill
from fedone_sdk.metrics import metric_text
from fedone_sdk.task import MAX_BIAS, Filling, TaskSpec, TextPrompt, form_of, words_of
from fedone_sdk.vocabulary import LABELS, special_token

if TYPE_CHECKING:
    from fedone_sdk.backends import LLMBackend, Prediction
    from fedone_sdk.budget import Usage
    from fedone_sdk.messages import Preference
    from fedone_sdk.metrics import MetricFunction
    from fedone_sdk.reports import Labelled, PromptArtefact
    from fedone_sdk.task import Example, ScoreFunction, TaskSpec


app = group("Use a tuned prompt.", example="fedone prompt use sst2.prompt.json --data texts.jsonl")

Artefact = Annotated[
    Path,
    typer.Argument(
        metavar="ARTEFACT", help="A prompt artefact, written by `fedone runs export --as prompt`."
    ),
]


FormName = Literal["text", "template", "python", "mlflow"]
"""Forms in which a prompt is printed."""


@command(app)
def use(
    path: Artefact,
    data: str | None = None,
    form: Annotated[FormName, typer.Option("--as")] = "template",
    backend_path: BackendFile = None,
    any_model: bool = False,
    target: Annotated[Path | None, typer.Option("--output", "-o")] = None,
) -> None:
    """Label texts with a tuned prompt, or print it.

    The output is JSON lines with the label and each label's log-probability. Without --backend the
    embedded model is used.

    Example: fedone prompt use sst2.prompt.json --backend run.yaml --data texts.jsonl

    Args:
        data (FILE): Label these: JSONL, CSV ..., or a .txt with a text a line; - is standard input
            (JSON objects or texts).
        form: Without --data: print the prompt's exact text, the model's input with it, a Python
            program for the model, or the arguments of MLflow's register_prompt.
        any_model: Allow another model than the one the prompt was tuned for.
        target (FILE): Write to this file instead of standard output.
    """
    from fedone_sdk.reports import label_examples, load_prompt

    quiet_logs()
    artefact = load_prompt(path)
    for key, name in artefact.functions.items():
        note(f"{path}: {key} names {name}, which is not imported")
    if token := special_token(artefact.prompt.text):
        note(f"{path}: the prompt holds {token!r}, a special token of some models")
    if target is not None:
        check_target("--output", target)
    if data is None:
        if any_model or (backend_path is not None and form != "python"):
            raise ArgumentError("--data: is required to use a model")
        with naming(str(path)):
            _say(_in_form(artefact, form, backend_path), target)
        return
    examples = _examples(data, artefact.task)
    backend = backend_of(backend_path)

    async def labelled() -> Labelled:
        async with backend:
            return await label_examples(backend, artefact, examples, any_model=any_model)

    with naming(str(path)):
        labels = asyncio.run(labelled())
    rows: Iterable[dict[str, Any]] = (
        {"text": text} if text is not None else {"label": label, "scores": scores}
        for label, scores, text in zip(labels.labels, labels.scores, labels.texts, strict=True)
    )
    ascii_only = target is None
    _say("".join(f"{json.dumps(row, ensure_ascii=ascii_only)}\n" for row in rows), target)
    usage = labels.usage
    terminal(stderr=True).print(
        f"{len(examples)} labelled, {plural(usage.requests, 'request')}, "
        f"{usage.prompt_tokens} prompt tokens, USD {money(usage, priced='usd' in backend.bounds)}"
    )


def _in_form(artefact: PromptArtefact, form: FormName, backend_path: Path | None) -> str:
    from fedone_sdk.reports import mlflow_prompt, program_of, ready_text
    from fedone_sdk.spec import BackendSpec, load_backend

    if form == "text":
        return artefact.prompt.text
    if form == "template":
        return ready_text(artefact.task, artefact.prompt.prompt)
    if form == "mlflow":
        return json.dumps(mlflow_prompt(artefact), indent=2, ensure_ascii=False) + "\n"
    backend = BackendSpec() if backend_path is None else load_backend(backend_path)
    code, note = program_of(artefact.task, artefact.prompt, backend, artefact.model)
    if not code:
        raise SpecError(note)
    return code


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
        with system_errors(DataError, f"{data}: cannot be read"), open(data, "rb") as file:
            examples = [*_lines(file, data, task)]
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


def score(
    run_path: RunPath,
    prompt: str = "",
    slot: list[str] | None = None,
    artefact_path: Annotated[Path | None, typer.Option("--artefact")] = None,
    data: str | None = None,
    backend_path: BackendFile = None,
    bias: str | None = None,
    pairs: bool = False,
    json_file: JsonFile = None,
) -> None:
    """Measure one prompt on one data file.

    Example: fedone score run.yaml --prompt " Overall verdict"

    Args:
        prompt: The prompt's exact text; empty is no prompt.
        slot (NAME=TEXT): Content of a slot of the task, once per slot; others are empty.
            labels=bad,good uses these label words, in the order of the task's labels.
        artefact_path (FILE): A prompt artefact with task and label bias, written by `tune
            --artefact`; RUN.yaml then only provides the model, the dev data and the names of
            functions.
        data (FILE): Labelled examples, or hf:NAME.
        bias (B,B): Add this to the label words' log-probabilities: one number per label, nats.
        pairs: Let the judge of task.score also compare the texts with those of no prompt, in both
            orders: two requests per example.
    """
    from fedone_sdk.backends.judge import Judge
    from fedone_sdk.local import load_measure, load_score

    output = Output(json_file)
    quiet_logs()
    run = RunFile.load(run_path)
    artefact = None if artefact_path is None else _artefact(artefact_path, prompt, slot, run)
    task = run.spec.task if artefact is None else artefact.asked
    if bias is not None:
        task = _with_bias(task, bias)
    asked = _asked(task, prompt, slot or []) if artefact is None else artefact.prompt.prompt
    source, examples = _dev_examples(run, data, task)
    backend = backend_of(backend_path) if backend_path else run.backend()
    with naming(str(run_path)):
        judge = load_score(task, run.folder)
        if pairs and not isinstance(judge, Judge):
            raise ArgumentError("--pairs: needs task.score: {judge: ...}")
        measure = load_measure(task, run.folder)
        size = run.spec.method.batch_size
        answers = asyncio.run(
            _measured(backend, task, asked, examples, size, judge, measure, pairs=pairs)
        )
        document, facts = _results(*answers, priced="usd" in backend.bounds)
    text = asked if isinstance(asked, str) else asked.text
    try:
        output.write_json(
            {"prompt": text, "data": source, "model": backend.fingerprint, **document}
        )
    finally:  # paid for: printed even if the file cannot be written
        output.heading(f"{text!r} on {source}")
        output.facts(facts)


async def _measured(
    backend: LLMBackend,
    task: TaskSpec,
    asked: TextPrompt,
    examples: Sequence[Example],
    size: int,
    score: ScoreFunction | None,
    measure: MetricFunction | None,
    *,
    pairs: bool,
) -> tuple[Prediction, Preference | None, tuple[Usage, bool] | None]:
    """Return a prompt's answers, with what a judge prefers and has cost."""
    from fedone_sdk.backends import predict, prediction_queries, score_all
    from fedone_sdk.backends.judge import Judge
    from fedone_sdk.backends.label_words import check_label_words
    from fedone_sdk.backends.queries import texts_of
    from fedone_sdk.evaluation.verdict import preference

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(backend)
        if isinstance(score, Judge):
            await stack.enter_async_context(score.backend)
        await check_label_words(backend, words_of(task, asked), form_of(task, asked))
        answers = await predict(backend, task, asked, examples, size, score=score, measure=measure)
        if not isinstance(score, Judge):
            return answers, None, None
        preferred = None
        if pairs:  # The cache has the answers to the prompt.
            texts = []
            for one in (asked, ""):
                queries = prediction_queries(backend, task, one, examples, size)
                texts.append(texts_of(queries, await score_all(backend, queries)))
            tuned, plain = texts
            preferred = preference(await score.preferences(tuned, plain, examples), tuned, plain)
        spent = (await score.bill.account()).spent
        return answers, preferred, (spent, "usd" in score.backend.bounds)


def _results(
    prediction: Prediction,
    preferred: Preference | None,
    judged: tuple[Usage, bool] | None,
    *,
    priced: bool,
) -> tuple[dict[str, Any], dict[str, str]]:
    from fedone_sdk.evaluation import Outcomes, interval

    task, failed = prediction.task, len(prediction.examples) - len(prediction.scored)
    ends = interval(task.metric, Outcomes.of("after", prediction), len(task.labels))
    metric = {"name": task.metric, "value": prediction.metric, "interval": ends and ends[1:3]}
    document: dict[str, Any] = {
        "metric": metric,
        "mean_loss": prediction.mean_loss,
        "bias": task.bias,
        "examples": len(prediction.examples),
        "failed": failed,
        "censored": prediction.censored,
        "usage": bill(prediction.usage, priced=priced),
    }
    spread = "" if ends is None else f", 95 % {ends.low:.4f} to {ends.high:.4f}"
    loss = f"{metric_text(prediction.mean_loss, 4)} ({task.loss})"
    facts = {"mean loss": loss + spread}
    if task.metric != "loss":
        facts = {task.metric: metric_text(prediction.metric, 4) + spread, "mean loss": loss}
    if judged is not None:
        spent, has_price = judged
        document["judge"] = bill(spent, priced=has_price)
        facts["judge"] = cost_text(spent, priced=has_price)
    if preferred is not None:
        document["preference"] = preferred.model_dump(mode="json")
        facts["judge in pairs"] = preferred.text
    if task.bias is not None:
        facts["label bias"] = bias_text(task.bias)
    facts["examples"] = f"{len(prediction.examples)} ({failed} failed)"
    facts["queries"] = f"{prediction.usage.queries} ({cost_text(prediction.usage, priced=priced)})"
    return document, facts


def _artefact(path: Path, prompt: str, slot: list[str] | None, run: RunFile) -> PromptArtefact:
    from fedone_sdk.reports import load_prompt

    for option in (name for name, value in {"--prompt": prompt, "--slot": slot}.items() if value):
        raise ArgumentError(f"{option}: does not go with --artefact")
    artefact = load_prompt(path)
    for key, name in artefact.functions.items():
        if name != getattr(run.spec.task, key.removeprefix("task.")):
            problem = f"{key}: {path} names {name!r}; it is imported only if this file names it too"
            raise SpecError(problem, source=str(run.path))
    return artefact


def _asked(task: TaskSpec, prompt: str, slots: list[str]) -> TextPrompt:
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


def _dev_examples(run: RunFile, data: str | None, task: TaskSpec) -> tuple[str, list[Example]]:
    if data is None:
        if run.spec.data is None or run.spec.data.dev is None:
            raise ArgumentError("--data: is required without a run that has dev data")
        dev = run.spec.data.dev
        data = dev if dev.startswith("hf:") else str(run.folder / dev)
    examples: list[Example] = [*load_examples(data, split="validation")]
    check_examples(task, examples, data)
    return data, examples
