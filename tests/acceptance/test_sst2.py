"""A few rounds of the paper's setting on real SST-2 rows and a real model, over HTTP."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from fedone_sdk.backends import AnswerCache, LLMBackend, ModelClient, OnnxBackend
from fedone_sdk.local import Federation, simulate
from fedone_sdk.messages import RunResult
from fedone_sdk.spec import RunSpec

SHARED = Path(os.environ.get("FEDONE_SHARED", Path(__file__).resolve().parents[3] / "shared"))
ROUNDS = 5


@pytest.fixture(scope="module")
def federation() -> Federation:
    rows = SHARED / "data" / "glue" / "sst2" / "train.jsonl"
    if not rows.exists():
        pytest.skip(f"{rows} is absent (FEDONE_SHARED names the folder of shared data)")
    spec = RunSpec.model_validate(
        {
            "name": "sst2",
            "task": {
                "template": "{prompt} {sentence} It was {mask}.",
                "labels": {0: " terrible", 1: " great"},
            },
            "data": {"train": str(rows), "num_clients": 100, "shots": 16},
            "prompt": {"length": 20, "vocabulary": {"kind": "pmi", "size": 200}},
            "method": {"name": "gs-bdpl", "num_samples": 20, "optimizer": "sgd"},
            "budget": {"queries": ROUNDS * 20},
            "rounds": ROUNDS,
        }
    )
    return Federation.load(spec)


async def run(federation: Federation, backend: LLMBackend, **participation: Any) -> RunResult:
    spec = federation.spec
    changed = spec.participation.model_copy(update=participation)
    spec = spec.model_copy(update={"participation": changed})
    return await simulate(dataclasses.replace(federation, spec=spec), backend=backend)


async def test_both_exchanges_agree_and_weigh_what_they_should(federation: Federation) -> None:
    folder = SHARED / "models" / "roberta-mini"
    cache = AnswerCache()
    async with ModelClient(OnnxBackend(folder), cache=cache) as backend:
        alpha = await run(federation, backend, exchange="alpha")
        asked = cache.misses
        losses = await run(federation, backend, exchange="losses")
        assert cache.misses == asked  # the same queries, so nothing is asked again
    for result in (alpha, losses):
        assert result.status == "completed"  # also when that took exactly the cap
        assert result.spent.queries == ROUNDS * 20
    assert alpha.alpha_sha256 == losses.alpha_sha256
    # Two alphas of 20 x 200 float32 in base64 a round, against 400 candidate indices and 20 losses.
    enrolment = 100 * 500
    sent = {
        result.name: result.communication.upload_bytes + result.communication.download_bytes
        for result in (alpha.model_copy(update={"name": "alpha"}), losses)
    }
    assert sent["alpha"] > ROUNDS * 2 * 20 * 200 * 4
    assert sent["sst2"] < ROUNDS * 3_000 + enrolment
