"""A small folder in the shape of GLUE's, made of the demo data that comes with the SDK."""

from __future__ import annotations

import json
from pathlib import Path

from fedone_sdk import assets


def sst2_folder(folder: Path) -> Path:
    """Writes sst2/train.jsonl and sst2/dev.jsonl; returns the folder above."""
    target = folder / "sst2"
    target.mkdir(parents=True)
    for name in ("train.jsonl", "dev.jsonl"):
        source = assets.path("companion_feedback") / name
        rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
        kept = [{"sentence": row["text"], "label": row["label"]} for row in rows]
        text = "".join(f"{json.dumps(row)}\n" for row in kept)
        (target / name).write_text(text, encoding="utf-8")
    return folder
