"""`VllmBackend` on a real vLLM server with a causal model, against transformers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedone_sdk.backends.base import Answer, Query
from fedone_sdk.backends.vllm import VllmBackend
from fedone_sdk.task import Part, Rendered
from tests.acceptance.test_slots_cli import chat_run, check, folder
from tests.console import Fedone, fedone
from tests.processes import free_port
from tests.tutorials.tutorial import Tutorial
from tests.weights import as_folder

from .conftest import Serve, VllmServer

TOLERANCE = 1e-4  # nats
LABELS = (" terrible", " great")
MAX_LENGTH = 256


@pytest.fixture
async def backend(llama_server: VllmServer) -> AsyncIterator[VllmBackend]:
    async with connect(llama_server) as backend:
        await backend.check(LABELS)
        yield backend


@pytest.fixture(scope="session")
def reference(tiny_llama: Path) -> Callable[[str, str], float]:
    """Transformers' log-probability of a text after another, nats."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    model = LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()

    def log_prob(text: str, ending: str) -> float:
        before = tokenizer(text).input_ids
        after = tokenizer(ending, add_special_tokens=False).input_ids
        with torch.no_grad():
            logits = model(torch.tensor([before + after])).logits[0]
        rows = logits[len(before) - 1 : -1].log_softmax(1)
        return float(rows.gather(1, torch.tensor(after)[:, None]).sum())

    return log_prob


def connect(server: VllmServer, **options: Any) -> VllmBackend:
    options = {"base_url": server.url, "tokenizer": str(server.folder), **options}
    return VllmBackend(server.model, **options)


def rendered(sentence: str) -> Rendered:
    return (Part("prompt", " really"), Part("field", f" {sentence}"), Part("text", " It was"))


def text_of(parts: Rendered) -> str:
    return "".join(part.text for part in parts)


def ask(sentences: Sequence[str], words: tuple[str, ...] = LABELS, **options: Any) -> Query:
    return Query(inputs=tuple(map(rendered, sentences)), label_words=words, **options)


def assert_close(answer: Answer, expected: Sequence[Sequence[float]]) -> None:
    assert len(answer.log_probs) == len(expected)
    for row, right in zip(answer.log_probs, expected, strict=True):
        assert row == pytest.approx(right, abs=TOLERANCE, rel=0)


async def test_label_log_probs_are_those_of_transformers(
    backend: VllmBackend, reference: Callable[[str, str], float], sst2: list[dict[str, Any]]
) -> None:
    # Different label sets at the same time, in batches of different sizes.
    queries = [
        ask([row["sentence"] for row in sst2[start : start + size]], words)
        for start, size, words in (
            (0, 32, LABELS),
            (0, 1, (" great", " terrible")),
            (32, 5, (" boring", " good", " bad", ".", "the")),
            (40, 8, (" hilarious", " dull")),
        )
    ]
    answers = await asyncio.gather(*map(backend.score, queries))
    for query, answer in zip(queries, answers, strict=True):
        expected = [
            [reference(text_of(parts), word) for word in query.label_words]
            for parts in query.inputs
        ]
        assert_close(answer, expected)
        assert answer.usage == (await backend.quote(query)).without_queries()
        assert answer.model is not None
        assert "(system_fingerprint vllm-" in answer.model


async def test_labels_of_several_tokens_are_those_of_transformers(
    llama_server: VllmServer, reference: Callable[[str, str], float], sst2: list[dict[str, Any]]
) -> None:
    words = (" absolutely terrible", " great", " a masterpiece of its kind")
    query = ask([row["sentence"] for row in sst2[:6]], words)
    async with connect(llama_server, multi_token_labels=True) as backend:
        await backend.check(words)
        answer = await backend.score(query)
        assert answer.usage == (await backend.quote(query)).without_queries()
    expected = [[reference(text_of(parts), word) for word in words] for parts in query.inputs]
    assert_close(answer, expected)


async def test_references_are_scored_as_by_transformers(
    backend: VllmBackend, reference: Callable[[str, str], float], sst2: list[dict[str, Any]]
) -> None:
    sentences = [row["sentence"] for row in sst2[:6]]
    endings = tuple(f" about {row['sentence']}" for row in sst2[6:12])
    query = ask(sentences, (), want="reference", references=endings)
    answer = await backend.score(query)
    expected = [
        [reference(text_of(parts), ending)]
        for parts, ending in zip(query.inputs, endings, strict=True)
    ]
    assert_close(answer, expected)


async def test_texts_are_those_that_transformers_generates(
    backend: VllmBackend, tiny_llama: Path, sst2: list[dict[str, Any]]
) -> None:
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    model = LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    query = ask([row["sentence"] for row in sst2[:4]], (), want="text", max_tokens=8)
    answer = await backend.score(query)
    for parts, text in zip(query.inputs, answer.texts, strict=True):
        ids = torch.tensor([tokenizer(text_of(parts)).input_ids])
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False
        )
        expected = tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)
        assert text == expected.rstrip("\ufffd")  # vLLM keeps half a character back.


async def test_an_answer_does_not_depend_on_its_company(
    backend: VllmBackend, sst2: list[dict[str, Any]]
) -> None:
    sentences = [row["sentence"] for row in sst2[:16]]
    together = await backend.score(ask(sentences))
    reverse = await backend.score(ask(sentences[::-1]))
    alone = await asyncio.gather(*(backend.score(ask([sentence])) for sentence in sentences))
    rows = [row or () for row in together.log_probs]
    assert_close(reverse, rows[::-1])
    for answer, row in zip(alone, rows, strict=True):
        assert_close(answer, [row])


__all__ = ["fedone", "folder"]


def test_a_prompt_of_slots(fedone: Fedone, folder: Path, smollm2: Path, serve: Serve) -> None:
    server = serve(as_folder(smollm2, folder / "weights"), "--max-model-len", "512")
    backend = {
        "kind": "vllm",
        "model": server.model,
        "base_url": server.url,
        "tokenizer": str(folder / "weights"),
    }
    check(fedone, folder, chat_run(backend))


def test_vllm_tutorial(tmp_path: Path, shared: Callable[..., Path]) -> None:
    page = Tutorial("vllm", tmp_path, changes={"8000": str(free_port())})
    page.skip("python3 -m venv")
    page.run()
    page.skip("hf download FacebookAI/roberta-base --local-dir model")
    (page.folder / "model").symlink_to(shared("models", "roberta-mini"))
    with page.start() as server:
        server.reaches("Application startup complete")
        page.shown(server)
        page.run()
        page.run()
        result = json.loads((page.folder / "result.json").read_text())
        assert (result["status"], result["rounds"]) == ("completed", 50)
        assert 0 < result["spent"]["queries"] <= 500
        served, ledger = (float(line.split()[-1]) for line in page.run().splitlines())
        assert served == ledger == result["spent"]["prompt_tokens"] > 0
        page.run()
    assert page.rest == []
