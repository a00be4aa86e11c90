"""`fedone retune`: a prompt moves from one real model to another."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fedone_sdk import assets
from fedone_sdk.reports import PromptArtefact, load_prompt
from tests.acceptance.tiny import write_sentences
from tests.console import Fedone, Outcome, the_line

RUN = """\
name: tiny
task: {template: "{prompt} {text} It was {mask}.", labels: {0: " terrible", 1: " great"}}
data: {train: train.jsonl, dev: dev.jsonl, num_clients: 4}
prompt:
  {length: 3, vocabulary: {kind: list, candidates: [" fine", " good", " bad", " really", " so"]}}
method: {name: thompson, num_samples: 4, batch_size: 4}
participation: {exchange: losses}
budget: {queries: 16}
rounds: 4
evaluation: {every: 0}
"""
NEW = "kind: onnx\nmodel: models/next\n"
DATA = ["--run", "run.yaml"]
TOO_LOW = "run.yaml with new.yaml: budget: may be too low for one round and all measurements"
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tuned prompt, its data, and a second model: the embedded one under another name."""
    folder = tmp_path_factory.mktemp("made")
    write_sentences(folder, train=60, dev=40)
    (folder / "run.yaml").write_text(RUN)
    (folder / "new.yaml").write_text(NEW)
    shutil.copytree(assets.path("roberta_mini"), folder / "models" / "next")
    command = _command("tune", "run.yaml", "--no-store", "--artefact", "old.json")
    subprocess.run(command, cwd=folder, env=_environment(), check=True, capture_output=True)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "work"
    shutil.copytree(made, folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def retune(fedone: Fedone) -> Fedone:
    def run(*arguments: object, prompt: str = "old.json", backend: str = "new.yaml") -> Outcome:
        return fedone("retune", prompt, "--backend", backend, *arguments)

    return run


def _command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "fedone_sdk.cli", *map(str, arguments)]


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}


def document(path: str = "r.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(path).read_bytes())
    return found


def old() -> PromptArtefact:
    return load_prompt(Path("old.json"))


def test_a_prompt_moves(retune: Fedone, fedone: Fedone, folder: Path) -> None:
    code, out, err = retune("--run", "run.yaml", "--json", "r.json", "--html", "r.html")
    assert code == 0, err
    found, run = document(), document()["run"]
    # The models are one and the same, so that the old prompt is worth what it was.
    assert found["old_model"] != found["new_model"]
    assert found["new_model"].startswith("onnx:next:")
    prompts = found["prompts"]
    assert prompts["old_prompt"]["value"] == found["on_old_model"]
    assert prompts["old_prompt"]["prompt"]["bias"] == list(old().prompt.bias or ())
    assert prompts["old_prompt_biased"]["prompt"]["bias"] != list(old().prompt.bias or ())
    assert prompts["no_prompt"]["prompt"]["bias"] is not None
    assert prompts["new_prompt"]["value"] == run["metric"]["after"]
    assert found["change"]["low"] <= 0 <= found["change"]["high"]
    # The cap, and evaluation with the biases, all in the run's ledger.
    assert 0 < run["spent"]["queries"] <= 16 == found["plan"]["cap"]["queries"]
    # Three prompts on 40 examples, and two on the 60 that biases are found on, four at a time.
    assert run["evaluation"]["queries"] == found["plan"]["evaluation_queries"] == 3 * 10 + 2 * 15
    assert run["spent"]["requests"] <= found["plan"]["most"]["requests"]
    assert run["spent"]["prompt_tokens"] <= found["plan"]["most"]["prompt_tokens"]
    best = prompts[found["recommended"]]
    assert best["value"] == max(one["value"] for one in prompts.values())
    made = load_prompt(Path(found["output"]))
    assert (made.model, made.run_id) == (found["new_model"], "tiny-on-new")
    assert made.prompt.model_dump(mode="json") == best["prompt"]
    for text in ("the old prompt with a new label bias", "Recommended: "):
        assert text in out
        assert text in Path("r.html").read_text()
    assert "up to 16 training and 60 evaluation queries" in err
    kept = {file.name for file in (folder / ".fedone").iterdir()}
    assert kept >= {"tiny-on-new.db", "tiny-on-new.clients", "answers.sqlite"}
    # The page's command runs, and the recommended prompt is worth what it was measured at.
    (command,) = re.findall(r"^.*>(fedone prompt use .*)</pre>", Path("r.html").read_text(), re.M)
    Path("texts.jsonl").write_text(Path("dev.jsonl").read_text())
    code, labelled, err = fedone(*shlex.split(command)[1:])
    assert code == 0, err
    rows = Path("dev.jsonl").read_text().splitlines()
    pairs = zip(map(json.loads, labelled.splitlines()), map(json.loads, rows), strict=True)
    right = [one["label"] == str(row["label"]) for one, row in pairs]
    assert sum(right) / len(right) == pytest.approx(best["value"])


def test_the_same_command_sends_nothing_more(retune: Fedone, folder: Path) -> None:
    command = [*DATA, "--cap", 12, "--json", "r.json", "-o", "new.json"]
    assert retune(*command).code == 0
    first = document()
    assert first["run"]["spent"]["queries"] <= 12
    code, _, err = retune(*command)
    assert code == 0
    assert "the run had ended before" in err
    assert "set a higher cap in the file, or with --cap N" in err
    again = document()
    assert again["prompts"] == first["prompts"]
    assert again["run"]["spent"] == first["run"]["spent"]
    assert retune(*command, "--fresh").code == 0
    again = document()
    assert again["run"]["spent"]["requests"] == 0  # Paid answers stay.
    assert again["prompts"] == first["prompts"]
    # Another model of the same name is another run.
    shutil.copytree("models/next", "models/third")
    Path("new.yaml").write_text(NEW.replace("next", "third"))
    line = the_line(retune(*command))
    assert line.startswith("new.yaml: backend: is 'onnx:third:")
    assert "--fresh" in line


def test_a_plan_sends_and_writes_nothing(retune: Fedone, folder: Path) -> None:
    before = {file.name for file in folder.iterdir()}
    code, out, _ = retune("--run", "run.yaml", "--plan", "--json", "-")
    assert code == 0
    assert json.loads(out)["training_queries"] == 16
    assert {file.name for file in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "line"),
    [(["--run", "no.yaml"], "no.yaml: cannot be read"), ([*DATA, "--cap", 3], TOO_LOW)],
)
def test_wrong_arguments(retune: Fedone, folder: Path, arguments: list[object], line: str) -> None:
    assert the_line(retune(*arguments)).startswith(line)
    assert not (folder / ".fedone").exists()
    assert not list(folder.glob("*.prompt.json"))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("dev: dev.jsonl, ", ""), "run.yaml: data.dev: is required"),
        (('1: " great"}', '2: " great"}'), "run.yaml: task.labels: must be the labels of the old"),
        (("{queries: 16}", "{queries: 16, requests: 40}"),
         f"{TOO_LOW}; the smallest sufficient cap is 4 queries, 64 requests"),
        (('great"}}', 'great"}, metric: f1}'),
         "run.yaml: task.metric: is 'f1', but the prompt was tuned and measured with 'accuracy'"),
    ],
)  # fmt: skip
def test_a_run_that_does_not_fit_the_prompt(
    retune: Fedone, folder: Path, change: tuple[str, str], line: str
) -> None:
    assert change[0] in RUN
    Path("run.yaml").write_text(RUN.replace(*change))
    assert the_line(retune("--run", "run.yaml")).startswith(line)
    assert not (folder / ".fedone").exists()


def test_ctrl_c_and_the_same_command(folder: Path) -> None:
    words = "retune old.json --backend new.yaml --cap 200 --json r.json"
    command = _command(*words.split(), *DATA)
    with (
        Path("err").open("wb") as err,
        subprocess.Popen(command, stdout=err, stderr=err, env=_environment()) as process,
        ExitStack() as stack,
    ):
        stack.callback(process.kill)  # A failure does not wait for its end.
        end = time.monotonic() + PATIENCE_S
        while "round 1/" not in Path("err").read_text():
            assert process.poll() is None, Path("err").read_text()
            assert time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
    said = Path("err").read_text()
    assert "continue with: fedone retune old.json --backend new.yaml" in said
    assert "No recommendation yet" in said
    assert "Traceback" not in said
    assert document()["recommended"] is None
    assert document()["output"] is None
    assert not list(folder.glob("*.prompt.json"))
    rounds = document()["run"]["rounds"]
    done = subprocess.run(
        command, capture_output=True, env=_environment(), check=True, timeout=PATIENCE_S
    )
    assert b"had ended before" not in done.stderr
    found = document()
    assert found["run"]["rounds"] > rounds
    assert found["run"]["spent"]["queries"] <= 200
    # What was measured before the stop is not paid for twice.
    assert found["run"]["spent"]["requests"] <= found["plan"]["expected"]["requests"]
    assert load_prompt(Path(found["output"])).status in ("completed", "budget_exhausted")


def test_a_masked_models_prompt_on_a_causal_one(
    retune: Fedone, folder: Path, smollm2: Path
) -> None:
    pytest.importorskip("xllamacpp")
    # One thread: two wait for each other where another process has one of two cores.
    backend = f"kind: llama_cpp\nmodel: {smollm2}\nmax_input_tokens: 512\nthreads: 1\n"
    Path("new.yaml").write_text(backend)
    line = the_line(retune("--run", "run.yaml"))  # It has no masks to fill.
    assert line.startswith("run.yaml with new.yaml: the template has {mask}")
    chat = 'chat: {user: "{text}", assistant: "{prompt} It was"}'
    Path("run.yaml").write_text(
        RUN.replace('template: "{prompt} {text} It was {mask}."', chat)
        .replace("terrible", "bad")
        .replace("great", "good")
    )
    for name, count in ("train", 12), ("dev", 8):
        lines = Path(f"{name}.jsonl").read_text().splitlines(True)
        Path(f"{name}.jsonl").write_text("".join(lines[:count]))
    code, out, err = retune("--run", "run.yaml", "--json", "r.json")
    assert code == 0, err
    found = document()
    assert found["new_model"].startswith("llama_cpp:")
    assert found["run"]["spent"]["queries"] <= 16
    assert "Recommended: " in out
