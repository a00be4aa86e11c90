from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from fedone_paper.glue import glue_task
from fedone_sdk.backends import OnnxBackend, Query
from fedone_sdk.backends.transformers import TransformersBackend
from fedone_sdk.budget import Usage
from fedone_sdk.errors import BackendError, SpecError
from fedone_sdk.task import Part, Rendered, TaskSpec, render
from tests.weights import random_model

WHY = "the extra `torch` is not installed: pip install 'fedone-sdk[torch]'"
torch = pytest.importorskip("torch", reason=WHY)
transformers = pytest.importorskip("transformers", reason=WHY)
tokenizers = pytest.importorskip("tokenizers")

MAX_SEQUENCES = "fedone_sdk.backends.transformers.MAX_SEQUENCES"
SHARED = Path(os.environ.get("FEDONE_SHARED", Path(__file__).resolve().parents[4] / "shared"))
SST2 = glue_task("sst2")
ASKED = TaskSpec(
    template="{prompt} Review: {sentence} Sentiment:", labels={"0": " terrible", "1": " great"}
)
SENTENCES = (
    "a gorgeous , witty , seductive movie .",
    "dull .",
    "it 's slow -- very , very slow , and by the end nobody cares who did it or why .",
)
CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "gpt2": ("GPT2LMHeadModel", {}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            "num_key_value_heads": 1,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "final_logit_softcapping": 2.0,  # It changes the logits after its head: by a tanh.
        },
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small random causal models, which start their inputs with <s>."""
    return {
        name: random_model(tmp_path_factory.mktemp(name), kind, **shape)
        for name, (kind, shape) in CAUSAL.items()
    }


@pytest.fixture
def llama(folders: dict[str, Path]) -> Path:
    return folders["llama"]


@pytest.fixture
def roberta() -> Path:
    folder = SHARED / "models" / "roberta-mini"
    if not folder.exists():
        pytest.skip(f"{folder} is absent (FEDONE_SHARED names the folder of shared data)")
    return folder


def backend(model: Path, **options: Any) -> TransformersBackend:
    return TransformersBackend(model, **{"device": "cpu"} | options)


def inputs(*sentences: str, prompt: str = " really good", task: TaskSpec = ASKED) -> Any:
    return tuple(render(task, prompt, {"sentence": sentence}) for sentence in sentences)


def ask(*sentences: str, prompt: str = " really good", task: TaskSpec = ASKED) -> Query:
    return Query(inputs=inputs(*sentences, prompt=prompt, task=task), label_words=task.label_words)


class Naive:
    """The answers by another way: one forward pass per text, and log-softmax of all of it."""

    def __init__(self, folder: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    def ids(self, rendered: Rendered) -> list[int]:
        return list(self.tokenizer.encode("".join(part.text for part in rendered)).ids)

    def log_probs(self, ids: list[int]) -> Any:
        with torch.no_grad():
            return self.model(torch.tensor([ids])).logits[0].log_softmax(-1)

    def log_prob(self, rendered: Rendered, text: str) -> float:
        start = self.ids(rendered)
        goes_on = self.tokenizer.encode(text, add_special_tokens=False).ids
        scores = self.log_probs([*start, *goes_on])
        at = range(len(start) - 1, len(start) + len(goes_on) - 1)
        return sum(float(scores[i, token]) for i, token in zip(at, goes_on, strict=True))

    def greedy(self, rendered: Rendered, num_tokens: int) -> list[int]:
        ids = self.ids(rendered)
        for _ in range(num_tokens):
            ids.append(int(self.log_probs(ids)[-1].argmax()))
        return ids[-num_tokens:]


async def test_the_same_numbers_as_onnx(roberta: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    for name in ("model.onnx", "tokenizer.json", "config.json"):
        shutil.copy(roberta / name, tmp_path)
    query = ask(*SENTENCES, "<mask> </s>", "", " word" * 500, prompt=" a film", task=SST2)
    async with OnnxBackend(tmp_path) as onnx, backend(roberta) as ours:
        expected, found = await onnx.score(query), await ours.score(query)
        assert ours.max_length == onnx.max_length
        encode = [each._loaded_encoder().encode for each in (ours, onnx)]
        for rendered in query.inputs:
            assert encode[0](rendered) == encode[1](rendered)
    torch.testing.assert_close(
        torch.tensor(found.log_probs), torch.tensor(expected.log_probs), atol=1e-4, rtol=0
    )
    assert found.usage == expected.usage


async def test_bfloat16_is_close_and_another_model(roberta: Path) -> None:
    query = ask(*SENTENCES, task=SST2)
    async with backend(roberta) as exact, backend(roberta, dtype="bfloat16") as half:
        expected = torch.tensor((await exact.score(query)).log_probs)
        found = torch.tensor((await half.score(query)).log_probs)
        assert exact.fingerprint != half.fingerprint
    assert not torch.equal(found, expected)
    # Eight bits of mantissa: log-probabilities near 10 move by some hundredths.
    torch.testing.assert_close(found, expected, atol=0.2, rtol=0)


@pytest.fixture
def model(request: pytest.FixtureRequest, folders: dict[str, Path]) -> tuple[Path, TaskSpec]:
    """The model of a kind, and a task for it."""
    if request.param == "roberta":
        return request.getfixturevalue("roberta"), SST2
    return folders[request.param], ASKED


@pytest.mark.parametrize("model", ["roberta", "llama", "gpt2"], indirect=True)
async def test_the_head_sees_the_asked_positions_only(model: tuple[Path, TaskSpec]) -> None:
    folder, task = model
    shapes = []
    async with backend(folder) as ours:
        await ours.check(task.label_words)
        head = ours._loaded().head
        head.register_forward_hook(lambda _, args, out: shapes.append((args[0].shape, out.shape)))
        await ours.score(ask(*SENTENCES, task=task))
    ((seen, logits),) = shapes
    assert seen[:2] == (1, 3)
    assert logits == (1, 3, 8192)


@pytest.mark.parametrize("kind", CAUSAL)
async def test_labels_are_those_of_a_naive_pass(kind: str, folders: dict[str, Path]) -> None:
    naive, query = Naive(folders[kind]), ask(*SENTENCES)
    async with backend(folders[kind]) as ours:
        answer = await ours.score(query)
    for rendered, row in zip(query.inputs, answer.log_probs, strict=True):
        expected = [naive.log_prob(rendered, word) for word in query.label_words]
        assert row == pytest.approx(expected, abs=2e-5)
    num_tokens = sum(len(naive.ids(rendered)) for rendered in query.inputs)
    assert answer.usage == Usage(requests=1, prompt_tokens=num_tokens)


@pytest.mark.parametrize("model", ["roberta", *CAUSAL], indirect=True)
async def test_padding_changes_nothing(
    model: tuple[Path, TaskSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, task = model
    sentences = [*SENTENCES, "x", " word" * 60]
    async with backend(folder) as ours:
        together = (await ours.score(ask(*sentences, task=task))).log_probs
        alone = [(await ours.score(ask(each, task=task))).log_probs[0] for each in sentences]
        monkeypatch.setattr(MAX_SEQUENCES, 2)
        in_twos = (await ours.score(ask(*sentences, task=task))).log_probs
    assert len({row for row in together}) == len(sentences)
    for found in (alone, in_twos):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(together), atol=1e-5, rtol=0)


async def test_label_words_of_several_tokens_sum_up(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MAX_SEQUENCES, 4)
    naive = Naive(llama)
    words = (" great", " terrible", " not good", " not bad at all", "!")
    query = Query(inputs=inputs(*SENTENCES), label_words=words)
    async with backend(llama, multi_token_labels=True) as ours:
        await ours.check(words)
        answer = await ours.score(query)
    for rendered, row in zip(query.inputs, answer.log_probs, strict=True):
        expected = [naive.log_prob(rendered, word) for word in words]
        assert row == pytest.approx(expected, abs=5e-5)
    longest = len(naive.tokenizer.encode(words[3], add_special_tokens=False).ids)
    num_tokens = sum(len(naive.ids(rendered)) + longest - 1 for rendered in query.inputs)
    assert longest > 2
    assert answer.usage == Usage(requests=1, prompt_tokens=num_tokens)


async def test_the_log_probability_of_a_reference(llama: Path) -> None:
    naive = Naive(llama)
    references = (" a fine film", ".", " nobody should have to see this twice")
    query = Query(inputs=inputs(*SENTENCES), want="reference", references=references)
    async with backend(llama) as ours:
        answer = await ours.score(query)
        with pytest.raises(BackendError, match="reference text has 0 tokens"):
            await ours.score(Query(inputs=inputs("x"), want="reference", references=("",)))
        with pytest.raises(ValueError, match="one reference per input"):
            await ours.score(Query(inputs=inputs("x"), want="reference"))
    for rendered, text, row in zip(query.inputs, references, answer.log_probs, strict=True):
        assert row == pytest.approx([naive.log_prob(rendered, text)], abs=5e-5)


async def test_what_it_writes_is_greedy_and_ends_where_the_model_ends(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MAX_SEQUENCES, 2)
    naive, asked = Naive(llama), inputs(*SENTENCES)
    expected = [naive.greedy(rendered, 6) for rendered in asked]
    # A copy of the model that ends with what it would write third for the second input; and whose
    # authors recommend to sample.
    end = expected[1][2]
    assert end not in expected[1][:2]
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    advice = {"eos_token_id": end, "do_sample": True, "temperature": 5.0, "repetition_penalty": 9.0}
    (tmp_path / "generation_config.json").write_text(json.dumps(advice))
    cut = [tokens[: tokens.index(end) + 1] if end in tokens else tokens for tokens in expected]
    rows: list[int] = []
    async with backend(tmp_path) as ours:
        await ours.check(())
        ours._loaded().module.register_forward_pre_hook(
            lambda _, args, options: rows.append(len(options["input_ids"])), with_kwargs=True
        )
        answer = await ours.score(Query(inputs=asked, want="text", max_tokens=6))
        with pytest.raises(BackendError, match="max_tokens"):
            await ours.score(Query(inputs=asked, want="text"))
    written = [[token for token in tokens if token != end] for tokens in cut]
    assert answer.texts == tuple(naive.tokenizer.decode(tokens) for tokens in written)
    assert answer.log_probs == ((), (), ())
    assert set(rows) == {1, 2}
    num_tokens = sum(len(naive.ids(rendered)) for rendered in asked)
    assert answer.usage == Usage(
        requests=1, prompt_tokens=num_tokens, completion_tokens=sum(map(len, cut))
    )


async def test_a_long_field_makes_room(llama: Path) -> None:
    queries = [
        Query(inputs=inputs(" word" * 500), label_words=(" great",)),
        Query(inputs=inputs(" word" * 500), want="reference", references=(" a b c",)),
        Query(inputs=inputs(" word" * 500), want="text", max_tokens=10),
    ]
    async with backend(llama) as ours:
        for query in queries:
            usage = (await ours.score(query)).usage
            assert usage.prompt_tokens == (86 if query.want == "text" else 96)
        assert (await ours.quote(queries[0])).completion_tokens == 0


async def test_counting_does_without_the_weights(llama: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(llama / name, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    text = Query(inputs=inputs(*SENTENCES), want="text", max_tokens=5)
    async with backend(tmp_path) as ours:
        quotes = [await ours.quote(query) for query in (ask(*SENTENCES), text)]
        assert quotes[0].prompt_tokens == quotes[1].prompt_tokens > 30
        assert quotes[1].completion_tokens == 15
        for _ in range(2):
            with pytest.raises(BackendError, match="cannot load the model") as caught:
                await ours.score(text)
        assert "\n" not in str(caught.value)


async def test_out_of_memory_names_the_setting(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB.\nSee ...")

    async with backend(llama) as ours:
        await ours.check(())
        with monkeypatch.context() as patch:
            patch.setattr(ours._loaded().module, "forward", run_out)
            with pytest.raises(BackendError, match=r"out of memory .* up to 256") as caught:
                await ours.score(ask("x"))
        assert "\n" not in str(caught.value)
        assert len((await ours.score(ask("x"))).log_probs) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("model", ["roberta", "llama"], indirect=True)
async def test_a_gpu_gives_the_same_numbers(model: tuple[Path, TaskSpec]) -> None:
    query = ask(*SENTENCES, task=model[1])
    async with backend(model[0]) as cpu, backend(model[0], device="cuda") as gpu:
        found = [torch.tensor((await each.score(query)).log_probs) for each in (cpu, gpu)]
    torch.testing.assert_close(*found, atol=1e-4, rtol=0)


def test_a_folder_that_holds_no_model_is_refused_at_once(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="there is no folder"):
        backend(tmp_path / "absent")
    with pytest.raises(SpecError, match=r"needs config\.json"):
        backend(tmp_path)
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(llama / name, tmp_path)
    assert backend(tmp_path).max_length == 96
    (tmp_path / "config.json").write_text('{"architectures": ["T5ForConditionalGeneration"]}')
    with pytest.raises(SpecError, match=r"\['T5ForConditionalGeneration'\]; needs a masked"):
        backend(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(SpecError, match=r"needs tokenizer\.json"):
        backend(tmp_path)


async def test_weights_without_a_head_are_refused(roberta: Path, tmp_path: Path) -> None:
    """The library would fill it with random numbers."""
    with pytest.raises(SpecError, match=r"multi_token_labels: must be false"):
        backend(roberta, multi_token_labels=True)
    shutil.copytree(roberta, tmp_path, dirs_exist_ok=True, copy_function=shutil.copyfile)
    model = transformers.AutoModelForMaskedLM.from_pretrained(roberta)
    model.roberta.save_pretrained(tmp_path)
    shutil.copyfile(roberta / "config.json", tmp_path / "config.json")
    async with backend(tmp_path) as ours:
        with pytest.raises(BackendError, match=r"the weights lack lm_head\.\w+, lm_head"):
            await ours.check((" great",))


async def test_code_that_comes_with_a_model_is_never_run(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    config = json.loads((llama / "config.json").read_text())
    config["model_type"] = "theirs"
    config["auto_map"] = {"AutoConfig": "theirs.C", "AutoModelForCausalLM": "theirs.M"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "theirs.py").write_text("raise SystemExit('run')\n")
    async with backend(tmp_path) as ours:
        with pytest.raises(BackendError, match="cannot load the model"):
            await ours.check((" great",))


def test_the_fingerprint_names_the_bytes(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "mine")
    names = ("config.json", "tokenizer.json", "model.safetensors")
    content = b"".join((llama / name).read_bytes() for name in names)
    expected = sha256(content).hexdigest()[:16]
    assert backend(tmp_path / "mine").fingerprint == f"transformers:mine:{expected}:float32"
    with (tmp_path / "mine" / "model.safetensors").open("r+b") as file:
        file.seek(len(content) // 4)  # In the midst of the numbers.
        file.write(b"\0\1\2\3")
    assert expected not in backend(tmp_path / "mine").fingerprint


HUB = """
import asyncio, sys
from fedone_sdk.backends import Query
from fedone_sdk.backends.transformers import TransformersBackend
from fedone_sdk.errors import SpecError
from fedone_sdk.task import Part

async def main():
    async with TransformersBackend("org/tiny", device="cpu") as backend:
        print(backend.fingerprint)
        query = Query(inputs=((Part("field", "a film"),),), label_words=(" great",))
        print((await backend.score(query)).log_probs[0][0])
    for options in ({"model": "org/absent"},):
        try:
            TransformersBackend(**options)
        except SpecError as exc:
            print(str(exc).splitlines())

asyncio.run(main())
"""


def test_a_name_on_the_hub(llama: Path, tmp_path: Path) -> None:
    """From the hub's local cache, as it looks after a download, without a network."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    place = tmp_path / "hub" / "models--org--tiny"
    shutil.copytree(llama, place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    run = [sys.executable, "-W", "error", "-c", HUB]
    done = subprocess.run(run, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    fingerprint, log_prob, absent = done.stdout.splitlines()
    assert fingerprint == "transformers:org/tiny:0123456789abcdef:float32"
    expected = Naive(llama).log_prob((Part("field", "a film"),), " great")
    assert float(log_prob) == pytest.approx(expected, abs=2e-5)
    assert "model: 'org/absent' is not a folder, and the hub does not have it" in absent
