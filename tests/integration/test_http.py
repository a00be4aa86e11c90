"""The HTTP API: every refusal, the long poll, server-sent events, secrets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from openapi_spec_validator import validate
from pydantic import SecretStr
from structlog.testing import capture_logs

from fedone_sdk.aggregator import Aggregator
from fedone_sdk.aggregator.authority import AdminToken, Role
from fedone_sdk.aggregator.http.application import ROUTES, build_app
from fedone_sdk.aggregator.http.openapi import MAX_BODY_BYTES, openapi_document
from fedone_sdk.backends import Answer, ModelClient, Query
from fedone_sdk.errors import BackendBlocked, FedOneError, StoreUnavailable
from fedone_sdk.spec import RetrySpec, RunSpec
from fedone_sdk.stores import MemoryStore
from fedone_sdk.testing import ScriptedBackend
from fedone_sdk.vocabulary import Vocabulary
from tests.integration.caller import ADMIN, TOKEN, Server, served
from tests.runs import WORDS, run_spec, until

LESSER_ROLES: dict[str, tuple[Role, ...]] = {
    "operator": ("viewer",),
    "admin": ("viewer", "operator"),
}
"""By role, those without its rights; here each is the token of a person who has it."""
EXAMPLES = [{"text": "a first text"}, {"text": "a second text"}]


def spec_of(name: str = "run", *, rounds: int = 3, **participation: Any) -> RunSpec:
    return run_spec(name=name, rounds=rounds, participation=participation)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    people = [
        AdminToken(token=SecretStr(role), name=role, role=role) for role in LESSER_ROLES["admin"]
    ]
    async with served(
        spec_of(), enrolment_tokens=["another", TOKEN], admin_tokens=people
    ) as server:
        yield server


class TestAuthentication:
    async def test_any_of_the_enrolment_tokens(self, server: Server) -> None:
        for token in ("another", TOKEN):
            assert (await server.call("POST", "/v1/clients", {}, token=token))[0] == 201

    async def test_a_refusal_describes_how_to_authenticate(self, server: Server) -> None:
        _, _, response = await server.call("POST", "/v1/clients", {})
        assert response.headers["WWW-Authenticate"] == "Bearer"

    async def test_bytes_that_are_no_text(self, server: Server) -> None:
        """Sent by hand: no client library would."""
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = b"GET /v1/runs HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        writer.write(head + b"Authorization: Bearer \xff\xfe\r\n\r\n")
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        assert answer.startswith(b"HTTP/1.1 401 ")

    async def test_without_an_admin_token_no_caller_controls_runs(self) -> None:
        async with served(spec_of(), admin_token=None) as server:
            for token in (None, "", "None", TOKEN, await server.credential()):
                for path in ("/v1/runs", "/v1/runs/run/stop", "/v1/runs/run/resume"):
                    assert await server.refused("POST", path, {}, token=token) == "forbidden"
                assert await server.refused("GET", "/v1/runs/run/log", token=token) == "forbidden"
            assert server.run.state.running


class TestRefusals:
    @pytest.mark.parametrize(
        ("method", "path", "code"),
        [
            ("GET", "/v1/nothing", "not_found"),
            ("GET", "/v1/runs/nothing", "not_found"),
            ("GET", "/v1/runs/nothing/events", "not_found"),
            ("GET", "/v1/score", "method_not_allowed"),
            ("PUT", "/v1/runs/run", "method_not_allowed"),
            ("PUT", "/healthz", "method_not_allowed"),
        ],
    )
    async def test_unknown_routes(self, server: Server, method: str, path: str, code: str) -> None:
        status, _, response = await server.call(method, path, token=ADMIN)
        assert await server.refused(method, path, token=ADMIN) == code
        assert ("Allow" in response.headers) == (status == 405)

    @pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded"])
    async def test_only_json(self, server: Server, content_type: str) -> None:
        code = await server.refused(
            "POST", "/v1/clients", b"{}", token=TOKEN, headers={"Content-Type": content_type}
        )
        assert code == "not_json"

    async def test_an_unauthenticated_body_is_not_read(self, server: Server) -> None:
        """A caller without a token cannot make the server hold megabytes."""
        body = b" " * (MAX_BODY_BYTES + 1)
        assert await server.refused("POST", "/v1/clients", body) == "unauthorized"

    @pytest.mark.parametrize(
        ("error", "code", "retry_after"),
        [(FedOneError, "internal", None), (StoreUnavailable, "store_unavailable", "1")],
    )
    async def test_a_failure_shows_nothing_to_unknown_callers(
        self, server: Server, error: type[FedOneError], code: str, retry_after: str | None
    ) -> None:
        async def failing(*_: Any, **__: Any) -> Any:
            raise error("postgres://user:password@db/fedone: cannot be reached")

        server.aggregator.service.store.enrol = failing  # type: ignore[method-assign]
        sent: dict[str, Any] = {"body": {}, "token": TOKEN}
        assert await server.refused("POST", "/v1/clients", **sent) == code
        _, document, response = await server.call("POST", "/v1/clients", **sent)
        assert response.headers.get("Retry-After") == retry_after
        assert "password" not in json.dumps(document)


class TestWork:
    async def test_a_round_by_hand(self, server: Server) -> None:
        credential = await server.credential()
        work = await server.claim(credential)
        assert work["exchange"] == "losses"
        score = {"assignment_id": work["assignment_id"], "examples": EXAMPLES}
        status, scores, _ = await server.call("POST", "/v1/score", score, token=credential)
        assert (status, scores["log_probs"]["shape"]) == (200, [4, 2, 2])
        status, receipt = await server.update(credential, work)
        assert (status, receipt["round"]) == (200, 0)
        assert await server.update(credential, work) == (200, receipt)
        status, problem = await server.update(credential, work, losses=[1, 1, 1, 1])
        assert (status, problem["code"]) == (409, "update_conflict")
        _, result, _ = await server.call("GET", "/v1/runs/run", token=ADMIN)
        assert result["rounds"] == 1
        assert result["spent"]["queries"] == 4
        assert result["gateway"]["messages"] == 2
        assert result["gateway"]["upload_bytes"] >= len(json.dumps(score))
        assert result["communication"]["messages"] == 2 + 2 + 3 * 2  # enrol, claim, updates

    async def test_another_client_s_assignment(self, server: Server) -> None:
        owner, other = await server.credential(), await server.credential()
        work = await server.claim(owner)
        base = f"/v1/assignments/{work['assignment_id']}"
        assert (await server.update(other, work))[1]["code"] == "not_found"
        assert await server.refused("POST", f"{base}/renew", token=other) == "not_found"
        decline = {"reason": "x"}
        assert await server.refused("POST", f"{base}/decline", decline, token=other) == "not_found"
        score = {"assignment_id": work["assignment_id"], "examples": EXAMPLES}
        refused = await server.refused("POST", "/v1/score", score, token=other)
        assert refused == "assignment_expired"  # It has no open work, so the body is not read.
        assert server.backend.asked == []
        assert (await server.update(owner, work))[0] == 200

    async def test_a_device_that_disconnects_leaves_its_long_poll(self, server: Server) -> None:
        first, second = await server.credential(), await server.credential()
        await server.claim(first)
        async with asyncio.timeout(10):
            async with aiohttp.ClientSession() as session:
                other = replace(server, session=session)
                waiting = asyncio.create_task(other.claim(second, wait_s=60))
                polls = server.aggregator.service.dispatcher._polls
                await until(lambda: 1 in polls)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
            await until(lambda: 1 not in polls)

    async def test_decline_and_renew(self, server: Server) -> None:
        credential = await server.credential()
        work = await server.claim(credential)
        base = f"/v1/assignments/{work['assignment_id']}"
        status, renewed, _ = await server.call("POST", f"{base}/renew", token=credential)
        assert (status, renewed) == (200, {"deadline_s": work["deadline_s"]})
        status, document, _ = await server.call(
            "POST", f"{base}/decline", {"reason": "no battery"}, token=credential
        )
        assert (status, document) == (204, None)
        assert (await server.update(credential, work))[1]["code"] == "assignment_expired"

    async def test_task_and_vocabulary(self, server: Server) -> None:
        credential = await server.credential()
        for token in (credential, ADMIN):
            _, task, _ = await server.call("GET", "/v1/runs/run/task", token=token)
            assert (task["prompt_len"], task["vocab_size"], task["gateway"]) == (2, 3, True)
            assert task["vocabulary_sha256"] == WORDS.sha256
            _, words, _ = await server.call("GET", "/v1/runs/run/vocabulary", token=token)
            assert words == {"candidates": list(WORDS.candidates)}

    async def test_answers_longer_than_one_read(self, server: Server) -> None:
        """What a client reads in pieces arrives whole."""
        from fedone_sdk.client import HttpTransport

        words = Vocabulary(candidates=tuple(f" word {number:0150}" for number in range(20_000)))
        await server.aggregator.add_run(spec_of("large"), words)
        transport = HttpTransport(server.url)
        try:
            message = await transport.vocabulary(await server.credential(), "large")
        finally:
            await transport.aclose()
        assert message.candidates == words.candidates


class TestRuns:
    async def test_a_posted_run(self, server: Server) -> None:
        document = spec_of("posted").model_dump(mode="json")
        status, result, response = await server.call("POST", "/v1/runs", document, token=ADMIN)
        assert (status, result["status"], result["rounds"]) == (201, "running", 0)
        assert response.headers["Location"] == "/v1/runs/posted"
        assert await server.refused("POST", "/v1/runs", document, token=ADMIN) == "run_conflict"
        _, runs, _ = await server.call("GET", "/v1/runs", token=ADMIN)
        assert [run["run_id"] for run in runs] == ["run", "posted"]

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"rounds": 0}, "rounds:"),
            ({"surprise": 1}, "unknown key"),
            ({"data": {"train": "/etc/passwd"}}, "data: clients have their own data"),
            ({"prompt": {"vocabulary": {"kind": "file", "path": "/etc/passwd"}}}, "must be list"),
            ({"prompt": {"vocabulary": {"kind": "list", "candidates": ["a"]}}}, "needs 2"),
            ({"budget": {"queries": 3, "minutes": 2}}, "budget.minutes"),
        ],
    )
    async def test_a_bad_run(self, server: Server, changes: dict[str, Any], reason: str) -> None:
        document = {**spec_of("posted").model_dump(mode="json"), **changes}
        status, problem, _ = await server.call("POST", "/v1/runs", document, token=ADMIN)
        assert (status, problem["code"]) == (422, "invalid_run")
        assert reason in problem["detail"]
        assert list(server.aggregator.service.runs) == ["run"]

    async def test_rounds_that_end_while_events_are_written(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A slow reader misses nothing."""
        from fedone_sdk.aggregator.http import run_routes

        credential = await server.credential()
        await server.update(credential, await server.claim(credential))
        write, names = run_routes._event, []

        async def slowly(response: Any, name: str, message: Any) -> None:
            names.append((name, getattr(message, "round", None)))
            if name == "round" and message.round == 0:
                for _ in range(2):
                    await server.update(credential, await server.claim(credential))
            await write(response, name, message)

        monkeypatch.setattr(run_routes, "_event", slowly)
        async with asyncio.timeout(10):
            async with server.session.get(
                f"{server.url}/v1/runs/run/events", headers={"Authorization": f"Bearer {ADMIN}"}
            ) as response:
                await response.read()
        assert names == [("round", 0), ("round", 1), ("round", 2), ("end", None)]


class TestMachines:
    async def test_health(self, server: Server) -> None:
        assert (await server.call("GET", "/healthz"))[:2] == (200, {"status": "ok", "checks": {}})
        status, document, _ = await server.call("GET", "/readyz")
        assert (status, document["status"]) == (200, "ok")
        found = {name: check["ok"] for name, check in document["checks"].items()}
        assert found == {"serving": True, "store": True, "model": True}

    @pytest.mark.parametrize("hangs", [False, True])
    async def test_a_store_that_cannot_be_used(
        self, hangs: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("fedone_sdk.aggregator.http.server_routes._TIMEOUT_S", 0.01)

        class Broken(MemoryStore):
            async def ping(self) -> None:
                if hangs:
                    await asyncio.Event().wait()
                raise StoreUnavailable("disk full")

        async with Aggregator(store=Broken()) as aggregator, aiohttp.ClientSession() as session:
            url = await aggregator.listen()
            with capture_logs() as logs:
                async with session.get(f"{url}/readyz") as response:
                    assert response.status == 503
                    text = await response.text()
            assert "disk full" not in text
            assert hangs or [line["reason"] for line in logs] == ["disk full"]
            checks = json.loads(text)["checks"]
            assert [name for name in checks if not checks[name]["ok"]] == ["store"]
            async with session.get(f"{url}/healthz") as alive:
                assert alive.status == 200

    async def test_an_unqueried_model(self) -> None:
        """Its breaker is open: users and updates are served, and the answer reports it."""

        class Down(ScriptedBackend):
            async def score(self, query: Query) -> Answer:
                raise BackendBlocked("the key sk-123 is not accepted")

        backend = ModelClient(Down(), retry=RetrySpec())
        async with Aggregator(backend=backend) as aggregator, aiohttp.ClientSession() as session:
            url = await aggregator.listen()
            with pytest.raises(BackendBlocked):
                await backend.score(Query(inputs=((),), label_words=(" a",)))
            async with session.get(f"{url}/readyz") as response:
                assert response.status == 200
                text = await response.text()
            assert "sk-123" not in text
            assert json.loads(text)["status"] == "ok"
            checks = json.loads(text)["checks"]
            assert [name for name in checks if not checks[name]["ok"]] == ["model"]
            backend.reset()
            async with session.get(f"{url}/readyz") as response:
                assert json.loads(await response.text())["checks"]["model"]["ok"] is True

    async def test_request_ids(self, server: Server) -> None:
        """A plain id is taken over; anything else is replaced, and never sent back."""
        for given in ("abc-123", "x" * 65, "a b", "<script>"):
            _, _, response = await server.call("GET", "/healthz", headers={"X-Request-ID": given})
            shown = response.headers["X-Request-ID"]
            assert (shown == given) == (given == "abc-123")
            assert shown.isascii()
            assert len(shown) <= 64
        _, _, refused = await server.call("GET", "/v1/nothing")
        assert len(refused.headers["X-Request-ID"]) == 32


class TestContract:
    def test_it_is_valid(self) -> None:
        document = openapi_document(ROUTES)
        validate(document)
        for operation in operations(document):
            assert operation["description"]
            assert "500" in operation["responses"]

    async def test_it_is_what_is_served(self, server: Server) -> None:
        _, document, _ = await server.call("GET", "/openapi.json")
        assert document == openapi_document(ROUTES)
        schemas = document["components"]["schemas"]
        seed = schemas["LossesAssignment"]["properties"]["minibatch_seed"]
        losses = schemas["LossesUpdate"]["properties"]["losses"]["items"]
        assert (seed["format"], losses["format"]) == ("int64", "double")
        app = build_app(server.aggregator.service)
        served = {
            (route.method.lower(), route.resource.canonical)
            for route in app.router.routes()
            if route.resource is not None and route.method != "HEAD"
        }
        described = {(m, path) for path, methods in document["paths"].items() for m in methods}
        assert described == served
        names = [operation["operationId"] for operation in operations(document)]
        assert len(set(names)) == len(names)

    async def test_every_route_requires_its_access(self, server: Server) -> None:
        """The access that a route declares is the one that it has."""
        for route in ROUTES:
            path = route.path
            for name in route.path_parameters:
                path = path.replace(f"{{{name}}}", "run" if name == "run_id" else "x")
            if route.access != "public":
                assert await server.refused(route.method, path) == "unauthorized"
            if route.access in ("viewer", "operator", "admin"):
                code = await server.refused(route.method, path, token=await server.credential())
                assert code == "unauthorized"
            if route.access == "device":
                assert await server.refused(route.method, path, token=ADMIN) == "unauthorized"
            for role in LESSER_ROLES.get(route.access, ()):
                assert await server.refused(route.method, path, token=role) == "forbidden"

    async def test_refusals_are_described(self, server: Server) -> None:
        """Statuses come from the codes, so a code is enough; this sees that codes are not lost."""
        document = openapi_document(ROUTES)
        claim = document["paths"]["/v1/assignments/claim"]["post"]
        assert set(claim["responses"]) >= {"200", "204", "401", "404", "410", "413", "415", "422"}
        assert "Retry-After" in claim["responses"]["204"]["headers"]
        assert claim["security"] == [{"device": []}]
        assert document["paths"]["/v1/runs"]["post"]["x-fedone-role"] == "operator"
        assert "Location" in document["paths"]["/v1/runs"]["post"]["responses"]["201"]["headers"]


def operations(document: Any) -> list[Any]:
    return [found for methods in document["paths"].values() for found in methods.values()]
