"""Methods that need the model's weights, on a real model, with pinned numbers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the extra torch is not installed")
pytest.importorskip("transformers", reason="the extra torch is not installed")

from fedone_paper import Settings, find_study, run_study
from tests.acceptance import golden_paper

SHARED = Path(os.environ.get("FEDONE_SHARED", Path(__file__).resolve().parents[4] / "shared"))
MODEL = SHARED / "models" / "roberta-mini"


@pytest.mark.parametrize(
    ("name", "methods", "tasks"),
    [
        ("table1", "fine-tuning,prompt-tuning,p-tuning-v2,bbt", ("sst2",)),
        ("table-queries", "bbt-20", None),
    ],
)
def test_pinned_numbers(
    tmp_path: Path, name: str, methods: str, tasks: tuple[str, ...] | None
) -> None:
    if not MODEL.exists():
        pytest.skip(f"{MODEL} is absent (FEDONE_SHARED names the folder of shared data)")
    options, data = {"methods": methods}, SHARED / "data" / "glue"
    settings = Settings(model=MODEL, data=data, seeds=1, quick=True, tasks=tasks, options=options)
    finished = run_study(find_study(name), settings, out=tmp_path, workers=1)
    assert finished.failures == {}
    document = json.loads((tmp_path / name / f"{name}.json").read_text())
    results = {key: trial["result"] for key, trial in document["trials"].items()}
    assert results
    assert results.keys() <= golden_paper.GOLDEN[name].keys()
    # Sums of torch depend on its threads.
    golden_paper.check(name, results, rel_tol=1e-4)
