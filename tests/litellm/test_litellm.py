"""The real LiteLLM against servers that speak the dialects of three providers.

Run by scripts/test-trackers, which installs it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from socket import SO_LINGER, SOL_SOCKET
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from fedone_sdk.backends import Answer, LLMBackend, OpenAIBackend, Query
from fedone_sdk.backends.build import build_backend
from fedone_sdk.backends.litellm import LiteLLMBackend, the_package
from fedone_sdk.budget import NOTHING, Budget, BudgetGuard, Price, PriceTier, Usage
from fedone_sdk.errors import (
    BackendBlocked,
    BackendError,
    BackendUnavailable,
    BudgetExhausted,
    SpecError,
)
from fedone_sdk.spec import LimitsSpec, LiteLLMSpec, PriceSpec, RetrySpec
from fedone_sdk.task import Part
from tests.fake_openai import FakeModel, FakeOpenAI, Script

if find_spec("litellm") is None:
    pytest.skip("scripts/test-trackers installs litellm", allow_module_level=True)

litellm = the_package()

# LiteLLM's own deprecations are its own.
pytestmark = pytest.mark.filterwarnings("default")

WORDS = (" terrible", " great")
ONE = Usage(requests=1)
KEY = "sk-test-0123456789abcdef"

Make = Callable[..., LiteLLMBackend]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[LLMBackend] = []

    def make(base_url: str | None, model: str = "openai/fake-1", **options: Any) -> LiteLLMBackend:
        made.append(LiteLLMBackend(model, base_url=base_url, **options))
        return made[-1]

    yield make
    for backend in made:
        await backend.aclose()


def ask(text: str = "a fine film", **options: Any) -> Query:
    parts = (Part("prompt", "Decide: "), Part("field", text), Part("text", " great or terrible?"))
    return Query(**{"inputs": (parts,), "label_words": WORDS, **options})


async def outcome(backend: LLMBackend, query: Query) -> tuple[object, ...]:
    """What became of a query, in a form that can be compared."""
    try:
        answer = await backend.score(query)
    except BackendError as exc:
        return (type(exc), exc.usage, getattr(exc, "retry_after_s", None))
    return (answer.log_probs, answer.texts, answer.usage, answer.censored, answer.model)


# As the openai adapter: whatever LiteLLM makes of it on the way

SAME = [
    "ok", "no_usage", "filtered", "refused", "empty", "reasons", "no_log_probs", "bad_key",
    "forbidden", "no_model", "no_quota", "too_long", "filtered_prompt", "rate_limited:3",
    "rate_limited_ms:250", "overloaded:2", "error", "error:502", "error:504", "truncated",
    "html", "reset",
]  # fmt: skip


@pytest.mark.parametrize("want", ["labels", "choice"])
@pytest.mark.parametrize("prefix", ["openai", "hosted_vllm"])
async def test_every_answer_is_what_the_openai_adapter_makes_of_it(
    make: Make, prefix: str, want: Any
) -> None:
    query = ask(want=want)
    for behaviour in SAME:
        async with FakeOpenAI(script=Script(default=behaviour)) as server:
            ours = make(server.base_url, f"{prefix}/fake-1", log_probs=want == "labels")
            plain = OpenAIBackend(
                "fake-1",
                base_url=server.base_url,
                api_key_env=None,
                log_probs=want == "labels",
            )
            async with plain:
                found = await outcome(ours, query)
                assert len(server.received) == 1
                expected = await outcome(plain, query)
        if behaviour == "no_usage":  # The frame of a schema is quoted higher.
            assert found[0] == expected[0]
            assert found[2] == (await ours.quote(query)).without_queries()
        else:
            assert found == expected, behaviour


async def test_the_request_is_the_openai_adapters(make: Make) -> None:
    async with FakeOpenAI() as server:
        for want in ("labels", "choice"):
            await make(server.base_url, log_probs=want == "labels").score(ask(want=want))
            plain = OpenAIBackend(
                "fake-1", base_url=server.base_url, api_key_env=None, log_probs=want == "labels"
            )
            async with plain:
                await plain.score(ask(want=want))
    bodies = [received.body for received in server.received]
    assert bodies[0] == bodies[1]
    assert bodies[2] == bodies[3]


async def test_how_the_server_wants_to_be_asked_is_learned(make: Make) -> None:
    async with FakeOpenAI(max_name="max_completion_tokens", max_top=5) as server:
        backend = make(server.base_url)
        for what in ("max_completion_tokens", "at most 5 tokens"):
            with pytest.raises(BackendUnavailable, match=what) as caught:
                await backend.score(ask())
            assert (caught.value.usage, caught.value.retry_after_s) == (ONE, 0.0)
        answer = await backend.score(ask())
    assert answer.log_probs[0] is not None


@pytest.mark.parametrize("behaviour", ["hang", "slow_body"])
async def test_a_server_that_does_not_end_its_answer_is_given_up(
    make: Make, behaviour: str
) -> None:
    async with FakeOpenAI(script=Script({2: behaviour})) as server:
        backend = make(server.base_url, timeout_s=5)
        await backend.score(ask())  # LiteLLM loads a part of itself at its first call.
        backend._timeout_s = 0.3
        with pytest.raises(BackendUnavailable, match="no answer in time") as caught:
            await backend.score(ask())
    assert caught.value.usage is None


async def test_a_dead_server_costs_nothing(make: Make) -> None:
    for model in ("openai/m", "hosted_vllm/m", "ollama_chat/m"):
        backend = make("http://127.0.0.1:9", model, log_probs=False)
        with pytest.raises(BackendUnavailable, match="no connection") as caught:
            await backend.score(ask(want="choice"))
        assert caught.value.usage == NOTHING


async def test_text_that_cannot_be_sent_is_refused(make: Make) -> None:
    backend = LiteLLMBackend("openai/fake-1", base_url="http://127.0.0.1:9/v1")
    with pytest.raises(BackendError, match="lone surrogate") as caught:
        await backend.score(ask("\ud800"))
    assert caught.value.usage == NOTHING


# Each request once


class Dropping:
    """A server that reads a request and hangs up: whether it was billed nobody knows.

    Args:
        rudely: By a reset.
    """

    def __init__(self, *, rudely: bool = False) -> None:
        self.requests = 0
        self.base_url = ""
        self._rudely = rudely
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Dropping:
        self._server = await asyncio.start_server(self._drop, "127.0.0.1", 0)
        self.base_url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def _drop(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.requests += head.startswith(b"POST")
        if self._rudely:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, linger)
        writer.close()


@pytest.mark.parametrize("rudely", [True, False])
@pytest.mark.parametrize("model", ["openai/m", "hosted_vllm/m", "ollama_chat/m", "anthropic/m"])
async def test_a_request_whose_connection_broke_is_not_sent_again(
    make: Make, model: str, rudely: bool
) -> None:
    async with Dropping(rudely=rudely) as server:
        backend = make(server.base_url, model, log_probs=False, structured=False)
        with pytest.raises(BackendUnavailable, match="the connection broke") as caught:
            await backend.score(ask(want="choice"))
        assert server.requests == 1
    assert caught.value.usage is None  # charged in full


async def test_what_litellm_sends_again_is_held_back_from_us_alone(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(litellm, "disable_aiohttp_transport", True)
    clients = type(litellm.in_memory_llm_clients_cache)()
    monkeypatch.setattr(litellm, "in_memory_llm_clients_cache", clients)
    async with Dropping() as server:
        backend = make(server.base_url, "hosted_vllm/m", log_probs=False)
        with pytest.raises(BackendUnavailable, match="the connection broke") as caught:
            await backend.score(ask(want="choice"))
        assert (caught.value.usage, server.requests) == (None, 1)
        with pytest.raises(litellm.exceptions.InternalServerError):
            await litellm.acompletion(
                model="hosted_vllm/m",
                api_base=server.base_url,
                api_key="none",
                messages=[{"role": "user", "content": "x"}],
                num_retries=0,
                max_retries=0,
            )
        assert server.requests >= 2  # LiteLLM 1.106 has sent twice, 1.109 once.


async def test_retries_that_the_process_asks_for_do_not_pass(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(litellm, "num_retries", 3)
    async with FakeOpenAI(script=Script(default="error")) as server:
        backend = make(server.base_url)
        for number in (1, 2):
            with pytest.raises(BackendUnavailable, match="HTTP 500"):
                await backend.score(ask())
            assert len(server.received) == number


@pytest.mark.parametrize("unit", ["usd", "requests"])
async def test_no_cap_is_passed_by_200_callers_while_much_fails(unit: str) -> None:
    caps = {"usd": Decimal("0.05"), "requests": 120}
    chances = {
        "rate_limited_ms:5": 0.1, "error": 0.1, "error:502": 0.05, "reset": 0.05,
        "truncated": 0.05, "no_usage": 0.05, "filtered": 0.05,
    }  # fmt: skip
    price = Price(prompt=Decimal(2), completion=Decimal(10), request=Decimal("0.0002"))
    async with FakeOpenAI(script=Script(chances=chances, seed=7), latency_s=0.005) as server:
        spec = LiteLLMSpec(
            kind="litellm",
            model="hosted_vllm/fake-1",
            base_url=server.base_url,
            retry=RetrySpec(max_wait_s=0.05, breaker_failures=100_000),
            limits=LimitsSpec(concurrency=200),
            prices=PriceSpec(
                prompt=price.prompt, completion=price.completion, request=price.request
            ),
        )
        guard = BudgetGuard(Budget.model_validate({unit: caps[unit]}))
        async with build_backend(spec, guard=guard) as backend:

            async def caller(name: int) -> tuple[int, bool]:
                for number in range(1000):
                    try:
                        await backend.score(ask(f"caller {name}, {number}"))
                    except BudgetExhausted:
                        return number, True
                    except BackendError:
                        continue
                return 1000, False

            found = await asyncio.gather(*map(caller, range(200)))
    assert all(refused for _, refused in found)
    assert len(server.received) > 60  # It was really asked.
    billed = Usage(
        requests=len(server.received),
        prompt_tokens=sum(received.prompt_tokens for received in server.received),
        completion_tokens=sum(received.completion_tokens for received in server.received),
    )
    spent = (await guard.account()).spent
    assert billed.beyond(spent.without_queries()) == NOTHING  # Nothing was sent uncharged.
    assert price.priced(billed).usd <= spent.usd
    assert {"usd": spent.usd, "requests": spent.requests}[unit] <= caps[unit]


# Before anything is paid


async def test_a_provider_without_log_probs_is_named(make: Make) -> None:
    async with FakeOpenAI() as server:
        for model in ("anthropic/claude-sonnet-4-5", "ollama_chat/llama3.1"):
            with pytest.raises(SpecError, match="log_probs: false with loss: zero_one") as caught:
                make(server.base_url, model)
            assert model in str(caught.value)
            assert make(server.base_url, model, log_probs=False).answers == {"choice", "text"}
        assert not server.received
        assert not server.asked


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "no-such/model"}, "does not know the provider 'no-such'"),
        ({"model": "openai/gpt-4o-mini", "reasoning_effort": "low"}, "reasoning_effort: by"),
        ({"model": "openai/gpt-4o-mini", "api_key_env": "NOT_SET"}, "variable NOT_SET is not set"),
        ({"model": "openai/gpt-4o-mini"}, "LiteLLM needs OPENAI_API_KEY in the environment"),
        ({"model": "anthropic/claude-sonnet-4-5", "log_probs": False}, "ANTHROPIC_API_KEY"),
        ({"model": "openai/gpt-4o-mini", "tokenizer": "/nowhere"}, "there is no file '/nowhere'"),
    ],
)
def test_what_is_wrong_is_one_line_about_its_key(
    options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "NOT_SET"):
        monkeypatch.delenv(name, raising=False)
    if "tokenizer" in options:
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
    spec = LiteLLMSpec(kind="litellm", **options)
    with pytest.raises(SpecError, match=said) as caught:
        build_backend(spec)
    (problem,) = caught.value.problems
    assert problem.startswith("backend.")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["success_callback", "callbacks", "model_fallbacks"])
async def test_what_would_show_prompts_to_others_is_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    async with FakeOpenAI() as server:
        backend = make(server.base_url)
        monkeypatch.setattr(litellm, name, ["langfuse"])
        with pytest.raises(SpecError, match=f"litellm.{name} is set in this process"):
            make(server.base_url)
        with pytest.raises(SpecError, match=f"litellm.{name}"):
            await backend.score(ask())  # It came later.
        assert not server.received


# Prices


@pytest.mark.parametrize(
    ("model", "options", "price"),
    [
        ("openai/gpt-4o-mini", {}, Price(prompt=Decimal("0.15"), completion=Decimal("0.6"))),
        ("openai/gpt-4o-mini", {"base_url": "http://x/v1"}, None),
        ("openai/of-tomorrow", {}, None),
        ("ollama_chat/llama3", {"log_probs": False}, None),  # Nothing is no price.
    ],
)
def test_what_a_model_costs(
    monkeypatch: pytest.MonkeyPatch, model: str, options: dict[str, Any], price: Price | None
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OLLAMA_API_BASE", "http://127.0.0.1:9")
    found = LiteLLMBackend(model, **options).price
    assert found == price


def test_steps_and_the_dearest_fee_count(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {
        "litellm_provider": "perplexity",
        "input_cost_per_token": 1e-6,
        "input_cost_per_token_above_200k_tokens": 2e-6,
        "output_cost_per_token": 3e-6,
        "output_cost_per_reasoning_token": 4e-6,
        "search_context_cost_per_query": {"search_context_size_low": 0.005, "x_high": 0.012},
    }
    monkeypatch.setitem(litellm.model_cost, "perplexity/p", row)
    monkeypatch.setenv("PERPLEXITYAI_API_KEY", KEY)
    monkeypatch.setenv("PERPLEXITY_API_KEY", KEY)
    usual = Price(prompt=Decimal(1), completion=Decimal(4), request=Decimal("0.012"))
    assert LiteLLMBackend("perplexity/p", log_probs=False).price == usual
    long = LiteLLMBackend("perplexity/p", log_probs=False, max_input_tokens=300_000).price
    tier = PriceTier(above=200_000, prompt=Decimal(2), completion=Decimal(4))
    assert long == usual.model_copy(update={"tiers": (tier,)})


def test_a_cap_in_money_needs_a_price(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    known = build_backend(LiteLLMSpec(kind="litellm", model="openai/gpt-4o-mini"))
    assert "usd" in known.bounds
    assert known.worst_case(1).usd > 0
    assert "usd" not in build_backend(LiteLLMSpec(kind="litellm", model="openai/new")).bounds


# Secrets


class Records(logging.Handler):
    """All that is logged, to be looked through."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += f"{record.name} {record.getMessage()} {record.exc_info}\n"


async def test_no_key_and_no_prompt_is_told(
    make: Make, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    key = "zz-quite-another-form-of-key-0123"
    monkeypatch.setenv("THEIR_KEY", key)
    records = Records()
    for name in ("LiteLLM", "openai", "httpx", ""):
        logger = logging.getLogger(name)
        monkeypatch.setattr(logger, "level", logging.DEBUG)
        monkeypatch.setattr(logger, "handlers", [records])
        logger.manager._clear_cache()  # type: ignore[attr-defined]
    behaviours = ["bad_key", "ok", "error", "no_quota", "too_long", "reset", "truncated"]
    script = Script(dict(enumerate(behaviours, 1)))

    class Telling(FakeOpenAI):
        async def _serve(self, request: web.Request) -> web.StreamResponse:
            response = await super()._serve(request)
            if isinstance(response, web.Response) and response.status >= 400:
                said = json.loads(response.text or "")
                said["error"]["message"] += f" ({request.headers['Authorization']}, {key})"
                response.text = json.dumps(said)
            return response

    told = ""
    with capture_logs() as logs:
        async with Telling(script=script, key=key) as server:
            backend = make(server.base_url, api_key_env="THEIR_KEY")
            told += repr(backend) + backend.fingerprint
            for _ in behaviours:
                try:
                    answer = await backend.score(ask("PRIVATE-TEXT"))
                except BackendError as exc:
                    told += f"{exc!r} {exc} {exc.__cause__!r}"
                else:
                    told += repr(answer)
        assert len(server.received) == len(behaviours)
        assert {r.headers["authorization"] for r in server.received} == {f"Bearer {key}"}
    logging.getLogger("httpx").info("others are heard")
    told += records.text + str(logs) + "".join(capfd.readouterr())
    assert "the key is in THEIR_KEY" in told
    assert "others are heard" in told
    assert key not in told
    assert "PRIVATE-TEXT" not in told


async def test_a_key_of_the_environment_goes_to_no_other_server(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    async with FakeOpenAI() as server:
        await make(server.base_url).score(ask())
    assert KEY not in str(server.received[0].headers)


def test_nothing_is_fetched_or_read_at_home(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("FROM_A_FILE=1\n")
    code = """
import os, sys
def audit(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        raise SystemExit(f"{event} {args}")
sys.addaudithook(audit)
from fedone_sdk.backends import LiteLLMBackend
backend = LiteLLMBackend("anthropic/claude-sonnet-4-5", log_probs=False)
print(len(backend._litellm.model_cost) > 1000, "FROM_A_FILE" in os.environ)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PATH": "", "ANTHROPIC_API_KEY": KEY, "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.strip(), done.returncode) == ("True False", 0), done.stderr


# Other dialects


class Dialect:
    """A provider that does not speak OpenAI's dialect; it counts what it is sent.

    Args:
        path: That is asked.
        answer: From the request's body to status and answer.
    """

    def __init__(
        self, path: str, answer: Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]
    ) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.base_url = ""
        self._path, self._answer = path, answer

    async def __aenter__(self) -> Dialect:
        app = web.Application()
        app.router.add_post(self._path, self._serve)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.base_url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        status, answer = self._answer(self.bodies[-1])
        return web.json_response(answer, status=status, headers={"retry-after": "4"})


def ollama(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    content = body["messages"][0]["content"]
    if "missing" in content:
        return 404, {"error": "model 'm' not found, try pulling it first"}
    written = FakeModel().choose(content, WORDS).strip()
    return 200, {
        "model": "m",
        "created_at": "2026-01-01T00:00:00Z",
        "message": {"role": "assistant", "content": json.dumps({"label": written})},
        "done": True,
        "done_reason": "stop",
        "prompt_eval_count": 21,
        "eval_count": 7,
    }


async def test_ollama(make: Make) -> None:
    async with Dialect("/api/chat", ollama) as server:
        backend = make(server.base_url, "ollama_chat/m", log_probs=False)
        answer = await backend.score(ask(want="choice"))
        with pytest.raises(BackendBlocked, match=r"HTTP 404.*try pulling it first") as caught:
            await backend.score(ask("missing", want="choice"))
    chosen = FakeModel().choose("Decide: a fine film great or terrible?", WORDS)
    assert answer.log_probs[0] is not None
    assert WORDS[answer.log_probs[0].index(0.0)] == chosen
    assert answer.usage == Usage(requests=1, prompt_tokens=21, completion_tokens=7)
    assert caught.value.usage == ONE
    assert server.bodies[0]["options"]["num_predict"] == 64
    assert server.bodies[0]["format"]["properties"]["label"]["enum"] == ["terrible", "great"]
    assert len(server.bodies) == 2


def anthropic(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    content = str(body["messages"])
    if "busy" in content:
        error = {"type": "overloaded_error", "message": "Overloaded"}
        return 529, {"type": "error", "error": error}
    label = {"label": "great"}
    block: dict[str, Any] = {"type": "text", "text": json.dumps(label)}
    if body.get("tools"):
        name = body["tools"][0]["name"]
        block = {"type": "tool_use", "id": "toolu_1", "name": name, "input": label}
    return 200, {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": body["model"],
        "content": [block],
        "stop_reason": "end_turn",
        "usage": {"input_tokens": 500, "output_tokens": 12},
    }


@pytest.mark.parametrize("structured", [True, False])
async def test_anthropic(make: Make, monkeypatch: pytest.MonkeyPatch, structured: bool) -> None:
    monkeypatch.setenv("THEIR_KEY", KEY)
    async with Dialect("/v1/messages", anthropic) as server:
        backend = make(
            server.base_url,
            "anthropic/claude-sonnet-4-5",
            api_key_env="THEIR_KEY",
            log_probs=False,
            structured=structured,
        )
        answer: Answer = await backend.score(ask(want="choice"))
        with pytest.raises(BackendUnavailable, match=r"HTTP 529 \(Overloaded") as caught:
            await backend.score(ask("busy", want="choice"))
        quoted = await backend.quote(ask(want="choice"))
    assert answer.log_probs[0] is not None
    assert answer.log_probs[0].index(0.0) == 1
    assert answer.usage == Usage(requests=1, prompt_tokens=500, completion_tokens=12)
    assert not structured or answer.usage.beyond(quoted) == NOTHING
    assert (caught.value.usage, caught.value.retry_after_s) == (ONE, 4.0)
    assert len(server.bodies) == 2
    assert server.headers[0]["x-api-key"] == KEY
    assert server.bodies[0]["max_tokens"] == 64
