"""`fedone tune` for the methods that tune a soft prompt, on a real model and real rows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedone_sdk.messages import RunResult

pytest.importorskip("torch", reason="the extra torch is not installed")
pytest.importorskip("transformers", reason="the extra torch is not installed")

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("FEDONE_SHARED", ROOT.parent / "shared"))
MODEL = SHARED / "models" / "roberta-mini"
DATA = SHARED / "data" / "glue" / "sst2"
BBT = {"name": "bbt", "num_samples": 6, "batch_size": 8}
TUNING = {
    "name": "prompt-tuning",
    "hidden_size": 192,
    "learning_rate": 0.03,
    "local_steps": 20,
    "batch_size": 16,
}
P_TUNING = {**TUNING, "name": "p-tuning-v2", "num_layers": 3}


def tune(tmp_path: Path, *options: object, **changes: Any) -> tuple[int, str, RunResult | None]:
    """Run the command in one separate process, which loads torch once."""
    for name in ("train", "dev"):
        lines = (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines[:200]), encoding="utf-8")
    run = {
        "name": "soft",
        "task": "sst2",
        "data": {"train": "train.jsonl", "dev": "dev.jsonl", "num_clients": 4, "shots": 8},
        "prompt": {"length": 5},
        "rounds": 3,
        "evaluation": {"every": 0},
        "backend": {"kind": "transformers", "model": str(MODEL), "device": "cpu"},
        **changes,
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
    target = tmp_path / "result.json"
    command = [sys.executable, "-m", "fedone_sdk.cli", "tune", "run.yaml", "--json", target]
    done = subprocess.run(
        [*command, *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        # One thread: others would only wait for each other on a machine that does more than this.
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    found = RunResult.model_validate_json(target.read_bytes()) if target.exists() else None
    return done.returncode, done.stdout + done.stderr, found


@pytest.fixture(autouse=True)
def needs_shared() -> None:
    if not MODEL.exists() or not DATA.exists():
        pytest.skip(f"{SHARED} is absent (FEDONE_SHARED names the folder of shared data)")


@pytest.mark.parametrize("exchange", ["alpha", "losses"])
def test_bbt_sends_the_queries_of_its_budget(tmp_path: Path, exchange: str) -> None:
    code, out, result = tune(tmp_path, "--exchange", exchange, method=BBT, budget={"queries": 15})
    assert code == 0, out
    assert result is not None
    # The last step has the three candidates that were left.
    assert (result.status, result.spent.queries) == ("completed", 15)
    assert result.metric.before is not None
    assert result.metric.after is not None


@pytest.mark.parametrize("method", [TUNING, P_TUNING], ids=lambda method: method["name"])
def test_what_clients_train_is_better_than_what_they_began_with(
    tmp_path: Path, method: dict[str, Any]
) -> None:
    code, out, result = tune(tmp_path, "--transport", "memory", method=method)
    assert code == 0, out
    assert result is not None
    assert (result.status, result.spent.queries) == ("completed", 0)
    losses = [entry.mean_loss for entry in result.history]
    assert losses[-1] < losses[0]


def test_a_model_whose_weights_are_elsewhere_is_one_clear_line(tmp_path: Path) -> None:
    code, out, _ = tune(tmp_path, method=TUNING, backend={"kind": "onnx", "model": str(MODEL)})
    assert code == 2
    assert out == "run.yaml: backend.kind: white-box methods need transformers\n"
