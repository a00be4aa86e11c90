"""docs/tutorials/vllm.md on a real server, with the small RoBERTa instead of the hub's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.processes import free_port
from tests.tutorials.tutorial import Tutorial


def test_vllm_tutorial(tmp_path: Path, shared: Callable[..., Path]) -> None:
    page = Tutorial("vllm", tmp_path, changes={"8000": str(free_port())})
    page.skip("python3 -m venv")
    page.run()
    page.skip("hf download FacebookAI/roberta-base --local-dir model")
    (page.folder / "model").symlink_to(shared("models", "roberta-mini"))
    with page.start() as server:
        server.reaches("Application startup complete")
        page.shown(server)
        page.run()
        page.run()
        result = json.loads((page.folder / "result.json").read_text())
        assert (result["status"], result["rounds"]) == ("completed", 50)
        assert 0 < result["spent"]["queries"] <= 500
        served, ledger = (float(line.split()[-1]) for line in page.run().splitlines())
        assert served == ledger == result["spent"]["prompt_tokens"] > 0
        page.run()
    assert page.rest == []
