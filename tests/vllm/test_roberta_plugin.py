"""RoBERTa on a real vLLM server with our plugin, against transformers on the same model."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from fedone_sdk.backends import vllm_roberta

from .conftest import DeadServer, VllmServer, serving

START, END, MASK = 0, 2, 8191
NUM_TOKENS = 8192
TOLERANCE = 1e-4  # nats
GOOD = [START, 68, MASK, END]
PLUGIN = ("--io-processor-plugin", "fedone_roberta")


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    # Every request at once; the server queues them.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


async def post(
    http: aiohttp.ClientSession, server: VllmServer, body: dict[str, Any], path: str = "/pooling"
) -> tuple[int, Any]:
    async with http.post(server.url + path, json={"model": server.model} | body) as answer:
        return answer.status, await answer.json()


async def log_probs(
    http: aiohttp.ClientSession,
    server: VllmServer,
    inputs: Sequence[list[int]],
    labels: Sequence[int],
) -> Any:
    import numpy as np

    data = {"token_ids": inputs, "label_token_ids": labels}
    status, answer = await post(http, server, {"data": data})
    assert status == 200, answer
    assert answer["data"]["prompt_tokens"] == sum(map(len, inputs))
    return np.array(answer["data"]["log_probs"])


def reference(folder: Path, inputs: Sequence[list[int]]) -> Any:
    """Transformers' log-probabilities at the mask; shape (inputs, vocabulary)."""
    import torch
    from transformers import RobertaForMaskedLM

    model = RobertaForMaskedLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    with torch.inference_mode():
        for ids in inputs:  # One by one: no padding, and no choice of a mask for it.
            logits = model(input_ids=torch.tensor([ids])).logits[0, ids.index(MASK)]
            rows.append(logits.log_softmax(-1))
    return torch.stack(rows).numpy()


@pytest.fixture(scope="module")
def clozes(roberta_server: VllmServer, sst2: list[dict[str, Any]]) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(roberta_server.folder / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    return [
        [START, *encode(f" {row['sentence']} It was"), MASK, *encode("."), END]
        for row in sst2[:200]
    ]


async def test_concurrent_requests_get_the_numbers_of_transformers(
    http: aiohttp.ClientSession, roberta_server: VllmServer, clozes: list[list[int]]
) -> None:
    import numpy as np

    expected = reference(roberta_server.folder, clozes)
    rng = random.Random(0)

    async def ask(size: int, num_labels: int) -> float:
        rows = rng.sample(range(len(clozes)), size)
        labels = rng.sample(range(NUM_TOKENS), num_labels)
        found = await log_probs(http, roberta_server, [clozes[row] for row in rows], labels)
        assert found.shape == (size, num_labels)
        return float(np.abs(found - expected[rows][:, labels]).max())

    shapes = [(rng.choice((1, 2, 5, 32)), rng.choice((1, 2, 3, 20, 128))) for _ in range(300)]
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(ask(*shape)) for shape in shapes]
    assert max(task.result() for task in asked) < TOLERANCE


@pytest.mark.parametrize("odd_roberta", [True, False], indirect=True, ids=["tied", "untied"])
async def test_the_decoder_is_the_one_of_the_checkpoint(
    http: aiohttp.ClientSession, odd_roberta: Path, tmp_path: Path
) -> None:
    import numpy as np

    inputs = [GOOD, [START, MASK, *range(100, 129), END]]
    labels = [0, 5, 8191, 8192, 8202]
    with serving(odd_roberta, tmp_path / "log", "--max-model-len", "32", *PLUGIN) as server:
        found = await log_probs(http, server, inputs, labels)
    expected = reference(odd_roberta, inputs)[:, labels]
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)


async def test_the_longest_and_the_shortest_input(
    http: aiohttp.ClientSession, roberta_server: VllmServer
) -> None:
    import numpy as np

    inputs = [[START, *range(100, 225), MASK, END], [MASK]]
    assert len(inputs[0]) == 128
    found = await log_probs(http, roberta_server, inputs, [592, 7, 592])
    expected = reference(roberta_server.folder, inputs)[:, [592, 7, 592]]
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)


def data(token_ids: object = (GOOD,), label_token_ids: object = (5,), **more: object) -> Any:
    return {"data": {"token_ids": token_ids, "label_token_ids": label_token_ids, **more}}


BAD = {
    "no mask": (data([GOOD, [START, 5, END]]), "token_ids.1: needs the mask token, id 8191, exac"),
    "two masks": (data([[START, MASK, 5, MASK, END]]), "exactly once, and has it 2 times"),
    "empty input": (data([[]]), "token_ids.0: needs the mask token"),
    "too long": (data([[MASK] + [5] * 128]), "token_ids.0: has 129 tokens; the server takes 128"),
    "id too large": (data([[*GOOD, 8192]]), "token_ids.0: 8192 is not a token id (0 to"),
    "id beyond 64 bits": (data([[*GOOD, 1 << 70]]), "is not a token id"),
    "label too large": (data(label_token_ids=[5, 8192]), "label_token_ids: 8192 is not a token"),
    "no labels": (data(label_token_ids=[]), "data.label_token_ids: List should have at least 1"),
    "an id as text": (data([["5", MASK]]), "data.token_ids.0.0: Input should be a valid integer"),
    "unknown key": (data(mask=3), "data.mask: Extra inputs are not permitted"),
    "missing key": ({"data": {"token_ids": [GOOD]}}, "data.label_token_ids: Field required"),
    "mask cut off": (data() | {"truncate_prompt_tokens": 2}, "send no truncate_prompt_tokens"),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_request_is_refused_and_harms_no_caller(
    http: aiohttp.ClientSession, roberta_server: VllmServer, name: str
) -> None:
    body, message = BAD[name]
    before = await log_probs(http, roberta_server, [GOOD], [5])
    answers = await asyncio.gather(
        *(log_probs(http, roberta_server, [GOOD], [5]) for _ in range(4)),
        post(http, roberta_server, body),
        *(log_probs(http, roberta_server, [GOOD], [5]) for _ in range(4)),
    )
    status, problem = answers.pop(4)
    assert (status, problem["error"]["type"]) == (400, "BadRequestError")
    assert message in problem["error"]["message"]
    assert "\n" not in problem["error"]["message"]
    for found in answers:
        assert abs(found - before).max() < TOLERANCE


async def test_requests_past_the_plugin_do_not_stop_the_engine(
    http: aiohttp.ClientSession, roberta_server: VllmServer
) -> None:
    past = [{"input": "good <mask>"}, {"input": [GOOD, [MASK, MASK]]}, {"input": [[START, END]]}]
    *others, found = await asyncio.gather(
        *(post(http, roberta_server, body) for body in past),
        log_probs(http, roberta_server, [GOOD], [5, 6]),
    )
    for status, answer in others:
        assert status == 200
        assert all(row["data"] == [] for row in answer["data"])
    assert found.shape == (1, 2)
    await log_probs(http, roberta_server, [GOOD], [5])


async def test_a_client_that_disconnects_harms_no_caller(
    http: aiohttp.ClientSession, roberta_server: VllmServer
) -> None:
    before = await log_probs(http, roberta_server, [GOOD], [5])
    many = [asyncio.ensure_future(post(http, roberta_server, data([GOOD] * 32))) for _ in range(50)]
    await asyncio.wait(many, return_when=asyncio.FIRST_COMPLETED)
    for request in many:
        request.cancel()
    await asyncio.gather(*many, return_exceptions=True)
    assert abs(await log_probs(http, roberta_server, [GOOD], [5]) - before).max() < TOLERANCE


async def test_the_server_tells_a_client_what_it_needs(
    http: aiohttp.ClientSession, roberta_server: VllmServer
) -> None:
    async def tokenise(prompt: str, **options: bool) -> Any:
        body = {"prompt": prompt, "return_token_strs": True, **options}
        status, answer = await post(http, roberta_server, body, "/tokenize")
        assert status == 200
        return answer

    around = await tokenise("<mask>")
    assert around["tokens"] == [START, MASK, END]
    assert around["token_strs"] == ["<s>", "<mask>", "</s>"]
    assert around["max_model_len"] == 128
    great = await tokenise(" great", add_special_tokens=False)
    assert great["token_strs"] == ["Ġgreat"]
    # Why text of users must not go there whole: its special tokens would be special.
    assert MASK in (await tokenise("a <mask>", add_special_tokens=False))["tokens"]
    assert MASK not in (await tokenise("<", add_special_tokens=False))["tokens"]
    assert MASK not in (await tokenise("mask>", add_special_tokens=False))["tokens"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        # vLLM's own choice, from config.json, is 130.
        ((), "start vLLM with --max-model-len 128"),
        (
            ("--max-model-len", "128", "--enable-chunked-prefill"),
            "start vLLM without --enable-chunk",
        ),
    ],
)
def test_options_that_give_wrong_numbers_are_refused_at_the_start(
    tmp_path: Path, roberta_server: VllmServer, options: tuple[str, ...], message: str
) -> None:
    server = serving(roberta_server.folder, tmp_path / "log", *PLUGIN, *options)
    with pytest.raises(DeadServer), server:
        pass
    assert message in (tmp_path / "log").read_text()


def test_another_model_is_refused_at_the_start(tmp_path: Path, tiny_llama: Path) -> None:
    options = ("--runner", "pooling", *PLUGIN)
    with pytest.raises(DeadServer), serving(tiny_llama, tmp_path / "log", *options):
        pass
    assert "serves RobertaForMaskedLM, but the model is LlamaForC" in (tmp_path / "log").read_text()


def test_vllm_finds_both_parts_by_one_name() -> None:
    from importlib.metadata import entry_points

    for group, function in (
        ("vllm.general_plugins", vllm_roberta.register),
        ("vllm.io_processor_plugins", vllm_roberta.io_processor),
    ):
        (plugin,) = entry_points(group=group, name="fedone_roberta")
        assert plugin.load() is function
