from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from fedone_sdk.backends.base import Query, Want
from fedone_sdk.backends.vllm import VllmBackend
from fedone_sdk.budget import Usage
from fedone_sdk.errors import (
    BackendBlocked,
    BackendError,
    BackendRefused,
    BackendUnavailable,
    LabelWordError,
    SpecError,
)
from fedone_sdk.task import Part, Rendered
from tests.unit.backends.fake_vllm import MAX_LENGTH, TOKENIZER, FakeVllm, ids_of, log_prob, serving

LABELS = (" terrible", " great")
MASK = 8191


@pytest.fixture
async def server() -> AsyncIterator[FakeVllm]:
    async with serving() as fake:
        yield fake


@pytest.fixture
async def backend(server: FakeVllm) -> AsyncIterator[VllmBackend]:
    async with connect(server) as backend:
        await backend.check(LABELS)
        server.requests.clear()
        yield backend


def connect(server: FakeVllm, **options: Any) -> VllmBackend:
    return VllmBackend(
        "tiny", **{"base_url": server.url, "tokenizer": str(TOKENIZER), "timeout_s": 5.0, **options}
    )


KEYS = [f"token_id:{ids_of(word)[0]}" for word in LABELS]


def rendered(text: str, *, masked: bool = False) -> Rendered:
    ending = (Part("mask", ""), Part("text", ".")) if masked else ()
    return (Part("prompt", " really"), Part("field", text), Part("text", " It was"), *ending)


def ask(*texts: str, want: Want = "labels", masked: bool = False, **options: Any) -> Query:
    options = {"label_words": LABELS if want == "labels" else (), **options}
    inputs = tuple(rendered(text, masked=masked) for text in texts)
    return Query(inputs=inputs, want=want, **options)


async def test_a_query_is_one_request_for_exact_label_log_probs(
    server: FakeVllm, backend: VllmBackend
) -> None:
    answer = await backend.score(ask(" a film", " a very slow film"))
    prompts = [[0, *ids_of(f" really{text} It was")] for text in (" a film", " a very slow film")]
    labels = [ids_of(word)[0] for word in LABELS]
    assert server.requests == [
        (
            "/v1/completions",
            {
                "model": "tiny",
                "prompt": prompts,
                "max_tokens": 1,
                "temperature": 0,
                "logprobs": 0,
                "logprob_token_ids": labels,
                "return_tokens_as_token_ids": True,
            },
        )
    ]
    assert answer.log_probs == tuple(
        tuple(log_prob(ids, label) for label in labels) for ids in prompts
    )
    assert answer.usage == Usage(
        requests=1, prompt_tokens=sum(map(len, prompts)), completion_tokens=2
    )
    assert answer.model == "/models/tiny (system_fingerprint vllm-0.32.0-abc)"


async def test_labels_of_several_tokens_are_sent_after_each_input(server: FakeVllm) -> None:
    words = (" terrible", " great movie", " great")
    async with connect(server, multi_token_labels=True) as backend:
        await backend.check(words)
        query = ask(" a film", " dull", label_words=words)
        answer = await backend.score(query)
        assert backend.worst_case(2).prompt_tokens == 2 * 3 * (MAX_LENGTH - 1)
        assert (await backend.quote(query)).without_queries() == answer.usage
    (body,) = server.asked("/v1/completions")
    starts = [[0, *ids_of(f" really{text} It was")] for text in (" a film", " dull")]
    assert body["prompt"] == [start + ids_of(word) for start in starts for word in words]
    for row, start in zip(answer.log_probs, starts, strict=True):
        assert row is not None
        for value, word in zip(row, words, strict=True):
            assert value == pytest.approx(total(start, ids_of(word)), rel=1e-6)
            assert struct.unpack("<f", struct.pack("<f", value)) == (value,)


def total(before: list[int], ending: list[int]) -> float:
    return sum(log_prob([*before, *ending[:place]], token) for place, token in enumerate(ending))


async def test_single_token_labels_are_requested_in_the_cheap_way(
    server: FakeVllm, backend: VllmBackend
) -> None:
    with pytest.raises(LabelWordError, match="multi_token_labels: true"):
        await backend.score(ask(" a", label_words=(" great movie",)))
    async with connect(server, multi_token_labels=True) as other:
        await other.check(LABELS)
        assert await other.score(ask(" a film")) == await backend.score(ask(" a film"))
        assert other.worst_case(3) == backend.worst_case(3)


async def test_references_are_scored_whole(server: FakeVllm, backend: VllmBackend) -> None:
    references = (" great movie, really", " no", " a")
    # The first and the last input are the same, and too long: each is cut for its own reference.
    query = ask(" bad" * 99, " b", " bad" * 99, want="reference", references=references)
    answer = await backend.score(query)
    (body,) = server.asked("/v1/completions")
    assert [len(ids) for ids in body["prompt"]][::2] == [MAX_LENGTH - 1] * 2
    for ids, reference, row in zip(body["prompt"], references, answer.log_probs, strict=True):
        ending = ids_of(reference)
        assert ids[-len(ending) :] == ending
        assert row == (pytest.approx(total(ids[: -len(ending)], ending), rel=1e-6),)
    with pytest.raises(BackendError, match="reference text has 90 tokens; it must have 1 to 62"):
        await backend.score(ask(" a", want="reference", references=(" a" * 90,)))
    with pytest.raises(BackendError, match="reference text has 0 tokens"):
        await backend.score(ask(" a", want="reference", references=("",)))
    with pytest.raises(ValueError, match="one reference per input"):
        await backend.score(ask(" a", want="reference"))


async def test_texts_are_generated(server: FakeVllm, backend: VllmBackend) -> None:
    query = ask(" a film", " bad" * 99, want="text", max_tokens=20, schema='{"type": "object"}')
    answer = await backend.score(query)
    assert answer.texts == (" text 0", " text 1")
    assert answer.log_probs == ((), ())
    (body,) = server.asked("/v1/completions")
    assert body["max_tokens"] == 20
    held = {"name": "answer", "schema": {"type": "object"}}
    assert body["response_format"] == {"type": "json_schema", "json_schema": held}
    assert body["temperature"] == 0
    quoted = await backend.quote(query)
    assert quoted.completion_tokens == 40
    assert quoted.prompt_tokens == answer.usage.prompt_tokens
    for most in (0, MAX_LENGTH):
        with pytest.raises(BackendError, match="max_tokens must be from 1 to 63"):
            await backend.score(ask(" a", want="text", max_tokens=most))


async def test_too_long_inputs_lose_the_ends_of_their_fields(
    server: FakeVllm, backend: VllmBackend
) -> None:
    query = ask(" bad" * 1000, " fine")
    answer = await backend.score(query)
    (body,) = server.asked("/v1/completions")
    room = MAX_LENGTH - 1 - len([0, *ids_of(" really It was")])
    assert body["prompt"][0] == [0, *ids_of(" really" + " bad" * room + " It was")]
    worst = backend.worst_case(2)
    assert worst == Usage(queries=1, requests=1, prompt_tokens=126, completion_tokens=2)
    assert answer.usage == (await backend.quote(query)).without_queries()


async def test_inputs_start_as_the_server_starts_them(server: FakeVllm) -> None:
    for start in ([], [2, 0]):
        server.start = start
        async with connect(server) as backend:
            await backend.check(LABELS)
            await backend.score(ask(" a"))
        assert server.asked("/v1/completions")[-1]["prompt"] == [
            [*start, *ids_of(" really a It was")]
        ]


async def test_a_masked_model_is_queried_through_the_plugin(server: FakeVllm) -> None:
    server.masked = True
    async with connect(server) as backend:
        await backend.check(LABELS)
        server.requests.clear()
        query = ask(" a <mask> film ", " bad" * 1000, masked=True)
        answer = await backend.score(query)
        assert (await backend.quote(query)).without_queries() == answer.usage
        assert backend.worst_case(2) == Usage(queries=1, requests=1, prompt_tokens=2 * MAX_LENGTH)
    ((path, body),) = server.requests[:1]
    assert path == "/pooling"
    first, second = body["data"]["token_ids"]
    # The mask swallows the space before it, and is the only one.
    assert first[-3:] == [MASK, *ids_of("."), 2]
    assert [first.count(MASK), second.count(MASK), len(second)] == [1, 1, MAX_LENGTH]
    labels = body["data"]["label_token_ids"]
    assert labels == [ids_of(word)[0] for word in LABELS]
    assert answer.log_probs == tuple(
        tuple(log_prob(ids, label) for label in labels) for ids in (first, second)
    )
    assert answer.usage == Usage(requests=1, prompt_tokens=len(first) + len(second))
    assert answer.model == "/models/tiny (system_fingerprint vllm-0.32.0)"


async def test_a_masked_model_needs_the_plugin(server: FakeVllm) -> None:
    server.masked = True
    error = {"error": {"message": "Unsupported task", "code": 400}}
    server.overrides["/pooling"] = lambda: web.json_response(error, status=400)
    async with connect(server) as backend:
        with pytest.raises(BackendBlocked, match="--io-processor-plugin fedone_roberta"):
            await backend.check(LABELS)


async def test_the_fingerprint_is_the_servers_model(server: FakeVllm) -> None:
    async with connect(server) as backend:
        for early in (lambda: backend.fingerprint, lambda: backend.worst_case(1)):
            with pytest.raises(BackendError, match="not been checked"):
                early()
        await backend.check(LABELS)
        assert backend.fingerprint == "vllm:/models/tiny:64"
        await backend.check(LABELS)
        server.root = "/models/other"
        with pytest.raises(BackendBlocked, match=r"changed from /models/tiny .* to /models/other"):
            await backend.check(LABELS)
        assert backend.fingerprint == "vllm:/models/tiny:64"


async def test_another_model_or_kind_of_server_is_refused(server: FakeVllm) -> None:
    async with VllmBackend("huge", base_url=server.url, tokenizer=str(TOKENIZER)) as backend:
        with pytest.raises(BackendBlocked, match=r"no model 'huge', only 'lora', 'tiny': change"):
            await backend.check(LABELS)
    server.overrides["/v1/models"] = lambda: {"data": [{"id": "tiny"}]}
    async with connect(server) as backend:
        with pytest.raises(BackendBlocked, match="not a vLLM server: change base_url"):
            await backend.check(LABELS)


async def test_another_tokeniser_is_refused(server: FakeVllm, tmp_path: Path) -> None:
    description = json.loads(TOKENIZER.read_text(encoding="utf-8"))
    description["model"]["merges"] = description["model"]["merges"][:50]
    (tmp_path / "tokenizer.json").write_text(json.dumps(description), encoding="utf-8")
    for masked in (False, True):
        server.masked = masked
        async with connect(server, tokenizer=str(tmp_path)) as backend:
            with pytest.raises(BackendBlocked, match="is not the tokeniser of 'tiny'") as caught:
                await backend.check(LABELS)
            assert "\n" not in str(caught.value)


async def test_missing_usage_is_charged_in_full(server: FakeVllm, backend: VllmBackend) -> None:
    query = ask(" a film", want="text", max_tokens=5)
    server.overrides["/v1/completions"] = lambda: {"choices": [{"index": 0, "text": "x"}]}
    assert (await backend.score(query)).usage == (await backend.quote(query)).without_queries()


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": []},
        {"choices": [{"index": 0, "text": "x", "logprobs": None}]},
        # A server that does not know logprob_token_ids answers with what it has sampled.
        {"choices": [{"index": 0, "logprobs": {"top_logprobs": [{"token_id:500": -1.0}]}}]},
        {"choices": [{"index": 0, "logprobs": {"top_logprobs": [dict.fromkeys(KEYS)]}}]},
        {"choices": [{"index": 0, "logprobs": {"top_logprobs": [dict.fromkeys(KEYS, math.nan)]}}]},
        {},
    ],
)
async def test_an_answer_without_the_log_probs_is_one_clear_error(
    server: FakeVllm, backend: VllmBackend, answer: object
) -> None:
    server.overrides["/v1/completions"] = lambda: answer
    with pytest.raises(BackendBlocked, match="update vLLM") as caught:
        await backend.score(ask(" a"))
    assert caught.value.usage == (await backend.quote(ask(" a"))).without_queries()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ({"error": {"message": "the words", "code": 503}}, BackendUnavailable),
        ({"error": "the words"}, BackendRefused),
        ({"object": "error", "message": "the words", "code": 400}, BackendRefused),
        ({"object": "error", "message": "the words", "code": 401}, BackendBlocked),
    ],
)
async def test_an_error_in_place_of_an_answer_is_what_it_says(
    server: FakeVllm, backend: VllmBackend, answer: object, error: type[BackendError]
) -> None:
    await backend.check(LABELS)
    server.overrides["/v1/completions"] = lambda: answer
    with pytest.raises(error) as caught:
        await backend.score(ask(" a"))
    assert ("the words" in caught.value.said) is (error is not BackendBlocked)
    assert caught.value.usage == Usage(requests=1)


def test_a_tokeniser_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.json"):
        with pytest.raises(SpecError, match="tokenizer: there is no file"):
            VllmBackend("tiny", tokenizer=str(path))


async def test_a_tokeniser_is_found_by_the_models_name_here_and_there(
    server: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with connect(server, tokenizer=None) as backend:
        with pytest.raises(BackendBlocked, match=r"set tokenizer to its tokenizer\.json"):
            await backend.check(LABELS)
        shutil.copy(TOKENIZER, tmp_path)
        server.root = str(tmp_path)
        await backend.check(LABELS)
    assert VllmBackend(str(tmp_path))._tokenizer_file == tmp_path / "tokenizer.json"
    assert VllmBackend("no/such-model")._tokenizer_file is None
    assert VllmBackend("no name on the hub: //")._tokenizer_file is None
