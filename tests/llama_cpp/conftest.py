"""A real llama.cpp server with SmolLM2-135M-Instruct."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.processes import free_port

KEY = "sk-llama-0123456789"
ALIAS = "smollm2"
CONTEXT = 512
SERVE = Path(__file__).with_name("serve.py")


class LlamaServer:
    """A server process that can be killed and started again on the same port."""

    def __init__(self, model: Path, *, alias: str = ALIAS) -> None:
        self.port = free_port()
        self._command = [
            *(sys.executable, str(SERVE), str(model), "--port", str(self.port), "--key", KEY),
            *("--alias", alias, "--context", str(CONTEXT)),
        ]
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        """Without ``/v1``."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns when it answers."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        assert said.strip() == self.url, said

    def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Asks a route that no part of the SDK uses."""
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as response:
            found: dict[str, Any] = json.load(response)
        return found


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The model's file."""
    if find_spec("xllamacpp") is None:
        pytest.skip("needs xllamacpp: pip install 'fedone-sdk[llama-cpp]'")
    named = os.environ.get("FEDONE_SMOLLM2")
    if named is not None:
        return Path(named)
    if find_spec("fedone_sdk.backends.local_models") is None:
        pytest.skip("needs SmolLM2-135M-Instruct: name its GGUF file in FEDONE_SMOLLM2")
    models = import_module("fedone_sdk.backends.local_models")
    if not models.is_present(models.local_model("smollm2-135m-instruct")):
        pytest.skip("needs SmolLM2: fedone models smollm2-135m-instruct, or FEDONE_SMOLLM2")
    return Path(models.model_path("smollm2-135m-instruct"))


@pytest.fixture(scope="session")
def shared_server(smollm2: Path) -> Iterator[LlamaServer]:
    server = LlamaServer(smollm2)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def server(shared_server: LlamaServer, monkeypatch: pytest.MonkeyPatch) -> LlamaServer:
    """The server that all tests share, and its key in LLAMA_KEY."""
    monkeypatch.setenv("LLAMA_KEY", KEY)
    return shared_server


@pytest.fixture
def own_server(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LlamaServer]:
    """A server of this test's own, which it may kill."""
    monkeypatch.setenv("LLAMA_KEY", KEY)
    server = LlamaServer(smollm2)
    server.start()
    yield server
    server.kill()
