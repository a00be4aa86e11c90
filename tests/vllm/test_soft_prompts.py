"""Soft prompts on a real vLLM server, against transformers and against the server itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedone_sdk.backends import query_for
from fedone_sdk.backends.base import Answer, Query
from fedone_sdk.backends.embedding_matrix import EmbeddingMatrix
from fedone_sdk.backends.transformers import TransformersBackend
from fedone_sdk.backends.vllm import VllmBackend
from fedone_sdk.errors import BackendBlocked, BackendError
from fedone_sdk.soft_prompt import SoftPrompt
from fedone_sdk.task import TaskSpec

from .conftest import Serve, VllmServer
from .test_tune import tokens_served, tune

TOLERANCE = 1e-4  # nats
MAX_LENGTH = 256
WIDTH = 64
ASKED = TaskSpec(
    template="{prompt} Review: {sentence} It was", labels={"0": " terrible", "1": " great"}
)
WRITES = TaskSpec(template=ASKED.template, loss="score", label_field="label", max_tokens=8)
RUN = """
name: bbt
task:
  template: "{{prompt}} {{sentence}} great or terrible?"
  labels: {{0: " terrible", 1: " great"}}
data: {{train: {data}/train.jsonl, num_clients: 6, shots: 8}}
prompt: {{length: 4, vocabulary: null}}
method: {{name: bbt, num_samples: 6, intrinsic_dim: 10, batch_size: 8}}
budget: {{queries: 1000, requests: 1000, tokens: 1000000}}
rounds: 5
backend: {{kind: {kind}, model: "{model}"{more}}}
"""


@pytest.fixture(scope="session")
def embeds_server(serve: Serve, tiny_llama: Path) -> VllmServer:
    """The random causal model, on a server that takes embeddings."""
    return serve(tiny_llama, "--max-model-len", str(MAX_LENGTH), "--enable-prompt-embeds")


@pytest.fixture
async def backend(embeds_server: VllmServer) -> AsyncIterator[VllmBackend]:
    async with connect(embeds_server) as backend:
        await backend.check(ASKED.label_words)
        yield backend


@pytest.fixture
async def local(tiny_llama: Path) -> AsyncIterator[TransformersBackend]:
    async with TransformersBackend(tiny_llama, device="cpu") as backend:
        yield backend


def connect(server: VllmServer, **options: Any) -> VllmBackend:
    folder = str(server.folder)
    options = {"base_url": server.url, "tokenizer": folder, "embeddings": folder, **options}
    return VllmBackend(server.model, **options)


def random_prompt(length: int, seed: int = 1) -> SoftPrompt:
    rng = np.random.default_rng(seed)
    return SoftPrompt.of("embeddings", rng.normal(scale=0.2, size=(length, WIDTH)))


def assert_close(found: Answer, expected: Answer) -> None:
    assert len(found.log_probs) == len(expected.log_probs)
    for row, right in zip(found.log_probs, expected.log_probs, strict=True):
        assert row == pytest.approx(right, abs=TOLERANCE, rel=0)


async def test_label_log_probs_are_those_of_transformers(
    backend: VllmBackend, local: TransformersBackend, sst2: list[dict[str, Any]]
) -> None:
    # Prompts of different lengths, in batches of different sizes, among queries of texts.
    queries = [
        query_for(ASKED, prompt, sst2[start : start + size], backend=backend)
        for start, size, prompt in (
            (0, 32, random_prompt(5)),
            (0, 8, random_prompt(5, seed=2)),
            (8, 8, " really"),
            (32, 1, random_prompt(1)),
            (33, 4, random_prompt(50)),
        )
    ]
    answers = await asyncio.gather(*map(backend.score, queries))
    for query, answer in zip(queries, answers, strict=True):
        assert_close(answer, await local.score(query))
        assert answer.usage == await backend.quote(query)
    assert answers[0].log_probs[:8] != answers[1].log_probs


async def test_embeddings_of_words_are_the_words(
    backend: VllmBackend, embeds_server: VllmServer, sst2: list[dict[str, Any]]
) -> None:
    words = " a really good film"
    ids, _ = await backend._server.tokenise(words)
    vectors = EmbeddingMatrix(embeds_server.folder).embedded(ids)
    soft = SoftPrompt.of("embeddings", vectors)
    found = await backend.score(query_for(ASKED, soft, sst2[:16], backend=backend))
    expected = await backend.score(query_for(ASKED, words, sst2[:16], backend=backend))
    assert_close(found, expected)
    assert found.usage == expected.usage


async def test_texts_are_those_that_transformers_generates(
    backend: VllmBackend, local: TransformersBackend, sst2: list[dict[str, Any]]
) -> None:
    query = query_for(WRITES, random_prompt(5), sst2[:4], backend=backend)
    found, expected = await backend.score(query), await local.score(query)
    for text, right in zip(found.texts, expected.texts, strict=True):
        assert text
        assert right is not None
        assert text == right.rstrip("\ufffd")  # vLLM keeps half a character back.


async def test_too_long_inputs_are_cut_to_what_the_server_takes(backend: VllmBackend) -> None:
    row = {"sentence": "bad" + " bad" * 999}
    query = query_for(ASKED, random_prompt(20), [row], backend=backend)
    answer = await backend.score(query)
    assert answer.usage.prompt_tokens == MAX_LENGTH - 1
    assert answer.usage.prompt_tokens <= backend.worst_case(1).prompt_tokens
    longest = query_for(ASKED, random_prompt(MAX_LENGTH), [row], backend=backend)
    with pytest.raises(BackendError, match="without its text fields"):
        await backend.score(longest)


async def test_the_server_tokenises_alike(
    backend: VllmBackend,
    embeds_server: VllmServer,
    sst2: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # No folder of the model's name here.
    query = query_for(ASKED, random_prompt(5), sst2[:4], backend=backend)
    async with connect(embeds_server, tokenizer=None) as other:
        await other.check(ASKED.label_words)
        assert_close(await other.score(query), await backend.score(query))


async def test_both_see_the_same_embedding_space(
    backend: VllmBackend, local: TransformersBackend
) -> None:
    found, expected = await backend.embedding_space(), await local.embedding_space()
    assert found.size == expected.size == WIDTH
    assert found.std == pytest.approx(expected.std, rel=1e-9)


async def test_what_vllm_cannot_answer_with_embeddings_is_refused(
    backend: VllmBackend, embeds_server: VllmServer, sst2: list[dict[str, Any]]
) -> None:
    query = query_for(ASKED, random_prompt(5), sst2[:1], backend=backend)
    parts: dict[str, Any] = {"inputs": query.inputs, "soft_prompt": query.soft_prompt}
    with pytest.raises(BackendError, match="cannot score reference texts"):
        await backend.score(Query(want="reference", references=(" a",), **parts))
    async with connect(embeds_server, multi_token_labels=True) as other:
        with pytest.raises(BackendError, match="choose label words of one token"):
            await other.score(Query(label_words=(" great", " great movie"), **parts))


async def test_a_server_that_takes_no_embeddings_is_refused_at_the_start(
    llama_server: VllmServer,
) -> None:
    async with connect(llama_server) as backend:
        with pytest.raises(BackendBlocked, match="start vLLM with --enable-prompt-embeds"):
            await backend.check(ASKED.label_words)


@pytest.mark.parametrize(
    ("width", "message"), [(64, "does not hold the embeddings"), (32, "hidden_size 32")]
)
async def test_weights_of_another_model_are_refused_at_the_start(
    width: int, message: str, embeds_server: VllmServer, tmp_path: Path
) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig.from_pretrained(embeds_server.folder, hidden_size=width)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    async with connect(embeds_server, embeddings=str(tmp_path)) as backend:
        with pytest.raises(BackendBlocked, match=message):
            await backend.check(ASKED.label_words)


async def test_weights_of_lower_precision_do(
    embeds_server: VllmServer, tmp_path: Path, sst2: list[dict[str, Any]], backend: VllmBackend
) -> None:
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(embeds_server.folder, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    query = query_for(ASKED, random_prompt(5), sst2[:8], backend=backend)
    async with connect(embeds_server, embeddings=str(tmp_path)) as other:
        await other.check(ASKED.label_words)
        found, expected = await other.score(query), await backend.score(query)
    for row, right in zip(found.log_probs, expected.log_probs, strict=True):
        assert row != right
        assert row == pytest.approx(right, abs=0.2, rel=0)


def test_bbt_runs_and_is_that_of_transformers(
    embeds_server: VllmServer, shared: Callable[..., Path], tmp_path: Path
) -> None:
    data, folder = shared("data", "glue", "sst2"), embeds_server.folder
    before = tokens_served(embeds_server)
    found = run(
        tmp_path / "vllm",
        data=data,
        kind="vllm",
        model=embeds_server.model,
        more=f', base_url: "{embeds_server.url}", tokenizer: "{folder}", embeddings: "{folder}"',
    )
    served = tokens_served(embeds_server) - before
    assert (found["status"], found["rounds"]) == ("completed", 5)
    expected = run(
        tmp_path / "local", data=data, kind="transformers", model=folder, more=", device: cpu"
    )
    assert found["spent"]["queries"] == expected["spent"]["queries"]
    # The same losses, but for rounding: the same prompts were asked about.
    for ours, theirs in zip(found["history"], expected["history"], strict=True):
        assert ours["mean_loss"] == pytest.approx(theirs["mean_loss"], abs=1e-3)
    checks = served - found["spent"]["prompt_tokens"]
    assert 0 < checks < 200


def run(folder: Path, **fields: object) -> dict[str, Any]:
    folder.mkdir()
    return tune(folder, RUN.format(**fields))
