"""`fedone retune`: a prompt moves from one real model to another."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedone_sdk import assets
from fedone_sdk.reports import PromptArtefact, read_artefact
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
DATA = ["--data", "train.jsonl", "--dev", "dev.jsonl"]
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tuned prompt, its data, and a second model: the embedded one under another name."""
    folder = tmp_path_factory.mktemp("made")
    write_sentences(folder, train=60, dev=40)
    (folder / "run.yaml").write_text(RUN)
    (folder / "new.yaml").write_text(NEW)
    shutil.copytree(assets.path("roberta_mini"), folder / "models" / "next")
    subprocess.run(
        [*_command("tune", "run.yaml", "--no-store", "--artefact", "old.json")],
        cwd=folder,
        env=_environment(),
        check=True,
        capture_output=True,
    )
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
        memory = ("--transport", "memory")
        return fedone("retune", prompt, "--backend", backend, *memory, *arguments)

    return run


def _command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "fedone_sdk.cli", *map(str, arguments)]


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}


def document(path: str = "r.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(path).read_bytes())
    return found


def old() -> PromptArtefact:
    return read_artefact(Path("old.json"))


def test_a_prompt_moves(retune: Fedone, folder: Path) -> None:
    code, out, err = retune("--run", "run.yaml", "--json", "r.json", "--html", "r.html")
    assert code == 0, err
    found, run = document(), document()["run"]
    # The models are one and the same, so that the old prompt is worth what it was.
    assert found["old_model"] != found["new_model"]
    assert found["new_model"].startswith("onnx:next:")
    assert found["old_prompt"]["value"] == found["on_old_model"]["value"]
    assert found["old_prompt"]["bias"] == list(old().prompt.bias or ())
    assert found["old_prompt_biased"]["bias"] != found["old_prompt"]["bias"]
    assert found["no_prompt_biased"]["bias"] is not None
    assert found["holds"] == "yes"
    low, high = found["old_prompt"]["interval"]
    assert low <= found["old_prompt"]["value"] <= high
    assert found["new_prompt"]["value"] == run["metric"]["after"]
    assert found["no_prompt"]["value"] == run["metric"]["no_prompt"]
    # The run began with the old prompt, without its bias.
    assert run["metric"]["before"] is not None
    # The cap, and evaluation with the biases, all in the run's ledger.
    assert 0 < run["spent"]["queries"] <= 16 == found["plan"]["cap"]
    assert run["evaluation"]["queries"] == found["plan"]["evaluation_queries"]
    # Three prompts on 40 examples, and two on the 60 that biases are found on, four at a time.
    assert found["plan"]["evaluation_queries"] == 3 * 10 + 2 * 15
    assert run["spent"]["requests"] <= found["plan"]["most"]["requests"]
    assert run["spent"]["prompt_tokens"] <= found["plan"]["most"]["prompt_tokens"]
    new = read_artefact(Path(found["output"]))
    assert new.model == found["new_model"]
    assert new.prompt.text == found["prompt"]["text"]
    assert new.run_id == "tiny-on-new"
    for text in ("old prompt, as it is", "old prompt, bias found again", "Conclusion: "):
        assert text in out
        assert text in Path("r.html").read_text()
    assert "up to 16 training and 60 evaluation queries" in err
    kept = {file.name for file in (folder / ".fedone").iterdir()}
    assert kept >= {"tiny-on-new.db", "tiny-on-new.clients", "answers.sqlite"}


def test_the_same_command_sends_nothing_more(retune: Fedone, folder: Path) -> None:
    assert retune(*DATA, "--queries", 20, "--json", "r.json").code == 0
    first = document()
    code, _, err = retune(*DATA, "--queries", 20, "--json", "r.json")
    assert code == 0
    assert "the run had ended before" in err
    again = document()
    del first["run"]["communication"], again["run"]["communication"]  # Clients ask once more.
    assert again == first
    assert retune(*DATA, "--queries", 20, "--fresh", "--json", "r.json").code == 0
    again = document()
    assert again["run"]["spent"]["requests"] == 0  # Paid answers stay.
    assert again["plan"] == first["plan"]
    for name in ("old_prompt", "old_prompt_biased", "new_prompt", "conclusion", "prompt"):
        assert again[name] == first[name]


def test_without_a_run_the_artefact_defines_the_queries(retune: Fedone, folder: Path) -> None:
    code, _, err = retune(*DATA, "--queries", 20, "--json", "r.json", "-o", "new.json")
    assert code == 0, err
    assert document()["run"]["spent"]["queries"] <= 20
    new = read_artefact(Path("new.json"))
    assert (new.task, new.method) == (old().task, "thompson")
    assert new.evaluation.batch_size == old().evaluation.batch_size


def test_a_plan_sends_and_writes_nothing(retune: Fedone, folder: Path) -> None:
    before = {file.name for file in folder.iterdir()}
    code, out, _ = retune("--run", "run.yaml", "--plan", "--json", "-")
    assert code == 0
    assert json.loads(out)["training_queries"] == 16
    assert {file.name for file in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "arguments: --data: is required without --run"),
        (["--data", "train.jsonl"], "arguments: --dev: is required without --run"),
        (["--run", "run.yaml", "--dev", "dev.jsonl"], "arguments: --dev: does not go with --run"),
        (["--data", "no.jsonl", "--dev", "dev.jsonl"], "no.jsonl: "),
        (["--data", "train.jsonl", "--dev", "no.jsonl"], "arguments: data.dev: no.jsonl: "),
        (["--run", "no.yaml"], "no.yaml: cannot be read"),
        (
            ["--run", "run.yaml", "--queries", 3],
            "new.yaml: budget.queries: 3 does not cover one round of 4",
        ),
        ([*DATA, "-o", "old.json"], "arguments: --output: old.json exists and is not of run"),
        ([*DATA, "-o", "no/new.json"], "arguments: --output: there is no folder no"),
        ([*DATA, "--html", "r.txt"], "arguments: --html: r.txt must end in .html"),
    ],
)
def test_wrong_arguments(retune: Fedone, folder: Path, arguments: list[object], line: str) -> None:
    assert the_line(retune(*arguments)).startswith(line)
    assert not (folder / ".fedone").exists()
    assert not list(folder.glob("*.prompt.json"))


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("[]", "new.yaml: must be a mapping"),
        ("kind: onnx\nmodle: x\n", "new.yaml: modle: unknown key (allowed: "),
        ("backend: {kind: onnx, modle: x}\n", "new.yaml: backend.modle: unknown key (allowed: "),
        ("backend: {kind: onnx}\nbakend: 1\n", "new.yaml: bakend: unknown key"),
        ("model: x\n", "new.yaml: kind: is required"),
        ("kind: gpt\n", "new.yaml: kind: 'gpt' is not one of "),
        ("kind: onnx\nmodel: no/such\n", "new.yaml: backend.model: "),
        (
            "{kind: openai, model: some, api_key_env: null, log_probs: false, tokenizer: T}",
            "new.yaml: ",
        ),
    ],
)
def test_a_backend_that_cannot_be_used(
    retune: Fedone, folder: Path, content: str, line: str
) -> None:
    tokenizer = folder / "models" / "next" / "tokenizer.json"
    Path("new.yaml").write_text(content.replace("tokenizer: T", f"tokenizer: {tokenizer}"))
    assert the_line(retune(*DATA)).startswith(line)
    assert not (folder / ".fedone").exists()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("great", "awful"), "old.json: sha256: is another one: the file was changed"),
        (('"fedone-prompt"', '"fedone-run"'), "old.json: is no prompt artefact"),
    ],
)
def test_a_prompt_that_is_not_to_be_trusted(
    retune: Fedone, folder: Path, change: tuple[str, str], line: str
) -> None:
    Path("old.json").write_text(Path("old.json").read_text().replace(*change))
    assert the_line(retune(*DATA)) == line


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("dev: dev.jsonl, ", ""), "run.yaml: data.dev: is required"),
        (('1: " great"}', '2: " great"}'), "run.yaml: task.labels: must be the prompt's"),
        (
            ("{every: 0}", "{every: 0, queries: 30}"),
            "new.yaml: evaluation.queries: 30 of 60 that comparing needs",
        ),
        (
            ("{queries: 16}", "{queries: 16, requests: 40}"),
            "new.yaml: budget: may not cover one round and all measurements; the smallest cap "
            "that does is 4 queries, 64 requests",
        ),
        (
            ('great"}}', 'great"}, metric: f1}'),
            "run.yaml: task.metric: is 'f1', the prompt was tuned and measured with 'accuracy'",
        ),
    ],
)
def test_a_run_that_does_not_fit_the_prompt(
    retune: Fedone, folder: Path, change: tuple[str, str], line: str
) -> None:
    assert change[0] in RUN
    Path("run.yaml").write_text(RUN.replace(*change))
    assert the_line(retune("--run", "run.yaml")).startswith(line)
    assert not (folder / ".fedone").exists()


def test_another_model_of_the_same_name(retune: Fedone, folder: Path) -> None:
    assert retune(*DATA, "--queries", 20).code == 0
    shutil.copytree("models/next", "models/third")
    Path("new.yaml").write_text(NEW.replace("next", "third"))
    line = the_line(retune(*DATA, "--queries", 20))
    assert line.startswith("new.yaml: backend: is 'onnx:third:")
    assert "--fresh" in line
    assert retune(*DATA, "--queries", 20, "--fresh").code == 0
    Path("third.yaml").write_text(NEW.replace("next", "third"))
    assert retune(*DATA, "--queries", 20, backend="third.yaml").code == 0


def test_another_file_is_replaced_only_where_that_is_asked(retune: Fedone, folder: Path) -> None:
    shutil.copy("old.json", "other.json")
    assert "--overwrite replaces it" in the_line(retune(*DATA, "-o", "other.json"))
    assert retune(*DATA, "--queries", 20, "-o", "other.json", "--overwrite").code == 0
    assert read_artefact(Path("other.json")).run_id == "tiny-on-new"


def test_ctrl_c_and_the_same_command(folder: Path) -> None:
    command = _command(
        *("retune", "old.json", "--backend", "new.yaml", *DATA),
        *("--queries", 200, "--json", "r.json"),
    )
    with (
        Path("err").open("wb") as err,
        subprocess.Popen(command, stdout=err, stderr=err, env=_environment()) as process,
    ):
        end = time.monotonic() + PATIENCE_S
        while "round 1/" not in Path("err").read_text():
            assert process.poll() is None, Path("err").read_text()
            assert time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
    said = Path("err").read_text()
    assert "continue with: fedone retune old.json --backend new.yaml" in said
    assert "Conclusion: none yet" in said
    assert "Traceback" not in said
    assert document()["conclusion"] == "unknown"
    assert document()["output"] is None
    assert not list(folder.glob("*.prompt.json"))
    rounds = document()["run"]["rounds"]
    done = subprocess.run(command, capture_output=True, env=_environment(), check=True)
    assert b"had ended before" not in done.stderr
    found = document()
    assert found["run"]["rounds"] > rounds
    assert found["run"]["spent"]["queries"] <= 200
    # What was measured before the stop is not paid for twice.
    assert found["run"]["spent"]["requests"] <= found["plan"]["expected"]["requests"]
    assert read_artefact(Path(found["output"])).status in ("completed", "budget_exhausted")


def test_a_masked_models_prompt_on_a_causal_one(
    retune: Fedone, folder: Path, smollm2: Path
) -> None:
    pytest.importorskip("xllamacpp")
    # One thread: two wait for each other where another process has one of two cores.
    backend = f"kind: llama_cpp\nmodel: {smollm2}\ncontext_length: 512\nthreads: 1\n"
    Path("new.yaml").write_text(backend)
    line = the_line(retune("--run", "run.yaml"))  # It has no masks to fill.
    assert line.startswith("new.yaml: ")
    assert "{mask}" in line
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
    assert found["old_prompt"]["scored"] == 8
    assert "Conclusion: " in out
