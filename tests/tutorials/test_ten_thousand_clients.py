"""docs/tutorials/ten-thousand-clients.md, with all ten thousand clients."""

from __future__ import annotations

from pathlib import Path

from fedone_sdk.messages import RunResult
from tests.tutorials.tutorial import Tutorial


def test_ten_thousand_clients(tmp_path: Path) -> None:
    page = Tutorial("ten-thousand-clients", tmp_path)
    page.skip("python3 -m venv")
    (page.root / "many").mkdir()
    for _ in range(4):
        page.run()
    assert page.rest == []
    results = {
        name: RunResult.model_validate_json((page.folder / f"{name}.json").read_bytes())
        for name in ("iid", "unlike", "ten")
    }
    for name, run in results.items():
        assert run.status == "completed"
        assert 0 < run.spent.queries <= 500
        for entry in run.history:
            assert len(entry.client_id.split(",")) == (10 if name == "ten" else 1)
    assert len({run.alpha_sha256 for run in results.values()}) == 3
