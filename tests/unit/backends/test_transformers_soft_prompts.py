"""Soft prompts of the transformers backend, against independent computations."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from fedone_sdk.backends import AnswerCache, ModelClient, Query, query_for
from fedone_sdk.backends.transformers import TransformersBackend
from fedone_sdk.errors import BackendError
from fedone_sdk.glue import glue_task
from fedone_sdk.soft_prompt import SoftPrompt
from fedone_sdk.task import Part, TaskSpec
from tests.weights import random_model

WHY = "the extra `torch` is not installed: pip install 'fedone-sdk[torch]'"
torch = pytest.importorskip("torch", reason=WHY)
transformers = pytest.importorskip("transformers", reason=WHY)
tokenizers = pytest.importorskip("tokenizers")
functional = torch.nn.functional

CLOZE = glue_task("sst2")
ASKED = TaskSpec(
    template="{prompt} Review: {sentence} Sentiment:", labels={"0": " terrible", "1": " great"}
)
ROWS: tuple[dict[str, Any], ...] = (
    {"sentence": "a gorgeous , witty , seductive movie ."},
    {"sentence": "dull ."},
    {"sentence": "it 's slow -- very , very slow , and by the end nobody cares who did it ."},
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "roberta": ("RobertaForMaskedLM", {"max_position_embeddings": 98}),
    "gpt2": ("GPT2LMHeadModel", {}),
    # Two query heads share one of the keys.
    "llama": ("LlamaForCausalLM", {"num_key_value_heads": 2}),
}
CAUSAL = ("gpt2", "llama")
KV_WIDTH = {"roberta": 32, "gpt2": 32, "llama": 16}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small random models; the causal ones start their inputs with <s>."""
    return {
        name: random_model(
            tmp_path_factory.mktemp(name), kind, random_biases=True, num_attention_heads=4, **shape
        )
        for name, (kind, shape) in MODELS.items()
    }


def backend(model: Path, **options: Any) -> TransformersBackend:
    return TransformersBackend(model, **{"device": "cpu"} | options)


def task_of(name: str) -> TaskSpec:
    return ASKED if name in CAUSAL else CLOZE


def random_prompt(name: str, kind: Any, length: int = 5, seed: int = 1) -> SoftPrompt:
    shape = (length, 32) if kind == "embeddings" else (2 * 2 * length, KV_WIDTH[name])
    return SoftPrompt.of(kind, torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def load(name: str, folder: Path) -> Any:
    return getattr(transformers, MODELS[name][0]).from_pretrained(folder).eval()


class Plain:
    """The models in plain torch: one row, no padding, no library but for reading the weights.

    Args:
        prefix: Per layer the keys and the values before the input's, shape (n, heads x size).
    """

    def __init__(self, name: str, folder: Path, prefix: Any = None) -> None:
        self.weights = load(name, folder).state_dict()
        self.prefix = prefix
        self.start = 0 if prefix is None else prefix.shape[2]
        self.run = getattr(self, name)

    def log_probs(self, ids: list[int], vectors: Any = None, at: int = 0) -> Any:
        """Shape (length, vocabulary); `vectors` stand in the place of ids from `at` on."""
        name = next(key for key in self.weights if key.endswith(("word_embeddings.weight",
                    "wte.weight", "embed_tokens.weight")))  # fmt: skip
        embedded = self.weights[name][torch.tensor(ids)]
        if vectors is not None:
            embedded = torch.cat([embedded[:at], vectors, embedded[at:]])
        return self.run(embedded, torch.arange(self.start, self.start + len(embedded)))

    def linear(self, name: str, x: Any) -> Any:
        bias = self.weights.get(f"{name}.bias")
        return functional.linear(x, self.weights[f"{name}.weight"], bias)

    def norm(self, name: str, x: Any) -> Any:
        weight, bias = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        if bias is None:
            return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
        x = x - x.mean(-1, keepdim=True)
        eps = 1e-12 if "roberta" in name or "lm_head" in name else 1e-5
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight + bias

    def attend(self, layer: int, q: Any, k: Any, v: Any, *, causal: bool) -> Any:
        """Shapes (length, heads x 8); several query heads may share keys."""
        if self.prefix is not None:
            k = torch.cat([self.prefix[layer, 0], k])
            v = torch.cat([self.prefix[layer, 1], v])
        q, k, v = (x.view(len(x), -1, 8).transpose(0, 1) for x in (q, k, v))
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        scores = q @ k.transpose(1, 2) / math.sqrt(8)
        if causal:
            seen = torch.ones(scores.shape[1:]).tril(self.start).bool()
            scores = scores.masked_fill(~seen, -math.inf)
        return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)

    def roberta(self, x: Any, positions: Any) -> Any:
        base = "roberta.embeddings."
        x = x + self.weights[base + "token_type_embeddings.weight"][0]
        x = x + self.weights[base + "position_embeddings.weight"][positions + 2]
        x = self.norm(base + "LayerNorm", x)
        for layer in range(2):
            name = f"roberta.encoder.layer.{layer}."
            q, k, v = (
                self.linear(f"{name}attention.self.{part}", x) for part in ("query", "key", "value")
            )
            seen = self.attend(layer, q, k, v, causal=False)
            seen = self.linear(name + "attention.output.dense", seen)
            x = self.norm(name + "attention.output.LayerNorm", x + seen)
            grown = functional.gelu(self.linear(name + "intermediate.dense", x))
            grown = self.linear(name + "output.dense", grown)
            x = self.norm(name + "output.LayerNorm", x + grown)
        x = self.norm("lm_head.layer_norm", functional.gelu(self.linear("lm_head.dense", x)))
        decoder = self.weights["roberta.embeddings.word_embeddings.weight"]
        return (x @ decoder.T + self.weights["lm_head.bias"]).log_softmax(-1)

    def gpt2(self, x: Any, positions: Any) -> Any:
        def convolve(name: str, x: Any) -> Any:
            return x @ self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

        x = x + self.weights["transformer.wpe.weight"][positions]
        for layer in range(2):
            name = f"transformer.h.{layer}."
            q, k, v = convolve(name + "attn.c_attn", self.norm(name + "ln_1", x)).chunk(3, -1)
            seen = self.attend(layer, q, k, v, causal=True)
            x = x + convolve(name + "attn.c_proj", seen)
            grown = convolve(name + "mlp.c_fc", self.norm(name + "ln_2", x))
            grown = functional.gelu(grown, approximate="tanh")
            x = x + convolve(name + "mlp.c_proj", grown)
        x = self.norm("transformer.ln_f", x)
        return (x @ self.weights["transformer.wte.weight"].T).log_softmax(-1)

    def llama(self, x: Any, positions: Any) -> Any:
        angles = positions[:, None] / 10000 ** (torch.arange(0, 8, 2) / 8)
        cos, sin = (torch.cat([f(angles)] * 2, -1)[:, None] for f in (torch.cos, torch.sin))

        def turned(x: Any) -> Any:
            x = x.view(len(x), -1, 8)
            first, second = x.chunk(2, -1)
            return (x * cos + torch.cat([-second, first], -1) * sin).flatten(1)

        for layer in range(2):
            name = f"model.layers.{layer}."
            h = self.norm(name + "input_layernorm", x)
            q, k, v = (self.linear(f"{name}self_attn.{part}_proj", h) for part in "qkv")
            seen = self.attend(layer, turned(q), turned(k), v, causal=True)
            x = x + self.linear(name + "self_attn.o_proj", seen)
            h = self.norm(name + "post_attention_layernorm", x)
            gate = functional.silu(self.linear(name + "mlp.gate_proj", h))
            x = x + self.linear(name + "mlp.down_proj", gate * self.linear(name + "mlp.up_proj", h))
        return self.linear("lm_head", self.norm("model.norm", x)).log_softmax(-1)


def asked_about(ours: TransformersBackend, query: Query, name: str) -> list[tuple[list[int], int]]:
    """Per input its ids without a soft prompt, and the position that answers."""
    encoder = ours._loaded().encoder
    if name in CAUSAL:
        return [(ids := encoder.encode(rendered), len(ids) - 1) for rendered in query.inputs]
    return [encoder.encode(rendered)[:2] for rendered in query.inputs]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["embeddings", "key_values"])
async def test_scores_are_those_of_plain_torch(
    name: str, kind: Any, folders: dict[str, Path]
) -> None:
    soft, task = random_prompt(name, kind), task_of(name)
    async with backend(folders[name]) as ours:
        query = query_for(task, soft, ROWS, backend=ours)
        answer = await ours.score(query)
        (*labels,) = (tokens for (tokens,) in ours._loaded().label_ids(task.label_words))
        places = asked_about(ours, query, name)
    vectors = torch.from_numpy(soft.array())
    assert len({len(ids) for ids, _ in places}) == 3  # so that there is padding
    for (ids, position), found in zip(places, answer.log_probs, strict=True):
        if kind == "embeddings":  # the prompt stands behind <s>
            scores = Plain(name, folders[name]).log_probs(ids, vectors, at=1)[position + 5]
        else:
            prefix = vectors.view(2, 2, 5, -1)
            scores = Plain(name, folders[name], prefix).log_probs(ids)[position]
        assert found == pytest.approx(scores[labels].tolist(), abs=5e-5)
    num_ids = sum(len(ids) for ids, _ in places)
    assert answer.usage.prompt_tokens == num_ids + (15 if kind == "embeddings" else 0)


@pytest.mark.parametrize("name", MODELS)
async def test_embeddings_of_words_are_the_words(name: str, folders: dict[str, Path]) -> None:
    words, task = " a really good film", task_of(name)
    async with backend(folders[name]) as ours:
        model = ours._loaded()
        ids = model.encoder._tokenise(words).ids
        soft = SoftPrompt.of("embeddings", model.embeddings[torch.tensor(ids)].numpy())
        found = await ours.score(query_for(task, soft, ROWS, backend=ours))
        expected = await ours.score(query_for(task, words, ROWS, backend=ours))
    for ours_row, row in zip(found.log_probs, expected.log_probs, strict=True):
        assert ours_row == pytest.approx(row, abs=1e-5)
    assert found.usage == expected.usage


@pytest.mark.parametrize("name", CAUSAL)
async def test_keys_and_values_of_words_are_the_words(name: str, folders: dict[str, Path]) -> None:
    """What a causal model remembers of a text is that text."""
    before = [0, 700, 42, 1234]
    model = load(name, folders[name])
    with torch.no_grad():
        cache = model(torch.tensor([before]), use_cache=True).past_key_values
    pairs = [pair for layer in cache.layers for pair in (layer.keys, layer.values)]
    matrix = torch.cat([pair[0].transpose(0, 1).flatten(1) for pair in pairs])
    async with backend(folders[name]) as ours:
        soft = SoftPrompt.of("key_values", matrix.numpy())
        query = query_for(ASKED, soft, ROWS, backend=ours)
        answer = await ours.score(query)
        (*labels,) = (tokens for (tokens,) in ours._loaded().label_ids(ASKED.label_words))
        places = asked_about(ours, query, name)
    for (ids, _), found in zip(places, answer.log_probs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*before, *ids]])).logits[0, -1]
        assert found == pytest.approx(logits.log_softmax(-1)[labels].tolist(), abs=5e-5)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["embeddings", "key_values"])
async def test_padding_changes_nothing(name: str, kind: Any, folders: dict[str, Path]) -> None:
    soft, task = random_prompt(name, kind), task_of(name)
    rows = (*ROWS, {"sentence": " word" * 300})
    async with backend(folders[name]) as ours, backend(folders[name], max_batch=2) as split:
        together = (await ours.score(query_for(task, soft, rows, backend=ours))).log_probs
        in_twos = (await split.score(query_for(task, soft, rows, backend=split))).log_probs
        for row, found, twos in zip(rows, together, in_twos, strict=True):
            (alone,) = (await ours.score(query_for(task, soft, [row], backend=ours))).log_probs
            assert found == pytest.approx(alone, abs=1e-5)
            assert twos == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["embeddings", "key_values"])
async def test_fields_make_room(name: str, kind: Any, folders: dict[str, Path]) -> None:
    task = task_of(name)
    rows = [{"sentence": " word" * 300}]
    async with backend(folders[name]) as ours:
        query = query_for(task, random_prompt(name, kind, length=40), rows, backend=ours)
        usage = (await ours.score(query)).usage
        assert usage.prompt_tokens == (96 if kind == "embeddings" else 56)
        assert usage.prompt_tokens <= (await ours.quote(query)).prompt_tokens
        too_long = query_for(task, random_prompt(name, kind, length=96), rows, backend=ours)
        with pytest.raises(BackendError, match="without its text fields, the model takes 96"):
            await ours.score(too_long)


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("kind", ["embeddings", "key_values"])
async def test_what_it_writes_is_greedy(name: str, kind: Any, folders: dict[str, Path]) -> None:
    task = TaskSpec(template=ASKED.template, loss="score", label_field="reference", max_tokens=4)
    soft = random_prompt(name, kind)
    vectors = torch.from_numpy(soft.array())
    prefix = None if kind == "embeddings" else vectors.view(2, 2, 5, -1)
    plain = Plain(name, folders[name], prefix)
    async with backend(folders[name], max_batch=2) as ours:
        query = query_for(task, soft, ROWS, backend=ours)
        answer = await ours.score(query)
        decode = ours._loaded().encoder.decode
        places = asked_about(ours, query, name)
    for (ids, _), text in zip(places, answer.texts, strict=True):
        written = list(ids)
        for _ in range(4):
            given = vectors if kind == "embeddings" else None
            written.append(int(plain.log_probs(written, given, at=1)[-1].argmax()))
        new = written[len(ids) :]
        assert text == decode(new[: new.index(2)] if 2 in new else new)


@pytest.mark.parametrize("kind", ["embeddings", "key_values"])
async def test_bfloat16_is_close(kind: Any, folders: dict[str, Path]) -> None:
    soft = random_prompt("roberta", kind)
    async with (
        backend(folders["roberta"]) as exact,
        backend(folders["roberta"], dtype="bfloat16") as half,
    ):
        query = query_for(CLOZE, soft, ROWS, backend=exact)
        expected, found = [(await each.score(query)).log_probs for each in (exact, half)]
    assert expected != found
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1.0, rtol=0)


async def test_shapes_and_the_embedding_space(folders: dict[str, Path]) -> None:
    for name, width in KV_WIDTH.items():
        async with backend(folders[name]) as ours:
            assert ours.takes == {"embeddings", "key_values"}
            assert await ours.soft_shape("embeddings", 7) == (7, 32)
            assert await ours.soft_shape("key_values", 7) == (2 * 2 * 7, width)
            space = await ours.embedding_space()
        matrix = load(name, folders[name]).get_input_embeddings().weight.detach().numpy()
        assert space.size == 32
        assert space.std == pytest.approx(float(matrix.astype("f8").std()), rel=1e-6)


async def test_a_soft_prompt_for_another_model(folders: dict[str, Path]) -> None:
    wrong: list[Any] = [
        SoftPrompt.of("embeddings", torch.zeros(5, 16)),
        SoftPrompt.of("key_values", torch.zeros(20, 16)),
        SoftPrompt.of("key_values", torch.zeros(6, 32)),  # of three layers
    ]
    async with backend(folders["roberta"]) as ours:
        for soft in wrong:
            with pytest.raises(BackendError, match="is for another model"):
                await ours.score(query_for(CLOZE, soft, ROWS, backend=ours))


async def test_inputs_without_a_place(folders: dict[str, Path]) -> None:
    words = {"label_words": CLOZE.label_words}
    end = (Part("mask", ""),)
    for name, tail in (("roberta", end), ("llama", ())):
        soft = random_prompt(name, "embeddings")
        async with backend(folders[name]) as ours:
            for parts in (
                (Part("field", "x"), *tail),
                (Part("prompt", "y"), Part("field", "x"), *tail),
                (Part("prompt", ""), Part("prompt", ""), Part("field", "x"), *tail),
            ):
                with pytest.raises(BackendError, match="stand at the place of the prompt"):
                    await ours.score(Query(inputs=(parts,), soft_prompt=soft, **words))


async def test_a_cache_tells_soft_prompts_apart(folders: dict[str, Path]) -> None:
    prompts = [
        random_prompt("roberta", kind, seed=seed)
        for kind in ("embeddings", "key_values")
        for seed in (1, 2)
    ]
    async with ModelClient(backend(folders["roberta"]), cache=AnswerCache()) as cached:
        queries = [query_for(CLOZE, soft, ROWS, backend=cached) for soft in prompts]
        first = [await cached.score(query) for query in queries]
        again = [await cached.score(query) for query in queries]
    assert len({answer.log_probs for answer in first}) == 4
    assert cached.misses == 4
    assert [answer.log_probs for answer in again] == [answer.log_probs for answer in first]
