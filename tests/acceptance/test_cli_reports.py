"""`fedone report`, `fedone prompt` and trackers."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import structlog

import fedone_sdk.cli
from fedone_sdk.cli import report
from fedone_sdk.reports import PromptArtefact, load_prompt
from fedone_sdk.spec import RunSpec
from fedone_sdk.testing import LoopbackFederation, ScriptedBackend
from fedone_sdk.trackers import tracker
from fedone_sdk.vocabulary import Vocabulary
from tests.acceptance.tiny import RUN, result_in, write_sentences
from tests.console import Fedone
from tests.integration.tuned import ROWS, SPEC


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that is over: its store, result, artefact and both reports."""
    folder = tmp_path_factory.mktemp("finished")
    write_sentences(folder)
    (folder / "run.yaml").write_text(RUN)
    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        context.chdir(folder)
        context.setattr(sys, "excepthook", sys.excepthook)
        words = "fedone tune run.yaml --store run.db --json result.json --artefact prompt.json"
        context.setattr(sys, "argv", [*words.split(), "--report", "report.html"])
        with pytest.raises(SystemExit) as ended:
            fedone_sdk.cli.main()
        structlog.reset_defaults()
    assert ended.value.code == 0
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for file in finished.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def artefact(folder: Path) -> PromptArtefact:
    return load_prompt(folder / "prompt.json")


def test_tune_writes_the_artefact_and_the_report(folder: Path) -> None:
    found, made = result_in("result.json"), artefact(folder)
    assert made.prompt == found.prompt
    assert made.alpha_sha256 == found.alpha_sha256
    assert made.ledger.spent == found.spent
    page = (folder / "report.html").read_text()
    assert found.alpha_sha256 in page
    assert page.startswith("<!DOCTYPE html>")


def test_score_measures_an_artefact(fedone: Fedone, folder: Path) -> None:
    made = artefact(folder)
    command = ("score", "run.yaml", "--artefact", "prompt.json")
    code, _, err = fedone(*command, "--json", "score.json")
    assert (code, err) == (0, "")
    found = json.loads((folder / "score.json").read_text())
    assert found["prompt"] == made.prompt.text
    assert found["metric"]["value"] == pytest.approx(result_in("result.json").metric.after)
    code, _, err = fedone(*command, "--prompt", "x")
    assert (code, err) == (2, "arguments: --prompt: cannot be combined with --artefact\n")


def test_export_gives_the_same_artefact(fedone: Fedone, folder: Path) -> None:
    code, out, err = fedone("runs", "export", "tiny", "--as", "prompt", "--store", "run.db")
    assert (code, out) == (0, "tiny.prompt.json: prompt of run tiny, 4 rounds\n"), err
    assert (folder / "tiny.prompt.json").read_bytes() == (folder / "prompt.json").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["prompt", "use", "none.json"], "none.json: No such file or directory"),
        (["prompt", "use", "dev.jsonl"], "dev.jsonl: is not JSON"),
        (["prompt", "use", "result.json"], "result.json: is not a prompt artefact"),
        (["report", "run.yaml"], "run.yaml: damaged, or not an export of a run"),
        (["prompt", "use", "prompt.json", "--backend", "run.yaml"],
         "arguments: --data: is required to use a model"),
        (["prompt", "use", "prompt.json", "--data", "bad.txt"], "bad.txt: line 1 is not JSON"),
        (["prompt", "use", "prompt.json", "--data", "o.jsonl"], "o.jsonl: example 1 has no text"),
        (["report", "other", "--store", "run.db"], "there is no run 'other' in the store"),
        (["tune", "run.yaml", "--json", "no/x.json"], "--json: there is no folder no"),
        (["tune", "run.yaml", "--json=./run.yaml"], "--json: run.yaml is also another argument's"),
        (["prompt", "use", "prompt.json", "--data", "o.jsonl", "-o", "o.jsonl"],
         "--output: o.jsonl is also another argument's file"),
        (["prompt", "use", "prompt.json", "--data", "o.jsonl", "-oo.jsonl"],
         "--output: o.jsonl is also another argument's file"),
        (["tune", "run.yaml", "--json", "dev.jsonl"], "--json: dev.jsonl is also named in run.ya"),
        (["tune", "run.yaml", "--json", "n.json", "--artefact", "n.json"],
         "--json: n.json is also another argument's file"),
        (["tune", "run.yaml", "--tracker", "paper"], "--tracker: 'paper' is not one of mlflow"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_each(
    fedone: Fedone, folder: Path, arguments: list[str], problem: str
) -> None:
    Path("bad.txt").write_text("{bad\n")
    Path("o.jsonl").write_text('{"sentence": "fine"}\n')
    code, out, err = fedone(*arguments)
    assert (code, out) == (2, "")
    assert problem in err
    assert err.count("\n") == 1


def test_use_prints_the_prompt(fedone: Fedone, folder: Path) -> None:
    prompt = result_in("result.json").prompt.text
    template = f"{prompt} {{text}} It was {{mask}}."
    assert fedone("prompt", "use", "prompt.json") == (0, template, "")
    assert fedone("prompt", "use", "prompt.json", "--as", "text") == (0, prompt, "")
    assert fedone("prompt", "use", "prompt.json", "--as", "mlflow", "-o", "m.json") == (0, "", "")
    assert json.loads(Path("m.json").read_text())["name"] == "tiny"
    command = ("prompt", "use", "prompt.json", "--as", "python", "--backend", "run.yaml")
    code, out, err = fedone(*command)
    assert (code, err) == (0, "")
    assert "BackendSpec.model_validate(" in out


def test_use_labels_texts(fedone: Fedone, folder: Path) -> None:
    """As `fedone score` measures: the same rows right."""
    command = ("prompt", "use", "prompt.json", "--data")
    code, out, err = fedone(*command, "dev.jsonl", "--backend", "run.yaml")
    assert code == 0, err
    dev = [json.loads(line) for line in (folder / "dev.jsonl").read_text().splitlines()]
    labels = [json.loads(line)["label"] for line in out.splitlines()]
    right = [label == str(row["label"]) for label, row in zip(labels, dev, strict=True)]
    assert sum(right) / len(right) == result_in("result.json").metric.after
    assert err.startswith("16 labelled, ")
    # Lines of standard input: a text, or its fields; blank lines are none.
    lines = f"{dev[0]['text']}\n\n{json.dumps({'text': dev[1]['text']})}\n"
    code, out, err = fedone(*command, "-", stdin=lines)
    assert [json.loads(line)["label"] for line in out.splitlines()] == labels[:2], err


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (b"fine\n\xff\n", "line 2 is not UTF-8 text"),
        (b'fine\n{"a": ' + b"[" * 100_000, "line 2 is not JSON: maximum recursion depth exceeded"),
        (b'fine\n{"text": "\\ud800"}\n', "example 2: 'text' is not valid Unicode"),
        (b'\xef\xbb\xbf{"a": "fine"}\n', "example 1 has no text 'text'"),
    ],
    ids=["bytes", "nested", "surrogate", "byte order mark"],
)
def test_values_that_are_no_texts_are_reported(
    fedone: Fedone, folder: Path, lines: bytes, problem: str
) -> None:
    Path("bad.txt").write_bytes(lines)
    for data, source in ("-", "standard input"), ("bad.txt", "bad.txt"):
        code, out, err = fedone("prompt", "use", "prompt.json", "--data", data, stdin=lines)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"{source}: {problem}")


def test_use_takes_no_other_model(fedone: Fedone, folder: Path) -> None:
    other = artefact(folder).model_copy(update={"model": "openai:api.openai.com:gpt"}).signed()
    Path("other.json").write_text(other.dump())
    command = ("prompt", "use", "other.json", "--data", "dev.jsonl")
    code, out, err = fedone(*command)
    assert (code, out) == (2, "")
    assert "the prompt was tuned for 'openai:api.openai.com:gpt'" in err
    assert fedone(*command, "--any-model").code == 0


def test_report_of_a_store_and_an_export(fedone: Fedone, folder: Path) -> None:
    fedone("runs", "export", "tiny", "--store", "run.db", "-o", "tiny.jsonl")
    code, out, err = fedone("report", "tiny", "--store", "run.db", "-o", "stored.html")
    assert (code, out) == (0, "stored.html: run tiny, 4 rounds\n"), err
    assert fedone("report", "tiny.jsonl").out == "tiny.html: run tiny, 4 rounds\n"
    # From wherever it comes it is the same page.
    assert Path("tiny.html").read_bytes() == Path("stored.html").read_bytes()
    assert Path("tiny.html").read_bytes() == Path("report.html").read_bytes()


def test_a_missing_extra_is_reported_before_the_work(
    fedone: Fedone, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    monkeypatch.setattr(tracker, "find_spec", lambda name: None)
    wanted = "a report needs an extra: pip install 'jinja2>=3.1.5' 'matplotlib>=3.10.8'\n"
    assert fedone("report", "result.json", "-o", "x.html") == (2, "", wanted)
    assert fedone("tune", "run.yaml", "--report", "x.html") == (2, "", wanted)
    wanted = "--tracker mlflow needs an extra: pip install 'mlflow-skinny>=3.1'\n"
    assert fedone("tune", "run.yaml", "--tracker", "mlflow") == (2, "", wanted)


TRACKERS = """\
class Tracker:
    def __init__(self, run):
        self.file = open("told.txt", "w")
        print("run", run.name, run.params.get("method.name"), file=self.file)

    def round(self, report, queries):
        print("round", report.round, queries, file=self.file)

    def metric(self, name, value, queries):
        print("metric", name, queries, file=self.file)

    def end(self, result):
        print("end", result.status, file=self.file)
        self.file.close()


def Broken(run):
    raise OSError("the disk is full")
"""


def install_trackers(folder: Path) -> None:
    """Install a third-party package with two trackers, as pip does."""
    metadata = folder / "theirs-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[fedone.trackers]\nlines = cli_lines:Tracker\nbroken = cli_lines:Broken\n"
    )
    (folder / "cli_lines.py").write_text(TRACKERS)


def test_tune_tells_trackers(fedone: Fedone, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of ours is not needed for it: any installed package may bring one."""
    install_trackers(folder)
    monkeypatch.syspath_prepend(folder)
    code, out, err = fedone(*("tune", "run.yaml", "--tracker", "lines", "--tracker", "broken"))
    assert (code, "status           completed" in out) == (0, True)
    assert "a tracker failed; the run continues without it" in err
    assert "the disk is full" in err
    message = Path("told.txt").read_text().splitlines()
    assert (message[0], message[-1]) == ("run tiny gs-bdpl", "end completed")
    # A measurement is reported once it exists, some rounds late.
    assert [line for line in message if line.startswith("round")] == [
        f"round {number} {4 * number + 4}" for number in range(4)
    ]
    assert [line for line in message if line.startswith("metric")] == [
        "metric accuracy 8",
        "metric accuracy 16",
    ]


async def test_a_served_run_is_tracked_and_reported(tmp_path: Path) -> None:
    install_trackers(tmp_path)
    spec = RunSpec.model_validate(SPEC)
    vocabulary = Vocabulary(candidates=(" good", " bad", " really", " so"))
    path = os.pathsep.join((str(tmp_path), *sys.path))

    async def start(*arguments: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fedone_sdk.cli", *arguments, "--server", served.url),
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, "FEDONE_ADMIN_TOKEN": "admin"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async with LoopbackFederation(spec, vocabulary, backend=ScriptedBackend()) as served:
        watching = await start("runs", "watch", "small", "--tracker", "lines")
        async with served.client(ROWS[:6]) as client:
            await client.run_forever()
        _, err = await watching.communicate()
        assert watching.returncode == 0, err.decode()
        for command in ("report", "small"), ("runs", "export", "small", "--as", "prompt"):
            process = await start(*command)
            _, err = await process.communicate()
            assert process.returncode == 0, err.decode()
        digest = served.run.result().alpha_sha256
    assert (tmp_path / "told.txt").read_text().splitlines() == [
        "run small None",
        *(f"round {number} {4 * number + 4}" for number in range(8)),
        "end completed",
    ]
    assert digest in (tmp_path / "small.html").read_text()
    assert load_prompt(tmp_path / "small.prompt.json").alpha_sha256 == digest
