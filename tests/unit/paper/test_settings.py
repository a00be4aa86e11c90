"""Models and data of the Hugging Face hub, from a cache that is laid out as its client does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedone_paper.settings import fetch_data, fetch_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FETCH = "import sys; from fedone_paper.settings import fetch_model; print(fetch_model(sys.argv[1]))"


def fetched(cache: Path, name: str) -> subprocess.CompletedProcess[str]:
    """Fetch a model without a network, in a process that has read the variables."""
    environment = {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-c", FETCH, name],
        env={"PYTHONPATH": ":".join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_model_of_the_hub_is_a_folder_of_its_cache(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="it comes with the extra torch")
    repository = tmp_path / "models--tiny--roberta"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (snapshot / name).write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    found = fetched(tmp_path, "tiny/roberta")
    assert (found.returncode, found.stdout.strip()) == (0, str(snapshot)), found.stderr
    absent = fetched(tmp_path, "tiny/absent")
    assert absent.returncode != 0
    assert "'tiny/absent' is no folder, and the hub does not give it" in absent.stderr


def test_a_folder_and_a_file_stay_what_they_are(tmp_path: Path) -> None:
    assert fetch_model(str(tmp_path)) == tmp_path
    assert fetch_model("models/mini/model.gguf") == Path("models/mini/model.gguf")


def test_rows_of_the_hub_become_files_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def load_dataset(name: str, config: str, *, split: str) -> list[dict[str, object]]:
        asked.append((name, config, split))
        return [{"sentence": f"a {split}", "label": 1, "idx": 0}]

    datasets = ModuleType("datasets")
    datasets.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    for _ in range(2):
        assert fetch_data("hf:glue", ("sst2", "mnli"), tmp_path) == tmp_path
    assert asked == [
        ("nyu-mll/glue", "sst2", "train"),
        ("nyu-mll/glue", "sst2", "validation"),
        ("nyu-mll/glue", "mnli", "train"),
        ("nyu-mll/glue", "mnli", "validation_matched"),
    ]
    row = json.loads((tmp_path / "sst2" / "dev.jsonl").read_text())
    assert row["sentence"] == "a validation"
    assert fetch_data(str(tmp_path), ("sst2",), tmp_path / "other") == tmp_path
