"""The examples that tune: own backend, algorithm and metric, and a paid API under a cap."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from fedone_sdk.aggregator.http.application import listening
from fedone_sdk.backends import OnnxBackend, predict
from fedone_sdk.data import load_examples
from fedone_sdk.local import Federation, simulate
from fedone_sdk.spec import RunSpec
from fedone_sdk.task import Part
from fedone_sdk.testing import ScriptedBackend, pseudo_log_probs
from tests.fake_openai import FakeOpenAI, Script

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


async def start(*command: object, folder: Path, **env: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-W", "error"),
        *map(str, command),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def output(*command: object, folder: Path, **env: str) -> str:
    """What a program prints that succeeds."""
    process = await start(*command, folder=folder, **env)
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


class Ranking:
    """The service that the example's backend speaks to; it is busy now and then."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.answered = 0

    async def rank(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        if len(self.requests) in (2, 9):
            return web.Response(status=(429, 503)[len(self.requests) == 9], headers=NOW)
        self.answered += 1
        texts = body["texts"]
        rows = [pseudo_log_probs((Part("text", text),), body["words"]) for text in texts]
        return web.json_response({"log_probs": rows, "tokens": sum(map(len, texts))})


NOW = {"Retry-After": "0"}


@asynccontextmanager
async def serving(service: Ranking) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/rank", service.rank)
    async with listening(app) as url:
        yield url


async def test_own_backend(tmp_path: Path) -> None:
    """The wrappers repeat requests that get a busy answer, and count each request."""
    service = Ranking()
    async with asyncio.timeout(60), serving(service) as url:
        out = await output(
            EXAMPLES / "own_backend.py", EXAMPLES / "zero_one" / "RUN.yaml", url, folder=tmp_path
        )
    status, accuracy, spent = out.splitlines()[-3:]  # logs may stand before them
    assert status.startswith("completed: '")
    assert re.fullmatch(r"accuracy [01]\.\d+ -> [01]\.\d+", accuracy)
    assert len(service.requests) == service.answered + 2
    assert re.fullmatch(rf"\d+ queries, {len(service.requests)} requests", spent)
    # Equal queries were asked once, but for the two that failed.
    asked = [json.dumps(body) for body in service.requests]
    assert len(set(asked)) == len(asked) - 2


async def test_own_algorithm(tmp_path: Path) -> None:
    """It runs on the embedded model, reproducibly, and its output is true."""
    async with asyncio.timeout(120):
        out = await output(EXAMPLES / "own_algorithm.py", folder=tmp_path)
    ours, theirs = out.splitlines()
    line = r"(.*): ('.*'), accuracy (\d\.\d{3}) -> (\d\.\d{3})"
    found = [re.fullmatch(line, text) for text in (ours, theirs)]
    assert [each and each[1] for each in found] == ["hill climb", "random search"]
    assert found[0] is not None
    prompt, before, after = found[0][2], float(found[0][3]), float(found[0][4])
    assert prompt != "''"
    assert after > before
    task = RunSpec.load(ROOT / "fedone_sdk" / "assets" / "quickstart-mini.yaml").task
    dev = list(load_examples(ROOT / "fedone_sdk" / "assets" / "companion_feedback" / "dev.jsonl"))
    async with OnnxBackend() as model:
        again = await predict(model, task, prompt.strip("'"), dev, 16)
    assert f"{again.metric:.3f}" == f"{after:.3f}"


async def fedone(*arguments: object, folder: Path) -> Any:
    out = await output("-m", "fedone_sdk.cli", *arguments, "--json", "-", folder=folder)
    return json.loads(out)


async def test_own_metric(tmp_path: Path) -> None:
    run = EXAMPLES / "own_metric" / "RUN.yaml"
    async with asyncio.timeout(60):
        result = await fedone("tune", run, "--no-store", folder=tmp_path)
        prompt, bias = result["prompt"]["text"], result["prompt"]["bias"]
        with_bias = ["--bias", ",".join(map(str, bias))]
        score = await fedone("score", run, "--prompt", prompt, *with_bias, folder=tmp_path)
    assert result["status"] == "completed"
    assert result["metric"]["name"] == "costs:money_saved"
    assert score["metric"]["name"] == "costs:money_saved"
    assert score["metric"]["value"] == result["metric"]["after"]
    # What the function says of what the model predicted, by hand.
    spec = RunSpec.load(run)
    dev = list(load_examples(EXAMPLES / "zero_one" / "dev.jsonl"))
    async with OnnxBackend() as model:
        found = await predict(
            model,
            spec.task.with_bias(bias),
            prompt,
            dev,
            spec.method.batch_size,
            measure=lambda true, predicted: (
                sum(
                    {(0, 0): 5, (1, 0): -1}.get(pair, 0)
                    for pair in zip(true, predicted, strict=True)
                )
                / len(true)
            ),
        )
    assert found.metric == pytest.approx(result["metric"]["after"])


async def test_a_metric_of_scikit_learn() -> None:
    """True labels come first, as it has them: balanced accuracy is not symmetric."""
    from sklearn.metrics import balanced_accuracy_score

    document = yaml.safe_load((EXAMPLES / "own_metric" / "RUN.yaml").read_text())
    document["task"]["metric"] = "sklearn.metrics:balanced_accuracy_score"
    spec = RunSpec.model_validate(document)
    federation = Federation.load(spec, EXAMPLES / "own_metric")
    result = await simulate(federation, backend=ScriptedBackend())
    true = [row["label"] for row in federation.dev]
    words = spec.task.label_words
    said = []
    for row in federation.dev:
        text = spec.task.template.format(prompt="", mask="", **{"text": row["text"]})
        values = pseudo_log_probs((Part("text", text),), words)
        said.append(values.index(max(values)))
    assert result.metric.no_prompt == pytest.approx(balanced_accuracy_score(true, said))
    assert result.metric.no_prompt != pytest.approx(balanced_accuracy_score(said, true))


async def test_openai_budget(tmp_path: Path) -> None:
    """By the provider's own count the cap holds, through its failures and `kill -9`."""
    cap = 100
    server = FakeOpenAI(
        script=Script(chances={"error:500": 0.05, "rate_limited_ms:5": 0.05}), key="sk-example"
    )
    arguments = ("--requests", cap, "--usd", 1, "--model", "fake-1")
    async with asyncio.timeout(120), server:
        command = (EXAMPLES / "openai_budget.py", *arguments, "--base-url", server.base_url)
        process = await start(*command, folder=tmp_path, OPENAI_API_KEY="sk-example")
        assert process.stdout is not None
        async for line in process.stdout:
            if re.fullmatch(rb"the caps buy about \d+ rounds\n", line):
                break
        before = server.asked.copy()
        while len(server.received) < cap // 3:
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        await process.wait()
        killed_at = len(server.received)
        out = await output(*command, folder=tmp_path, OPENAI_API_KEY="sk-example")
    assert before  # the plan asked for the list of models, and for nothing that is paid
    assert killed_at < len(server.received) <= cap
    status, accuracy, spent = out.splitlines()[-3:]
    assert re.fullmatch(r"budget_exhausted after \d+ rounds: '.*'", status)
    assert accuracy.startswith("accuracy ")
    found = re.fullmatch(rf"spent (\d+) of {cap} requests, \$(\d\.\d{{4}}) of \$1\.0", spent)
    assert found is not None
    # The account is never below the bill: what the killed process may have sent is in it.
    assert len(server.received) <= int(found[1]) <= cap
    billed = sum(0.10 * r.prompt_tokens + 0.50 * r.completion_tokens for r in server.received)
    assert billed / 1e6 <= float(found[2]) + 0.00005
