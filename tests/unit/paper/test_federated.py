"""A federated tuning as a trial: the same run as any other, told as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedone_paper import Settings
from fedone_paper.federated import Tuning, run_trial, run_tuning, tuning_federation
from fedone_sdk.data import load_examples
from fedone_sdk.evaluation.engine import Trial, Workspace

SMALL: dict[str, Any] = {
    "task": "sst2",
    "method": {"name": "gs-bdpl", "num_samples": 4, "batch_size": 4, "learning_rate": 0.01},
    "seed": 3,
    "num_clients": 4,
    "shots": 4,
    "prompt_len": 3,
    "vocab_size": 20,
    "rounds": 6,
    "clients_per_round": 2,
    "every": 2,
    "curve_examples": 16,
}


def workspace(trial: Trial, folder: Path) -> Workspace:
    return Workspace(inputs=trial.inputs, folder=folder)


def test_held_out_rows_are_no_clients(glue: Path, tmp_path: Path) -> None:
    tuning = Tuning(**{**SMALL, "held_out": 8, "shots": 12})
    trial = run_trial("pilot", Settings(data=glue), tuning, run_tuning)
    assert "dev" not in trial.inputs
    federation = tuning_federation(trial.options, workspace(trial, tmp_path / "pilot"))
    rows = load_examples(glue / "sst2" / "train.jsonl")
    assert list(federation.dev) == rows[::8]
    held = [row for shard in federation.shards for row in shard]
    assert held
    assert all(row in rows for row in held)
    assert not [row for row in held if row in federation.dev]
