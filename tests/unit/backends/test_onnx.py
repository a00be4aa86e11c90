from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from fedone_paper.glue import glue_task
from fedone_sdk import assets
from fedone_sdk.backends import AnswerCache, ModelClient, Query
from fedone_sdk.backends.encoders import ClozeEncoder
from fedone_sdk.backends.onnx import OnnxBackend, _MaskedModel
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.errors import BackendError, LabelWordError, SpecError
from fedone_sdk.task import Part, TaskSpec, render

np = pytest.importorskip("numpy")
onnxruntime = pytest.importorskip("onnxruntime")
tokenizers = pytest.importorskip("tokenizers")

EMBEDDED = assets.path("roberta_mini")
SHARED = Path(os.environ.get("FEDONE_SHARED", Path(__file__).resolve().parents[4] / "shared"))
SST2 = glue_task("sst2")
SENTENCES = (
    "a gorgeous , witty , seductive movie .",
    "dull .",
    "it 's slow -- very , very slow , and by the end nobody cares who did it or why .",
)


@pytest.fixture(scope="module")
def model() -> _MaskedModel:
    return _MaskedModel(EMBEDDED / "model.int8.onnx", pad_id=1)


@pytest.fixture
async def backend() -> AsyncIterator[OnnxBackend]:
    async with OnnxBackend(threads=2) as backend:
        yield backend


def shared(*parts: str) -> Path:
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"{path} is absent (FEDONE_SHARED names the folder of shared data)")
    return path


def sst2_dev(num_rows: int) -> list[dict[str, Any]]:
    lines = shared("data", "glue", "sst2", "dev.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:num_rows]]


def ask(*sentences: str, prompt: str = "", task: TaskSpec = SST2) -> Query:
    inputs = tuple(render(task, prompt, {"sentence": sentence}) for sentence in sentences)
    return Query(inputs=inputs, label_words=task.label_words)


def direct(texts: list[str], words: tuple[str, ...]) -> Any:
    """The answer by another way: one marked-up text per input, and the tokeniser's own specials."""
    tokenizer = tokenizers.Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    label_ids = [tokenizer.encode(word, add_special_tokens=False).ids[0] for word in words]
    tokenizer.enable_padding(pad_id=1, pad_token="<pad>")
    found = tokenizer.encode_batch(texts)
    ids = np.array([encoding.ids for encoding in found])
    session = onnxruntime.InferenceSession(str(EMBEDDED / "model.int8.onnx"))
    (logits,) = session.run(
        ["logits"],
        {
            "input_ids": ids,
            "attention_mask": np.array([encoding.attention_mask for encoding in found]),
            "mask_index": np.argmax(ids == tokenizer.token_to_id("<mask>"), axis=1),
        },
    )
    p = np.exp(logits.astype(np.float64))
    return np.log(p / p.sum(axis=1, keepdims=True))[:, label_ids], int((ids != 1).sum())


async def test_scores_are_those_of_a_direct_call(backend: OnnxBackend) -> None:
    answer = await backend.score(ask(*SENTENCES, prompt=" really good"))
    texts = [f" really good {sentence} It was <mask>." for sentence in SENTENCES]
    expected, num_tokens = direct(texts, SST2.label_words)
    # Float32 numbers near 5 are 5e-7 apart; onnxruntime may use more threads in `direct`.
    np.testing.assert_allclose(answer.log_probs, expected, atol=2e-6)
    assert answer.usage == Usage(requests=1, prompt_tokens=num_tokens)
    assert not answer.cached


async def test_int8_agrees_with_fp32(backend: OnnxBackend, tmp_path: Path) -> None:
    for name in ("model.onnx", "tokenizer.json", "config.json"):
        shutil.copy(shared("models", "roberta-mini", name), tmp_path)
    query = ask(*(row["sentence"] for row in sst2_dev(64)), prompt=" a film")
    async with OnnxBackend(tmp_path) as exact:
        expected = np.array((await exact.score(query)).log_probs)
        assert exact.fingerprint != backend.fingerprint
        assert exact.max_length == 128
    found = np.array((await backend.score(query)).log_probs)
    # Nats. The model card states label logits up to 0.14 apart; the normaliser moves a little too.
    np.testing.assert_allclose(found, expected, atol=0.25)
    assert np.mean(found.argmax(1) == expected.argmax(1)) >= 0.95


async def test_scores_do_not_depend_on_threads_or_on_other_queries() -> None:
    queries = [
        ask(*(SENTENCES * 7)[:size], prompt=prompt) for prompt in ("", " no") for size in (1, 3, 20)
    ]
    async with OnnxBackend(threads=1) as one, OnnxBackend(threads=4) as four:
        alone = [await one.score(query) for query in queries]
        assert await asyncio.gather(*map(one.score, queries)) == alone
        assert await asyncio.gather(*map(four.score, queries * 3)) == alone * 3


async def test_label_words(backend: OnnxBackend) -> None:
    await backend.check((" terrible", " great"))
    for word in ("", " <mask>", "<mask>"):
        with pytest.raises(LabelWordError):
            await backend.check((" great", word))


def test_the_mask_alone_is_an_input(model: _MaskedModel) -> None:
    encoder = ClozeEncoder(EMBEDDED / "tokenizer.json", 128)
    cloze = encoder.encode((Part("field", " "), Part("mask", "")))
    assert cloze[:2] == ([0, 8191, 2], 1)
    assert len(model.log_probs([cloze], [5])) == 1
    assert os.environ["ORT_DISABLE_TELEMETRY"] == "1"  # set before the library was loaded


def test_the_fingerprint_names_the_bytes(tmp_path: Path) -> None:
    content = [(EMBEDDED / name).read_bytes() for name in ("model.int8.onnx", "tokenizer.json")]
    expected = sha256(b"".join(content)).hexdigest()[:16]
    assert OnnxBackend().fingerprint == f"onnx:roberta_mini:{expected}"
    other = Path(shutil.copytree(EMBEDDED, tmp_path / "mine"))
    with (other / "tokenizer.json").open("a") as file:
        file.write("\n")
    name, digest = OnnxBackend(other).fingerprint.removeprefix("onnx:").split(":")
    assert name == "mine"
    assert digest != expected


def test_a_folder_that_holds_no_model_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="absent: there is no such model folder"):
        OnnxBackend(tmp_path / "absent")
    missing = {
        "model.onnx": r"needs model\.int8\.onnx or model\.onnx",
        "tokenizer.json": r"needs tokenizer\.json",
        "config.json": "maximum length is unknown",
    }
    for file, refusal in missing.items():
        with pytest.raises(SpecError, match=refusal):
            OnnxBackend(str(tmp_path))
        (tmp_path / file).write_text("{")
    for text in "{", "[" * 100_000:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(SpecError, match=r"config\.json: is not JSON"):
            OnnxBackend(tmp_path)


async def test_inputs_that_were_cut_at_other_lengths_share_no_answer(tmp_path: Path) -> None:
    """The length stands in a file that the fingerprint does not hash."""
    folder = tmp_path / EMBEDDED.name
    shutil.copytree(EMBEDDED, folder)
    long, short = ask(" word" * 120), ask(" good")
    found = []
    for length in (128, 64):
        (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": length}))
        async with ModelClient(
            OnnxBackend(folder), cache=AnswerCache(tmp_path / "answers")
        ) as cached:
            found.append(await cached.score(long))
            assert (await cached.score(short)).cached == (length == 64)
            assert await cached.score(long) == replace(found[-1], usage=NOTHING, cached=True)
    assert [answer.cached for answer in found] == [False, False]
    assert found[0].log_probs != found[1].log_probs


async def test_a_wrong_model_is_one_clear_error(tmp_path: Path) -> None:
    # It has positions for 128 tokens, whatever the folder says.
    shutil.copytree(EMBEDDED, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 300}')
    async with OnnxBackend(tmp_path) as backend:
        with pytest.raises(BackendError, match="onnxruntime failed"):
            await backend.score(ask(" word" * 500))
    (tmp_path / "model.int8.onnx").write_bytes(b"not a model")
    async with OnnxBackend(tmp_path) as backend:
        for _ in range(2):
            with pytest.raises(BackendError, match="cannot load the model"):
                await backend.check((" great",))
