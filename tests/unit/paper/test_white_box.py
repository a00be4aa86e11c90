"""Rows that need the model's weights, each once and small, on a real model."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the extra torch is not installed")
pytest.importorskip("transformers", reason="the extra torch is not installed")

from fedone_paper import Settings, find_study, run_study
from fedone_paper.methods import METHODS
from fedone_sdk.evaluation.engine import Result, Workspace
from tests.acceptance import golden_paper

SHARED = Path(os.environ.get("FEDONE_SHARED", Path(__file__).resolve().parents[4] / "shared"))
MODEL = SHARED / "models" / "roberta-mini"
RUN = {
    "task": "sst2",
    "seed": 0,
    "num_clients": 4,
    "shots": 4,
    "prompt_len": 3,
    "vocab_size": 20,
    "num_samples": 4,
    "batch_size": 4,
    "rounds": 3,
    "every": 1,
    "searches": False,
}


@pytest.fixture
def settings(glue: Path) -> Settings:
    if not MODEL.exists():
        pytest.skip(f"{MODEL} is absent (FEDONE_SHARED names the folder of shared data)")
    return Settings(model=MODEL, data=glue, device="cpu")


@pytest.mark.parametrize(
    ("name", "methods"),
    [("table1", "fine-tuning,prompt-tuning,p-tuning-v2,bbt"), ("table-queries", "bbt-20")],
)
def test_pinned_numbers(tmp_path: Path, name: str, methods: str) -> None:
    tasks = ("sst2",) if name == "table1" else None
    settings = Settings(
        model=MODEL,
        data=SHARED / "data" / "glue",
        seeds=1,
        quick=True,
        device="cpu",
        tasks=tasks,
        options={"methods": methods},
    )
    finished = run_study(find_study(name), settings, out=tmp_path, workers=1)
    assert finished.failures == {}
    results = {
        file.stem: json.loads(file.read_text())["result"]
        for file in (tmp_path / name / "trials").glob("*.json")
    }
    assert results
    assert results.keys() <= golden_paper.GOLDEN[name].keys()
    golden_paper.check(name, results)


@pytest.mark.parametrize("name", ["prompt-tuning", "p-tuning-v2", "bbt"])
def test_soft_prompts(settings: Settings, tmp_path: Path, name: str) -> None:
    row = METHODS[name]

    def run(rate: float | None) -> Result:
        trial = row.trial("x", settings, RUN, rate)
        return trial.run(trial.options, Workspace(inputs=trial.inputs, folder=tmp_path / f"{rate}"))

    found = run(row.rates[0] if row.rates else None)
    assert found["status"] == "completed"
    assert found["model"].startswith("transformers:roberta-mini")
    assert [point["round"] for point in found["curve"]] == [-1, 0, 1, 2]
    # The file has the same float32 weights, and a few names before them.
    weights = (MODEL / "model.safetensors").stat().st_size
    assert found["loaded_bytes"] == pytest.approx(weights, rel=0.01)
    assert found["device"] == "cpu"
    if row.access == "white box":
        assert found["spent"]["queries"] == 0
        assert run(1e-6)["alpha_sha256"] != found["alpha_sha256"]  # the rate is used
    else:
        assert found["spent"]["queries"] == 3 * 4


def test_fine_tuning(settings: Settings, tmp_path: Path) -> None:
    row = METHODS["fine-tuning"]
    trial = row.trial("x", settings, {**RUN, "shots": 8})
    found = trial.run(trial.options, Workspace(inputs=trial.inputs, folder=tmp_path / "work"))
    assert 0.0 <= found["metric"]["after"] <= 1.0
    assert found["rows"] == 4 * 2 * 8
    assert found["epochs"] == 1
    assert found["learning_rate"] == trial.options["rates"][0]
