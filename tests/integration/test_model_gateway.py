"""`fedone gateway` over real sockets: what it answers, refuses, charges, and tells to whom."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import structlog
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from fedone_sdk.aggregator.http import listening
from fedone_sdk.backends import Answer, CachedBackend, LLMBackend, Query
from fedone_sdk.backends.build import build_backend
from fedone_sdk.backends.gateway import GatewayBackend
from fedone_sdk.backends.wrappers import BudgetedBackend, RetryingBackend, SplitBackend
from fedone_sdk.budget import (
    NOTHING,
    Account,
    Budget,
    BudgetGuard,
    MemoryLedger,
    Price,
    SqliteLedger,
    Usage,
)
from fedone_sdk.errors import (
    PROBLEMS,
    BackendBlocked,
    BackendError,
    BackendUnavailable,
    BudgetExhausted,
    LabelWordError,
    SpecError,
)
from fedone_sdk.gateway import CallerLimits, ModelGateway, build_app
from fedone_sdk.messages import ModelInfo, ModelProblem, Problem
from fedone_sdk.spec import GatewaySpec, RetrySpec, RunSpec
from fedone_sdk.task import Part, Rendered
from fedone_sdk.testing import LoopbackFederation, ManualClock, ScriptedBackend
from fedone_sdk.vocabulary import Vocabulary

ALICE, BOB = "alice-secret-7f3a", "bob-secret-91bc"
WORDS = (" no", " yes")
PRICE = Price(prompt=Decimal("0.15"), completion=Decimal("0.6"), request=Decimal("0.0000001"))


def query_of(*texts: str, **changes: Any) -> Query:
    inputs = tuple((Part("prompt", "Say: "), Part("field", text)) for text in texts)
    return replace(Query(inputs=inputs, label_words=WORDS), **changes)


class Gateways:
    """Gateways on loopback, and backends that ask them."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.url = ""

    async def start(self, backend: LLMBackend, **options: Any) -> GatewayBackend:
        gateway = ModelGateway(backend, tokens={"alice": ALICE, "bob": BOB}, **options)
        return await self.serve(build_app(gateway))

    async def serve(self, app: web.Application) -> GatewayBackend:
        self.url = await self._stack.enter_async_context(listening(app))
        return self.backend()

    def backend(self, token_env: str = "TEST_ALICE", **options: Any) -> GatewayBackend:
        found = GatewayBackend(options.pop("url", self.url), token_env=token_env, **options)
        self._stack.push_async_callback(found.aclose)
        return found

    async def raw(
        self, path: str, body: bytes | None = None, token: str | None = ALICE
    ) -> tuple[int, Problem, Any]:
        """Sends anything, and gets a refusal."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        method = "GET" if body is None else "POST"
        data = None if body is None else io.BytesIO(body)
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, self.url + path, data=data, headers=headers) as response,
        ):
            assert response.content_type == "application/problem+json"
            problem = Problem.model_validate(
                {
                    key: value
                    for key, value in (await response.json()).items()
                    if key in Problem.model_fields
                }
            )
            assert problem.status == response.status == PROBLEMS[problem.code][0]
            return response.status, problem, response.headers


@pytest.fixture
async def gateways(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gateways]:
    monkeypatch.setenv("TEST_ALICE", ALICE)
    monkeypatch.setenv("TEST_BOB", f"{BOB}\n")
    monkeypatch.setenv("TEST_WRONG", "wrong-secret")
    async with AsyncExitStack() as stack:
        yield Gateways(stack)


class Failing:
    """A gate that raises what it is given, one each query, and then lets all through."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)

    def __call__(self, query: Query) -> None:
        if self.errors:
            raise self.errors.pop(0)


class TestAnswers:
    async def test_the_same_as_the_model_itself(self, gateways: Gateways) -> None:
        model = ScriptedBackend(lambda parts, _: None if "x" in parts[1].text else (-0.1, -1 / 3))
        asked = await gateways.start(model, generated_text=True)
        query = query_of("naïve 日本 🎬", "x", "")
        assert await asked.score(query) == await ScriptedBackend.score(model, query)
        assert model.asked[0].inputs == query.inputs
        await asked.check(WORDS)
        assert asked.fingerprint == "scripted"
        assert asked.bounds == model.bounds
        assert asked.answers == model.answers
        assert asked.max_inputs == 1024
        for size in (1, 2, 3, 7, 100, 1024):
            assert asked.worst_case(size) == model.worst_case(size)
        assert asked.worst_case(1500) == Usage(queries=1, requests=2, prompt_tokens=1500)
        assert await asked.quote(query) == model.worst_case(3)

    @pytest.mark.parametrize(
        "changes",
        [
            {"want": "choice"},
            {"want": "reference", "label_words": (), "references": ("r", "s")},
            {"want": "text", "label_words": (), "max_tokens": 5},
        ],
    )
    async def test_whatever_is_asked(self, gateways: Gateways, changes: dict[str, Any]) -> None:
        model = ScriptedBackend(write=lambda parts, _: None if parts[1].text == "b" else "naïve")
        asked = await gateways.start(model, generated_text=True)
        query = query_of("a", "b", **changes)
        assert await asked.score(query) == await model.score(query)

    async def test_what_the_provider_says_of_itself(self, gateways: Gateways) -> None:
        class Talking(ScriptedBackend):
            async def score(self, query: Query) -> Answer:
                return replace(await super().score(query), model="m-2024 fp_1", censored=1)

        answer = await (await gateways.start(Talking())).score(query_of("a"))
        assert (answer.model, answer.censored) == ("m-2024 fp_1", 1)

    async def test_what_is_known_is_free(self, gateways: Gateways) -> None:
        asked = await gateways.start(CachedBackend(BudgetedBackend(ScriptedBackend())))
        assert not (await asked.score(query_of("a"))).cached
        assert await asked.quote(query_of("a")) == Usage(queries=1)
        again = await asked.score(query_of("a"))
        assert (again.cached, again.usage) == (True, NOTHING)

    async def test_a_quote_is_asked_for_once(self, gateways: Gateways) -> None:
        class Quoting(ScriptedBackend):
            quotes = 0

            async def quote(self, query: Query) -> Usage:
                self.quotes += 1
                return await super().quote(query)

        model = Quoting()
        asked = await gateways.start(CachedBackend(BudgetedBackend(model)))
        for _ in range(3):
            await asked.quote(query_of("a"))
        assert model.quotes == 1
        await asked.score(query_of("a"))
        assert await asked.quote(query_of("a")) == Usage(queries=1)

    async def test_a_client_without_a_key_tunes_through_it(self, gateways: Gateways) -> None:
        model = ScriptedBackend()
        asked = await gateways.start(CachedBackend(BudgetedBackend(model, price=PRICE)))
        spec = RunSpec.model_validate(
            {
                "task": {"template": "{prompt} {text}", "labels": {0: " no", 1: " yes"}},
                "prompt": {"length": 2, "vocabulary": {"kind": "list", "candidates": ["x", "y"]}},
                "method": {"name": "gs-bdpl", "num_samples": 4, "batch_size": 2},
                "participation": {"exchange": "losses", "trusted_clients": True},
                "budget": {"queries": 8},
                "rounds": 2,
                "evaluation": {"every": 0},
            }
        )
        rows = [{"text": f"text {n}", "label": n % 2} for n in range(4)]
        async with LoopbackFederation(spec, Vocabulary(candidates=(" x", " y"))) as federation:
            async with federation.client(rows, backend=asked) as client:
                await client.run_forever()
            result = federation.run.result()
        assert (result.status, result.rounds, result.model) == ("completed", 2, "scripted")
        assert result.spent.requests == len(model.asked)


class TestCallers:
    async def test_a_wrong_token(self, gateways: Gateways) -> None:
        model = ScriptedBackend()
        await gateways.start(model)
        wrong = gateways.backend("TEST_WRONG")
        calls = (wrong.check(WORDS), wrong.quote(query_of("a")), wrong.score(query_of("a")))
        for call in calls:
            with pytest.raises(BackendBlocked, match="the key is in TEST_WRONG") as excinfo:
                await call
            assert "secret" not in str(excinfo.value)
            assert excinfo.value.usage == NOTHING
        for path in ("/v1/model", "/v1/model/check", "/v1/model/quote", "/v1/model/score"):
            for token in (None, "", "wrong", f"{ALICE}x", "\udcff"):
                body = None if path == "/v1/model" else b"{}"
                status, problem, headers = await gateways.raw(path, body, token)
                assert (status, problem.code) == (401, "unauthorized")
                assert headers["WWW-Authenticate"] == "Bearer"
        assert model.asked == []

    @pytest.mark.parametrize("value", [None, "  \n", "tökén", "a\x00b"])
    def test_a_token_that_cannot_be(
        self, monkeypatch: pytest.MonkeyPatch, value: str | None
    ) -> None:
        monkeypatch.delenv("TEST_ALICE", raising=False)
        if value is not None:
            monkeypatch.setattr(os, "environ", {"TEST_ALICE": value})
        with pytest.raises(SpecError, match="token_env: the environment variable TEST_ALICE"):
            GatewayBackend("http://x", token_env="TEST_ALICE")

    async def test_names_pay_and_stand_in_the_logs(self, gateways: Gateways) -> None:
        model = ScriptedBackend()
        await gateways.start(model)
        with structlog.testing.capture_logs() as logs:
            await gateways.backend().score(query_of("private"))
            await gateways.backend("TEST_BOB").score(query_of("private"))
        assert [query.payer and query.payer.name for query in model.asked] == ["alice", "bob"]
        answered = [entry for entry in logs if entry["event"] == "answered"]
        assert [entry["caller"] for entry in answered] == ["alice", "bob"]
        assert answered[0]["usage"]["requests"] == 1
        assert "secret" not in str(logs)
        assert "private" not in str(logs)

    async def test_nobody_asks_more_often_than_allowed(self, gateways: Gateways) -> None:
        model, clock = ScriptedBackend(), ManualClock()
        limits = CallerLimits(client_requests_per_minute=2)
        asked = await gateways.start(model, limits=limits, clock=clock)
        await asked.score(query_of("a"))
        clock.advance(20.5)
        await asked.score(query_of("b"))
        with pytest.raises(BackendUnavailable, match="more than 2 requests a minute") as excinfo:
            await asked.score(query_of("c"))
        assert excinfo.value.retry_after_s == 40.0
        assert excinfo.value.usage == NOTHING
        await asked.quote(query_of("c"))
        await gateways.backend("TEST_BOB").score(query_of("c"))
        clock.advance(40)
        await asked.score(query_of("c"))
        assert len(model.asked) == 4


class TestLimits:
    async def test_too_much_is_refused_before_it_costs(self, gateways: Gateways) -> None:
        model = ScriptedBackend()
        limits = CallerLimits(max_inputs=2, max_text_chars=20)
        asked = await gateways.start(model, limits=limits)
        for query, told in (
            (query_of("a", "b", "c"), "inputs: 3 were sent, a query has at most 2"),
            (query_of("a", "b" * 16), r"inputs.1: has 21 characters, an input has at most 20"),
            (query_of("a" * 100_001), "inputs.0.1.1: String should have at most 100000"),
            (query_of(*("a" * 1025)), "inputs: Tuple should have at most 1024"),
            (query_of("\ud800"), "not valid Unicode|inputs.0.1.1: Input should be a valid string"),
            (query_of("a", label_words=()), "label_words go with labels"),
        ):
            with pytest.raises(BackendError, match=told) as excinfo:
                await asked.score(query)
            assert type(excinfo.value) is BackendError
            assert excinfo.value.usage == NOTHING
        assert model.asked == []
        await asked.check(WORDS)
        assert len((await SplitBackend(asked).score(query_of("a", "b", "c"))).log_probs) == 3

    async def test_a_body_that_is_too_large_or_none(self, gateways: Gateways) -> None:
        await gateways.start(ScriptedBackend())
        path = "/v1/model/score"
        assert (await gateways.raw(path, b" " * (32 * 2**20 + 1)))[1].code == "body_too_large"
        assert (await gateways.raw(path, b"{}"))[1].code == "invalid_message"
        assert (await gateways.raw(path, b"{"))[1].code == "invalid_message"
        assert (await gateways.raw(path))[1].code == "method_not_allowed"
        assert (await gateways.raw("/v1/score"))[1].code == "not_found"

    @pytest.mark.parametrize(
        ("changes", "told"),
        [
            ({"inputs": []}, "inputs: "),
            ({"inputs": [[["field", "x"]], [["bold", "x"]]]}, "inputs.1.0.0: "),
            ({"inputs": [[["field", "x", "y"]], [["field", "x"]]]}, "inputs.0.0: "),
            ({"label_words": []}, "label_words go with labels"),
            ({"label_words": [" x"] * 65}, "label_words: "),
            ({"want": "reference", "label_words": []}, "references: one per input"),
            ({"want": "text", "label_words": []}, "max_tokens goes with text"),
            ({"max_tokens": 5}, "max_tokens goes with text"),
            ({"worst": {"usd": "-1"}}, "worst.usd: "),
            ({"worst": {"requests": 0.5}}, "worst.requests: "),
            ({"payer": "bob"}, "payer: "),
        ],
    )
    async def test_a_bad_query(
        self, gateways: Gateways, changes: dict[str, Any], told: str
    ) -> None:
        model = ScriptedBackend()
        await gateways.start(model)
        query = {"inputs": [[["field", "private"]]], "label_words": list(WORDS)}
        body = json.dumps({**query, **changes}).encode()
        for path in ("/v1/model/quote", "/v1/model/score"):
            status, problem, _ = await gateways.raw(path, body)
            assert (status, problem.code) == (422, "invalid_message")
            assert told in problem.detail
            assert "private" not in problem.detail
        assert model.asked == []

    async def test_generated_text_stays_inside(self, gateways: Gateways) -> None:
        model = ScriptedBackend()
        asked = await gateways.start(model)
        await asked.check(())
        assert asked.answers == {"labels", "choice", "reference"}
        with pytest.raises(BackendBlocked, match="this gateway gives out no generated text"):
            await asked.score(query_of("a", label_words=(), want="text", max_tokens=5))
        assert model.asked == []

    async def test_what_the_model_does_not_answer(self, gateways: Gateways) -> None:
        asked = await gateways.start(ScriptedBackend(answers=["labels", "text"]))
        with pytest.raises(BackendError, match=r"want: this model answers labels$"):
            await asked.score(query_of("a", want="choice"))

    async def test_health(self, gateways: Gateways) -> None:
        class Broken(MemoryLedger):
            broken = False

            def account(self, cap: Budget | None) -> Account:
                if self.broken:
                    raise OSError("the disk is gone")
                return super().account(cap)

        ledger = Broken()
        await gateways.start(ScriptedBackend(), guard=BudgetGuard(None, ledger=ledger))
        async with aiohttp.ClientSession() as session:
            for path, broken, status in (
                ("/healthz", False, 200),
                ("/readyz", False, 200),
                ("/readyz", True, 503),
                ("/healthz", True, 200),
            ):
                ledger.broken = broken
                async with session.get(gateways.url + path) as response:
                    assert response.status == status


ERRORS = (
    BackendError("context too long", usage=Usage(requests=1)),
    BackendUnavailable("http://x: HTTP 429", usage=Usage(requests=1), retry_after_s=2.5),
    BackendUnavailable("http://x: HTTP 500", usage=NOTHING),
    BackendBlocked("http://x: the key is not valid: set KEY", usage=Usage(requests=1)),
)


class TestErrors:
    @pytest.mark.parametrize("error", ERRORS, ids=str)
    async def test_come_through_as_they_were(self, gateways: Gateways, error: BackendError) -> None:
        asked = await gateways.start(ScriptedBackend(gate=Failing(error)))
        with pytest.raises(type(error)) as excinfo:
            await asked.score(query_of("a"))
        found = excinfo.value
        assert type(found) is type(error)
        assert (str(found), found.usage) == (str(error), error.usage)
        if isinstance(error, BackendUnavailable):
            assert isinstance(found, BackendUnavailable)
            assert found.retry_after_s == error.retry_after_s

    async def test_an_unknown_cost_is_the_whole_quote(self, gateways: Gateways) -> None:
        error = BackendUnavailable("no answer in time")
        asked = await gateways.start(ScriptedBackend(gate=Failing(error)))
        with pytest.raises(BackendUnavailable) as excinfo:
            await asked.score(query_of("a", "b"))
        assert excinfo.value.usage == Usage(requests=1, prompt_tokens=2)

    async def test_a_label_word(self, gateways: Gateways) -> None:
        class Strict(ScriptedBackend):
            async def check(self, label_words: tuple[str, ...], form: Rendered = ()) -> None:
                if label_words:
                    raise LabelWordError(label_words[0], ["un", "likely"])

        asked = await gateways.start(Strict())
        await asked.check(())
        with pytest.raises(LabelWordError) as excinfo:
            await asked.check(("unlikely",))
        assert str(excinfo.value) == str(LabelWordError("unlikely", ["un", "likely"]))
        assert (excinfo.value.word, excinfo.value.tokens) == ("unlikely", ["un", "likely"])
        assert excinfo.value.usage == NOTHING

    async def test_a_model_that_comes_up_late(self, gateways: Gateways) -> None:
        """Who knows the model from before need not check it again."""

        class Late(ScriptedBackend):
            up = checked = False

            @property
            def fingerprint(self) -> str:
                if not self.checked:
                    raise BackendError("not checked yet", usage=NOTHING)
                return "late"

            async def check(self, label_words: tuple[str, ...], form: Rendered = ()) -> None:
                if not self.up:
                    raise BackendUnavailable("no connection", usage=NOTHING)
                self.checked = True

        model = Late()
        asked = await gateways.start(CachedBackend(BudgetedBackend(model)))
        for call in (asked.check(()), asked.quote(query_of("a")), asked.score(query_of("a"))):
            with pytest.raises(BackendUnavailable, match="no connection"):
                await call
        model.up = True
        assert (await asked.score(query_of("a"))).usage.requests == 1

    async def test_a_bug_tells_nothing_and_is_not_asked_again(self, gateways: Gateways) -> None:
        asked = await gateways.start(ScriptedBackend(gate=Failing(RuntimeError("private"))))
        with pytest.raises(BackendError, match="see the gateway's log") as excinfo:
            await asked.score(query_of("a"))
        assert type(excinfo.value) is BackendError
        assert "private" not in str(excinfo.value)
        assert excinfo.value.usage == Usage(requests=1, prompt_tokens=1)

    async def test_every_line_is_one(self, gateways: Gateways) -> None:
        error = BackendError("two\n lines", usage=NOTHING)
        asked = await gateways.start(ScriptedBackend(gate=Failing(error)))
        with pytest.raises(BackendError, match=r"^two lines$"):
            await asked.score(query_of("a"))

    async def test_another_model_is_noticed(self, gateways: Gateways) -> None:
        model = ScriptedBackend()
        asked = await gateways.start(model)
        await asked.check(())
        model._fingerprint = "another"
        for call in (asked.score(query_of("a")), asked.check(())):
            with pytest.raises(BackendBlocked, match="it was scripted, now it is another"):
                await call

    async def test_before_the_first_check(self, gateways: Gateways) -> None:
        asked = await gateways.start(ScriptedBackend())
        for ask in (lambda: asked.fingerprint, lambda: asked.worst_case(1)):
            with pytest.raises(BackendError, match="has not been checked yet"):
                ask()


class TestTrouble:
    """What is no gateway, or no longer one."""

    async def refused(self, asked: GatewayBackend) -> BackendError:
        with pytest.raises(BackendError) as excinfo:
            await asked.score(query_of("a"))
        assert ALICE not in str(excinfo.value)
        assert "\n" not in str(excinfo.value)
        return excinfo.value

    async def serve(
        self, gateways: Gateways, handler: Callable[[web.Request], Any]
    ) -> GatewayBackend:
        app = web.Application()
        app.router.add_post("/v1/model/score", handler)
        return await gateways.serve(app)

    async def test_nobody_listens(self, gateways: Gateways) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{free.getsockname()[1]}"
        error = await self.refused(gateways.backend(url=url))
        assert isinstance(error, BackendUnavailable)
        assert error.usage == NOTHING

    @pytest.mark.parametrize(
        ("status", "kind", "usage"),
        [
            (404, BackendBlocked, NOTHING),
            (302, BackendBlocked, NOTHING),
            (200, BackendBlocked, None),
            (429, BackendUnavailable, NOTHING),
            (502, BackendUnavailable, None),
            (503, BackendUnavailable, NOTHING),
            (504, BackendUnavailable, None),
        ],
    )
    async def test_a_proxy_answers(
        self, gateways: Gateways, status: int, kind: type[BackendError], usage: Usage | None
    ) -> None:
        async def handler(request: web.Request) -> web.Response:
            headers = {"Retry-After": "7", "Location": "http://elsewhere.invalid"}
            return web.Response(status=status, text="<html>", headers=headers)

        error = await self.refused(await self.serve(gateways, handler))
        assert (type(error), error.usage) == (kind, usage)
        if isinstance(error, BackendUnavailable):
            assert error.retry_after_s == 7.0

    async def test_no_answer_in_time(self, gateways: Gateways) -> None:
        never = asyncio.Event()

        async def handler(request: web.Request) -> web.Response:
            await never.wait()
            return web.Response()

        await self.serve(gateways, handler)
        error = await self.refused(gateways.backend(timeout_s=0.05))
        never.set()
        assert isinstance(error, BackendUnavailable)
        assert (str(error), error.usage) == (f"{gateways.url}: no answer in time", None)

    async def test_the_connection_breaks(self, gateways: Gateways) -> None:
        async def handler(request: web.Request) -> web.Response:
            assert request.transport is not None
            request.transport.close()
            return web.Response()

        error = await self.refused(await self.serve(gateways, handler))
        assert isinstance(error, BackendUnavailable)
        assert error.usage is None

    async def test_plain_http_where_tls_is_expected(self, gateways: Gateways) -> None:
        await gateways.start(ScriptedBackend())
        error = await self.refused(gateways.backend(url=gateways.url.replace("http:", "https:")))
        assert isinstance(error, BackendBlocked)
        assert error.usage == NOTHING
        assert "check http or https" in str(error)

    async def test_too_few_rows(self, gateways: Gateways) -> None:
        class Short(ScriptedBackend):
            async def score(self, query: Query) -> Answer:
                return await super().score(replace(query, inputs=query.inputs[:1]))

        asked = await gateways.start(Short())
        with pytest.raises(BackendBlocked, match="answered 1 inputs of 2"):
            await asked.score(query_of("a", "b"))


class TestWorstCase:
    @given(st.integers(1, 40), st.integers(1, 1024), st.integers(1, 3000), st.integers(0, 50))
    def test_bounds_every_size(
        self, most: int, max_inputs: int, batch_size: int, tokens: int
    ) -> None:
        """Whatever the model takes at once; exact for those that take one, or all."""

        class Chunky(ScriptedBackend):
            def worst_case(self, batch_size: int, max_tokens: int = 0) -> Usage:
                prompt_tokens = tokens * batch_size
                return Usage(queries=1, requests=1, prompt_tokens=prompt_tokens)

        for each in (most, 1, None):
            model = Chunky()
            model.max_inputs = each
            truth = SplitBackend(model)
            asked = GatewayBackend("http://x", token_env="PATH")
            asked.max_inputs = max_inputs
            asked._info = ModelInfo(
                fingerprint="x",
                bounds=(),
                answers=(),
                max_inputs=max_inputs,
                worst=tuple(truth.worst_case(2**n) for n in range(max_inputs.bit_length())),
            )
            bound = asked.worst_case(batch_size)
            assert truth.worst_case(batch_size).beyond(bound) == NOTHING
            assert bound.prompt_tokens == tokens * batch_size
            if each == 1:
                assert bound == truth.worst_case(batch_size)
            if each is None and batch_size <= 2 ** (max_inputs.bit_length() - 1):
                assert bound == truth.worst_case(batch_size)


class TestMoney:
    async def test_the_caller_pays_what_it_really_cost(self, gateways: Gateways) -> None:
        asked = await gateways.start(BudgetedBackend(ScriptedBackend(), price=PRICE))
        await asked.check(())
        guard = BudgetGuard(Budget(usd=Decimal("0.01"), requests=10))
        answer = await BudgetedBackend(asked, guard=guard).score(query_of("a", "b", "c"))
        cost = Usage(requests=1, prompt_tokens=3, usd=Decimal("0.00000055"))
        assert answer.usage == cost
        assert (await guard.account()).spent == cost
        assert "usd" in asked.bounds

    async def test_attempts_are_quoted_and_charged(self, gateways: Gateways) -> None:
        error = BackendUnavailable("HTTP 500", usage=Usage(requests=1), retry_after_s=0)
        model = ScriptedBackend(gate=Failing(error))
        inner = RetryingBackend(BudgetedBackend(model), attempts=3, max_wait_s=0.01)
        asked = await gateways.start(inner, attempts=3)
        await asked.check(())
        assert asked.worst_case(2) == Usage(queries=1, requests=3, prompt_tokens=6)
        assert await asked.quote(query_of("a", "b")) == asked.worst_case(2)
        answer = await asked.score(query_of("a", "b"))
        assert answer.usage == Usage(requests=2, prompt_tokens=2)
        model._gate = Failing(error, error, error)
        with pytest.raises(BackendUnavailable) as excinfo:
            await asked.score(query_of("c"))
        assert excinfo.value.usage == Usage(requests=3)

    async def test_a_run_file_that_names_it(
        self, gateways: Gateways, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """The caller asks again, and both accounts agree to the last digit."""
        error = BackendUnavailable("HTTP 429", usage=Usage(requests=1), retry_after_s=0.01)
        model = ScriptedBackend(gate=Failing(error, error))
        paid = BudgetGuard(Budget(requests=50), ledger=SqliteLedger(tmp_path / "spent.db"))
        priced = BudgetedBackend(model, price=PRICE, guard=paid)
        await gateways.start(CachedBackend(priced), guard=paid)
        described = GatewaySpec(
            kind="gateway",
            url=gateways.url,
            token_env="TEST_ALICE",
            retry=RetrySpec(max_wait_s=0.02),
            cache="answers.db",
        )
        bill = BudgetGuard(Budget(requests=20, tokens=100))
        async with build_backend(described, tmp_path, guard=bill) as backend:
            assert "usd" not in backend.bounds
            await backend.check(WORDS)
            assert {"usd", "tokens"} <= backend.bounds
            queries = [query_of(f"text {n % 6}", "b") for n in range(12)]
            answers = await asyncio.gather(*map(backend.score, queries))
        assert answers[0].log_probs == answers[6].log_probs
        account = await bill.account()
        assert account.spent == (await paid.account()).spent
        assert account.spent.requests == len(model.asked) == 8
        assert account.leases == {}

    async def test_more_than_was_quoted_is_not_spent(self, gateways: Gateways) -> None:
        """An answer is known when it is quoted, and forgotten when it is asked for."""
        model = ScriptedBackend()
        asked = await gateways.start(CachedBackend(BudgetedBackend(model), max_entries=1))
        await asked.score(query_of("a"))
        assert await asked.quote(query_of("a")) == Usage(queries=1)
        await gateways.backend("TEST_BOB").score(query_of("b"))
        with pytest.raises(BackendUnavailable, match="holds no longer") as excinfo:
            await asked.score(query_of("a"))
        assert excinfo.value.usage == NOTHING
        assert len(model.asked) == 2
        guard = BudgetGuard(Budget(requests=1))
        answer = await BudgetedBackend(asked, guard=guard).score(query_of("a"))
        assert answer.usage.requests == 1

    async def test_a_budget_that_two_gateways_share(
        self, gateways: Gateways, tmp_path: Path
    ) -> None:
        models, callers = [], []
        for _ in range(2):
            guard = BudgetGuard(Budget(requests=7), ledger=SqliteLedger(tmp_path / "spent.db"))
            models.append(ScriptedBackend())
            callers.append(await gateways.start(models[-1], guard=guard))
        calls = [callers[n % 2].score(query_of(f"text {n}")) for n in range(20)]
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(answer, Answer) for answer in found) == 7
        assert sum(len(model.asked) for model in models) == 7
        spent = [error for error in found if isinstance(error, BudgetExhausted)]
        assert len(spent) == 13
        assert {str(error).partition(":")[0] for error in spent} == {
            "budget of 7 requests exhausted"
        }

    async def test_a_budget_behind_it_that_is_spent_costs_its_callers_nothing(
        self, gateways: Gateways, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        paid = BudgetGuard(Budget(requests=2))
        model = ScriptedBackend()
        priced = BudgetedBackend(model, price=PRICE, guard=paid)
        await gateways.start(CachedBackend(priced), guard=paid, attempts=6)
        described = GatewaySpec(kind="gateway", url=gateways.url, token_env="TEST_ALICE")
        bill = BudgetGuard(Budget(requests=1000))
        async with build_backend(described) as backend:
            await backend.check(WORDS)
            queries = [query_of(f"text {n}", payer=bill) for n in range(20)]
            calls = (backend.score(query) for query in queries)
            found = await asyncio.gather(*calls, return_exceptions=True)
        refused = [error for error in found if isinstance(error, BudgetExhausted)]
        assert (len(refused), len(model.asked)) == (18, 2)
        account = await bill.account()
        assert account.spent == (await paid.account()).spent
        assert account.leases == {}
        assert {error.usage for error in refused} == {NOTHING}

    async def test_attempts_before_the_budget_behind_it_was_spent_are_charged(
        self, gateways: Gateways
    ) -> None:
        """The first attempt fails and is paid, and a second one cannot be."""
        error = BackendUnavailable("HTTP 500", usage=Usage(requests=1), retry_after_s=0)
        paid = BudgetGuard(Budget(requests=1))
        priced = BudgetedBackend(ScriptedBackend(gate=Failing(error)), guard=paid)
        inner = RetryingBackend(priced, attempts=3, max_wait_s=0.01)
        asked = await gateways.start(inner, guard=paid, attempts=3)
        await asked.check(())
        bill = BudgetGuard(Budget(requests=1000))
        with pytest.raises(BudgetExhausted) as excinfo:
            await BudgetedBackend(asked, guard=bill).score(query_of("a"))
        assert (await bill.account()).held == Usage(requests=1)
        assert excinfo.value.usage == Usage(requests=1)

    async def test_a_cap_that_cannot_be_kept(self) -> None:
        class Unbounded(ScriptedBackend):
            bounds = frozenset({"queries", "requests"})

        guard = BudgetGuard(Budget(usd=Decimal(1)))
        gateway = ModelGateway(Unbounded(), tokens={"alice": ALICE}, guard=guard)
        with pytest.raises(SpecError, match=r"budget.usd: cannot be bounded .*: requests\)"):
            await gateway.start()

    async def test_what_is_paid_and_lost_is_free_the_next_time(self, gateways: Gateways) -> None:
        """The caller gives up, the gateway does not, and keeps the answer."""
        opened, entered = asyncio.Event(), asyncio.Event()

        async def gate(query: Query) -> None:
            entered.set()
            await opened.wait()

        model = ScriptedBackend(gate=gate)
        asked = await gateways.start(CachedBackend(BudgetedBackend(model)))
        call = asyncio.create_task(asked.score(query_of("a")))
        await entered.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        opened.set()
        answer = await asked.score(query_of("a"))
        assert (answer.cached, answer.usage, len(model.asked)) == (True, NOTHING, 1)


def test_a_problem_of_a_plain_kind_is_one_with_a_cost_too() -> None:
    plain = '{"type":"t","title":"t","status":401,"code":"unauthorized","detail":"d"}'
    assert ModelProblem.model_validate_json(plain).usage is None


# As processes

CONFIG = """\
listen: {host}:0
tokens: {{alice: {alice}, bob: {{env: TEST_BOB}}}}
budget: {{requests: 5}}
ledger: spent.db
"""
PATIENCE_S = 60.0


class Process:
    """`fedone gateway` under way, its output in files."""

    def __init__(self, folder: Path, name: str, *arguments: object) -> None:
        self._out, self._err = folder / f"{name}.out", folder / f"{name}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "fedone_sdk.cli", "gateway", *map(str, arguments)],
                stdout=out,
                stderr=err,
                cwd=folder,
                env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "TEST_BOB": BOB},
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def url(self) -> str:
        """Where it serves, once it does."""
        deadline = time.monotonic() + PATIENCE_S
        while '"event": "serving"' not in self.out:
            assert self.popen.poll() is None, f"ended early: {self.out}{self.err}"
            assert time.monotonic() < deadline, f"waited too long: {self.out}{self.err}"
            time.sleep(0.02)
        return self.out.partition('"url": "')[2].partition('"')[0]

    def ended(self) -> int:
        return self.popen.wait(PATIENCE_S)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    (tmp_path / "gateway.yaml").write_text(CONFIG.format(host="127.0.0.1", alice=ALICE))
    with ExitStack() as stack:
        count = iter(range(100))

        def run(*arguments: object) -> Process:
            process = Process(tmp_path, str(next(count)), *arguments)
            stack.enter_context(process.popen)
            stack.callback(process.popen.kill)
            return process

        yield run


async def test_two_processes_share_a_budget_and_stop_when_told(
    start: Callable[..., Process], gateways: Gateways
) -> None:
    pytest.importorskip("onnxruntime", reason="the embedded model needs onnxruntime")
    processes = [start("gateway.yaml"), start("gateway.yaml")]
    callers = [gateways.backend(url=process.url()) for process in processes]
    words = (" terrible", " great")
    for caller in callers:
        await caller.check(words)
    assert callers[0].fingerprint == callers[1].fingerprint
    outcomes: list[object] = []
    for number in range(8):
        parts = (Part("field", f"film {number} was"), Part("mask", ""))
        query = Query(inputs=(parts,), label_words=words)
        try:
            outcomes.append(await callers[number % 2].score(query))
        except BudgetExhausted as exc:
            outcomes.append(str(exc))
    assert all(isinstance(outcome, Answer) for outcome in outcomes[:5])
    assert set(outcomes[5:]) == {"budget of 5 requests exhausted: 5 held, 1 more asked"}
    for process, number in zip(processes, (signal.SIGINT, signal.SIGTERM), strict=True):
        process.popen.send_signal(number)
        assert process.ended() == 0
        assert process.err == ""
        assert '"event": "stopping"' in process.out
        assert '"caller": "alice"' in process.out
        assert "secret" not in process.out


def test_a_check_says_what_is_wrong_and_leaves_nothing(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime", reason="the embedded model needs onnxruntime")
    fine = start("--check", "gateway.yaml")
    assert (fine.ended(), fine.err) == (0, "")
    assert fine.out == "gateway.yaml: would answer 2 callers at 127.0.0.1:0\n"
    assert not (tmp_path / "spent.db").exists()
    text = (tmp_path / "gateway.yaml").read_text()
    (tmp_path / "wrong.yaml").write_text(text.replace("requests: 5", "usd: five"))
    (tmp_path / "open.yaml").write_text(text.replace("127.0.0.1", "0.0.0.0"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (tmp_path / "taken.yaml").write_text(text.replace(":0", f":{port}"))
        runs = [
            start("--check", "wrong.yaml"),
            start("--check", "open.yaml"),
            start("taken.yaml"),
        ]
        wrong, exposed, busy = runs
        assert [run.ended() for run in runs] == [2, 0, 2]
    assert wrong.err.startswith("wrong.yaml: budget.usd: input should be a valid decimal")
    assert "tokens cross the network in plain text: set tls" in exposed.err
    assert busy.err.startswith("gateway.yaml".replace("gateway", "taken") + ": listen: 127.0.0.1:")
    assert "secret" not in "".join(run.out + run.err for run in runs)
