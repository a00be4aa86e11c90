"""What every adapter to a model does."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fedone_sdk import assets
from fedone_sdk.backends import LLMBackend, Query, TransformersBackend, Want, check_answer
from fedone_sdk.backends.base import float32
from fedone_sdk.backends.llama_cpp import LlamaCppBackend
from fedone_sdk.backends.onnx import OnnxBackend
from fedone_sdk.backends.openai import OpenAIBackend
from fedone_sdk.backends.vllm import VllmBackend
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.errors import BackendError, LabelWordError, SpecError
from fedone_sdk.task import Part, Rendered
from tests.weights import random_model

WORDS = (" terrible", " great")
SHARED = Path(os.environ.get("FEDONE_SHARED", Path(__file__).resolve().parents[4] / "shared"))
TOKENIZER = assets.path("roberta_mini") / "tokenizer.json"
KINDS = ("onnx", "masked", "causal", "llama_cpp", "openai", "vllm", "vllm_masked")
MASKED = ("onnx", "masked", "vllm_masked")
LOCAL = {
    "onnx": "fedone-onnx",
    "masked": "fedone-transformers",
    "causal": "fedone-transformers",
    "llama_cpp": "fedone-llama-cpp",
}
"""Kinds that run in this process, and the names of their threads."""


@dataclass
class Case:
    """An adapter that is connected, and its number of requests at a server."""

    kind: str
    backend: LLMBackend
    num_sent: Callable[[], int] = lambda: 0

    def inputs(self, *texts: str, prompt: str = " really") -> tuple[Rendered, ...]:
        ending = (Part("mask", ""), Part("text", ".")) if self.kind in MASKED else ()
        return tuple(
            (Part("prompt", prompt), Part("field", text), Part("text", " It was"), *ending)
            for text in texts
        )

    def ask(self, *texts: str, want: Want = "labels", prompt: str = " really") -> Query:
        return Query(
            inputs=self.inputs(*texts, prompt=prompt),
            want=want,
            label_words=WORDS if want == "labels" else (),
            references=(" a fine film",) * len(texts) if want == "reference" else (),
            max_tokens=5 if want == "text" else 0,
        )

    def questions(self) -> list[Query]:
        """A short and a too long query of every supported kind, of one input each."""
        return [
            self.ask(text, want=want)
            for want in sorted(self.backend.answers - {"choice"})
            for text in (" a film", " a slow film" * 500)
        ]


@pytest.fixture(params=KINDS)
async def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Case]:
    kind = request.param
    async with AsyncExitStack() as stack:
        case = await connected(kind, request, tmp_path_factory, stack)
        await stack.enter_async_context(case.backend)
        await case.backend.check(WORDS)
        yield case


async def connected(
    kind: str,
    request: pytest.FixtureRequest,
    folders: pytest.TempPathFactory,
    stack: AsyncExitStack,
) -> Case:
    if kind == "onnx":
        pytest.importorskip("onnxruntime")
        return Case(kind, OnnxBackend())
    if kind in ("masked", "causal"):
        pytest.importorskip("torch")
        folder = SHARED / "models" / "roberta-mini"
        if kind == "causal":
            folder = random_model(folders.mktemp("llama"), "LlamaForCausalLM")
        elif not folder.exists():
            pytest.skip(f"{folder} is absent")
        return Case(kind, TransformersBackend(folder, device="cpu"))
    if kind == "llama_cpp":
        pytest.importorskip("xllamacpp")
        model = request.getfixturevalue("smollm2")
        return Case(kind, LlamaCppBackend(model, threads=1, max_input_tokens=128))
    options: dict[str, Any] = {"tokenizer": str(TOKENIZER), "api_key_env": None}
    if kind == "openai":
        from tests.fake_openai import FakeOpenAI

        provider = await stack.enter_async_context(FakeOpenAI())
        backend = OpenAIBackend(
            "fake-1", base_url=provider.base_url, max_input_tokens=64, **options
        )
        return Case(kind, backend, lambda: len(provider.received))
    from tests.unit.backends.fake_vllm import serving

    fake = await stack.enter_async_context(serving())
    fake.masked = kind == "vllm_masked"
    path = "/pooling" if fake.masked else "/v1/completions"
    return Case(
        kind,
        VllmBackend("tiny", base_url=fake.url, **options),
        lambda: sum(bool(body.get("prompt") or "data" in body) for body in fake.asked(path)),
    )


async def test_an_answer_fits_its_query_and_the_wire(case: Case) -> None:
    for query in case.questions():
        answer = await case.backend.score(query)
        check_answer(query, answer)
        assert not answer.cached
        assert answer.usage.queries == 0
        for row in answer.log_probs:
            assert row is not None
            assert [float32(value) for value in row] == list(row)
            assert all(value <= 0 for value in row)


async def test_a_quote_lies_between_the_usage_and_the_worst_case(case: Case) -> None:
    for query in case.questions():
        quoted = await case.backend.quote(query)
        used = (await case.backend.score(query)).usage
        assert used.beyond(quoted) == NOTHING
        assert quoted.beyond(case.backend.worst_case(1, query.max_tokens)) == NOTHING
        if query.want != "text" and case.kind != "openai":
            assert used + Usage(queries=1) == quoted


@pytest.mark.parametrize("case", [kind for kind in KINDS if kind != "openai"], indirect=True)
async def test_several_inputs_keep_their_order(case: Case) -> None:
    texts = (" a film", " a slow film, and nobody cares who did it or why", " x")
    together = await case.backend.score(case.ask(*texts))
    for text, row in zip(texts, together.log_probs, strict=True):
        (alone,) = (await case.backend.score(case.ask(text))).log_probs
        # An int8 model's numbers depend on the batch.
        assert row == pytest.approx(alone, abs=0.2)


async def test_what_does_not_fit_is_refused_before_it_is_sent(case: Case) -> None:
    before = case.num_sent()
    for call in (case.backend.quote, case.backend.score):
        with pytest.raises(BackendError, match="without its text fields"):
            await call(case.ask(" x", prompt=" a" * 500))
    assert case.num_sent() == before


async def test_a_mask_stands_where_the_model_takes_one(case: Case) -> None:
    (parts,) = case.inputs(" x")
    masks = [part for part in parts if part.kind != "mask"]
    wrong = (
        [tuple(masks), (*parts, Part("mask", ""))]
        if case.kind in MASKED
        else [(*parts, Part("mask", ""))]
    )
    for rendered in wrong:
        with pytest.raises(BackendError, match=r"\{mask\}"):
            await case.backend.score(Query(inputs=(rendered,), label_words=WORDS))


async def test_an_impossible_query_is_refused(case: Case) -> None:
    with pytest.raises(ValueError, match="one input"):
        await case.backend.score(Query(inputs=(), label_words=WORDS))
    for want in {"choice", "reference", "text"} - case.backend.answers:
        query = replace(case.ask(" x"), want=want, references=(" y",), max_tokens=3)
        with pytest.raises((BackendError, ValueError), match="answer"):
            await case.backend.score(query)
    with pytest.raises(BackendError, match="Unicode"):
        await case.backend.score(case.ask("\ud800"))


async def test_a_label_word_is_one_token(case: Case) -> None:
    for word in (" antidisestablishment", " great movie"):
        with pytest.raises(LabelWordError) as caught:
            await case.backend.check((" great", word))
        assert caught.value.word == word
        assert len(caught.value.tokens) != 1
    with pytest.raises((BackendError, SpecError), match="same"):
        await case.backend.check((" great", " bad", " great"))


async def test_the_fingerprint_names_kind_and_model(case: Case) -> None:
    first = case.backend.fingerprint
    kind = {"masked": "transformers", "causal": "transformers", "vllm_masked": "vllm"}
    assert first.startswith(f"{kind.get(case.kind, case.kind)}:")
    await case.backend.score(case.ask(" a film"))
    assert case.backend.fingerprint == first


@pytest.mark.parametrize("case", LOCAL, indirect=True)
async def test_a_local_model_leaves_the_event_loop_free_and_no_thread(case: Case) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticker = asyncio.create_task(tick())
    await case.backend.score(case.ask(*[" a slow film" * 10] * 20))
    ticker.cancel()
    # A call that blocked would let it tick two or three times.
    assert ticks > 20
    await case.backend.aclose()
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if LOCAL[case.kind] in name]


@pytest.mark.parametrize("case", ["onnx"], indirect=True)
async def test_few_long_queries_stay_in_memory(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedone_sdk.backends.base._MAX_PREPARED", 1000)  # tokens
    for number in range(40):
        await case.backend.quote(case.ask(*[f" a slow film {number}" * 10] * 5))
    assert 1 <= len(case.backend._recent) <= 5
