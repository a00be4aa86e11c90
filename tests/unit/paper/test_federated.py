"""A federated tuning as a trial: the same run as any other, told as JSON."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from fedone_paper import Settings
from fedone_paper.federated import Tuning, run_trial, run_tuning, tuning_federation
from fedone_paper.glue import glue_task
from fedone_sdk.backends.build import build_backend
from fedone_sdk.data import load_examples
from fedone_sdk.evaluation.engine import Trial, Workspace
from fedone_sdk.local import Federation, simulate
from fedone_sdk.spec import RunSpec

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


def test_it_is_the_run_that_simulate_runs(glue: Path, tmp_path: Path) -> None:
    trial = run_trial("small", Settings(data=glue), Tuning(**SMALL), run_tuning)
    found = trial.run(trial.options, workspace(trial, tmp_path / "answers"))
    assert found == json.loads(json.dumps(found))

    spec = RunSpec.model_validate(
        {
            "task": glue_task("sst2"),
            "data": {
                "train": str(glue / "sst2" / "train.jsonl"),
                "dev": str(glue / "sst2" / "dev.jsonl"),
                "num_clients": 4,
                "shots": 4,
            },
            "prompt": {"length": 3, "vocabulary": {"kind": "pmi", "size": 20}},
            "method": SMALL["method"],
            "participation": {"clients_per_round": 2},
            "rounds": 6,
            "evaluation": {"every": 2, "examples": 16},
            "seed": 3,
        }
    )

    async def direct() -> Any:
        async with build_backend(spec.backend) as backend:
            return await simulate(Federation.load(spec), backend=backend)

    result = asyncio.run(direct())
    assert found["alpha_sha256"] == result.alpha_sha256
    assert found["prompt"] == result.prompt.text
    assert found["metric"] == result.metric.model_dump(mode="json")
    assert found["spent"]["queries"] == 6 * 2 * 4
    assert found["queries_per_round"] == [8] * 6
    assert found["model"] == result.model
    assert found["curve"][0] == {"round": -1, "queries": 0, "metric": result.metric.before}
    measured = {entry.round: entry.metric for entry in result.history if entry.metric is not None}
    assert {point["round"]: point["metric"] for point in found["curve"][1:]} == measured
    assert [point["queries"] for point in found["curve"][1:]] == [16, 32, 48]

    # Interrupted or repeated: every answer is known by now.
    again = trial.run(trial.options, workspace(trial, tmp_path / "answers"))
    assert found["spent"]["requests"] > 0
    assert again["spent"]["requests"] == 0
    assert again["alpha_sha256"] == found["alpha_sha256"]


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
