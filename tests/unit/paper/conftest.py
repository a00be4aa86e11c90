"""A GLUE-like folder made of what ships with the SDK."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedone_sdk import assets
from fedone_sdk.data import load_examples


@pytest.fixture
def glue(tmp_path: Path) -> Path:
    """sst2/ with 120 training rows and 120 dev rows."""
    source, target = assets.path("companion_feedback"), tmp_path / "glue" / "sst2"
    target.mkdir(parents=True)
    for name, count in ("train", 120), ("dev", 120):
        rows = load_examples(source / f"{name}.jsonl")[:count]
        lines = [json.dumps({"sentence": row["text"], "label": row["label"]}) for row in rows]
        (target / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return target.parent
