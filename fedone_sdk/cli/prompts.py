"""`fedone score`, which measures a prompt, and `fedone prompt use`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fedone_sdk import backends, local, reports
from fedone_sdk.backends.judge import Judge
from fedone_sdk.backends.label_words import check_label_words
from fedone_sdk.backends.queries import texts_of
from fedone_sdk.budget import Usage
from fedone_sdk.cli import _output
from fedone_sdk.cli._options import BackendFile, JsonFile, RunPath, command, group
from fedone_sdk.cli._output import Output, cost_text, note
from fedone_sdk.cli._process import errors_in, quiet_logs
from fedone_sdk.cli._run_file import RunFile, backend_of
from fedone_sdk.data import check_examples, load_examples
from fedone_sdk.errors import ArgumentError, DataError, SpecError, system_errors
from fedone_sdk.messages import Preference
from fedone_sdk.messages.run import bill
from fedone_sdk.metrics import metric_text
from fedone_sdk.spec import BackendSpec, load_backend
from fedone_sdk.task import MAX_BIAS, Example, Filling, TaskSpec, TextPrompt, form_of, words_of
from fedone_sdk.vocabulary import LABELS, special_token

app = group("Use a tuned prompt.", example="fedone prompt use sst2.prompt.json --data texts.jsonl")

FormName = Literal["text", "template", "python", "mlflow"]


@command(app)
def use(
    path: Path,
    data: str | None = None,
    form: Annotated[FormName, typer.Option("--as")] = "template",
    backend_path: BackendFile = None,
    any_model: bool = False,
    target: Annotated[Path | None, typer.Option("--output", "-o")] = None,
) -> None:
    """Label texts with a tuned prompt, or print the prompt.

    Each line of the output is a JSON object with the predicted label, and the log-probability of
    every label. Without --backend the embedded model is used.

    Example: fedone prompt use sst2.prompt.json --backend run.yaml --data texts.jsonl

    Args:
        path (ARTEFACT): A prompt artefact, from `fedone tune --artefact`, or exported from a run.
        data (FILE): The texts to label: JSONL, CSV ..., or a .txt with one text per line. With -,
            standard input is read: each line is a JSON object or a text. Blank lines are skipped.
        form: What to print without --data: the prompt's exact text (text), the model's input with
            the prompt (template), a program that uses the prompt (python), or the arguments of
            MLflow's register_prompt (mlflow).
        any_model: Allow a model other than the one that the prompt was tuned for.
        target (FILE): Write to this file instead of standard output.
    """
    quiet_logs()
    artefact = reports.load_prompt(path)
    for key, name in artefact.functions.items():
        note(f"{path}: {key} names {name}; this command does not import it")
    if token := special_token(artefact.prompt.text):
        note(f"{path}: the prompt contains {token!r}, a special token of some models")
    _output.check_target("--output", target)
    if data is None:
        if any_model or (backend_path is not None and form != "python"):
            raise ArgumentError("--data: is required to use a model")
        with errors_in(str(path)):
            _write(_in_form(artefact, form, backend_path), target)
        return
    examples = _examples(data, artefact.task)
    backend = backend_of(backend_path)

    async def label() -> reports.Labelled:
        async with backend:
            return await reports.label_examples(backend, artefact, examples, any_model=any_model)

    with errors_in(str(path)):
        labelled = asyncio.run(label())
    rows: Iterable[dict[str, Any]] = (
        {"text": one.text} if one.text is not None else {"label": one.label, "scores": one.scores}
        for one in labelled.predictions
    )
    _write("".join(f"{json.dumps(row, ensure_ascii=target is None)}\n" for row in rows), target)
    cost = cost_text(labelled.usage, priced="usd" in backend.bounds)
    note(f"{len(examples)} labelled, {cost}")


def _in_form(artefact: reports.PromptArtefact, form: FormName, backend_path: Path | None) -> str:
    if form == "text":
        return artefact.prompt.text
    if form == "template":
        return reports.ready_text(artefact.task, artefact.prompt.prompt)
    if form == "mlflow":
        return json.dumps(reports.mlflow_prompt(artefact), indent=2, ensure_ascii=False) + "\n"
    backend = BackendSpec() if backend_path is None else load_backend(backend_path)
    program, reason = reports.program_of(artefact.task, artefact.prompt, backend, artefact.model)
    if not program:
        raise SpecError(reason)
    return program


def _write(text: str, target: Path | None) -> None:
    if target is not None:
        _output.write_file("--output", target, text)
    else:
        # On a terminal a line break is added; programs read the exact text.
        end = "\n" if os.isatty(1) and not text.endswith("\n") else ""
        _output.say(f"{text}{end}")


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
            if any("\ud800" <= char <= "\udfff" for char in text):  # JSON can contain surrogates.
                raise DataError(f"{source}: example {number}: {name!r} is not valid Unicode")
    return examples


def _lines(lines: Iterable[bytes], source: str, task: TaskSpec) -> Iterable[Example]:
    for number, line in enumerate(lines, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip("\r\n")
        except UnicodeDecodeError as exc:
            raise DataError(f"{source}: line {number} is not UTF-8 text") from exc
        if not text.strip():
            continue
        if text.lstrip().startswith("{"):
            try:
                yield json.loads(text)
            except (ValueError, RecursionError) as exc:  # Python limits the depth of nesting.
                raise DataError(f"{source}: line {number} is not JSON: {exc}") from exc
        elif len(task.fields) == 1:
            yield {task.fields[0]: text}
        else:
            fields = ", ".join(task.fields)
            raise DataError(f"{source}: line {number} must be a JSON object with {fields}")


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
        prompt: The prompt's exact text; an empty text means no prompt.
        slot (NAME=TEXT): Content of a slot of the task; repeatable. Other slots are empty.
            labels=bad,good uses these label words, in the order of the task's labels.
        artefact_path (FILE): Measure the prompt of this artefact (from `fedone tune --artefact`),
            with its task and label bias. RUN.yaml then provides only the model, the dev rows and
            your score and metric functions.
        data (FILE): Labelled examples: a file, or hf:NAME. Default: data.dev of RUN.yaml.
        bias (B,B): The label bias: one number per label, added to its log-probability (nats).
        pairs: Also let the judge of task.score compare each generated text with the text that is
            generated without a prompt, in both orders: two requests per example.
    """
    output = Output(json_file)
    quiet_logs()
    run = RunFile.load(run_path)
    artefact = None if artefact_path is None else _artefact(artefact_path, prompt, slot, run)
    task = run.spec.task if artefact is None else artefact.tuned_task
    if bias is not None:
        task = _with_bias(task, bias)
    measured = _prompt_of(task, prompt, slot or []) if artefact is None else artefact.prompt.prompt
    source, examples = _dev_examples(run, data, task)
    backend = backend_of(backend_path) if backend_path else run.backend()
    with errors_in(str(run_path)):
        answers = asyncio.run(_measure(run, backend, task, measured, examples, pairs=pairs))
        document, facts = _results(*answers, priced="usd" in backend.bounds)
    text = measured if isinstance(measured, str) else measured.text
    try:
        output.write_json(
            {"prompt": text, "data": source, "model": backend.fingerprint, **document}
        )
    finally:  # Print the paid result even if the file cannot be written.
        output.heading(f"{text!r} on {source}")
        output.facts(facts)


async def _measure(
    run: RunFile,
    backend: backends.LLMBackend,
    task: TaskSpec,
    prompt: TextPrompt,
    examples: Sequence[Example],
    *,
    pairs: bool,
) -> tuple[backends.Prediction, Preference | None, tuple[Usage, bool] | None]:
    """Return answers, the judge's preference and usage, and whether the judge has a price."""
    from fedone_sdk.evaluation.verdict import preference

    judge, size = local.load_score(task, run.folder), run.spec.method.batch_size
    functions: dict[str, Any] = {"score": judge, "measure": local.load_measure(task, run.folder)}
    if pairs and not isinstance(judge, Judge):
        raise ArgumentError("--pairs: needs task.score: {judge: ...}")
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(backend)
        if isinstance(judge, Judge):
            await stack.enter_async_context(judge.backend)
        await check_label_words(backend, words_of(task, prompt), form_of(task, prompt))
        answers = await backends.predict(backend, task, prompt, examples, size, **functions)
        if not isinstance(judge, Judge):
            return answers, None, None
        preferred = None
        if pairs:  # The answers with the tuned prompt are cached already.
            texts = []
            for compared in (prompt, ""):
                queries = backends.prediction_queries(backend, task, compared, examples, size)
                texts.append(texts_of(queries, await backends.score_all(backend, queries)))
            tuned, plain = texts
            preferred = preference(await judge.preferences(tuned, plain, examples), tuned, plain)
        spent = (await judge.bill.account()).spent
        return answers, preferred, (spent, "usd" in judge.backend.bounds)


def _results(
    prediction: backends.Prediction,
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
    spread = "" if ends is None else f", 95 % interval {ends.low:.4f} to {ends.high:.4f}"
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
        facts["judge's preference"] = preferred.text
    if task.bias is not None:
        facts["label bias"] = _output.bias_text(task.bias)
    facts["examples"] = f"{len(prediction.examples)} ({failed} failed)"
    facts["queries"] = f"{prediction.usage.queries} ({cost_text(prediction.usage, priced=priced)})"
    return document, facts


def _artefact(
    path: Path, prompt: str, slot: list[str] | None, run: RunFile
) -> reports.PromptArtefact:
    for option in (name for name, value in {"--prompt": prompt, "--slot": slot}.items() if value):
        raise ArgumentError(f"{option}: cannot be combined with --artefact")
    artefact = reports.load_prompt(path)
    for key, name in artefact.functions.items():
        if name != getattr(run.spec.task, key.removeprefix("task.")):
            problem = f"{key}: must be {name!r}, the function that {path} names"
            raise SpecError(problem, source=str(run.path))
    return artefact


def _prompt_of(task: TaskSpec, prompt: str, slots: list[str]) -> TextPrompt:
    if not slots:
        if prompt and task.slots:
            names = ", ".join(task.slots)
            raise ArgumentError(f"--prompt: the task has slots ({names}); use --slot")
        return prompt
    texts = dict(each.partition("=")[::2] for each in slots)
    allowed = (*task.slots, LABELS)
    for name in texts:
        if name not in allowed:
            raise ArgumentError(f"--slot: {name!r} is not a slot; allowed: {', '.join(allowed)}")
    words = tuple(texts[LABELS].split(",")) if LABELS in texts else ()
    if words and len(words) != len(task.labels):
        raise ArgumentError(f"--slot: 'labels' needs {len(task.labels)} words, separated by commas")
    if not task.slots:
        return Filling((prompt,), words)
    if prompt:
        raise ArgumentError("--prompt: cannot be combined with --slot")
    return Filling(tuple(texts.get(name, "") for name in task.slots), words)


def _with_bias(task: TaskSpec, text: str) -> TaskSpec:
    try:
        return task.with_bias([float(part) for part in text.split(",")])
    except ValueError as exc:
        raise ArgumentError(
            f"--bias: needs {len(task.labels)} numbers from -{MAX_BIAS:g} to {MAX_BIAS:g}, "
            "separated by commas"
        ) from exc


def _dev_examples(run: RunFile, data: str | None, task: TaskSpec) -> tuple[str, list[Example]]:
    if data is None:
        if run.spec.data is None or run.spec.data.dev is None:
            raise ArgumentError("--data: is required, because RUN.yaml has no data.dev")
        dev = run.spec.data.dev
        data = dev if dev.startswith("hf:") else str(run.folder / dev)
    examples: list[Example] = [*load_examples(data, split="validation")]
    check_examples(task, examples, data)
    return data, examples
