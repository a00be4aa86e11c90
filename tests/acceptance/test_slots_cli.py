"""A prompt of slots from a short RUN.yaml: plan, tune, prompt use, on several backends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedone_sdk import assets
from fedone_sdk.messages import RunResult
from tests.console import Fedone
from tests.llama_cpp.conftest import ALIAS, KEY, LlamaServer
from tests.weights import as_folder

CLOZE = """
  template: "{instruction}{demonstrations}{text}{closing} {mask}."
  labels: {0: " terrible", 1: " great"}
"""
CHAT = """
  chat: {system: "{instruction}", user: "{demonstrations}{text}", assistant: "{closing}"}
  labels: {0: negative, 1: positive}
"""
RUN = """\
name: slots
task: {task}  description: {{text: customer review, aspect: sentiment}}
data: {{train: train.jsonl, dev: dev.jsonl, num_clients: 4, shots: 3}}
prompt:
  slots:
    - {{name: instruction, candidates: {{kind: instructions, size: 3}}}}
    - name: demonstrations
      candidates: {{kind: demonstrations, file: public.jsonl, shots: [0, 2], blocks: 1}}
    - {{name: closing, candidates: {closings}}}
    - {{name: labels, candidates: {{kind: labels, sets: [{words}]}}}}
method: {{name: {method}, num_samples: 4, batch_size: 3}}
participation: {{exchange: losses}}
budget: {{queries: 12}}
rounds: 3
evaluation: {{every: 0}}
backend: {backend}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    lines = (assets.path("companion_feedback") / "train.jsonl").read_text().splitlines(True)
    (tmp_path / "train.jsonl").write_text("".join(lines[:40]))
    (tmp_path / "public.jsonl").write_text("".join(lines[40:60]))
    (tmp_path / "dev.jsonl").write_text("".join(lines[60:66]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(fedone: Fedone, folder: Path, text: str) -> RunResult:
    (folder / "run.yaml").write_text(text)
    planned = fedone("plan", "run.yaml", "--no-probe", "--json", "plan.json")
    assert planned.code == 0, planned.err
    tuned = fedone("tune", "run.yaml", "--json", "r.json", "--artefact", "prompt.json")
    assert tuned.code == 0, tuned.err
    result = RunResult.model_validate_json(Path("r.json").read_bytes())
    assert result.spent.queries <= 12
    assert result.prompt.slots is not None
    assert [slot.name for slot in result.prompt.slots] == [
        "instruction",
        "demonstrations",
        "closing",
    ]
    assert result.prompt.labels is not None
    assert "{" not in result.prompt.text
    most = json.loads(Path("plan.json").read_text())["most"]
    assert result.spent.prompt_tokens <= most["prompt_tokens"]
    (folder / "texts.txt").write_text("It stopped playing after a day.\n")
    used = fedone("prompt", "use", "prompt.json", "--data", "texts.txt", "--backend", "run.yaml")
    assert used.code == 0, used.err
    assert json.loads(used.out.splitlines()[0])["label"] in ("0", "1")
    return result


def chat_run(backend: dict[str, object]) -> str:
    """The run as a chat, on a backend."""
    return RUN.format(
        task=CHAT, closings='["Sentiment:", "My answer is"]', words="[bad, good]",
        method="thompson", backend=json.dumps(backend),
    )  # fmt: skip


@pytest.mark.parametrize("method", ["thompson", "gs-bdpl"])
def test_the_embedded_model(fedone: Fedone, folder: Path, method: str) -> None:
    closings = '[" It was", " In summary, the product is"]'
    run = RUN.format(
        task=CLOZE, closings=closings, words='[" bad", " good"]', method=method,
        backend="{kind: onnx}",
    )  # fmt: skip
    check(fedone, folder, run)
    (folder / "run.yaml").write_text(run.replace("rounds: 3", "rounds: 50"))
    planned = fedone("plan", "run.yaml", "--no-probe").out
    fewer = "for 3 of 3 rounds (the cap on queries pays for no more of the 50), at worst-case"
    assert (fewer in planned) is (method == "thompson")


def test_a_server_through_openai(
    fedone: Fedone, folder: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xllamacpp", reason="needs the extra llama-cpp")
    server = LlamaServer(smollm2)
    server.start()
    try:
        monkeypatch.setenv("LLAMA_KEY", KEY)
        backend = {
            "kind": "openai",
            "base_url": f"{server.url}/v1",
            "model": ALIAS,
            "api_key_env": "LLAMA_KEY",
        }
        check(fedone, folder, chat_run(backend))
    finally:
        server.kill()


def test_weights_in_transformers(
    fedone: Fedone, folder: Path, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for module in ("torch", "transformers", "gguf"):
        pytest.importorskip(module, reason="needs scripts/test-torch")
    weights = as_folder(smollm2, tmp_path_factory.mktemp("weights") / "smollm2")
    check(fedone, folder, chat_run({"kind": "transformers", "model": str(weights)}))


def test_a_public_file_without_one_class(fedone: Fedone, folder: Path) -> None:
    rows = [line for line in Path("public.jsonl").read_text().splitlines() if '"label": 1' in line]
    Path("public.jsonl").write_text("\n".join(rows) + "\n")
    run = RUN.format(
        task=CLOZE, closings='[" It was", ""]', words='[" bad", " good"]', method="random",
        backend="{kind: onnx}",
    )  # fmt: skip
    (folder / "run.yaml").write_text(run)
    outcome = fedone("tune", "run.yaml")
    assert outcome.code == 2
    (line,) = outcome.err.splitlines()
    assert "slots.1 (demonstrations): " in line
    assert "class 0 has 0" in line
    assert not (folder / ".fedone").exists()


def test_score_measures_slots(fedone: Fedone, folder: Path) -> None:
    closings = '[" It was", ""]'
    run = RUN.format(
        task=CLOZE, closings=closings, words='[" bad", " good"]', method="random",
        backend="{kind: onnx}",
    )  # fmt: skip
    (folder / "run.yaml").write_text(run)
    scored = fedone(
        "score", "run.yaml", "--slot", "closing= It was", "--slot", "labels= bad, good",
        "--json", "s.json",
    )  # fmt: skip
    assert scored.code == 0, scored.err
    assert json.loads(Path("s.json").read_text())["prompt"] == " It was"
    for arguments, message in [
        (("--prompt", "x"), "--prompt: the task has slots"),
        (("--slot", "ending=x"), "--slot: 'ending' is not a slot; allowed: instruction,"),
        (("--slot", "labels=a"), "--slot: 'labels' needs 2 words"),
    ]:
        refused = fedone("score", "run.yaml", *arguments)
        assert refused.code == 2
        assert message in refused.err
