from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedone_sdk.backends import query_for
from fedone_sdk.backends.base import Query, Want
from fedone_sdk.backends.vllm import VllmBackend
from fedone_sdk.errors import BackendBlocked, BackendError, MissingExtraError, SpecError
from fedone_sdk.soft_prompt import SoftPrompt
from fedone_sdk.task import TaskSpec
from tests.unit.backends.fake_vllm import (
    MAX_LENGTH,
    TOKENIZER,
    VECTOR,
    FakeVllm,
    ids_of,
    log_prob,
    serving,
)

pytest.importorskip("openai")
safetensors = pytest.importorskip("safetensors.numpy")

WORDS = (" terrible", " great")
TASK = TaskSpec(
    template="{prompt} Review:{sentence} It was", labels={"0": " terrible", "1": " great"}
)
ROWS: list[dict[str, Any]] = [{"sentence": " a film"}, {"sentence": " a very slow film"}]
WIDTH = 4


@pytest.fixture(scope="module")
def matrix() -> NDArray[np.float32]:
    return np.random.default_rng(0).normal(size=(8192, WIDTH)).astype(np.float32)


@pytest.fixture
def weights(tmp_path: Path, matrix: NDArray[np.float32]) -> Path:
    safetensors.save_file(
        {"model.embed_tokens.weight": matrix}, str(tmp_path / "model.safetensors")
    )
    return tmp_path


@pytest.fixture
async def server(matrix: NDArray[np.float32]) -> AsyncIterator[FakeVllm]:
    async with serving() as fake:
        fake.embeddings = matrix
        yield fake


@pytest.fixture
async def backend(server: FakeVllm, weights: Path) -> AsyncIterator[VllmBackend]:
    async with connect(server, weights) as backend:
        await backend.check(WORDS)
        server.requests.clear()
        yield backend


def connect(server: FakeVllm, weights: Path, **options: Any) -> VllmBackend:
    options = {"tokenizer": str(TOKENIZER), "embeddings": str(weights), **options}
    return VllmBackend("tiny", base_url=server.url, **options)


def soft_prompt(length: int = 3, width: int = WIDTH) -> SoftPrompt:
    return SoftPrompt.of("embeddings", np.full((length, width), 7.0))


async def test_whole_inputs_are_sent_as_vectors(server: FakeVllm, backend: VllmBackend) -> None:
    assert backend.takes == {"embeddings"}
    query = query_for(TASK, soft_prompt(), ROWS, backend=backend)
    answer = await backend.score(query)
    starts = [
        [0, VECTOR, VECTOR, VECTOR, *ids_of(f" Review:{row['sentence']} It was")] for row in ROWS
    ]
    labels = [ids_of(word)[0] for word in WORDS]
    assert answer.log_probs == tuple(
        tuple(log_prob(ids, label) for label in labels) for ids in starts
    )
    assert answer.usage == await backend.quote(query)
    assert answer.usage.prompt_tokens == sum(map(len, starts))
    (body,) = server.asked("/v1/completions")
    assert body["prompt"] is None
    assert body["logprob_token_ids"] == labels


async def test_vectors_of_words_are_the_words(
    server: FakeVllm, backend: VllmBackend, matrix: NDArray[np.float32]
) -> None:
    soft = SoftPrompt.of("embeddings", matrix[ids_of(" really good")])
    found = await backend.score(query_for(TASK, soft, ROWS, backend=backend))
    assert found == await backend.score(query_for(TASK, " really good", ROWS, backend=backend))
    embeds, tokens = server.asked("/v1/completions")
    assert "prompt_embeds" not in tokens
    assert embeds["prompt"] is None


async def test_texts_are_written_after_vectors(server: FakeVllm, backend: VllmBackend) -> None:
    task = TaskSpec(template=TASK.template, loss="score", label_field="label", max_tokens=5)
    answer = await backend.score(query_for(task, soft_prompt(), ROWS, backend=backend))
    assert answer.texts == (" text 0", " text 1")
    (body,) = server.asked("/v1/completions")
    assert body["max_tokens"] == 5


async def test_fields_make_room_for_vectors(backend: VllmBackend) -> None:
    long = [{"sentence": " bad" * 300}]
    query = query_for(TASK, soft_prompt(20), long, backend=backend)
    assert (await backend.score(query)).usage.prompt_tokens == MAX_LENGTH - 1
    with pytest.raises(BackendError, match="without its text fields"):
        await backend.score(query_for(TASK, soft_prompt(MAX_LENGTH), long, backend=backend))


async def test_the_embedding_space_is_that_of_the_weights(
    server: FakeVllm, backend: VllmBackend, matrix: NDArray[np.float32]
) -> None:
    space = await backend.embedding_space()
    assert space.size == WIDTH
    assert space.std == pytest.approx(float(matrix.astype(np.float64).std()), rel=1e-9)
    async with connect(server, TOKENIZER, embeddings=None) as other:
        assert not other.takes
        with pytest.raises(SpecError, match="does not"):
            await other.embedding_space()


async def test_the_check_is_one_request_and_made_once(server: FakeVllm, weights: Path) -> None:
    async with connect(server, weights) as backend:
        await backend.check(WORDS)
        await backend.check(WORDS)
        fingerprint = backend.fingerprint
    (body,) = server.asked("/v1/completions")
    assert len(body["prompt"]) == len(body["prompt_embeds"]) == 1
    async with connect(server, weights, embeddings=None) as other:
        await other.check(WORDS)
        assert other.fingerprint == fingerprint


async def test_a_server_that_takes_no_vectors_is_refused(server: FakeVllm, weights: Path) -> None:
    server.embeddings = None
    async with connect(server, weights) as backend:
        with pytest.raises(BackendBlocked, match="start vLLM with --enable-prompt-embeds"):
            await backend.check(WORDS)
    server.masked = True
    async with connect(server, weights) as backend:
        with pytest.raises(BackendBlocked, match="masked model, which takes no embeddings"):
            await backend.check(WORDS)


async def test_weights_of_another_model_are_refused(
    server: FakeVllm, weights: Path, matrix: NDArray[np.float32]
) -> None:
    server.embeddings = np.roll(matrix, 1, axis=0)
    async with connect(server, weights) as backend:
        with pytest.raises(BackendBlocked, match="does not hold the embeddings of 'tiny'"):
            await backend.check(WORDS)
    safetensors.save_file({"wte.weight": matrix[:100]}, str(weights / "model.safetensors"))
    async with connect(server, weights) as backend:
        with pytest.raises(BackendError, match="has the embeddings of 100 tokens, none of"):
            await backend.check(WORDS)


async def test_an_answer_of_another_form_is_refused(server: FakeVllm, weights: Path) -> None:
    server.overrides["/v1/completions"] = lambda: {"choices": []}
    async with connect(server, weights) as backend:
        with pytest.raises(BackendBlocked, match="update the server"):
            await backend.check(WORDS)


@pytest.mark.parametrize(
    ("want", "soft", "message"),
    [
        ("labels", SoftPrompt.of("key_values", np.ones((4, WIDTH))), "for another model"),
        ("labels", soft_prompt(width=5), "3 x 5 embeddings is for another model"),
        ("reference", soft_prompt(), "cannot score reference texts"),
    ],
)
async def test_an_impossible_query_costs_nothing(
    want: Want, soft: SoftPrompt, message: str, server: FakeVllm, backend: VllmBackend
) -> None:
    inputs = query_for(TASK, soft_prompt(), ROWS, backend=backend).inputs
    query = Query(
        inputs=inputs,
        want=want,
        soft_prompt=soft,
        label_words=WORDS if want == "labels" else (),
        references=(" a", " b") if want == "reference" else (),
    )
    with pytest.raises(BackendError, match=message):
        await backend.score(query)
    assert not server.requests


async def test_label_words_of_several_tokens_are_refused(server: FakeVllm, weights: Path) -> None:
    words = (" terrible", " great movie")
    async with connect(server, weights, multi_token_labels=True) as backend:
        await backend.check(words)
        query = query_for(TASK, soft_prompt(), ROWS, backend=backend)
        with pytest.raises(BackendError, match="choose label words of one token"):
            await backend.score(
                Query(inputs=query.inputs, label_words=words, soft_prompt=query.soft_prompt)
            )


async def test_a_backend_without_embeddings_is_reported(
    server: FakeVllm, backend: VllmBackend
) -> None:
    query = query_for(TASK, soft_prompt(), ROWS, backend=backend)
    async with connect(server, TOKENIZER, embeddings=None) as other:
        with pytest.raises(BackendError, match="a soft prompt needs embeddings"):
            await other.score(query)


def test_numpy_is_required(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fedone_sdk.backends.vllm_embeds", None)
    with pytest.raises(MissingExtraError, match="alpha"):
        VllmBackend("tiny", tokenizer=str(TOKENIZER), embeddings=str(weights))
