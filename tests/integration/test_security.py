"""The aggregator and unknown callers, over real HTTP: scopes, limits, leaks."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import structlog
from pydantic import SecretStr

from fedone_sdk.aggregator import Aggregator
from fedone_sdk.aggregator.authority import AdminToken, EnrolmentToken, digest
from fedone_sdk.aggregator.http.guards import NO_LIMITS
from fedone_sdk.aggregator.rounds.lifecycle import pause, resume
from fedone_sdk.backends import Query
from fedone_sdk.errors import BackendBlocked, FedOneError, ProblemError
from fedone_sdk.messages import Claim
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import MemoryStore
from fedone_sdk.task import Rendered
from fedone_sdk.testing import ScriptedBackend
from tests.integration.caller import Server, served
from tests.runs import run_spec, until

FLEET, ACME = "fleet-secret-5b1e", "acme-secret-77d0"
ROOT, OPS, LOOK = "root-secret-19ab", "ops-secret-c4f2", "look-secret-e06d"
CLAIM = {"num_examples": 5, "wait_s": 0}


def spec_of(name: str) -> RunSpec:
    return run_spec(name=name)


def serving(**settings: Any) -> AbstractAsyncContextManager[Server]:
    return served(
        *map(spec_of, ("acme-1", "other")),
        enrolment_tokens=[
            FLEET,
            EnrolmentToken(token=SecretStr(ACME), name="acme", runs=("acme-*",)),
        ],
        admin_token=ROOT,
        admin_tokens=[
            AdminToken(token=SecretStr(OPS), name="ops", role="operator", runs=("acme-*",)),
            AdminToken(token=SecretStr(LOOK), name="look", role="viewer"),
        ],
        **{"limits": NO_LIMITS, **settings},
    )


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as server:
        yield server


@contextlib.asynccontextmanager
async def raw(server: Server) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection for what no client library would send."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(10):
            yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def claiming(credential: str, *fields: str) -> bytes:
    """The head of a claim, with some fields of its own."""
    lines = ("POST /v1/assignments/claim HTTP/1.1", "Host: x", "Content-Type: application/json")
    return "\r\n".join((*lines, f"Authorization: Bearer {credential}", *fields, "", "")).encode()


OF_A_RUN = ["/task", "/vocabulary", "/prompt"]


class TestScopes:
    @pytest.mark.parametrize("what", OF_A_RUN)
    async def test_a_run_of_others_is_not_there(self, server: Server, what: str) -> None:
        _, credential = await server.enrol(ACME)
        path = f"/v1/runs/other{what}"
        _, hidden, _ = await server.call("GET", path, token=credential)
        _, missing, _ = await server.call("GET", f"/v1/runs/nobody{what}", token=credential)
        assert hidden["code"] == "not_found"
        # Nothing tells a run that is hidden from one that is not there.
        assert hidden == json.loads(json.dumps(missing).replace("nobody", "other"))

    async def test_only_its_own_are_listed_and_given_as_work(self, server: Server) -> None:
        _, credential = await server.enrol(ACME)
        listed = await server.ok("GET", "/v1/runs", token=credential)
        assert [run["run_id"] for run in listed] == ["acme-1"]
        body = {**CLAIM, "run_id": "other"}
        path = "/v1/assignments/claim"
        assert await server.refused("POST", path, body, token=credential) == "not_found"
        work = await server.ok("POST", path, CLAIM, token=credential)
        assert work["run_id"] == "acme-1"

    async def test_people_have_scopes_too(self, server: Server) -> None:
        listed = await server.ok("GET", "/v1/runs", token=OPS)
        assert [run["run_id"] for run in listed] == ["acme-1"]
        assert await server.refused("POST", "/v1/runs/other/stop", token=OPS) == "not_found"
        assert await server.refused("GET", "/v1/runs/other/log", token=OPS) == "not_found"
        await server.ok("POST", "/v1/runs/acme-1/stop", token=OPS)

    async def test_metrics_are_of_all_runs(self, server: Server) -> None:
        assert await server.refused("GET", "/metrics", token=OPS) == "forbidden"
        assert await server.refused("GET", "/metrics", token=LOOK) == "not_found"  # keeps none


JANE = "Jane Doe lives at 4 Elm Street"
WHOLE = BackendBlocked(
    "the key may not use this model: change its rights",
    url="https://model.internal/v1",
    key_env="TEAM_KEY",
    said=f"no access for input '{JANE}'",
)


class TestReasons:
    """A provider quotes what it was sent: only operators may see it."""

    @contextlib.asynccontextmanager
    async def paused(self, failure: Exception) -> AsyncIterator[Server]:
        """A run that the text of one device has paused."""

        def gate(query: Query) -> None:
            raise failure

        async with serving(backend=ScriptedBackend(gate=gate)) as server:
            _, first = await server.enrol(ACME)
            work = await server.ok("POST", "/v1/assignments/claim", CLAIM, token=first)
            body = {"assignment_id": work["assignment_id"], "examples": [{"text": JANE}]}
            code = await server.refused("POST", "/v1/score", body, token=first)
            assert code == "run_conflict"
            yield server

    async def answers_to(self, server: Server, token: str) -> list[str]:
        """What a caller reads of the run: its result, and the end of its stream of events."""
        headers = {"Authorization": f"Bearer {token}"}
        path = f"{server.url}/v1/runs/acme-1"
        seen = []
        for what in ("", "/events"):
            async with server.session.get(path + what, headers=headers) as response:
                assert response.status == 200
                seen.append(await response.text())
        return seen

    async def test_a_second_reason_does_not_show_the_first(self) -> None:
        async with self.paused(WHOLE) as server:
            run = server.aggregator.service.runs["acme-1"]
            await run.apply(pause, reason="the model is another one")
            for text in await self.answers_to(server, LOOK):
                assert "change its rights; the model is another one" in text
                assert JANE not in text

    async def test_a_model_that_cannot_be_looked_at(self) -> None:
        """A run that was loaded meanwhile does not change the answer to a claim."""
        store = MemoryStore()
        async with serving(store=store) as server:
            _, credential = await server.enrol(ACME)
            await server.ok("POST", "/v1/assignments/claim", CLAIM, token=credential)

        class Away(ScriptedBackend):
            async def check(self, label_words: tuple[str, ...], form: Rendered = ()) -> None:
                raise WHOLE

        backend = Away()
        aggregator = Aggregator(backend=backend, store=store, enrolment_tokens=[FLEET, ACME])
        async with aggregator:
            run = aggregator.service.runs["acme-1"]
            # As another replica, whose model answers, resumes it.
            await run.apply(resume)
            client = await aggregator.service.access.authenticate(credential)
            with pytest.raises(ProblemError) as caught:
                await aggregator.service.work.claim(client, Claim(num_examples=5, wait_s=0))
        assert caught.value.code == "backend_unavailable"
        for secret in (JANE, "model.internal", "TEAM_KEY"):
            assert secret not in caught.value.detail


class TestTokensAndClients:
    async def test_a_token_is_made_used_up_listed_and_revoked(self, server: Server) -> None:
        asked = {"name": "one", "runs": ["acme-*"], "uses": 1, "expires_in_s": 60}
        made = await server.ok("POST", "/v1/enrolment-tokens", asked, token=ROOT)
        client_id, credential = await server.enrol(made["token"])
        assert await server.refused("GET", "/v1/runs/other/task", token=credential) == "not_found"
        path = "/v1/clients"
        assert await server.refused("POST", path, {}, token=made["token"]) == "unauthorized"
        listed = await server.ok("GET", "/v1/enrolment-tokens", token=ROOT)
        assert [token["name"] for token in listed["tokens"]] == ["config:1", "config:acme", "one"]
        assert listed["tokens"][-1] == {
            "name": "one",
            "runs": ["acme-*"],
            "uses_left": 0,
            "expires_at": server.clock.now() + 60,
            "created_at": server.clock.now(),
            "revoked_at": None,
        }
        for secret in (FLEET, ACME, made["token"]):
            assert secret not in json.dumps(listed)
            assert digest(secret) not in json.dumps(listed)
        again = await server.refused("POST", "/v1/enrolment-tokens", asked, token=ROOT)
        assert again == "token_conflict"
        revoked = await server.ok("DELETE", "/v1/enrolment-tokens/one", token=ROOT)
        assert revoked["revoked_at"] == server.clock.now()
        listed = await server.ok("GET", "/v1/clients", token=ROOT)
        assert [(client["client_id"], client["token"]) for client in listed["clients"]] == [
            (client_id, "one")
        ]
        assert digest(credential) not in json.dumps(listed)


class TestProtocol:
    @pytest.mark.parametrize("version", [None, "1"])
    async def test_what_is_spoken_is_served(self, server: Server, version: str | None) -> None:
        headers = {} if version is None else {"FedOne-Protocol": version}
        status, _, response = await server.call("GET", "/v1/runs", token=ROOT, headers=headers)
        assert status == 200
        assert response.headers["FedOne-Protocol"] == "1"

    @pytest.mark.parametrize(
        "version", ["0", "2", "99", "-1", "1.0", "one", "", "9" * 30, "\u00b2"]
    )
    async def test_an_unsupported_protocol_version_is_a_clear_error(
        self, server: Server, version: str
    ) -> None:
        headers = {"FedOne-Protocol": version}
        status, problem, response = await server.call(
            "POST", "/v1/assignments/claim", CLAIM, headers=headers
        )
        assert (status, problem["code"]) == (426, "upgrade_required")
        assert "version 1 of the protocol" in problem["detail"]
        assert response.headers["Upgrade"] == "fedone/1"
        assert response.headers["FedOne-Protocol"] == "1"

    async def test_every_answer_has_the_protocol_headers(self, server: Server) -> None:
        for path in ("/healthz", "/nothing", "/v1/runs"):
            _, _, response = await server.call("GET", path)
            assert response.headers["FedOne-Protocol"] == "1"
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert response.headers["Server"] == "FedOne"


class TestLimits:
    async def test_clients_have_a_rate(self) -> None:
        limits = NO_LIMITS.model_copy(update={"requests_per_minute_per_client": 3.0})
        async with serving(limits=limits) as server:
            (_, one), (_, two) = await server.enrol(FLEET), await server.enrol(FLEET)
            for _ in range(3):
                await server.ok("GET", "/v1/runs", token=one)
            status, problem, response = await server.call("GET", "/v1/runs", token=one)
            assert (status, problem["code"]) == (429, "rate_limited")
            assert 1 <= int(response.headers["Retry-After"]) <= 20
            await server.ok("GET", "/v1/runs", token=two)

    async def test_unknown_callers_of_one_address_share_a_rate(self) -> None:
        limits = NO_LIMITS.model_copy(update={"requests_per_minute_per_ip": 5.0})
        async with serving(limits=limits) as server:
            _, credential = await server.enrol(FLEET)
            codes = [await server.refused("GET", "/v1/runs", token="wrong") for _ in range(8)]
            assert codes == ["unauthorized"] * 4 + ["rate_limited"] * 4
            assert await server.refused("GET", "/v1/runs", token=ROOT) == "rate_limited"
            await server.ok("GET", "/v1/runs", token=credential)
            await server.ok("GET", "/healthz")

    async def test_a_caller_that_guesses_is_blocked_soon(self) -> None:
        limits = NO_LIMITS.model_copy(update={"failures_per_minute_per_ip": 3.0})
        async with serving(limits=limits) as server:
            _, credential = await server.enrol(FLEET)
            for token in ("one", "two", "three"):
                assert await server.refused("GET", "/v1/runs", token=token) == "unauthorized"
            # Also with the right token: a guess must not show that it is.
            assert await server.refused("GET", "/v1/runs", token=ROOT) == "rate_limited"
            await server.ok("GET", "/v1/runs", token=credential)

    async def test_a_failing_device_is_still_served_on_device_routes(self) -> None:
        """Its other requests count as a stranger's, and block no client for longer."""
        limits = {"failures_per_minute_per_ip": 3.0, "requests_per_minute_per_ip": 100.0}
        async with serving(limits=NO_LIMITS.model_copy(update=limits)) as server:
            _, credential = await server.enrol(FLEET)
            codes = [await server.refused("GET", "/v1/me", token=credential) for _ in range(30)]
            assert codes == ["unauthorized"] * 3 + ["rate_limited"] * 27
            await server.ok("GET", "/v1/runs", token=credential)
            status, _, response = await server.call("GET", "/v1/me", token=ROOT)
            assert status == 429
            assert int(response.headers["Retry-After"]) <= 20

    @pytest.mark.parametrize("path", ["/v1/me", "/openapi.json", "/v1/nothing"])
    async def test_a_credential_does_not_bypass_the_rate_of_unknown_callers(
        self, path: str
    ) -> None:
        limits = NO_LIMITS.model_copy(update={"requests_per_minute_per_ip": 5.0})
        async with serving(limits=limits) as server:
            _, credential = await server.enrol(FLEET)
            statuses = [(await server.call("GET", path, token=credential))[0] for _ in range(8)]
            assert statuses[4:] == [429] * 4
            assert 429 not in statuses[:4]
            await server.ok("GET", "/v1/runs", token=credential)

    async def test_proxies_are_trusted_only_if_named(self) -> None:
        async def heard(server: Server) -> list[str]:
            return [
                await server.refused(
                    "GET", "/v1/runs", headers={"X-Forwarded-For": f"198.51.100.{number}"}
                )
                for number in range(3)
            ]

        limits = NO_LIMITS.model_copy(update={"requests_per_minute_per_ip": 1.0})
        async with serving(limits=limits) as server:
            assert await heard(server) == ["unauthorized", "rate_limited", "rate_limited"]
        limits = limits.model_copy(update={"trusted_proxies": ("127.0.0.1",)})
        async with serving(limits=limits) as server:
            assert await heard(server) == ["unauthorized"] * 3

    async def test_bodies_are_as_large_as_their_route_needs(self, server: Server) -> None:
        _, credential = await server.enrol(FLEET)
        path, more = "/v1/assignments/claim", {"token": credential}
        body = json.dumps({**CLAIM, "run_id": "x" * 70_000}).encode()
        assert await server.refused("POST", path, body, **more) == "body_too_large"

        async def slowly() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 1000):
                yield body[start : start + 1000]

        headers = {"Authorization": f"Bearer {credential}", "Content-Type": "application/json"}
        async with server.session.post(
            f"{server.url}{path}", data=slowly(), headers=headers
        ) as response:
            assert (await response.json(content_type=None))["code"] == "body_too_large"

    @pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "GZIP", "gzip, gzip"])
    async def test_nothing_is_unpacked(self, server: Server, encoding: str) -> None:
        _, credential = await server.enrol(FLEET)
        bomb = gzip.compress(bytes(64 * 1024 * 1024), 9)
        assert len(bomb) < 70_000
        tracemalloc.start()
        try:
            for body in (bomb[:60_000], b"no gzip at all"):
                status, problem, response = await server.call(
                    "POST",
                    "/v1/assignments/claim",
                    body,
                    token=credential,
                    headers={"Content-Encoding": encoding},
                )
                assert (status, problem["code"]) == (415, "unsupported_encoding")
                assert response.headers["Accept-Encoding"] == "identity"
            assert tracemalloc.get_traced_memory()[1] < 4 * 1024 * 1024
        finally:
            tracemalloc.stop()


class Held(MemoryStore):
    """Make a change by a method while it `holds`, and answer only when released by `go`."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method, self.holds, self.closed = method, False, False
        self.made, self.go = asyncio.Event(), asyncio.Event()

    async def close(self) -> None:
        self.closed = True

    async def change_client(self, index: int, **changes: Any) -> None:
        await super().change_client(index, **changes)
        await self._hold("change_client")

    async def commit(self, *arguments: Any) -> None:
        await super().commit(*arguments)
        await self._hold("commit")

    async def _hold(self, method: str) -> None:
        if self.holds and method == self.method:
            self.made.set()
            await self.go.wait()


class TestHangingUp:
    """A caller that disconnects leaves nothing half done."""

    async def hang_up(self, server: Server, request: str, token: str) -> Held:
        """Sends a request, and closes the connection when the store has made the change.

        Returns:
            The store, which answers the request when released.
        """
        store = server.store
        assert isinstance(store, Held)
        store.holds = True
        async with raw(server) as (reader, writer):
            head = f"{request} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n"
            writer.write(f"{head}Authorization: Bearer {token}\r\n\r\n".encode())
            await store.made.wait()
            writer.write_eof()
            assert await reader.read() == b""  # The server has seen it.
        return store

    async def test_the_store_stays_open_for_it(self) -> None:
        async with serving(store=Held("change_client")) as server:
            client_id, credential = await server.enrol(FLEET)
            store = await self.hang_up(server, f"POST /v1/clients/{client_id}/revoke", ROOT)
            stopping = asyncio.create_task(server.aggregator.service.stop())
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(stopping), 0.1)
            assert not store.closed
            store.go.set()
            await stopping
            assert store.closed
            assert not server.aggregator.service.access.is_cached(credential)

    async def test_a_client_that_is_revoked_is_shut_out(self) -> None:
        async with serving(store=Held("change_client")) as server:
            client_id, credential = await server.enrol(FLEET)
            await server.ok("POST", "/v1/assignments/claim", CLAIM, token=credential)
            store = await self.hang_up(server, f"POST /v1/clients/{client_id}/revoke", ROOT)
            store.go.set()
            access = server.aggregator.service.access
            await until(lambda: not access.is_cached(credential))
            assert await server.refused("GET", "/v1/runs", token=credential) == "unauthorized"
            pool = server.aggregator.service.dispatcher.pool
            await until(lambda: 0 not in pool)

    async def test_a_secret_that_was_replaced_is_shut_out(self) -> None:
        async with serving(store=Held("change_client")) as server:
            _, old = await server.enrol(FLEET)
            path = "/v1/clients/me/credential"
            new = (await server.ok("POST", path, token=old))["credential"]
            await server.ok("GET", "/v1/runs", token=old)
            store = await self.hang_up(server, "GET /v1/runs", new)
            store.go.set()
            access = server.aggregator.service.access
            await until(lambda: not access.is_cached(old))
            assert await server.refused("GET", "/v1/runs", token=old) == "unauthorized"
            await server.ok("GET", "/v1/runs", token=new)

    async def test_a_run_that_is_resumed_gives_work(self) -> None:
        async with serving(store=Held("commit")) as server:
            _, credential = await server.enrol(FLEET)
            await server.ok("POST", "/v1/runs/other/stop", token=ROOT)
            store = await self.hang_up(server, "POST /v1/runs/other/resume", ROOT)
            store.go.set()
            pool = server.aggregator.service.dispatcher.pool
            await until(lambda: pool.has_run("other"))
            body = {**CLAIM, "run_id": "other"}
            work = await server.ok("POST", "/v1/assignments/claim", body, token=credential)
            assert work["run_id"] == "other"


class TestSlowness:
    async def test_an_idle_connection_is_closed(self) -> None:
        limits = NO_LIMITS.model_copy(update={"first_request_s": 0.1})
        async with serving(limits=limits) as server, raw(server) as (reader, writer):
            _, credential = await server.enrol(FLEET)
            body = {**CLAIM, "wait_s": 1, "run_id": "acme-1"}
            asked = asyncio.create_task(
                server.call("POST", "/v1/assignments/claim", body, token=credential)
            )
            with contextlib.suppress(ConnectionError):
                for byte in b"GET /healthz HTTP/1.1\r\n":
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(0.02)
                assert await reader.read() == b""
            # Who has asked may wait for its answer, and ask again.
            assert (await asked)[0] in (200, 204)
            assert (await server.call("GET", "/healthz"))[0] == 200

    async def test_a_body_that_does_not_come_is_given_up(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("fedone_sdk.aggregator.http.requests._READ_TIMEOUT_S", 0.05)
        _, credential = await server.enrol(FLEET)
        async with raw(server) as (reader, writer):
            writer.write(claiming(credential, "Content-Length: 100") + b"{")
            answer = await reader.readuntil(b"}")
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"request_timeout" in answer

    async def test_a_device_that_is_revoked_while_it_sends_is_refused(self, server: Server) -> None:
        client_id, credential = await server.enrol(FLEET)
        body = json.dumps(CLAIM).encode()
        async with raw(server) as (reader, writer):
            fields = ("Expect: 100-continue", "Connection: close", f"Content-Length: {len(body)}")
            writer.write(claiming(credential, *fields))
            assert b" 100 " in await reader.readuntil(b"\r\n\r\n")  # It was let in.
            await server.ok("POST", f"/v1/clients/{client_id}/revoke", token=ROOT)
            writer.write(body)
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert server.store._members == {}

    async def test_a_body_that_is_cut_wrongly_is_no_failure_of_ours(self, server: Server) -> None:
        _, credential = await server.enrol(FLEET)
        async with raw(server) as (reader, writer):
            writer.write(claiming(credential, "Transfer-Encoding: chunked") + b"zz\r\n")
            answer = await reader.read(200)
        assert answer.split()[1] in (b"400", b"422")

    async def test_too_many_headers_are_refused(self, server: Server) -> None:
        lines = b"".join(b"X-%d: 1\r\n" % number for number in range(100))
        async with raw(server) as (reader, writer):
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n")
            assert (await reader.read(12)).endswith(b" 400")

    async def test_what_is_no_http_does_not_fill_the_log(
        self, server: Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        for sent in (b"nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x00\xa5"):
            async with raw(server) as (reader, writer):
                writer.write(sent)
                writer.write_eof()
                await reader.read()
        assert [record for record in caplog.records if record.exc_info] == []


async def test_no_secret_is_ever_shown(caplog: pytest.LogCaptureFixture) -> None:
    """Everything that is logged or answered while secrets are used in all ways."""
    caplog.set_level(logging.DEBUG)
    answers: list[str] = []
    logs: list[str] = []

    def keep(_: Any, __: str, line: str) -> str:
        logs.append(line)
        raise structlog.DropEvent

    async def failing(*_: Any, **__: Any) -> None:
        raise FedOneError("disk full")

    # The most talkative renderer: it prints the local variables of every frame.
    talkative = structlog.dev.RichTracebackFormatter(show_locals=True, width=1000)
    console = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=talkative)
    structlog.configure(processors=[console, keep])
    try:
        async with serving() as server:
            nonce = "nonce-that-is-a-secret-0001"
            document = await server.ok("POST", "/v1/clients", {"nonce": nonce}, token=FLEET)
            client_id, credential = document["client_id"], document["credential"]
            made = await server.ok("POST", "/v1/enrolment-tokens", {"name": "a"}, token=ROOT)
            _, plain = await server.enrol(made["token"])
            rotated = await server.ok("POST", "/v1/clients/me/credential", token=plain)
            secrets = [FLEET, ACME, ROOT, OPS, LOOK, nonce, credential, plain, made["token"]]
            secrets.append(rotated["credential"])
            for secret in secrets:
                for method, path, body in [
                    ("GET", "/v1/runs", None),
                    ("GET", "/v1/clients", None),
                    ("GET", "/v1/enrolment-tokens", None),
                    ("GET", "/v1/runs/none", None),
                    ("POST", "/v1/clients", {"nonce": 7, "name": secret * 50}),
                    ("POST", "/v1/clients", {secret: secret}),
                    ("POST", "/v1/enrolment-tokens", {"name": f"{secret}!"}),
                    ("POST", "/v1/assignments/claim", {"wait_s": secret}),
                    ("POST", "/v1/runs", {"name": "a", "method": secret}),
                ]:
                    _, problem, _ = await server.call(method, path, body, token=secret)
                    # A value in the wrong place may be shown to its sender, nowhere else.
                    if secret not in json.dumps(body):
                        answers.append(json.dumps(problem))
            work = await server.claim(credential)
            for changes in ({"losses": [1]}, {"extra": credential}):
                answers.append(repr(await server.update(credential, work, **changes)))
            with pytest.MonkeyPatch.context() as broken:
                broken.setattr(server.store, "commit", failing)
                broken.setattr(server.store, "enrol", failing)
                answers.append(repr(await server.update(credential, work)))
                assert await server.refused("POST", "/v1/clients", {}, token=FLEET) == "internal"
            client = await server.aggregator.service.access.authenticate(credential)
            await server.ok("POST", "/v1/runs/acme-1/stop", token=ROOT)
            await server.ok("POST", f"/v1/clients/{client_id}/revoke", token=ROOT)
            await server.call("GET", "/v1/runs", token=credential)
            access = server.aggregator.service.access
            kept = (vars(server.store), server.aggregator, client, access, vars(access))
            answers += map(repr, (*kept, access.authority.enrolment_tokens))
            answers += [repr(await server.store.clients()), repr(await server.store.tokens())]
    finally:
        structlog.reset_defaults()
    seen = "\n".join([*answers, *logs, caplog.text])
    for event in ("enrolled", "request failed", "run ended"):
        assert event in seen  # It was listened to.
    for secret in secrets:
        assert secret not in seen
