from __future__ import annotations

import asyncio
import json
import ssl
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from fedone_sdk.aggregator.http.application import listening
from fedone_sdk.backends import RateLimits
from fedone_sdk.backends.model_server import (
    OPENAI_URL,
    ModelServer,
    Reply,
    rate_limits,
    retry_after_s,
    usage_of,
)
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.errors import BackendBlocked, BackendError, BackendUnavailable, SpecError
from tests.certificates import issue
from tests.fake_openai import FakeOpenAI, Script
from tests.processes import free_port
from tests.virtual_time import now, on_virtual_time

KEY = "sk-very-secret-0123456789"
ONE = Usage(requests=1)


async def ask(
    base_url: str, *, timeout_s: float = 5.0, key_env: str | None = "FAKE_KEY", text: str = "x"
) -> Any:
    server = ModelServer("fake-1", base_url=base_url, api_key_env=key_env, timeout_s=timeout_s)
    try:
        body = {"model": "fake-1", "messages": [{"role": "user", "content": text}], "max_tokens": 1}
        return await server.call("/chat/completions", body)
    finally:
        await server.aclose()


async def failure_of(behaviour: str, *, timeout_s: float = 5.0) -> BackendError:
    async with FakeOpenAI(script=Script(default=behaviour)) as server:
        with pytest.raises(BackendError) as caught:
            await ask(server.base_url, timeout_s=timeout_s)
        assert len(server.received) == 1  # The client does not retry.
    assert KEY not in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_KEY", KEY)


async def test_a_key_is_sent_if_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("FAKE_KEY", KEY + "\n")
    async with FakeOpenAI() as server:
        await ask(server.base_url, key_env=None)
        await ask(server.base_url)
    sent = [one.headers.get("authorization") for one in server.received]
    assert sent == [None, f"Bearer {KEY}"]


def test_a_key_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://elsewhere.example/v1")
    assert ModelServer("x", base_url=None, api_key_env="FAKE_KEY", timeout_s=1).url == OPENAI_URL
    monkeypatch.delenv("FAKE_KEY")
    with pytest.raises(SpecError, match="variable FAKE_KEY is not set"):
        ModelServer("x", base_url=None, api_key_env="FAKE_KEY", timeout_s=1)
    monkeypatch.setenv("FAKE_KEY", "sk-\u2026\u2026secret")
    with pytest.raises(SpecError, match="FAKE_KEY has characters") as caught:
        ModelServer("x", base_url=None, api_key_env="FAKE_KEY", timeout_s=1)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("behaviour", "kind", "says", "retry_after"),
    [("rate_limited:2", BackendUnavailable, "429", 2.0),
     ("rate_limited_ms:250", BackendUnavailable, "429", 0.25),
     ('merged:{"finish_reason": "insufficient_system"}', BackendUnavailable, "insufficient", None),
     *((f"error:{status}", BackendUnavailable, str(status), None)
       for status in (408, 409, 425, 498, 499, 500)),
     ("overloaded:3", BackendUnavailable, "503", 3),
     ("no_quota", BackendBlocked, "no quota left: add credit", None),
     ("error:402", BackendBlocked, "no quota left", None),
     ("bad_key", BackendBlocked, "put a valid one in its place (the key is in FAKE_KEY)", None),
     ("no_model", BackendBlocked, "no model 'fake-1'", None),
     ("error:405", BackendBlocked, "check model and base_url", None)],
)  # fmt: skip
async def test_an_error_says_whether_it_may_pass_or_what_to_change(
    behaviour: str, kind: type[BackendError], says: str, retry_after: float | None
) -> None:
    failure = await failure_of(behaviour)
    assert type(failure) is kind
    assert says in str(failure)
    assert getattr(failure, "retry_after_s", None) == retry_after
    assert failure.usage == ONE


@pytest.mark.parametrize(
    "behaviour", ["error:502", "error:504", "error:524", "reset", "truncated", "hang", "slow_body"]
)
async def test_an_answer_that_does_not_arrive_is_charged_in_full(behaviour: str) -> None:
    """Also if a proxy says so: the server behind it may have answered."""
    # Only those that would never end get a short time.
    timeout_s = 0.3 if behaviour in ("hang", "slow_body") else 5.0
    failure = await failure_of(behaviour, timeout_s=timeout_s)
    assert type(failure) is BackendUnavailable
    assert failure.usage is None


@pytest.mark.parametrize("behaviour", ["bad_key", "forbidden", "error:400", "error:500"])
async def test_a_summary_shows_nothing_to_unknown_callers(behaviour: str) -> None:
    failure = await failure_of(behaviour)
    assert failure.url is not None
    assert str(failure).startswith(f"{failure.url}: {failure.summary}")
    for private in (failure.url, "FAKE_KEY", failure.said):
        assert not private or private not in failure.summary
    assert failure.key_env == ("FAKE_KEY" if behaviour in ("bad_key", "forbidden") else None)
    assert bool(failure.said) == (behaviour != "bad_key")


async def error_of(says: str, *, status: int, key_env: str | None) -> BackendError:
    """What is made of a refusal; ``{}`` in it is the key that the server was sent."""

    async def handler(request: web.Request) -> web.Response:
        sent = request.headers.get("Authorization", "").removeprefix("Bearer ")
        error = {"message": says.replace("{}", sent), "type": "invalid_request_error"}
        return web.json_response({"error": error}, status=status)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)
    async with listening(app) as url:
        with pytest.raises(BackendError) as caught:
            await ask(f"{url}/v1", key_env=key_env)
    return caught.value


@pytest.mark.parametrize("status", [400, 403, 429, 503])
@pytest.mark.parametrize(
    "secret",
    ["sk-proj-0123456789abcdef", "gsk_Abcdef0123456789Abcdef0123456789",
     "xai-0123456789abcdef0123456789", "0123456789abcdef0123456789abcdef", "plain+words/of=nobody"],
)  # fmt: skip
async def test_a_key_of_any_form_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, secret: str, status: int
) -> None:
    monkeypatch.setenv("MY_ACCESS", f"{secret}\n")
    failure = await error_of("No {}: get one. (Yours: {})", status=status, key_env="MY_ACCESS")
    assert secret not in str(failure)
    assert "No [removed]: get one. (Yours: [removed])" in str(failure)


@pytest.mark.parametrize("name", ["OTHER_API_KEY", "hf_token", "DB_PASSWORD", "Client_Secret"])
async def test_another_secret_is_known_by_the_name_of_its_variable(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "0123456789abcdef")
    monkeypatch.setenv("MY_CITY", "Grenoble-Isère")
    failure = await error_of("I know 0123456789abcdef of Grenoble-Isère", status=400, key_env=None)
    assert "I know [removed] of Grenoble-Isère" in str(failure)


async def test_a_message_has_no_part_of_a_long_key(monkeypatch: pytest.MonkeyPatch) -> None:
    # A server at home takes any short key, and such a word may stand in a message by chance.
    for key, says, part, shown in (
        ("0123456789abcdef" * 2, "x" * 280 + " {}", "0123", False),
        ("seven77", "{} of it is right", "seven77 of it is right", True),
    ):
        monkeypatch.setenv("MY_ACCESS", key)
        failure = await error_of(says, status=400, key_env="MY_ACCESS")
        assert (part in str(failure)) is shown


async def test_a_dead_server_costs_nothing() -> None:
    with pytest.raises(BackendUnavailable, match="no connection") as caught:
        await ask(f"http://127.0.0.1:{free_port()}/v1")
    assert caught.value.usage == NOTHING


@pytest.mark.parametrize(("timeout_s", "connect_s"), [(60.0, 10.0), (4.0, 2.0)])
@on_virtual_time
async def test_a_server_that_nothing_reaches_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float, connect_s: float
) -> None:
    """A firewall drops what is sent to it. Connecting is given up before the request is."""

    async def dropped(*arguments: object) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_connect", dropped)
    with pytest.raises(BackendUnavailable, match="no answer in time") as caught:
        await ask("http://127.0.0.1:9/v1", timeout_s=timeout_s)
    assert caught.value.usage == NOTHING
    assert now() == connect_s


async def test_a_proxy_that_does_not_connect_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses before any request to the provider."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    for name in ("NO_PROXY", "no_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as proxy:
        port = proxy.sockets[0].getsockname()[1]
        monkeypatch.setenv("HTTPS_PROXY", f"http://user:pass-0123@127.0.0.1:{port}")
        with pytest.raises(BackendUnavailable, match=r"no connection .*403.*Forbidden") as caught:
            await ask("https://provider.example/v1")
    assert caught.value.usage == NOTHING
    assert "pass-0123" not in str(caught.value)


async def test_text_that_is_not_unicode_costs_nothing() -> None:
    async with FakeOpenAI() as server:
        with pytest.raises(BackendError, match="Unicode") as caught:
            await ask(server.base_url, text="\ud800")
        assert not server.received
    assert caught.value.usage == NOTHING


@pytest.fixture
def certificate(tmp_path: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*issue("localhost").write(tmp_path, "server"))
    return context


async def test_a_certificate_that_is_not_accepted_is_named(certificate: ssl.SSLContext) -> None:
    async with FakeOpenAI(tls=certificate) as server:
        with pytest.raises(BackendBlocked, match=r"certificate is not accepted .*self") as caught:
            await ask(server.base_url)
        assert not server.received
    assert caught.value.usage == NOTHING


async def test_https_to_a_plain_server_is_named() -> None:
    async with FakeOpenAI() as server:
        with pytest.raises(BackendBlocked, match=r"TLS failed .*check http or https"):
            await ask(server.base_url.replace("http:", "https:"))


def test_rate_limits_are_read() -> None:
    assert rate_limits({"content-type": "application/json"}) is None
    headers = {
        "x-ratelimit-remaining-requests": "59", "x-ratelimit-reset-requests": "12ms",
        "x-ratelimit-remaining-tokens": "149984", "x-ratelimit-reset-tokens": "1m30.5s",
    }  # fmt: skip
    assert rate_limits(headers) == RateLimits(
        requests=59, requests_reset_s=0.012, tokens=149_984, tokens_reset_s=90.5
    )


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("6m0s", 360.0), ("1h2m3s", 3723.0), ("0s", 0.0), ("2d", 172_800.0), ("1.5", 1.5),
     ("soon", None), ("1x", None), ("-3", None), ("nan", None), ("", None)],
)  # fmt: skip
def test_durations(value: str, seconds: float | None) -> None:
    headers = {"x-ratelimit-remaining-requests": "1", "x-ratelimit-reset-requests": value}
    assert rate_limits(headers) == RateLimits(requests=1, requests_reset_s=seconds)


def test_the_time_to_wait_is_read() -> None:
    assert retry_after_s({}) is None
    assert retry_after_s({"retry-after": "7"}) == 7
    assert retry_after_s({"retry-after": "7", "retry-after-ms": "1500"}) == 1.5
    assert retry_after_s({"retry-after": "later"}) is None
    at = "Wed, 21 Oct 2015 07:{}:00 GMT".format
    assert retry_after_s({"retry-after": at(28), "date": at(27)}) == 60  # by the provider's clock
    assert retry_after_s({"retry-after": "7"}, "Please retry after 45 seconds.") == 7
    for said, seconds in {
        "Please retry after 45 seconds.": 45.0,
        "Please try again in 1m12.5s. Visit": 72.5,
        "{'details': [{'@type': 'RetryInfo', 'retryDelay': '38s'}]}": 38.0,
        "Please retry in 38.5s. Rate": 38.5,
        "try again in some time": None,
    }.items():
        assert retry_after_s({}, said) == seconds


QUOTED = Usage(queries=1, requests=1, prompt_tokens=50, completion_tokens=9)


@pytest.mark.parametrize(
    ("usage", "prompt", "completion"),
    [
        (None, 50, 9),
        ({}, 50, 9),
        ({"prompt_tokens": 7.0, "completion_tokens": float("nan")}, 7, 9),
        ({"prompt_tokens": 7, "total_tokens": 20}, 7, 13),
        ({"completion_tokens": 1, "total_tokens": 70}, 50, 20),
        # Less than was sent or written counts as the quote.
        ({"prompt_tokens": 4, "completion_tokens": 1}, 50, 1),
        ({"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}, 50, 9),
        ({"prompt_tokens": 0, "completion_tokens": 1, "total_tokens": 70}, 50, 20),
        ({"prompt_tokens": 7, "completion_tokens": 1}, 7, 1),
        ({"prompt_tokens": 7, "completion_tokens": 1, "total_tokens": 20}, 7, 13),
        ({"prompt_tokens": -7, "completion_tokens": True}, 50, 9),
        ({"prompt_tokens": "7", "completion_tokens": None}, 50, 9),
        ("free", 50, 9),
    ],
)
def test_missing_usage_is_the_quote(usage: object | None, prompt: int, completion: int) -> None:
    expected = Usage(requests=1, prompt_tokens=prompt, completion_tokens=completion)
    least = Usage(prompt_tokens=5, completion_tokens=1)
    assert usage_of(usage, QUOTED, least) == expected


@pytest.mark.parametrize(
    "body",
    [
        '{"error": {"message": "no such thing"}}', '{"error": "no such thing"}',
        '{"message": "no such thing", "code": 7}', '{"detail": "no such thing"}',
        '{"detail": [{"loc": ["body", "model"], "msg": "no such thing", "type": "x"}]}',
        '[{"error": {"code": 400, "message": "no such thing", "status": "INVALID_ARGUMENT"}}]',
        '{"errors": [{"message": "no such thing"}]}',
        '{"error": {"message": "Provider returned error", "metadata": {"raw": "no such thing"}}}',
        '{"object": "error", "message": "no such thing", "type": "BadRequestError"}',
        "no such thing", "<html><style>b {}</style><body><b>no such thing</b></body></html>",
    ],
)  # fmt: skip
async def test_a_refusal_of_any_form_keeps_the_server_s_words(body: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        kind = "application/json" if body[0] in "{[" else "text/html"
        return web.Response(status=400, text=body, content_type=kind)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with listening(app) as url:
        with pytest.raises(BackendError) as caught:
            await ask(f"{url}/v1")
    assert "no such thing" in caught.value.said
    assert "<" not in caught.value.said
    assert "{" not in caught.value.said


DEEP = json.loads('{"error":' * 500 + "1" + "}" * 500)


@pytest.mark.parametrize("body", ["<script>" * 100_000, "<a" * 100_000, DEEP])
def test_what_a_server_says_is_read_in_linear_time(body: Any) -> None:
    server = ModelServer("fake-1", base_url="http://x/v1", api_key_env=None, timeout_s=1.0)
    start = time.perf_counter()
    assert isinstance(server.error_of(Reply(500, body, {})), BackendUnavailable)
    assert time.perf_counter() - start < 5.0


@pytest.mark.parametrize("path", ["", "/chat/completions"])
async def test_an_address_of_azure_as_users_copy_it(path: str) -> None:
    asked = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path_qs)
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/openai/deployments/gpt/chat/completions", answer)
    address = f"/openai/deployments/gpt{path}?api-version=2024-10-21"
    async with listening(app) as url:
        server = ModelServer("gpt", base_url=url + address, api_key_env=None, timeout_s=5)
        await server.call("/chat/completions", {})
        await server.aclose()
    assert asked == ["/openai/deployments/gpt/chat/completions?api-version=2024-10-21"]
    url = f"https://name.openai.azure.com{address}"
    server = ModelServer("gpt", base_url=url, api_key_env="FAKE_KEY", timeout_s=5)
    assert server._headers["api-key"] == KEY


def test_the_account_of_a_key_is_told_to_openai_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_ORG_ID", "org-1\n")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "ü")
    for url, sent in (None, {"OpenAI-Organization": "org-1"}), ("http://127.0.0.1:1/v1", {}):
        server = ModelServer("gpt", base_url=url, api_key_env="FAKE_KEY", timeout_s=5)
        assert {k: v for k, v in server._headers.items() if k.startswith("OpenAI")} == sent


def test_an_address_that_is_none_is_named() -> None:
    hosts = ("htps://localhost", "http://", "http://h:99999", "http://h:port", "http://[::1")
    for url in ("localhost:8000", "http://a b", "https://u:secret@h", *hosts):
        with pytest.raises(SpecError, match=r"base_url: .* is not a URL") as caught:
            ModelServer("m", base_url=f"{url}/v1", api_key_env=None, timeout_s=5)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"), [("ALL_PROXY", "ftp://x:1"), ("HTTPS_PROXY", "http://u:secret@[::1")]
)
def test_a_wrong_proxy_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.delenv("HTTPS_PROXY", raising=False)
    monkeypatch.setenv(name, value)
    with pytest.raises(SpecError, match="the environment's proxy for https") as caught:
        ModelServer("m", base_url="https://h/v1", api_key_env=None, timeout_s=5)
    assert "secret" not in str(caught.value)
