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
from rich.filesize import decimal as size

from fedone_sdk import assets
from fedone_sdk.backends.local_models import LOCAL_MODELS, is_present
from fedone_sdk.cli._output import Output, check_target, note, plural
from fedone_sdk.cli._process import naming, quiet_logs
from fedone_sdk.cli._run_file import RunFile
from fedone_sdk.data import columns, load_examples
from fedone_sdk.errors import ArgumentError, SpecError

if TYPE_CHECKING:
    from fedone_sdk.local.draft import Draft

_SAMPLES, _BATCH = 6, 8
_ROUNDS = 10
"""Rounds of a new run, as a multiple of those that its cap pays for."""

_TUNE_S = 600.0
"""Seconds that a local model may take to read the texts of a run; longer texts are cut."""

_LENGTHS = (200, 300, 400, 600, 800, 1200, 2000)
"""Lengths at which texts are cut, characters; the last for a model whose speed is not known."""


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
    """Write a RUN.yaml for a file of labelled texts, with rows for measurement split off.

    The model derives what the files do not say: label words that it knows, and what the texts are.
    Some rows become public, as examples in prompts. On a terminal the command prompts for columns
    and model, unless they are given. Either all files are written, or none.

    Example: fedone init tickets.csv --model smollm2-135m-instruct

    Args:
        data (DATA): Labelled texts: CSV, TSV, JSONL or JSON.
        text (COLUMN): Column of the texts.
        label (COLUMN): Column of the labels.
        about (NOUN[:NOUN]): What a text is and what its label says, such as 'movie
            review:sentiment'; else the column names and the model say it.
        words (LABEL=WORD,...): What the labels mean, such as '0=negative,1=positive'.
        model (NAME): A name of `fedone models`, a GGUF file, a model folder, or the name of a model
            behind an OpenAI-compatible API.
        queries (N): The cap on training queries.
        target (RUN.yaml): The file to write.
        fresh: Replace the files of an earlier call.
    """
    output = Output(None)
    quiet_logs()
    check_target("--output", target)
    if target.exists() and not fresh:
        raise ArgumentError(f"{target} exists: --fresh replaces it, -o FILE writes another file")
    name = "".join(c if c.isalnum() and c.isascii() else "-" for c in data.stem).strip("-") or "run"
    with naming(str(data)):
        rows = load_examples(data)
        label = _chosen("--label", label, columns.label_columns(rows), columns.columns_of(rows))
        text = _chosen("--text", text, columns.text_columns(rows, label), columns.columns_of(rows))
        usable = columns.labelled(rows, text, label)
        parts = columns.split(usable.rows)
    backend = _backend_of(_model(model))
    noun, _, aspect = (about or "").partition(":")
    drafted, cut = asyncio.run(
        _drafted(
            backend,
            parts,
            queries,
            columns=(text, label),
            public=_file(name, "public"),
            text=noun or None,
            aspect=aspect or None,
            words=_meanings(words, sorted({row["label"] for row in usable.rows})),
        )
    )
    run = _NewRun(name, (text, label), parts, drafted, cut, backend)
    _write(target, run.files(target.name, queries), fresh=fresh)
    output.heading(f"{target}: texts of {text!r}, labels of {label!r}")
    output.facts(run.facts)
    for line in usable.notes:
        output.console.print(f"  note: {line}")
    output.console.print(f"\nNext: fedone plan {target}, then fedone tune {target}")


def _file(name: str, part: str) -> str:
    return f"{name}.{part}.jsonl"


class _NewRun(NamedTuple):
    """A run to write; `cut` is the length at which its texts are cut."""

    name: str
    columns: tuple[str, str]
    parts: columns.Splits
    draft: Draft
    cut: int
    backend: dict[str, Any]

    @property
    def clients(self) -> int:
        return max(1, min(20, len(self.parts.train) // _BATCH))

    def files(self, target: str, queries: int) -> dict[str, str]:
        """Return the contents of RUN.yaml and of its tables."""
        # The columns' own names, so that other rows of the table fit the task.
        taken, keys = {*self.draft.slots, "prompt", "mask"}, self.columns
        if not all(key.isidentifier() and key not in taken for key in keys):
            keys = ("text", "label")
        tables = {
            _file(self.name, part): "".join(
                _yaml(dict(zip(keys, row.values(), strict=True))) + "\n" for row in rows
            )
            for part, rows in self.parts._asdict().items()
        }
        run = _document(
            self.draft,
            form=f"{{{keys[0]}:.{self.cut}}}",
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
        longer = sum(len(row["text"]) > self.cut for row in rows)
        count = {part: plural(len(each), "row") for part, each in self.parts._asdict().items()}
        return {
            "model": self.backend.get("model", "roberta-mini"),
            "texts": f"{', '.join(task['description'].values())}; cut at {self.cut} characters"
            f" ({plural(longer, 'row')} of {len(rows)} longer)",
            "label words": ", ".join(
                f"{label}: {word!r}" for label, word in task["labels"].items()
            ),
            _file(self.name, "train"): f"{count['train']}, on {plural(self.clients, 'device')}",
            _file(self.name, "dev"): f"{count['dev']}, which only measure the prompt",
            _file(self.name, "public"): f"{count['public']}, which become public as examples",
        }


def _interactive() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _chosen(option: str, given: str | None, likely: Sequence[str], known: Sequence[str]) -> str:
    """Return a column: as given, as answered, or the most likely one."""
    if given is None and _interactive():
        others = ", ".join(likely[1:])
        question = f"Column of the {option[2:]}s{f' (or {others})' if others else ''}"
        given = typer.prompt(question, default=likely[0])
    if given is not None and given not in likely:
        why = "does not hold any" if given in known else "is no column"
        raise SpecError(f"{option}: {given!r} {why}; likely: {', '.join(likely)}", source="data")
    return given or likely[0]


def _meanings(given: str | None, labels: Sequence[str]) -> dict[str, str] | None:
    if given is None:
        return None
    pairs = [one.partition("=") for one in given.split(",")]
    meanings = {label.strip(): word.strip() for label, _, word in pairs}
    if set(meanings) != set(labels) or not all(meanings.values()):
        raise ArgumentError(f"--words: needs LABEL=WORD for each of {', '.join(labels)}")
    return meanings


def _model(given: str | None) -> str:
    """Return a model: as given, or the largest known one that is here, after an offer to fetch."""
    if given is not None:
        return given
    usable = [
        one
        for one in LOCAL_MODELS.values()
        if one.backend != "llama_cpp" or find_spec("xllamacpp") is not None
    ]
    usable.sort(key=lambda one: one.num_bytes)
    best, here = usable[-1], [one for one in usable if is_present(one)][-1]
    if best != here:
        num_bytes = size(best.wheel.num_bytes if best.wheel else best.num_bytes)
        if not _interactive():
            note(f"a better model: fedone models {best.name} fetches {num_bytes}")
        elif typer.confirm(f"Fetch {best.name} ({best.description}; {num_bytes})?", default=True):
            from fedone_sdk.cli.models import fetch

            fetch(best.name)
            here = best
    return str(typer.prompt("Model", default=here.name)) if _interactive() else here.name


def _backend_of(model: str) -> dict[str, Any]:
    if model in LOCAL_MODELS:
        known = LOCAL_MODELS[model]
        return {"kind": "onnx"} if known.wheel is None else {"kind": known.backend, "model": model}
    path, kind = Path(model), "openai"
    if path.suffix == ".gguf":
        kind = "llama_cpp"
    elif path.is_dir():
        kind = "onnx" if any(path.glob("*.onnx")) else "transformers"
    return {"kind": kind, "model": model if kind == "openai" else str(path.absolute())}


async def _drafted(
    backend: dict[str, Any], parts: columns.Splits, queries: int, **given: Any
) -> tuple[Draft, int]:
    from pydantic import TypeAdapter

    from fedone_sdk.backends.build import build_backend
    from fedone_sdk.local.draft import FRAME_CHARS, draft
    from fedone_sdk.spec import BackendSpec

    spec = TypeAdapter[Any](BackendSpec).validate_python(backend)
    async with build_backend(spec) as model:
        drafted = await draft(model, backend["kind"], parts.public, **given)
    if drafted.several:
        backend["multi_token_labels"] = True
    most = float(_LENGTHS[-1])
    if drafted.char_s:
        rows = queries * _BATCH + 3 * len(parts.dev)
        most = _TUNE_S / drafted.char_s / rows - FRAME_CHARS
    return drafted, max(filter(lambda one: one <= most, _LENGTHS), default=_LENGTHS[0])


def _write(target: Path, files: Mapping[str, str], *, fresh: bool) -> None:
    """Write all files, or none: they are checked in a temporary folder as `fedone plan` does."""
    folder = target.parent
    for file, content in files.items():
        place = folder / file
        if place.exists() and not fresh and place.read_text(encoding="utf-8") != content:
            raise ArgumentError(f"{place} exists with other content; --fresh replaces it")
    try:
        with TemporaryDirectory(prefix=".fedone-init-", dir=folder) as draft:
            for file, content in files.items():
                (Path(draft) / file).write_text(content, encoding="utf-8")
            asyncio.run(_check(Path(draft) / target.name))
            for file in files:
                os.replace(Path(draft) / file, folder / file)
    except OSError as exc:
        raise ArgumentError(f"--output: {exc.filename or folder}: {exc.strerror or exc}") from exc


async def _check(path: Path) -> None:
    from fedone_sdk.local.plan import plan_run

    run = RunFile.load(path)
    async with run.backend() as backend:
        await plan_run(run.federation(), backend=backend)


def _document(draft: Draft, form: str, **values: Any) -> str:
    """Return RUN.yaml; `form` is the placeholder of a text."""
    task = draft.task
    asked = {key: _yaml(value) for key, value in task.items() if key in ("chat", "template")}
    blocks = {
        "form": [f"  {key}: {value.replace('{text}', form)}" for key, value in asked.items()],
        "labels": [f"    {_yaml(one)}: {_yaml(word)}" for one, word in task["labels"].items()],
        "slots": [
            f"    - name: {slot}\n      candidates: {_yaml(candidates)}"
            for slot, candidates in draft.slots.items()
        ],
    }
    written = {key: _yaml(value) for key, value in values.items()}
    written |= {key: "\n".join(lines) for key, lines in blocks.items()}
    template = assets.path("new-run.yaml").read_text("utf-8")
    return template.format(description=_yaml(task["description"]), **written)


def _yaml(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
