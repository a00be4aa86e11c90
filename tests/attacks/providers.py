"""Attacks by a provider: bills that are too low, too high or absurd, and answers without an end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from decimal import Decimal
from pathlib import Path

import pytest
from aiohttp import web

from fedone_sdk.aggregator.http.requests import listening
from fedone_sdk.backends import ModelClient, Query
from fedone_sdk.backends.openai import OpenAIBackend
from fedone_sdk.budget import Budget, BudgetGuard, Price, Usage
from fedone_sdk.errors import BackendUnavailable, BudgetExhausted
from fedone_sdk.spec import LimitsSpec, RetrySpec
from fedone_sdk.task import Part
from tests.attacks import Attack, Succeeded
from tests.fake_openai import FakeOpenAI

LABELS = (" terrible", " great")
PRICE = Price(prompt=Decimal(5), completion=Decimal(15))
Tokens = tuple[int, int]
Bills = Callable[[int, Tokens], tuple[Tokens, Tokens]]


def under_reports(share: float) -> Bills:
    return lambda _, tokens: (tokens, (int(tokens[0] * share), int(tokens[1] * share)))


def reasons(hidden: int, growth: int) -> Bills:
    """Hidden reasoning, of some more tokens with each request."""

    def bills(number: int, tokens: Tokens) -> tuple[Tokens, Tokens]:
        more = tokens[0], tokens[1] + hidden + growth * number
        return more, more

    return bills


async def billed_under(cap: Budget, bills: Bills, concurrency: int) -> list[Usage]:
    """What a real server bills for each request until the cap ends them."""
    guard = BudgetGuard(cap)
    async with FakeOpenAI(bills=bills) as server:
        adapter = OpenAIBackend(
            "fake-1", base_url=server.base_url, api_key_env=None, max_input_tokens=64
        )
        limits = LimitsSpec(concurrency=concurrency)
        async with ModelClient(adapter, retry=RetrySpec(), limits=limits, price=PRICE) as backend:

            async def ask(number: int) -> bool:
                part = Part("field", f"review {number} was")
                query = Query(inputs=((part,),), label_words=LABELS, payer=guard)
                try:
                    await backend.score(query)
                except BudgetExhausted:
                    return False
                return True

            number = 0
            while all(await asyncio.gather(*(ask(number + more) for more in range(64)))):
                number += 64
                assert number < 2_000
    return [
        PRICE.priced(
            Usage(prompt_tokens=one.prompt_tokens, completion_tokens=one.completion_tokens)
        )
        for one in server.received
    ]


def _overshoots(bills: Bills, tokens: int) -> Callable[[Path], Awaitable[str]]:
    async def attack(folder: Path) -> str:
        billed = await billed_under(Budget(tokens=tokens), bills, concurrency=32)
        sizes = [one.prompt_tokens + one.completion_tokens for one in billed]
        if sum(sizes) > tokens + sizes[0]:
            raise Succeeded(f"{sum(sizes):,} tokens at a cap of {tokens:,}")
        return f"{sum(sizes):,} tokens at a cap of {tokens:,}"

    return attack


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


ATTACKS = (
    Attack(
        name="a provider reports 10^30 tokens",
        before="a ValidationError: the answer is paid for and lost, and the run pauses",
        run=_reports_huge,
    ),
    Attack(
        name="a provider's answer does not end",
        before="all that it sends within a minute is read into memory",
        run=_never_ends,
    ),
    Attack(
        name="a provider reports 0 tokens",
        before="29,256 tokens under a cap of 10,000; the ledger says 0",
        run=_overshoots(under_reports(0.0), 10_000),
    ),
    Attack(
        name="a provider bills hidden reasoning",
        before="27,249 tokens under a cap of 20,000",
        run=_overshoots(reasons(736, 0), 20_000),
    ),
)
