"""`fedone tune` on real vLLM servers: whole runs, and the bill next to the server's count."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import VllmServer

# As a template: the tiny model has no chat template.
QUESTION = (
    '{template: "{prompt} {sentence} great or terrible?", labels: {0: " terrible", 1: " great"}}'
)
RUN = """
name: {name}
task: {task}
data: {{train: {data}/train.jsonl, num_clients: 6, shots: 8}}
prompt: {{length: 4, vocabulary: {{kind: pmi, size: 30}}}}
method: {{name: gs-bdpl, num_samples: 6, optimizer: sgd, batch_size: 8}}
participation: {{exchange: losses}}
budget: {{queries: 40, requests: 60, tokens: 40000}}
rounds: 20
backend:
  kind: vllm
  base_url: {url}
  model: {model}
  tokenizer: {folder}
  cache: answers.db
"""


def tokens_served(server: VllmServer) -> int:
    """The server's own count of prompt tokens."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    counts = [line for line in lines if line.startswith("vllm:prompt_tokens_total")]
    return int(sum(float(line.split()[-1]) for line in counts))


def tune(folder: Path, text: str) -> dict[str, Any]:
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "fedone_sdk.cli", "tune", "run.yaml", "--json", "out.json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / "out.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize(
    ("fixture", "task"), [("roberta_server", "sst2"), ("llama_server", QUESTION)]
)
def test_the_job_runs_and_the_bill_is_the_servers(
    fixture: str,
    task: str,
    request: pytest.FixtureRequest,
    shared: Callable[..., Path],
    tmp_path: Path,
) -> None:
    server: VllmServer = request.getfixturevalue(fixture)
    data = shared("data", "glue", "sst2")
    fields = {"task": task, "data": data, "url": server.url, "model": server.model}
    before = tokens_served(server)
    result = tune(tmp_path, RUN.format(name="first", folder=server.folder, **fields))
    assert (result["status"], result["spent"]["queries"]) == ("budget_exhausted", 40)
    assert 0 < result["spent"]["requests"] <= 40
    assert result["spent"]["prompt_tokens"] == tokens_served(server) - before
    # The same run again is answered by the file of paid answers.
    before = tokens_served(server)
    again = tune(tmp_path, RUN.format(name="second", folder=server.folder, **fields))
    assert tokens_served(server) == before
    assert again["spent"]["requests"] == 0
    assert again["alpha_sha256"] == result["alpha_sha256"]
