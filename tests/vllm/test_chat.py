"""One instruct model behind four backends gives the same answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedone_sdk import assets
from fedone_sdk.backends import (
    LlamaCppBackend,
    LLMBackend,
    OpenAIBackend,
    TransformersBackend,
    VllmBackend,
    query_for,
)
from fedone_sdk.backends.completions import Token, label_log_probs, spellings
from fedone_sdk.task import Example, TaskSpec, form_of
from tests.vllm.conftest import Serve, VllmServer
from tests.weights import ATTACK, FORMS, as_float32, as_folder

PROMPT = "Judge the feedback. "


@pytest.fixture(scope="module")
def folder(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return as_folder(smollm2, tmp_path_factory.mktemp("weights") / "smollm2")


@pytest.fixture(scope="module")
def float32(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return as_float32(smollm2, tmp_path_factory.mktemp("weights") / "smollm2-f32.gguf")


@pytest.fixture(scope="module")
def server(folder: Path, serve: Serve) -> VllmServer:
    return serve(folder, "--max-model-len", "1024")


@pytest.fixture
def rows() -> list[Example]:
    lines = (assets.path("companion_feedback") / "dev.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in lines.splitlines()[:16]] + [{"text": ATTACK}]


async def answers(backend: LLMBackend, task: TaskSpec, rows: list[Example]) -> list[Any]:
    async with backend:
        await backend.check(task.label_words, form_of(task))
        found: list[Any] = []
        size = backend.max_inputs or len(rows)
        for at in range(0, len(rows), size):
            query = query_for(task, PROMPT, rows[at : at + size], backend=backend)
            found += (await backend.score(query)).log_probs
        return found


def furthest(ours: list[Any], theirs: list[Any]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(abs(x - y) for a, b in pairs for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("form", FORMS)
async def test_float32_backends_agree(
    form: str, folder: Path, float32: Path, server: VllmServer, rows: list[Example]
) -> None:
    task = FORMS[form]
    torch = await answers(TransformersBackend(folder, device="cpu"), task, rows)
    served = await answers(
        VllmBackend(server.model, base_url=server.url, tokenizer=str(folder)), task, rows
    )
    assert furthest(torch, served) < 1e-4
    llama = await answers(LlamaCppBackend(float32, max_input_tokens=1024), task, rows)
    # It sums the vocabulary in float32, which moves both labels of a row alike.
    assert furthest(torch, llama) < 1e-3
    between = [[a[0] - a[1]] for a in torch], [[a[0] - a[1]] for a in llama]
    assert furthest(*between) < 1e-4


async def shown_by_torch(folder: Path, task: TaskSpec, rows: list[Example]) -> list[Any]:
    """What the 20 likeliest tokens say of the labels."""
    words = spellings(task.label_words)
    async with TransformersBackend(folder, device="cpu") as backend:
        inputs = query_for(task, PROMPT, rows, backend=backend).inputs

        await backend.check(task.label_words, form_of(task))
        model: Any = backend._loaded()
        found = []
        for parts in inputs:
            ids = model._torch.tensor([model.encoder.encode(parts)])
            log_probs = model.module(input_ids=ids).logits[0, -1].log_softmax(-1)
            values, tokens = (one.tolist() for one in log_probs.topk(20))
            top = [
                Token(model.encoder.decode([token]), value)
                for token, value in zip(tokens, values, strict=True)
            ]
            row, _ = label_log_probs(top, None, words)
            # A label that is not shown gets a bound, which the token that is written moves.
            found.append([value if value > values[-1] else None for value in row])
        return found


@pytest.mark.parametrize("form", ["asked", "prefilled"])
async def test_a_chat_endpoint_shows_the_same(
    form: str, folder: Path, server: VllmServer, rows: list[Example]
) -> None:
    task, calm = FORMS[form], rows[:-1]  # The server makes special tokens of those in a text.
    backend = OpenAIBackend(
        server.model, base_url=f"{server.url}/v1", api_key_env=None, tokenizer=str(folder)
    )
    shown = await answers(backend, task, calm)
    known = await shown_by_torch(folder, task, calm)
    pairs = [
        (ours, theirs)
        for row, others in zip(known, shown, strict=True)
        for ours, theirs in zip(row, others, strict=True)
        if ours is not None
    ]
    assert len(pairs) > len(calm)
    assert max(abs(ours - theirs) for ours, theirs in pairs) < 1e-3
