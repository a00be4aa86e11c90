"""Models on a device: SmolLM2 in a Node process and in a page, by engines from npm."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import expect

from fedone_sdk import assets
from fedone_sdk.aggregator import Aggregator
from fedone_sdk.aggregator.http.guards import CorsConfig
from fedone_sdk.backends import LlamaCppBackend, Query, query_for
from fedone_sdk.spec import RunSpec
from fedone_sdk.testing import LoopbackFederation
from fedone_sdk.vocabulary import Vocabulary
from tests.browser.stage import Chromium, needs_chromium
from tests.typescript.devices import node_device
from tests.typescript.test_page import TOKEN, page_of, take_part
from tests.weights import FORMS, as_float32

pytestmark = [pytest.mark.typescript, pytest.mark.asyncio(loop_scope="session")]

PROMPTS = Vocabulary(candidates=("", "Judge the feedback. ", "Is it good or bad? "))


@pytest.fixture(scope="session")
def float32(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("gguf")
    return as_float32(smollm2, tmp_path_factory.mktemp("weights") / "smollm2-f32.gguf")


@pytest.fixture(scope="session")
def rows() -> list[dict[str, Any]]:
    lines = (assets.path("companion_feedback") / "dev.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in lines.splitlines()[:6]]


def spec_of(model: str) -> RunSpec:
    return RunSpec.model_validate(
        {
            "task": FORMS["prefilled"].model_dump(exclude_defaults=True),
            "prompt": {"length": 1, "vocabulary": {"kind": "list", "candidates": ["x"]}},
            "method": {"name": "random", "num_samples": 2, "batch_size": 4},
            "participation": {"exchange": "losses", "min_clients": 1, "model": model},
            "budget": {"queries": 1000},
            "rounds": 2,
            "evaluation": {"every": 0},
        }
    )


def as_json(query: Query) -> dict[str, Any]:
    """A query in the form of the package's `Backend`."""
    inputs = [[list(part) for part in each] for each in query.inputs]
    words = list(query.label_words)
    return {"want": "labels", "inputs": inputs, "labelWords": words, "references": []}


async def asked(
    file: Path, rows: Sequence[dict[str, Any]]
) -> tuple[str, list[dict[str, Any]], list[Any]]:
    """The backend's fingerprint, queries in each form, and its log-probabilities."""
    queries, answers = [], []
    async with LlamaCppBackend(file, threads=1) as backend:
        for form in FORMS.values():
            queries.append(query_for(form, PROMPTS.candidates[1], rows, backend=backend))
            answers.append((await backend.score(queries[-1])).log_probs)
        # Words that are not among the 256 likeliest tokens.
        unlikely = Query(inputs=queries[-1].inputs[:1], label_words=(" zinc", " Tuesday"))
        queries.append(unlikely)
        answers.append((await backend.score(unlikely)).log_probs)
        return backend.fingerprint, [as_json(query) for query in queries], answers


def agree(found: dict[str, Any], fingerprint: str, expected: list[Any]) -> None:
    assert {each["fingerprint"] for each in found["answers"]} == {fingerprint}
    for one, other in zip(found["answers"], expected, strict=True):
        assert len(one["logProbs"]) == len(other)
        for ours, theirs in zip(one["logProbs"], other, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-2)


async def test_node_agrees_with_llama_cpp(
    models: Path, float32: Path, rows: list[dict[str, Any]]
) -> None:
    fingerprint, queries, expected = await asked(float32, rows)
    done = await asyncio.to_thread(
        subprocess.run,
        ["node", models / "dist" / "node.js"],
        input=json.dumps(queries),
        env={**os.environ, "MODEL": str(float32)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    agree(json.loads(done.stdout), fingerprint, expected)


async def test_a_node_process_tunes_a_prompt(
    models: Path, smollm2: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    fingerprint, _, _ = await asked(smollm2, rows[:1])
    env = {"BACKEND": str(models / "dist" / "node.js"), "MODEL": str(smollm2)}
    async with (
        asyncio.timeout(300),
        LoopbackFederation(spec_of(fingerprint), PROMPTS) as served,
        node_device(
            models.parent, served.url, served.token, rows, tmp_path, env={**env, "FIELDS": "text"}
        ) as device,
    ):
        assert await device.ended() == 0
        result = served.run.result()
    assert (result.status, result.rounds, result.spent.queries) == ("completed", 2, 4)
    assert result.model == fingerprint
    assert all(0 < one.mean_loss < 5 for one in result.history)


def model_page(
    models: Path, file: Path, rows: list[dict[str, Any]]
) -> AbstractAsyncContextManager[str]:
    """The address of the page, with the model."""
    engine = models / "node_modules" / "@wllama" / "wllama" / "esm" / "wasm"
    return page_of(rows, models.parent / "demo", models / "dist", engine, file.parent)


@needs_chromium
async def test_a_page_agrees_with_llama_cpp(
    chromium: Chromium, models: Path, float32: Path, rows: list[dict[str, Any]]
) -> None:
    fingerprint, queries, expected = await asked(float32, rows[:3])
    async with model_page(models, float32, rows) as pages, chromium.watching(pages) as watcher:
        page: Any = watcher.page
        await page.goto(f"{pages}/page.html#{float32.name}")
        found = await page.evaluate("queries => score(queries)", queries)
    agree(found, fingerprint, expected)


@needs_chromium
async def test_a_page_tunes_a_prompt(
    chromium: Chromium, models: Path, smollm2: Path, rows: list[dict[str, Any]]
) -> None:
    fingerprint, _, _ = await asked(smollm2, rows[:1])
    async with (
        asyncio.timeout(500),
        model_page(models, smollm2, rows) as pages,
        Aggregator(enrolment_tokens=[TOKEN], cors=CorsConfig(origins=(pages,))) as aggregator,
    ):
        run = await aggregator.service.add_run(spec_of(fingerprint), PROMPTS)
        url = await aggregator.listen()
        async with chromium.watching(pages, also=url) as watcher:
            page: Any = watcher.page
            await page.goto(f"{pages}/page.html#{smollm2.name}")
            await take_part(page, url, TOKEN)
            await expect(page.get_by_role("status")).to_contain_text("ended", timeout=400_000)
        result = run.result()
    assert (result.status, result.rounds, result.model) == ("completed", 2, fingerprint)
    assert all(0 < one.mean_loss < 5 for one in result.history)
