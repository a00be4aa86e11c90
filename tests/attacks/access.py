"""Attacks by devices, viewers and replicas on what they may read, and on who may enrol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import SecretStr

from fedone_sdk.aggregator.authority import AdminToken, EnrolmentToken
from fedone_sdk.aggregator.http.guards import Limits
from fedone_sdk.backends import AnswerCache, ModelClient, Query
from fedone_sdk.client import EdgeClient
from fedone_sdk.errors import BackendBlocked
from fedone_sdk.messages import PromptReport, RunTask, VocabularyList
from fedone_sdk.messages.tensor import prompts_to_wire
from fedone_sdk.stores import MemoryStore, SqlStore
from fedone_sdk.testing import ScriptedBackend
from tests.attacks import Succeeded, attack
from tests.integration.caller import ADMIN, TOKEN, Server, served
from tests.runs import TASK, run_spec

VIEWER, OPERATOR = "viewer-token-6a2f", "operator-token-80d1"
PRIVATE = "HIV-positive"


@asynccontextmanager
async def _server(**settings: Any) -> AsyncIterator[Server]:
    people = [
        AdminToken(token=SecretStr(VIEWER), name="viewer", role="viewer"),
        AdminToken(token=SecretStr(OPERATOR), name="operator", role="operator"),
    ]
    async with served(run_spec(), admin_tokens=people, **settings) as server:
        yield server


async def _read_all(server: Server, token: str) -> dict[str, str]:
    """What a caller reads by GET, by route; the run must have ended, or its events do not end."""
    routes = (await server.ok("GET", "/openapi.json"))["paths"]
    headers = {"Authorization": f"Bearer {token}"}
    found = {}
    for route, methods in routes.items():
        if "get" in methods and "{page_file}" not in route:
            url = server.url + route.replace("{run_id}", "run")
            async with server.session.get(url, headers=headers) as response:
                if response.status == 200:
                    found[route] = await response.text()
    return found


@attack(
    "300 readiness probes at once by an unknown caller", before="100 queries of the store at once"
)
async def _floods_the_store(folder: Path) -> str:
    class Counted(MemoryStore):
        at_once = most = 0

        async def ping(self) -> None:
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            await asyncio.sleep(0.01)
            self.at_once -= 1

    store = Counted()
    async with _server(store=store, limits=Limits()) as server:
        calls = (server.call("GET", "/readyz") for _ in range(300))
        answers = await asyncio.gather(*calls)
    assert {status for status, *_ in answers} == {200}
    if store.most > 1:
        raise Succeeded(f"{store.most} queries of the store at once")
    return "they share one query of the store"


@attack(
    "a device reads about other devices",
    before="ids, exact mean losses, usage and cache hits of each round",
)
async def _device_reads_others(folder: Path) -> str:
    async with _server() as server:
        victim, credential = await server.enrol(name="the ward's tablet")
        work = await server.claim(credential)
        losses = [0.123456789, 0.5, 0.75, 0.25]
        assert (await server.update(credential, work, losses=losses))[0] == 200
        await server.call("POST", "/v1/runs/run/stop", token=ADMIN)
        found = await _read_all(server, await server.credential())
        secrets = [victim, repr(sum(losses) / 4), "tablet"]
        everything = await _read_all(server, ADMIN)
        assert all(any(secret in text for text in everything.values()) for secret in secrets)
    public = {"/", "/healthz", "/readyz", "/openapi.json", "/device.openapi.json"}
    allowed = {
        "/v1/runs": {"run_id", "status", "round", "rounds"},
        "/v1/runs/{run_id}/task": set(RunTask.model_fields),
        "/v1/runs/{run_id}/vocabulary": set(VocabularyList.model_fields),
        "/v1/runs/{run_id}/prompt": set(PromptReport.model_fields),
    }
    assert found.keys() == public | allowed.keys()
    for route, fields in allowed.items():
        document = json.loads(found[route])
        for part in document if isinstance(document, list) else [document]:
            if not part.keys() <= fields:
                raise Succeeded(f"reads {part.keys() - fields} of {route}")
    for secret in secrets:
        assert not any(secret in text for text in found.values()), secret
    return f"{len(allowed)} routes, none with ids, losses, usage or cache hits"


@attack(
    "a viewer reads words of devices and providers",
    before="label is 'HIV-positive', in /seats and in the reason of a failed run",
)
async def _viewer_reads_labels(folder: Path) -> str:
    def refuse(query: Query) -> None:
        raise BackendBlocked("the provider refuses", said=f"no access for {PRIVATE!r}")

    async with _server(backend=ScriptedBackend(gate=refuse)) as server:
        for unfit in (True, False):
            client_id, credential = await server.enrol(name=PRIVATE)
            path = f"/v1/assignments/{(await server.claim(credential))['assignment_id']}/decline"
            body = {"reason": f"label is {PRIVATE!r}", "unfit": unfit}
            await server.ok("POST", path, body, token=credential)
        await server.claim(credential)
        path = f"/v1/runs/run/clients/{client_id}/quarantine"
        await server.ok("POST", path, {"reason": f"reports only {PRIVATE!r}"}, token=OPERATOR)
        _, credential = await server.enrol()
        work = await server.claim(credential)
        body = {"assignment_id": work["assignment_id"], "examples": [{"text": PRIVATE}]}
        await server.call("POST", "/v1/score", body, token=credential)
        assert server.run.state.paused
        found, known = await _read_all(server, VIEWER), await _read_all(server, OPERATOR)
    leaks = [route for route, text in found.items() if PRIVATE in text]
    if leaks:
        raise Succeeded(f"reads a label in {leaks}")
    assert PRIVATE in known["/v1/runs/{run_id}/seats"]  # An operator has to find the cause.
    assert PRIVATE in known["/v1/runs/{run_id}"]
    return f"{len(found)} routes, none with words of a device, a provider or an operator"


@attack(
    "a run whose labels do not fit learns those of a device",
    before="label is 'HIV-positive', not one of: 0, 1",
)
async def _device_says_labels(folder: Path) -> str:
    rows = [{"text": f"text {number}", "label": PRIVATE} for number in range(20)]
    async with _server() as server:
        async with EdgeClient(server.url, token=TOKEN, data=rows, state_dir=folder) as client:
            assert (await client.run_once()).outcome == "declined"
        await server.call("POST", "/v1/runs/run/stop", token=ADMIN)
        found = await _read_all(server, ADMIN)
    leaks = [route for route, text in found.items() if PRIVATE in text]
    if leaks:
        raise Succeeded(f"the server knows a label: {leaks}")
    return f"the device says: field 'label' is none of: {', '.join(map(str, TASK['labels']))}"


@attack(
    "a replica with an old token closes enrolment",
    before="the live token is revoked for good, on all replicas",
)
async def _old_replica_closes_enrolment(folder: Path) -> str:
    def token(secret: str, name: str | None) -> EnrolmentToken:
        return EnrolmentToken(token=SecretStr(secret), name=name)

    async def serve(*tokens: EnrolmentToken) -> list[str]:
        """The configuration of a replica: who can enrol, with it running."""
        store = SqlStore.sqlite(folder / "fedone.db")
        async with _server(store=store, enrolment_tokens=tokens) as server:
            answers = {
                secret: (await server.call("POST", "/v1/clients", {}, token=secret))[0]
                for secret in ("live", "live-named")
            }
        return [secret for secret, status in answers.items() if status != 201]

    live = token("live", None), token("live-named", "fleet")
    for tokens in (live, (token("old", None), token("old-named", "fleet")), (), live):
        if refused := await serve(*tokens):
            raise Succeeded(f"closes enrolment with {refused}")
    return "the live tokens enrol on all replicas"


@attack(
    "a tenant asks by cache.hits whether another's device holds a text",
    before="hits: 1 if it does, 0 if not",
)
async def _tenant_asks_the_cache(folder: Path) -> str:
    tenants = ("acme", "zeta")
    tokens = [
        EnrolmentToken(token=SecretStr(name), name=name, runs=(f"{name}-*",)) for name in tenants
    ]
    exchange = {"exchange": "alpha"}
    specs = [run_spec(name=f"{name}-1", participation=exchange) for name in tenants]
    backend = ModelClient(ScriptedBackend(), cache=AnswerCache())
    prompts = prompts_to_wire(np.array([[0, 0], [0, 1], [1, 0], [1, 1]]), 3).model_dump(mode="json")
    async with served(*specs, backend=backend, enrolment_tokens=tokens) as server:
        found = []
        # A tablet, that of another tenant, and another tablet of that tenant ask the same.
        for tenant in ("acme", "zeta", "zeta"):
            _, credential = await server.enrol(tenant)
            work = await server.claim(credential)
            body = {"examples": [{"text": PRIVATE}], "prompts": prompts}
            body["assignment_id"] = work["assignment_id"]
            before = await server.ok("GET", f"/v1/runs/{tenant}-1", token=ADMIN)
            await server.ok("POST", "/v1/score", body, token=credential)
            run = await server.ok("GET", f"/v1/runs/{tenant}-1", token=ADMIN)
            hits = run["cache"]["hits"] - before["cache"]["hits"]
            found.append((hits, run["spent"]["requests"] - before["spent"]["requests"]))
            path = f"/v1/assignments/{work['assignment_id']}/decline"
            await server.ok("POST", path, {"reason": "done", "unfit": True}, token=credential)
    if len(set(found)) > 1:
        raise Succeeded(f"hits and requests differ: {found}")
    return "hits 0: what another run or device asked is asked again"


@attack(
    "wrong tokens from the address of a fleet",
    before="429 for each device that another replica enrolled, and for all after one ends",
)
async def _neighbour_locks_out(folder: Path) -> str:
    """Wrong tokens arrive from the devices' address while the server reloads its clients."""
    async with _server(limits=Limits(failures_per_minute_per_ip=3)) as server:
        access, credentials = server.aggregator.service.access, []
        for _ in range(3):
            credentials.append(await server.credential())
        rotated = await server.ok("POST", "/v1/clients/me/credential", token=credentials[0])
        for _ in range(5):
            await server.call("GET", "/v1/runs", token="a wrong token")
        credentials[0] = rotated["credential"]
        statuses = [(await server.call("GET", "/v1/runs", token=credentials[0]))[0]]
        for reloading in access.reload(1), access.reload_all():  # As a replica changes, or ends.
            await reloading
            for credential in credentials:
                statuses.append((await server.call("GET", "/v1/runs", token=credential))[0])
    if set(statuses) != {200}:
        raise Succeeded(f"known devices get {statuses}")
    return "known devices work on, also after rotations and restarts of replicas"
