"""docs/tutorials/support-mails.md, with the practice model and three shops."""

from __future__ import annotations

import json
from pathlib import Path

from tests.processes import free_port
from tests.tutorials.tutorial import Tutorial


def test_support_mails(tmp_path: Path) -> None:
    ports = {"8125": str(free_port()), "8083": str(free_port())}
    page = Tutorial("support-mails", tmp_path, changes=ports)
    page.skip("python3 -m venv")
    (page.root / "mails").mkdir()
    with page.start() as model:
        model.reaches("/v1")
        for _ in range(2):
            page.run()
        with page.start() as server:
            server.reaches('"event": "serving"')
            shops = page.run()
            for _ in range(3):
                page.run()
    assert page.rest == []
    assert not [name for name in ("Miriam", "Oskar", "Jana", "Tariq", "Ines") if name in shops]
    artefact = json.loads((page.folder / "mails.prompt.json").read_text())
    assert "year-month-day" in artefact["prompt"]["text"]
