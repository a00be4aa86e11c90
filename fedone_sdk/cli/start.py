"""`fedone quickstart` and `fedone init`: a first run, and a RUN.yaml for labelled texts."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedone_sdk import assets
from fedone_sdk.backends.local_models import LOCAL_MODELS, is_present
from fedone_sdk.cli._options import Cap, JsonFile, Seed
from fedone_sdk.cli._output import (
    Output,
    check_target,
    exit_code,
    note,
    plural,
    print_result,
    printable,
    write_file,
)
from fedone_sdk.cli._process import naming, quiet_logs
from fedone_sdk.cli._run_file import RunFile
from fedone_sdk.cli._tuning import run_here
from fedone_sdk.data import label_columns, load_examples, split_dev, text_columns
from fedone_sdk.errors import ArgumentError, BackendError, MissingExtraError, SpecError

if TYPE_CHECKING:
    from fedone_sdk.local import Federation
    from fedone_sdk.messages import RunResult
    from fedone_sdk.reports import Change
    from fedone_sdk.stores import Store


_DEV_SHARE = 0.2
_SAMPLES = 6
_ROUNDS = 10
"""Rounds of a new run, as a multiple of those that its cap pays for."""
_SMALL = "smollm2-135m-instruct"


def init(
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="Labelled texts: CSV, TSV, JSONL or JSON.")
    ],
    text: Annotated[str | None, typer.Option(metavar="COLUMN", help="Column of the texts.")] = None,
    label: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column of the labels.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A name of `fedone models`, a GGUF file, a model folder, or the name of a "
            "model behind an OpenAI-compatible API.",
        ),
    ] = None,
    queries: Annotated[
        int, typer.Option(metavar="N", min=_SAMPLES, help="The cap on training queries.")
    ] = 300,
    target: Annotated[
        Path, typer.Option("--output", "-o", metavar="RUN.yaml", help="The file to write.")
    ] = Path("run.yaml"),
) -> None:
    """Write a RUN.yaml for a file of labelled texts, with a dev set split off.

    On a terminal the command prompts for columns and model, unless they are given. Existing files
    are not overwritten.
    """
    output = Output(None)
    quiet_logs()
    name = "".join(c if c.isalnum() and c.isascii() else "-" for c in data.stem).strip("-") or "run"
    train_path, dev_path = (target.parent / f"{name}.{part}.jsonl" for part in ("train", "dev"))
    for file in (target, train_path, dev_path):
        check_target("--output", file)
        if file.exists():
            raise ArgumentError(f"{file} exists, and is not overwritten")
    with naming(str(data)):
        rows = load_examples(data)
        label = _chosen("--label", label, label_columns(rows), list(rows[0]))
        text = _chosen("--text", text, text_columns(rows, label), list(rows[0]))
        train, dev = split_dev(rows, label, share=_DEV_SHARE)
    backend = _backend_of(_model(model), target.parent)
    values = sorted({str(row[label]) for row in rows})
    words = asyncio.run(_label_words(backend, target.parent, values))
    clients = max(1, min(20, len(train) // 16))
    run_yaml = _run_yaml(
        name=name[:64],
        text=text,
        label=label,
        backend=backend,
        words=words,
        train=train_path.name,
        dev=dev_path.name,
        clients=clients,
        queries=queries,
    )
    for file, part in ((train_path, train), (dev_path, dev)):
        lines = (json.dumps({"text": row[text], "label": row[label]}) for row in part)
        write_file("--output", file, "".join(f"{line}\n" for line in lines))
    write_file("--output", target, run_yaml)
    output.heading(f"{target}: texts of {text!r}, labels of {label!r}")
    output.facts(
        {
            "model": backend.get("model", "roberta-mini"),
            "label words": ", ".join(
                f"{value}: {word.text!r}{word.note}" for value, word in words.items()
            ),
            str(train_path): f"{plural(len(train), 'row')}, on {plural(clients, 'device')}",
            str(dev_path): f"{plural(len(dev), 'row')}, which only measure the prompt",
        }
    )
    output.console.print(f"\nNext: fedone plan {target}, then fedone tune {target}")


def _interactive() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _chosen(option: str, given: str | None, likely: Sequence[str], known: Sequence[str]) -> str:
    """Return a column: as given, as answered, or the most likely one."""
    if given is None and _interactive():
        others = ", ".join(likely[1:])
        question = f"Column of the {option[2:]}s{f' (or {others})' if others else ''}"
        given = typer.prompt(question, default=likely[0])
    if given is not None and given not in likely:
        why = "does not hold one in every row" if given in known else "is no column"
        raise SpecError(f"{option}: {given!r} {why}; likely: {', '.join(likely)}", source="data")
    return given or likely[0]


def _model(given: str | None) -> str:
    from importlib.util import find_spec

    if given is not None:
        return given
    local = is_present(LOCAL_MODELS[_SMALL]) and find_spec("xllamacpp") is not None
    default = _SMALL if local else "roberta-mini"
    return str(typer.prompt("Model", default=default)) if _interactive() else default


def _backend_of(model: str, folder: Path) -> dict[str, Any]:
    if model in LOCAL_MODELS:
        known = LOCAL_MODELS[model]
        return {"kind": "onnx"} if known.wheel is None else {"kind": known.backend, "model": model}
    path = Path(model)
    if path.suffix == ".gguf":
        return {"kind": "llama_cpp", "model": str(path.absolute())}
    if path.is_dir():
        kind = "onnx" if any(path.glob("*.onnx")) else "transformers"
        return {"kind": kind, "model": str(path.absolute())}
    return {"kind": "openai", "model": model}


@dataclass(frozen=True, slots=True)
class _Word:
    text: str
    note: str


async def _label_words(
    backend: Mapping[str, Any], folder: Path, values: Sequence[str]
) -> dict[str, _Word]:
    """Return a word for each label: one that the model supports, else a guess with a note."""
    from pydantic import TypeAdapter

    from fedone_sdk.backends.build import build_backend
    from fedone_sdk.backends.label_words import spellings_of, valid_words
    from fedone_sdk.spec import BackendSpec

    chosen: dict[str, _Word] = {}
    try:
        async with build_backend(
            TypeAdapter[Any](BackendSpec).validate_python(dict(backend)), folder
        ) as model:
            for value in values:
                taken = [word.text for word in chosen.values()]
                found = await valid_words(model, [*spellings_of(value)], apart_from=taken)
                if found:
                    chosen[value] = _Word(found[0], "")
                else:
                    chosen[value] = _Word(
                        f" {value}", " (not one token of the model: choose another)"
                    )
    except (BackendError, MissingExtraError, SpecError) as exc:
        reason = str(exc).splitlines()[0]
        return {value: _Word(f" {value}", f" (not checked: {reason})") for value in values}
    return chosen


def _run_yaml(
    *,
    name: str,
    text: str,
    label: str,
    backend: Mapping[str, Any],
    words: Mapping[str, _Word],
    train: str,
    dev: str,
    clients: int,
    queries: int,
) -> str:
    import yaml

    from fedone_sdk.spec import RunSpec, validate_spec

    masked = backend["kind"] == "onnx"
    labels = "\n".join(
        f"    {_yaml(value)}: {_yaml(word.text)}{f'  #{word.note}' if word.note else ''}"
        for value, word in words.items()
    )
    form = (
        _MASKED.format(aspect=_plain(label).capitalize())
        if masked
        else _CHAT.format(text=_yaml(_plain(text)), aspect=_yaml(_plain(label)))
    )
    document = _RUN.format(
        name=_yaml(name),
        form=form,
        labels=labels,
        train=_yaml(train),
        dev=_yaml(dev),
        clients=clients,
        prompt=_WORDS if masked else _SLOTS,
        samples=_SAMPLES,
        queries=queries,
        rounds=_ROUNDS * max(1, queries // _SAMPLES),
        backend=_yaml(dict(backend)),
    )
    validate_spec(RunSpec, yaml.safe_load(document), source="the new run")
    return document


def _plain(name: str) -> str:
    kept = "".join(c if c.isalnum() else " " for c in name)
    return " ".join(kept.split())[:100] or "text"


def _yaml(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


_MASKED = """\
  # The model answers at {{mask}}; {{prompt}} is what is tuned.
  template: "{{prompt}} {{text}} {aspect}:{{mask}}"
"""
_CHAT = """\
  # Sent through the model's own chat template; {{instruction}} is what is tuned.
  chat: {{user: "{{instruction}}{{text}}"}}
  # Words for the task in the instructions.
  description: {{text: {text}, aspect: {aspect}}}
"""
_WORDS = """\
# Eight words, chosen from the texts; a position may be blank.
prompt: {length: 8, vocabulary: {kind: pmi, size: 100}}
"""
_SLOTS = """\
# Candidate instructions that ship with the SDK. Add your own sentences as a list.
prompt:
  slots:
    - {name: instruction, candidates: {kind: instructions, size: 12}}
"""
_RUN = """\
# Written by `fedone init`. All keys: docs/reference/run-yaml.md
name: {name}
task:
{form}  # The model's answer for each label: a word that is one token of it, with its leading space.
  # Words that describe the label work best.
  labels:
{labels}
  metric: accuracy
data:
  train: {train}
  # Only for measuring the prompt; no device has these rows.
  dev: {dev}
  # Number of simulated devices that share the rows.
  num_clients: {clients}
{prompt}# Thompson sampling over whole prompts. A query is one prompt on one mini-batch.
method: {{name: thompson, num_samples: {samples}, batch_size: 16}}
# A hard cap. A higher number continues the same run.
budget: {{queries: {queries}}}
# More than the budget pays for, so that a higher one has work to pay for.
rounds: {rounds}
# 0 measures only before and after the run.
evaluation: {{every: 0}}
backend: {backend}
seed: 0
"""


_SHOWN_CHANGES = 3


class _Model(StrEnum):
    smollm2 = "smollm2-135m-instruct"
    mini = "mini"


_FILES = {_Model.smollm2: "quickstart.yaml", _Model.mini: "quickstart-mini.yaml"}


def quickstart(
    model: Annotated[
        _Model,
        typer.Option(
            help="An instruct model of 135 million parameters (98 MB, fetched once), or the "
            "embedded masked model (10 seconds, no network)."
        ),
    ] = _Model.smollm2,
    seed: Seed = None,
    cap: Cap = None,
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the quickstart's run as a template for your own, without running it.",
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Tune a prompt for a small language model on feedback sentences that come with the SDK.

    A real aggregator and edge clients work in this process, under a hard cap on queries.
    """
    if write is not None:
        check_target("--write", write)
        write_file("--write", write, _as_own_run(assets.path(_FILES[model])))
        print(f"wrote {write}; next: fedone plan {write}")
        return
    output = Output(json_file)
    quiet_logs()
    run = RunFile.load(assets.path(_FILES[_available(model)]), seed=seed, cap=cap)
    federation = run.federation()
    result, changes = asyncio.run(_tuned(run, federation))
    output.write_json(result)
    print_result(output, result, num_clients=len(federation.shards))
    if changes is not None:
        output.console.print()
        _print_changes(output, run, result, changes)
    raise typer.Exit(exit_code(result))


def _available(model: _Model) -> _Model:
    if model is _Model.mini:
        return model
    from fedone_sdk.backends.local_models import is_present, local_model
    from fedone_sdk.cli.models import fetch

    try:
        if not is_present(local_model(model)):
            fetch(model)
    except SpecError as exc:
        note(f"{exc}; using the embedded mini model")
        return _Model.mini
    return model


def _as_own_run(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    folder = path.parent.as_posix()
    return text.replace("companion_feedback/", f"{folder}/companion_feedback/")


async def _tuned(run: RunFile, federation: Federation) -> tuple[RunResult, list[Change] | None]:
    """Return the run, and the answers that its prompt changes; None if it was stopped."""
    from fedone_sdk.stores import MemoryStore

    async with run.backend() as backend:
        store = MemoryStore()
        result = await run_here(federation, source=run.path, backend=backend, store=store)
    return result, None if exit_code(result) else await _changes(store, federation, result)


async def _changes(store: Store, federation: Federation, result: RunResult) -> list[Change]:
    from fedone_sdk.evaluation.outcomes import OUTCOMES, newest_outcomes
    from fedone_sdk.reports import changed_answers

    outcomes = newest_outcomes(await store.log(result.run_id, OUTCOMES))
    bias = None if result.verdict is None else result.verdict.bias
    return changed_answers(federation.spec.task, outcomes, federation.dev, bias)


def _print_changes(output: Output, run: RunFile, result: RunResult, found: list[Change]) -> None:
    task = run.spec.task
    words = [word.strip() for word in task.label_words]
    right = sum(change.after == change.target for change in found)
    output.heading(f"It changes {len(found)} answers, {right} of them for the better; for example")
    for change in found[:_SHOWN_CHANGES]:
        text = " ".join(printable(str(change.example[name])) for name in task.fields)
        verdict = "right" if change.after == change.target else "wrong"
        output.console.print(
            f"  {text!r}: {_word(words, change.before)} -> {_word(words, change.after)} ({verdict})"
        )
    spent, cap = result.spent, result.cap.queries
    output.console.print()
    output.console.print(
        f"Spent {spent.queries} of {cap} training queries. "
        "Next, a run of your own: fedone quickstart --write run.yaml"
    )


def _word(words: Sequence[str], index: int) -> str:
    return words[index] if index >= 0 else "no label"
