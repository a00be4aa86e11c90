"""A prompt of slots through a real vLLM server."""

from __future__ import annotations

from pathlib import Path

from tests.acceptance.test_slots_cli import chat_run, check, folder
from tests.console import Fedone, fedone
from tests.weights import as_folder

from .conftest import Serve

__all__ = ["fedone", "folder"]


def test_a_prompt_of_slots(fedone: Fedone, folder: Path, smollm2: Path, serve: Serve) -> None:
    server = serve(as_folder(smollm2, folder / "weights"), "--max-model-len", "512")
    backend = {
        "kind": "vllm",
        "model": server.model,
        "base_url": server.url,
        "tokenizer": str(folder / "weights"),
    }
    check(fedone, folder, chat_run(backend))
