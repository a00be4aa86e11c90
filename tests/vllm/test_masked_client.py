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
from fedone_sdk.budget import Usage
from fedone_sdk.errors import BackendError, LabelWordError
from fedone_sdk.task import Part, TaskSpec, render

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
        assert answer.usage == right.usage == await backend.quote(query)


async def test_scores_are_those_of_transformers(
    backend: VllmBackend, roberta_server: VllmServer, sst2: list[dict[str, Any]]
) -> None:
    import torch
    from transformers import AutoTokenizer, RobertaForMaskedLM

    tokenizer = AutoTokenizer.from_pretrained(roberta_server.folder)
    model = RobertaForMaskedLM.from_pretrained(roberta_server.folder, dtype=torch.float32).eval()
    labels = [tokenizer(word, add_special_tokens=False).input_ids[0] for word in LABELS]
    sentences = [row["sentence"] for row in sst2[:32]]
    expected = []
    for sentence in sentences:
        ids = torch.tensor([tokenizer(f" no way {sentence} It was <mask>.").input_ids])
        with torch.no_grad():
            logits = model(ids).logits[0]
        (place,) = (ids[0] == tokenizer.mask_token_id).nonzero().flatten().tolist()
        expected.append(logits[place].log_softmax(0)[labels].tolist())
    answer = await backend.score(ask(*sentences, prompt=" no way"))
    assert_close(answer.log_probs, expected)


async def test_the_model_classifies_sentiment(
    backend: VllmBackend, sst2: list[dict[str, Any]]
) -> None:
    answers = await asyncio.gather(
        *(
            backend.score(ask(*(row["sentence"] for row in sst2[start : start + 32])))
            for start in range(0, 192, 32)
        )
    )
    rows = [row for answer in answers for row in answer.log_probs if row is not None]
    right = [
        (row[1] > row[0]) == bool(example["label"])
        for row, example in zip(rows, sst2, strict=False)
    ]
    assert len(right) == 192
    assert sum(right) > 0.7 * 192


async def test_an_error_is_one_line(backend: VllmBackend) -> None:
    with pytest.raises(LabelWordError):
        await backend.check((" great", " great movie"))
    with pytest.raises(BackendError, match=r"needs \{mask\} exactly once"):
        await backend.score(Query(inputs=((Part("field", "x"),),), label_words=LABELS))
    with pytest.raises(BackendError, match="label words only"):
        await backend.score(Query(inputs=ask("x").inputs, want="text", max_tokens=3))


async def test_what_it_is_and_costs_at_most(
    backend: VllmBackend, roberta_server: VllmServer
) -> None:
    assert backend.fingerprint == f"vllm:{roberta_server.folder}:128"
    assert backend.worst_case(3) == Usage(queries=1, requests=1, prompt_tokens=3 * 128)
