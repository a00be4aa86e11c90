"""`VllmBackend` on a real vLLM server with RoBERTa, against onnxruntime and transformers."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from fedone_sdk.backends import Query
from fedone_sdk.backends.onnx import OnnxBackend
from fedone_sdk.backends.vllm import VllmBackend
from fedone_sdk.task import TaskSpec, render

from .conftest import VllmServer

TOLERANCE = 1e-4  # nats
TASK = TaskSpec(
    template="{prompt} {sentence} It was {mask}.", labels={"0": " terrible", "1": " great"}
)
LABELS = TASK.label_words


@pytest.fixture
async def backend(roberta_server: VllmServer) -> AsyncIterator[VllmBackend]:
    async with VllmBackend(
        roberta_server.model, base_url=roberta_server.url, tokenizer=str(roberta_server.folder)
    ) as backend:
        await backend.check(LABELS)
        yield backend


@pytest.fixture
async def onnx(shared: Callable[..., Path], tmp_path: Path) -> AsyncIterator[OnnxBackend]:
    pytest.importorskip("onnxruntime")
    for name in ("model.onnx", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shared("models", "roberta-mini", name), tmp_path)
    async with OnnxBackend(tmp_path) as backend:
        yield backend


def ask(*sentences: str, prompt: str = "", words: tuple[str, ...] = LABELS) -> Query:
    inputs = tuple(render(TASK, prompt, {"sentence": sentence}) for sentence in sentences)
    return Query(inputs=inputs, label_words=words)


def assert_close(found: Any, expected: Any) -> None:
    assert len(found) == len(expected)
    for row, right in zip(found, expected, strict=True):
        assert row == pytest.approx(right, abs=TOLERANCE, rel=0)


async def test_scores_are_those_of_onnxruntime(
    backend: VllmBackend, onnx: OnnxBackend, sst2: list[dict[str, Any]]
) -> None:
    sentences = [row["sentence"] for row in sst2[:40]]
    # Marks in a text, spaces at its end, nothing at all, and far too much.
    sentences += ["a <mask> film </s>", "so so   ", "", "very slow , " * 200, "naïve 日本 \n 12"]
    queries = [
        ask(*sentences, prompt=" really good"),
        ask(*sentences[:7], words=(" boring", " hilarious", " the")),
        *(ask(sentence) for sentence in sentences),
    ]
    found = await asyncio.gather(*map(backend.score, queries))
    for query, answer in zip(queries, found, strict=True):
        right = await onnx.score(query)
        assert_close(answer.log_probs, right.log_probs)
        quoted = await backend.quote(query)
        assert answer.usage == right.usage == quoted.without_queries()
