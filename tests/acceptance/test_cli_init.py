"""`fedone init`: from a table to a working run."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import typer

from fedone_sdk import assets
from fedone_sdk.backends.local_models import local_model, model_file
from fedone_sdk.cli import init
from fedone_sdk.data import load_examples
from fedone_sdk.data.columns import Splits
from fedone_sdk.errors import BackendError
from fedone_sdk.spec import RunSpec
from fedone_sdk.task import Description
from tests.console import Fedone
from tests.fake_openai.server import FakeOpenAI

COLUMNS: dict[str, Any] = {"columns": ("message", "label"), "public": "public.jsonl"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    lines = (assets.path("companion_feedback") / "train.jsonl").read_text().splitlines()[:80]
    with (tmp_path / "my tickets.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["id", "device", "body", "Sentiment"])
        for number, row in enumerate(map(json.loads, lines)):
            label = ("unsatisfactory_service", "Good")[row["label"]]
            table.writerow([number, row["domain"], row["text"], label])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_table_becomes_a_run(fedone: Fedone, folder: Path) -> None:
    code, out, err = fedone("init", "my tickets.csv", "--model", "roberta-mini", "--queries", 12)
    assert (code, err) == (0, "")
    assert "texts in column 'body', labels in column 'Sentiment'" in out
    spec = RunSpec.load("run.yaml")
    # Words of the labels that are one token of the model.
    assert spec.task.labels == {"Good": " good", "unsatisfactory_service": " service"}
    assert (spec.budget and spec.budget.queries, spec.rounds) == (12, 20)
    parts = [load_examples(f"my-tickets.{part}.jsonl") for part in ("train", "dev", "public")]
    assert list(map(len, parts)) == [40, 32, 8]
    assert all({row["Sentiment"] for row in part} == set(spec.task.labels) for part in parts)
    assert len({row["body"] for part in parts for row in part}) == 80
    assert (spec.task.fields, spec.task.label_field) == (("body",), "Sentiment")
    assert fedone("plan", "run.yaml").code == 0
    assert fedone("tune", "run.yaml").code == 0
    # What the file says of a higher number is true.
    text = Path("run.yaml").read_text()
    Path("run.yaml").write_text(text.replace("queries: 12", "queries: 18"))
    code, _, err = fedone("tune", "run.yaml", "--json", "r.json")
    assert (code, json.loads(Path("r.json").read_bytes())["spent"]["queries"]) == (0, 18)
    assert "raising queries 12 -> 18 after round 2" in err
    # Nothing is overwritten without --fresh, and equal rows are no obstacle to another file.
    before = Path("run.yaml").read_bytes()
    again = ("init", "my tickets.csv", "--model", "roberta-mini")
    outcome = fedone(*again)
    assert outcome.code == 2
    assert outcome.err.startswith("arguments: run.yaml exists; --fresh replaces it")
    assert Path("run.yaml").read_bytes() == before
    assert fedone(*again, "-o", "other.yaml").code == 0
    assert fedone(*again, "--fresh", "--queries", 12).code == 0
    assert Path("run.yaml").read_bytes() == before.replace(b"queries: 18", b"queries: 12")


def test_words_and_nouns_can_be_given(fedone: Fedone, folder: Path) -> None:
    given = ("--words", "Good=great, unsatisfactory_service=terrible", "--about", "note:mood")
    outcome = fedone("init", "my tickets.csv", "--model", "roberta-mini", *given)
    assert outcome.code == 0
    task = RunSpec.load("run.yaml").task
    assert task.labels == {"Good": " great", "unsatisfactory_service": " terrible"}
    assert task.description == Description(text="note", aspect="mood")


def test_a_failure_leaves_no_file(
    fedone: Fedone, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(path: Path) -> None:
        raise BackendError(f"{path.name} does not suit the model")

    monkeypatch.setattr(init, "_check", refuse)
    outcome = fedone("init", "my tickets.csv", "--model", "roberta-mini")
    assert (outcome.code, [file.name for file in folder.iterdir()]) == (2, ["my tickets.csv"])
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    assert fedone("init", "my tickets.csv", "--model", "roberta-mini").code == 0


def test_a_terminal_of_any_encoding_shows_the_result(tmp_path: Path) -> None:
    rows = [f"Text {number},{('für', 'wider')[number % 2]}" for number in range(12)]
    (tmp_path / "t.csv").write_text("\n".join(["text,label", *rows]), encoding="cp1252")
    done = subprocess.run(
        [sys.executable, "-m", "fedone_sdk.cli", "init", "t.csv", "--model", "roberta-mini"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
    )
    assert rb"f\xfcr: " in done.stdout
    assert done.stderr == b""


def test_a_hosted_model_needs_its_key(
    fedone: Fedone, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    outcome = fedone("init", "my tickets.csv", "--model", "gpt-6-luna")
    assert outcome.code == 2
    assert "the environment variable OPENAI_API_KEY is not set" in outcome.err
    assert [file.name for file in folder.iterdir()] == ["my tickets.csv"]
    assert outcome.err.startswith("arguments: --model: 'gpt-6-luna' is not a file, a folder or a")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://user:s3cret@host")
    outcome = fedone("init", "my tickets.csv", "--model", "gpt-6-luna")
    assert outcome.code == 2
    assert outcome.err.startswith("--model: backend: base_url: must be http://HOST")
    assert "s3cret" not in outcome.err


@pytest.mark.parametrize(
    ("model", "base_url", "keys"),
    [
        ("gpt-6-luna", "", {"reasoning_effort": "none"}),
        ("gpt-4.1", " ", {}),
        ("qwen", "http://127.0.0.1:8081/v1", {"base_url": "http://127.0.0.1:8081/v1"}),
    ],
)
def test_a_hosted_model_is_that_of_the_service(
    model: str, base_url: str, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", base_url)
    assert init._backend_of(model) == {"kind": "openai", "model": model, **keys}


async def drafted_by_a_service(rows: list[dict[str, str]], **keys: str) -> tuple[FakeOpenAI, Any]:
    async with FakeOpenAI() as server:
        backend = {"kind": "openai", "model": "fake-1", "base_url": server.base_url}
        backend |= {"api_key_env": None, **keys}
        return server, await init._drafted(backend, Splits(rows, rows, rows), 300, **COLUMNS)


async def test_a_hosted_model_is_asked_only_what_is_free() -> None:
    # All rows of spam have the same text, so a block of examples has one of them.
    rows = [{"text": f"text {at % 2 * at}", "label": ("spam", "ham")[at % 2]} for at in range(8)]
    server, (drafted, cut) = await drafted_by_a_service(rows)
    assert (server.received, len(server.asked) < 8, cut) == ([], True, 2000)
    assert drafted.task["chat"] == {"user": "{instruction}{demonstrations}{text}\n{opening}"}
    assert drafted.task["labels"] == {"ham": " ham", "spam": " spam"}
    assert drafted.task["description"] == {"text": "message", "aspect": "category"}
    assert drafted.slots["demonstrations"]["shots"] == [0, 2]


async def test_a_hosted_model_gets_codes_for_labels_of_several_tokens() -> None:
    rows = [{"text": f"text {at}", "label": ("qqx zzkw", "xqzv")[at % 2]} for at in range(8)]
    tokenizer = str(assets.path("roberta_mini") / "tokenizer.json")
    _, (drafted, _) = await drafted_by_a_service(rows, tokenizer=tokenizer)
    assert drafted.task["labels"] == {"qqx zzkw": " A", "xqzv": " B"}
    form = "{instruction}{demonstrations}{codes}{text}\n{opening}"
    assert drafted.task["chat"] == {"user": form}
    first, *_ = drafted.slots["codes"]
    assert first == "{label:qqx zzkw}: qqx zzkw\n{label:xqzv}: xqzv\n"


def test_four_questions_at_most(
    fedone: Fedone, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def prompt(question: str, default: str) -> str:
        asked.append(question)
        return default

    def confirm(question: str, default: bool) -> bool:
        asked.append(question.partition(" (")[0])
        return not default

    pytest.importorskip("xllamacpp")
    monkeypatch.setenv("FEDONE_CACHE", str(folder / "cache"))
    monkeypatch.setattr(init, "sys", Mock())  # On a terminal.
    monkeypatch.setattr(typer, "prompt", prompt)
    monkeypatch.setattr(typer, "confirm", confirm)
    assert fedone("init", "my tickets.csv").code == 0
    assert asked == [
        "Column of the labels (or device)",
        "Column of the texts (or device, id)",
        "Fetch smollm2-135m-instruct",
        "Model",
    ]
    asked.clear()
    given = ("--label", "Sentiment", "--text", "body", "--model", "roberta-mini")
    assert fedone("init", "my tickets.csv", *given, "-o", "other.yaml").code == 0
    assert asked == []
    monkeypatch.setattr(typer, "prompt", lambda *_, **__: "nope")
    outcome = fedone("init", "my tickets.csv", *given[:4], "-o", "third.yaml")
    assert outcome.err.startswith("arguments: --model: 'nope' is not a file")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--label", "kind"], "--label: 'kind' is not a column; possible columns: Sentiment, d"),
        (["--text", "Sentiment"], "--text: 'Sentiment' does not have texts"),
        (["--label", "body"], "--label: 'body' does not have 2 to 64 different values of"),
        (["-o", "nowhere/run.yaml"], "--output: there is no folder nowhere"),
        (["--model", "roberta-mini", "--words", "Good=fine,unsatisfactory_service=fine"],
         "--words: needs LABEL=WORD, with different words, for each of Good, unsatisfactory_ser"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_one_line(
    fedone: Fedone, folder: Path, arguments: list[str], said: str
) -> None:
    outcome = fedone("init", "my tickets.csv", *arguments)
    assert outcome.code == 2
    assert said in outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert [file.name for file in folder.iterdir()] == ["my tickets.csv"]


def test_a_fetched_instruct_model_is_the_default(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xllamacpp")
    monkeypatch.setenv("FEDONE_CACHE", str(folder / "cache"))
    file = model_file(local_model("smollm2-135m-instruct"))
    file.parent.mkdir(parents=True)
    with file.open("wb") as content:  # Of the model's size, without its weights.
        content.truncate(local_model("smollm2-135m-instruct").num_bytes)
    assert init._model(None) == "smollm2-135m-instruct"


def test_words_of_an_instruct_model_are_checked_as_they_are_asked(
    fedone: Fedone, folder: Path, smollm2: Path
) -> None:
    """`emotion` is one token of this model only behind text."""
    rows = [("I feel so happy now", "emotion"), ("A loop repeats its body", "coding")] * 6
    lines = [f"{text} {number};{label}" for number, (text, label) in enumerate(rows)]
    Path("few.csv").write_text("\n".join(["text;label", *lines]))
    assert fedone("init", "few.csv", "--model", smollm2, "--queries", 6).code == 0
    spec = RunSpec.load("run.yaml")
    assert spec.task.labels == {"coding": " coding", "emotion": " emotion"}
    assert spec.task.slots == ("instruction", "demonstrations", "opening")
    assert fedone("plan", "run.yaml").code == 0
    assert fedone("tune", "run.yaml", "--artefact", "a.json").code == 0
    assert fedone("score", "run.yaml", "--artefact", "a.json", "--data", "few.csv").code == 0
