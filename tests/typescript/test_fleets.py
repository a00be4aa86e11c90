"""Fleets of Python and TypeScript devices end a run at the same alpha with the same answers."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from fedone_sdk.aggregator import Aggregator
from fedone_sdk.aggregator.http.application import listening
from fedone_sdk.backends import LLMBackend, Query
from fedone_sdk.messages import RunResult
from fedone_sdk.spec import RunSpec
from fedone_sdk.task import Part
from fedone_sdk.testing import LoopbackFederation, ScriptedBackend
from fedone_sdk.vocabulary import Vocabulary
from tests.acceptance.test_reflection import TOPICS, answer, rules
from tests.acceptance.test_reflection import rows_of as topical
from tests.acceptance.test_reflection import spec_of as reflecting
from tests.typescript.devices import node_device

pytestmark = pytest.mark.typescript

WORDS = Vocabulary(candidates=("", " good", " naïve", " 日本"))
THREE = {"2": " two", "10": " ten", "1": " one"}
GS_BDPL = {
    **{"name": "gs-bdpl", "num_samples": 5, "batch_size": 4, "tau": 1.0},
    **{"optimizer": "sgd", "learning_rate": 0.01},
}
DEVICES = 4

RUNS: dict[str, dict[str, Any]] = {
    "cross-entropy": {"method": {**GS_BDPL, "optimizer": "adamw", "local_steps": 2}},
    "three labels, hinge, a bias": {
        "task": {
            "template": "{prompt} {text} {mask}",
            **{"labels": THREE, "loss": "hinge", "bias": [0.0, 0.5, -0.25]},
        }
    },
    "calibrated": {
        "method": {"name": "random", "num_samples": 5, "batch_size": 4},
        "calibration": {"kind": "labels"},
    },
    "reference texts": {"task": {"template": "{prompt} {text}", "loss": "nll"}},
}


def spec_of(changes: dict[str, Any]) -> RunSpec:
    labels = {"1": " yes", "0": " no"}
    return RunSpec.model_validate(
        {
            "task": {"template": "{prompt} {text} {mask}", "labels": labels},
            "prompt": {"length": 3, "vocabulary": {"kind": "list", "candidates": ["x", "y"]}},
            "method": GS_BDPL,
            # Everybody works in every round: who is quicker makes no difference.
            "participation": {
                "exchange": "losses",
                "clients_per_round": DEVICES,
                "min_clients": DEVICES,
                "model": "scripted",
            },
            "rounds": 4,
            "evaluation": {"every": 0},
            **changes,
        }
    )


def rows_of(spec: RunSpec, device: int) -> list[dict[str, Any]]:
    labels = list(spec.task.labels) or ["a text", "another"]
    return [
        {"text": f"Text {n} of {device} 🎬", "label": labels[n % len(labels)]} for n in range(7)
    ]


def app_of(model: LLMBackend) -> web.Application:
    """A model behind HTTP, called in the form of the package's `backend`."""

    async def score(request: web.Request) -> web.Response:
        asked = await request.json()
        query = Query(
            inputs=tuple(tuple(Part(*part) for part in each) for each in asked["inputs"]),
            label_words=tuple(asked["labelWords"]),
            want=asked["want"],
            max_tokens=asked["maxTokens"] or None,
        )
        found = await model.score(query)
        answers = {"logProbs": found.log_probs, "texts": found.texts}
        return web.json_response({"fingerprint": model.fingerprint, **answers})

    app = web.Application()
    app.router.add_post("/", score)
    return app


async def fleet(
    spec: RunSpec,
    folder: Path,
    package: Path,
    typescript: set[int],
    *,
    own: LLMBackend | None = None,
) -> RunResult:
    """The result of a run of these devices, enrolled in their order."""
    async with (
        asyncio.timeout(60),
        LoopbackFederation(spec, WORDS, backend=None if own else ScriptedBackend()) as served,
        AsyncExitStack() as stack,
    ):
        env = {"FIELDS": "text,label"}
        if own is not None:
            env |= {"MODEL_URL": await stack.enter_async_context(listening(app_of(own)))}
        working: list[asyncio.Task[Any]] = []
        for number in range(DEVICES):
            rows = rows_of(spec, number)
            if number in typescript:
                place = folder / f"device-{number}"
                started = node_device(package, served.url, served.token, rows, place, env=env)
                device = await stack.enter_async_context(started)
                await device.wait_for("enrolled")
                working.append(asyncio.create_task(device.ended()))
            else:
                client = await stack.enter_async_context(served.client(rows, backend=own))
                await client.enrol()
                working.append(asyncio.create_task(client.run_forever()))
        await asyncio.gather(*working)
        return served.run.result()


@pytest.mark.parametrize("changes", RUNS.values(), ids=RUNS)
async def test_the_same_alpha(changes: dict[str, Any], tmp_path: Path, package: Path) -> None:
    spec = spec_of(changes)
    python = await fleet(spec, tmp_path, package, set())
    mixed = await fleet(spec, tmp_path, package, {1, 3})
    assert python.status == mixed.status == "completed"
    assert python.alpha_sha256 == mixed.alpha_sha256
    assert python.prompt == mixed.prompt
    assert [one.mean_loss for one in python.history] == pytest.approx(
        [one.mean_loss for one in mixed.history], rel=1e-15
    )


async def test_a_device_counts_epsilon(tmp_path: Path, package: Path) -> None:
    """Two updates fit, the third would not; the count outlives a restart."""
    pytest.importorskip("dp_accounting")
    one = {"exchange": "losses", "min_clients": 1, "model": "scripted"}
    noise = {"clip": 2.0, "noise_multiplier": 4.0}
    spec = spec_of({"participation": one, "privacy": noise})
    env = {"FIELDS": "text", "POLICY": '{"privacy": {"maxEpsilon": 1.5, "unit": "label"}}'}
    async with (
        asyncio.timeout(60),
        LoopbackFederation(spec, WORDS, backend=ScriptedBackend()) as served,
    ):
        for kind in ("updated", "declined"):
            arguments = (package, served.url, served.token, rows_of(spec, 0), tmp_path)
            async with node_device(*arguments, env=env) as device:
                await device.wait_for(kind)
        assert "exceed the client's maximal epsilon" in device.events[-1]["reason"]
        assert len(served.run.result().history) == 2
    (file,) = (tmp_path / "state").glob("*device.spent*")
    assert json.loads(file.read_text()) == {"precision": 2 / 16, "queries": 0}


@pytest.mark.parametrize("own", [False, True], ids=["gateway", "own model"])
async def test_devices_write_candidates(own: bool, tmp_path: Path, package: Path) -> None:
    """As in Python: each rule comes from rows that were wrong, and wins on other devices."""
    part: dict[str, Any] = {"exchange": "losses", "min_clients": DEVICES}
    model = ScriptedBackend(answer, write=rules)
    spec = reflecting(backend=not own, participation=part | ({"model": "scripted"} if own else {}))
    token, env = "enrolment-token-of-a-fleet", {"FIELDS": "text", "REFLECT": "gateway"}
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(60))
        if own:
            url = await stack.enter_async_context(listening(app_of(model)))
            env |= {"MODEL_URL": url, "REFLECT": "model"}
        aggregator = Aggregator(backend=None if own else model, enrolment_tokens=[token])
        await stack.enter_async_context(aggregator)
        vocabulary = spec.prompt.build(spec.task)
        run = await aggregator.add_run(spec, vocabulary, proposer=None if own else model)
        url = await aggregator.listen()
        places = [(topical(number), tmp_path / f"{number}") for number in range(DEVICES)]
        devices = [node_device(package, url, token, *place, env=env) for place in places]
        started = [await stack.enter_async_context(device) for device in devices]
        assert [await device.ended() for device in started] == [0] * DEVICES
        result = run.result()
    assert result.status == "completed", result.reason
    for topic in TOPICS:
        assert f"{topic} cases" in result.prompt.text
    assert result.spent.queries <= 120
    assert len({one.client for one in result.lineage}) > 1
    assert any(one.gain is not None and one.gain > 0 for one in result.lineage)


async def test_devices_with_models_of_their_own(tmp_path: Path, package: Path) -> None:
    spec = spec_of({"budget": {"queries": 10_000}})
    python = await fleet(spec, tmp_path, package, set(), own=ScriptedBackend())
    mixed = await fleet(spec, tmp_path, package, {0, 2}, own=ScriptedBackend())
    assert python.status == mixed.status == "completed"
    assert python.alpha_sha256 == mixed.alpha_sha256
    assert python.spent.queries == mixed.spent.queries
