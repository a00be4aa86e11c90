"""Attacks by a provider: absurd bills, and answers without an end."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from aiohttp import web

from fedone_sdk.aggregator.http.application import listening
from fedone_sdk.backends import ModelClient, Query
from fedone_sdk.backends.openai import OpenAIBackend
from fedone_sdk.budget import Budget, BudgetGuard
from fedone_sdk.errors import BackendUnavailable
from fedone_sdk.spec import LimitsSpec, RetrySpec
from fedone_sdk.task import Part
from tests.attacks import Succeeded, attack
from tests.fake_openai import FakeOpenAI

LABELS = (" terrible", " great")


@attack(
    "a provider reports 10^30 tokens", before="a ValidationError after the request was paid for"
)
async def _reports_huge(folder: Path) -> str:
    """Tokens beyond what the ledger can add up."""
    guard = BudgetGuard(Budget(queries=3))
    async with FakeOpenAI(bills=lambda *_: ((10**30, 1), (10**30, 1))) as server:
        adapter = OpenAIBackend("fake-1", base_url=server.base_url, api_key_env=None)
        async with ModelClient(adapter, retry=RetrySpec(), limits=LimitsSpec()) as backend:
            for number in range(3):
                part = Part("field", f"review {number} was")
                try:
                    await backend.score(Query(inputs=((part,),), label_words=LABELS, payer=guard))
                except ValueError as exc:
                    raise Succeeded("the answer is paid for and lost") from exc
    return f"{(await guard.account()).spent.prompt_tokens:,} tokens are charged for 3 requests"


@attack(
    "a provider's answer does not end", before="it is read to its end; 100,000 choices take 94 s"
)
async def _never_ends(folder: Path) -> str:
    """Answers, and errors, of 256 MiB."""
    sent = []

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=200 if len(sent) % 2 else 500)
        await response.prepare(request)
        sent.append(0)
        with suppress(ConnectionError):
            while sent[-1] < 256:
                await response.write(b" " * 2**20)
                sent[-1] += 1
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with listening(app) as url:
        adapter = OpenAIBackend("m", base_url=f"{url}/v1", api_key_env=None)
        async with ModelClient(adapter, retry=RetrySpec(attempts=2)) as backend:
            with pytest.raises(BackendUnavailable, match="longer than"):
                await backend.score(Query(inputs=((Part("field", "it was"),),), label_words=LABELS))
    if max(sent) > 32:
        raise Succeeded(f"{max(sent)} MiB are read")
    return "4 MiB are read, then the connection is closed"
