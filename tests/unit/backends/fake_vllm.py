"""vLLM's HTTP API in this process, over a model that is a formula."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from fedone_sdk import assets

tokenizers = pytest.importorskip("tokenizers")

TOKENIZER = assets.path("roberta_mini") / "tokenizer.json"
MAX_LENGTH = 64


def log_prob(before: list[int], token: int) -> float:
    """The fake model's logit: a float32 number that depends on token and context."""
    value = -0.01 - (sum(before) * 31 + len(before) * 7 + token * 13) % 997 / 100
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


class FakeVllm:
    """vLLM's dialect, as 0.32 speaks it; `overrides` has the answers that replace a path's."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.headers: dict[str, str] = {}
        self.masked = False
        self.start = [0]
        self.root = "/models/tiny"
        self.overrides: dict[str, Callable[[], Any]] = {}
        self._tokenizer = tokenizers.Tokenizer.from_file(str(TOKENIZER))
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.method == "POST" else {}
        self.requests.append((request.path, body))
        self.headers = dict(request.headers)
        if request.path in self.overrides:
            found = self.overrides[request.path]()
            found = await found if asyncio.iscoroutine(found) else found
            return found if isinstance(found, web.StreamResponse) else web.json_response(found)
        handlers = {
            "/v1/models": self._models,
            "/version": lambda body: {"version": "0.32.0"},
            "/tokenize": self._tokenize,
            **({"/pooling": self._pool} if self.masked else {"/v1/completions": self._complete}),
        }
        if request.path not in handlers:
            return web.json_response({"detail": "Not Found"}, status=404)
        found = handlers[request.path](body)
        return found if isinstance(found, web.StreamResponse) else web.json_response(found)

    def asked(self, path: str) -> list[dict[str, Any]]:
        return [body for seen, body in self.requests if seen == path]

    def _models(self, body: dict[str, Any]) -> object:
        card = {"id": "tiny", "root": self.root, "max_model_len": MAX_LENGTH}
        return {"object": "list", "data": [{"id": "lora"}, card]}

    def _tokenize(self, body: dict[str, Any]) -> object:
        found = self._tokenizer.encode(body["prompt"], add_special_tokens=False)
        ids, names = found.ids, found.tokens
        if body["add_special_tokens"]:
            end = [2] if self.masked else []
            ids = [*self.start, *ids, *end]
            names = [*("<s>" for _ in self.start), *names, *("</s>" for _ in end)]
        return {"count": len(ids), "tokens": ids, "token_strs": names}

    def _complete(self, body: dict[str, Any]) -> object:
        prompts = body["prompt"]
        choices = []
        for index, ids in enumerate(prompts):
            assert 0 < len(ids) <= MAX_LENGTH - body["max_tokens"]
            shown = {
                f"token_id:{token}": log_prob(ids, token)
                for token in (500, *body.get("logprob_token_ids", ()))
            }
            prompt = [
                {str(token): {"logprob": log_prob(ids[:place], token), "rank": 9}}
                if place
                else None
                for place, token in enumerate(ids)
            ]
            choices.append(
                {
                    "index": index,
                    "text": f" text {index}",
                    "logprobs": {"top_logprobs": [shown]} if body.get("logprobs") == 0 else None,
                    "prompt_logprobs": prompt if body.get("prompt_logprobs") == 0 else None,
                }
            )
        return {
            "choices": choices[::-1],  # `index` says which is which.
            "system_fingerprint": "vllm-0.32.0-abc",
            "usage": {"prompt_tokens": sum(map(len, prompts)), "completion_tokens": len(choices)},
        }

    def _pool(self, body: dict[str, Any]) -> object:
        data = body["data"]
        if "token_ids" not in data:
            error = {"message": "data.token_ids: Field required", "code": 400}
            return web.json_response({"error": error}, status=400)
        rows = [
            [log_prob(ids, label) for label in data["label_token_ids"]] for ids in data["token_ids"]
        ]
        num_tokens = sum(map(len, data["token_ids"]))
        return {"data": {"log_probs": rows, "prompt_tokens": num_tokens}}


@asynccontextmanager
async def serving() -> AsyncIterator[FakeVllm]:
    fake = FakeVllm()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", fake.handle)
    async with TestServer(app) as running:
        fake.url = str(running.make_url("")).rstrip("/")
        yield fake


def ids_of(text: str) -> list[int]:
    tokenizer = tokenizers.Tokenizer.from_file(str(TOKENIZER))
    return list(tokenizer.encode(text, add_special_tokens=False).ids)
