"""Real vLLM servers, started once per test run and shared."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fedone_sdk import assets
from tests.processes import free_port

SHARED = Path(os.environ.get("FEDONE_SHARED", Path(__file__).resolve().parents[3] / "shared"))
START_S = 300.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmServer:
    """A running server; `url` is its root, without ``/v1``."""

    url: str
    model: str
    folder: Path
    log: Path


class DeadServer(Exception):
    """The server has ended, or was not ready in time; the message is the end of its log."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    absent = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: scripts/test-vllm")
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.vllm)
            item.add_marker(absent)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and isinstance(item, pytest.Function):
        for value in item.funcargs.values():
            if isinstance(value, VllmServer):
                report.sections.append((f"end of {value.log}", log_tail(value.log)))
    return report


def log_tail(log: Path, num_lines: int = 40) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:])


@contextmanager
def serving(folder: Path, log: Path, *options: str) -> Iterator[VllmServer]:
    """Start a server in its own process group, wait until it answers, and end the group."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(folder), "--served-model-name", folder.name),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--enforce-eager", *options),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT,
            start_new_session=True,
        )
    try:
        give_up = time.monotonic() + START_S
        while not healthy(url):
            if process.poll() is not None or time.monotonic() > give_up:
                raise DeadServer(log_tail(log))
            time.sleep(0.1)
        yield VllmServer(url=url, model=folder.name, folder=folder, log=log)
    finally:
        # The engine and its workers are processes of their own, and outlive a killed server.
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, sign)
                process.wait(timeout=20)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


Serve = Callable[..., VllmServer]


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Starts a server, ``serve(folder, *options)``; it ends with the tests."""
    with ExitStack() as servers:

        def start(folder: Path, *options: str) -> VllmServer:
            log = tmp_path_factory.mktemp("vllm") / f"{folder.name}.log"
            return servers.enter_context(serving(folder, log, *options))

        yield start


@pytest.fixture(scope="session")
def shared() -> Callable[..., Path]:
    """A path in the folder of shared data; skips the test where it is absent."""

    def find(*parts: str) -> Path:
        path = SHARED.joinpath(*parts)
        if not path.exists():
            pytest.skip(f"{path} is absent (FEDONE_SHARED names the folder of shared data)")
        return path

    return find


@pytest.fixture(scope="session")
def sst2(shared: Callable[..., Path]) -> list[dict[str, Any]]:
    """The development rows of SST-2: ``sentence`` and ``label``."""
    lines = shared("data", "glue", "sst2", "dev.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="session")
def roberta_server(serve: Serve, shared: Callable[..., Path]) -> VllmServer:
    """roberta-mini behind our plugin."""
    return serve(
        shared("models", "roberta-mini"),
        *("--max-model-len", "128", "--io-processor-plugin", "fedone_roberta"),
    )


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random causal model of 256 positions, with the vocabulary of the embedded model."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    tokenizer = Tokenizer.from_file(str(assets.path("roberta_mini") / "tokenizer.json"))
    # A causal model's input starts with <s>, and does not end with </s>.
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,  # Probabilities that differ.
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def llama_server(serve: Serve, tiny_llama: Path) -> VllmServer:
    """The random causal model, as any user would serve one."""
    return serve(tiny_llama, "--max-model-len", "256")


@pytest.fixture(scope="session")
def odd_roberta(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A random RoBERTa; `request.param` says whether its decoder is the word embedding.

    Its vocabulary is no multiple of 64, so that vLLM pads the embedding.
    """
    import torch
    from transformers import RobertaConfig, RobertaForMaskedLM

    name = "tied" if request.param else "untied"
    folder = tmp_path_factory.mktemp("models") / f"roberta-{name}"
    folder.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(assets.path("roberta_mini") / file, folder)
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=8203,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=34,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        initializer_range=0.2,
        tie_word_embeddings=request.param,
    )
    model = RobertaForMaskedLM(config)
    torch.nn.init.normal_(model.lm_head.bias)
    model.save_pretrained(folder)
    return folder
