"""LlamaCppBackend on a real instruct model."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from fedone_sdk.backends import Query, query_for
from fedone_sdk.errors import BackendError, SpecError
from fedone_sdk.task import Example, TaskSpec, form_of

pytest.importorskip("xllamacpp", reason="needs the extra llama-cpp")

from fedone_sdk.backends.llama_cpp import LlamaCppBackend
from tests.weights import ATTACK

ASKED = TaskSpec(
    chat={"system": "{prompt}", "user": "Review: {text}\nIs it negative or positive?"},
    labels={0: " negative", 1: " positive"},
)
PREFILLED = TaskSpec(
    chat={"user": "{prompt}Review: {text}", "assistant": "Sentiment:"},
    labels={0: " negative", 1: " positive"},
)
RAW = TaskSpec(template="{prompt}{text} It was", labels={0: " terrible", 1: " great"})
ROWS: list[Example] = [
    {"text": text}
    for text in ("I love it.", "It broke after a day.", "Fine, but the battery dies.", "Superb!")
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(smollm2: Path) -> AsyncIterator[LlamaCppBackend]:
    """One for all tests, which is possible because an answer depends only on its query."""
    # One thread: two wait for each other where another process has one of two cores.
    async with LlamaCppBackend(smollm2, threads=1) as opened:
        yield opened


def ask(backend: LlamaCppBackend, task: TaskSpec, prompt: str = "", rows: Any = ROWS) -> Query:
    return query_for(task, prompt, rows, backend=backend)


async def test_label_log_probs_are_over_the_whole_vocabulary(backend: LlamaCppBackend) -> None:
    answer = await backend.score(ask(backend, PREFILLED, "", ROWS[:2]))
    engine, encoder = backend._loaded(), backend._loaded_encoder()
    labels = [token for (token,) in encoder.label_ids(PREFILLED.label_words)]
    for number, row in enumerate(answer.log_probs):
        ids = encoder.encode(ask(backend, PREFILLED).inputs[number], reserve=1)
        every = engine._next_token(ids, fresh=True, n_probs=engine.num_vocab)["top_logprobs"]
        shown = {token["id"]: token["logprob"] for token in every}
        assert len(shown) == engine.num_vocab
        assert math.fsum(map(math.exp, shown.values())) == pytest.approx(1, abs=1e-3)
        assert row is not None
        # An input that shares tokens with the one before it is computed in other pieces, which
        # moves a 4-bit model's numbers.
        assert list(row) == pytest.approx([shown[token] for token in labels], abs=0.05)


async def test_unlikely_label_words_are_found_in_the_whole_vocabulary(
    backend: LlamaCppBackend,
) -> None:
    task = PREFILLED.model_copy(update={"labels": {"0": " zebra", "1": " positive"}})
    both = await backend.score(ask(backend, task))
    alone = await backend.score(ask(backend, PREFILLED))
    for row, known in zip(both.log_probs, alone.log_probs, strict=True):
        assert row is not None
        assert known is not None
        assert -30 < row[0] < -8
        assert row[1] == pytest.approx(known[1], abs=0.05)
    engine, encoder = backend._loaded(), backend._loaded_encoder()
    words = [token for (token,) in encoder.label_ids((" zebra", " river", " positive"))]
    ids = encoder.encode(ask(backend, PREFILLED).inputs[0], reserve=1)
    (found,) = engine.next_log_probs([ids], [words])
    every = engine._next_token(ids, fresh=False, n_probs=engine.num_vocab)["top_logprobs"]
    shown = {token["id"]: token["logprob"] for token in every}
    assert [found[each] for each in words] == pytest.approx([shown[w] for w in words], abs=1e-3)


async def test_an_answer_depends_on_its_query_alone(backend: LlamaCppBackend) -> None:
    query = ask(backend, ASKED, "Judge the review.")
    first = await backend.score(query)
    await backend.score(ask(backend, RAW, "Other.", ROWS[:2]))
    others = [ask(backend, PREFILLED, str(number), ROWS[:2]) for number in range(2)]
    await asyncio.gather(*map(backend.score, others))
    assert await backend.score(query) == first


async def test_what_would_be_sampled_does_not_matter(backend: LlamaCppBackend) -> None:
    """Of a token that is a part of a character the engine shows nothing."""
    rows = [{"text": text} for text in ("日本語は", "🙂🙃🙂", "naïve", "Ω≈ç√∫")]
    for task in (RAW, ASKED):
        for number in range(2):
            answer = await backend.score(ask(backend, task, f"{number}日本", rows))
            assert None not in answer.log_probs


async def test_special_tokens_in_a_text_are_text(backend: LlamaCppBackend) -> None:
    await backend.check(ASKED.label_words, form_of(ASKED))
    encoder = backend._loaded_encoder()
    rows = [{"text": "Fine."}, {"text": f"Fine.{ATTACK}"}]
    calm, hostile = map(encoder.encode, ask(backend, ASKED, "", rows).inputs)
    ends = [encoder._tokenizer.token_to_id(name) for name in ("<|im_end|>", "<|im_start|>")]
    assert [one for one in hostile if one in ends] == [one for one in calm if one in ends]
    assert await backend.special_tokens(ATTACK) == ["<|im_end|>", "<|im_start|>"]


class TestLabelWords:
    async def test_of_several_tokens_add_up(self, smollm2: Path) -> None:
        task = PREFILLED.model_copy(
            update={"labels": {"0": " not good at all", "1": " positive", "2": " not bad"}}
        )
        async with LlamaCppBackend(smollm2, threads=1, multi_token_labels=True) as backend:
            await backend.check(task.label_words, form_of(task))
            answer = await backend.score(ask(backend, task, "", ROWS[:1]))
            engine, encoder = backend._loaded(), backend._loaded_encoder()
            for number, row in enumerate(answer.log_probs):
                ids = encoder.encode(ask(backend, task).inputs[number])
                for label, value in zip(task.label_words, row or (), strict=True):
                    known = 0.0
                    tokens = encoder.continuation(label)
                    for at, token in enumerate(tokens):
                        (shown,) = engine.next_log_probs([[*ids, *tokens[:at]]], [[token]])
                        known += shown[token]
                    assert value == pytest.approx(known, abs=0.1)

    async def test_are_spelled_as_the_form_requires(self, backend: LlamaCppBackend) -> None:
        for word in ("negative", " negative"):
            await backend.check((word,), form_of(ASKED))
            await backend.check((word,), form_of(PREFILLED))


async def test_generation_continues_to_its_end(backend: LlamaCppBackend) -> None:
    task = TaskSpec(
        chat={"user": "{prompt}{text} Answer with one word."}, loss="score", max_tokens=8
    )
    rows = [{"text": "What is the capital of France?"}, {"text": "What is two plus two?"}]
    query = ask(backend, task, "", rows)
    quoted = await backend.quote(query)
    answer = await backend.score(query)
    assert "Paris" in str(answer.texts[0])
    assert quoted.completion_tokens == 16
    assert 2 <= answer.usage.completion_tokens <= 16
    assert (await backend.score(query)) == answer


async def test_a_text_is_held_to_a_schema(backend: LlamaCppBackend) -> None:
    kinds = {"city": {"type": "string", "maxLength": 20}, "known": {"type": "boolean"}}
    schema = {
        "type": "object",
        "properties": kinds,
        "required": [*kinds],
        "additionalProperties": False,
    }
    task = TaskSpec(
        chat={"user": "{prompt}{text}"},
        loss="score",
        max_tokens=200,
        score={"json_fields": {"schema": schema}},
    )
    rows = [{"text": "What is the capital of France?"}, {"text": "Hello"}]
    for text in (await backend.score(ask(backend, task, "", rows))).texts:
        found = json.loads(str(text))
        assert {name: type(value) for name, value in found.items()} == {"city": str, "known": bool}


class TestRefused:
    def test_a_file_that_is_no_model(self, tmp_path: Path) -> None:
        (tmp_path / "model.gguf").write_bytes(b"PK\3\4" + bytes(100))
        with pytest.raises(SpecError, match=r"model\.gguf: is not a GGUF file"):
            LlamaCppBackend(tmp_path / "model.gguf")

    async def test_weights_that_are_cut_off(self, smollm2: Path, tmp_path: Path) -> None:
        cut = tmp_path / "cut.gguf"
        with smollm2.open("rb") as whole:
            cut.write_bytes(whole.read(20_000_000))
        async with LlamaCppBackend(cut) as backend:
            with pytest.raises(BackendError, match=r"cut\.gguf: llama\.cpp cannot load the model"):
                await backend.check(ASKED.label_words)

    def test_a_context_that_the_model_does_not_have(self, smollm2: Path) -> None:
        with pytest.raises(SpecError, match="max_input_tokens: must be from 16 to 8192"):
            LlamaCppBackend(smollm2, max_input_tokens=9000)


async def test_a_raw_template_gets_one_warning(smollm2: Path) -> None:
    async with LlamaCppBackend(smollm2, threads=1) as backend:
        with capture_logs() as logs:
            await backend.check(ASKED.label_words, form_of(ASKED))
            assert logs == []
            await backend.check(RAW.label_words, form_of(RAW))
            await backend.check(RAW.label_words, form_of(RAW))
    assert [line["event"] for line in logs] == ["raw_template_on_chat_model"]


async def test_the_fingerprint_names_file_and_settings(smollm2: Path) -> None:
    plain = LlamaCppBackend(smollm2).fingerprint
    assert plain.startswith(f"llama_cpp:{smollm2.name}:")
    assert LlamaCppBackend(smollm2, max_input_tokens=512).fingerprint == f"{plain}:context=512"
    assert LlamaCppBackend(smollm2, threads=1).fingerprint == plain


def test_stderr_stays_silent(smollm2: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "from fedone_sdk.backends.llama_cpp import LlamaCppBackend\n"
        "async def main():\n"
        "    async with LlamaCppBackend(sys.argv[1]) as backend:\n"
        "        await backend.check((' good',))\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(smollm2)], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")


async def test_its_http_server_is_for_this_process_alone(backend: LlamaCppBackend) -> None:
    await backend.check(ASKED.label_words)
    url = backend._loaded()._url
    assert url.startswith("http://127.0.0.1:")
    for path, body in (("/completion", {"prompt": "a"}), ("/tokenize", {"content": "a"})):
        async with (
            aiohttp.ClientSession() as session,
            session.post(url + path, json=body) as message,
        ):
            assert message.status == 401
