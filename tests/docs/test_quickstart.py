"""The second half of the quickstart, run unchanged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.pages import blocks

ROOT = Path(__file__).resolve().parents[2]


def test_the_commands_run(tmp_path: Path) -> None:
    page = blocks((ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8"))
    (run,) = [block.text for block in page if block.language == "yaml"]
    (tmp_path / "run.yaml").write_text(run, encoding="utf-8")
    (tmp_path / "fedone_sdk").symlink_to(ROOT / "fedone_sdk")  # where the data lies in a checkout
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    (commands,) = [block.text for block in page if block.language == "bash"]
    command = ["bash", "-euo", "pipefail", "-c", commands]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "training queries" in done.stdout
    assert "Tuned prompt" in done.stdout
    assert "over no prompt" in done.stdout
    assert json.loads(done.stdout.splitlines()[-1])["label"] in ("0", "1")
    assert {"report.html", "prompt.json"} <= {file.name for file in tmp_path.iterdir()}
    assert (tmp_path / ".fedone" / "feedback.db").is_file()
