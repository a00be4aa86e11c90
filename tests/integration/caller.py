"""A real server on loopback, and requests of any kind to it."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from fedone_sdk.aggregator import Aggregator, ServedRun
from fedone_sdk.errors import PROBLEMS
from fedone_sdk.messages import Problem
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import MemoryStore
from fedone_sdk.testing import ManualClock, ScriptedBackend
from fedone_sdk.vocabulary import Vocabulary
from tests.runs import WORDS

TOKEN, ADMIN = "enrolment-token-7f3a", "admin-token-91bc"
UPDATE = {
    "exchange": "losses",
    "num_examples": 5,
    "scored": {"scored": 2},
    "usage": {},
    "model": "scripted",
    "losses": [0.5, 0.25, 0.75, 0.5],
}


class Caller:
    """A server's base URL, and requests to it."""

    url: str
    session: aiohttp.ClientSession

    async def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        token: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any, aiohttp.ClientResponse]:
        """Status, parsed body (None where it is empty) and the response."""
        raw = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        sent: dict[str, str] = {} if raw is None else {"Content-Type": "application/json"}
        sent |= {} if token is None else {"Authorization": f"Bearer {token}"}
        async with self.session.request(
            method,
            f"{self.url}{path}",
            data=raw and io.BytesIO(raw),
            headers={**sent, **(headers or {})},
        ) as response:
            text = await response.text()
            return response.status, json.loads(text) if text else None, response

    async def claim(self, credential: str, **fields: Any) -> Any:
        """The work of a claim, which does not wait by default; the status if there is none."""
        body = {"num_examples": 5, "wait_s": 0, **fields}
        status, document, _ = await self.call(
            "POST", "/v1/assignments/claim", body, token=credential
        )
        return document if status == 200 else status

    async def update(self, credential: str, work: Any, **changes: Any) -> tuple[int, Any]:
        """Status and body of an update with four losses."""
        path = f"/v1/assignments/{work['assignment_id']}/update"
        body = {**UPDATE, **changes}
        status, document, _ = await self.call("POST", path, body, token=credential)
        return status, document

    async def refused(self, method: str, path: str, body: object = None, **more: Any) -> str:
        """The code of a refusal, which must be a well-formed problem."""
        status, document, response = await self.call(method, path, body, **more)
        assert response.content_type == "application/problem+json"
        problem = Problem.model_validate(document)
        assert problem.status == status == PROBLEMS[problem.code][0]
        assert problem.type == f"urn:fedone:problem:{problem.code}"
        return problem.code


@dataclass(slots=True, kw_only=True)
class Server(Caller):
    """An aggregator with a manual clock, and a session of an unknown caller."""

    aggregator: Aggregator
    url: str
    session: aiohttp.ClientSession
    store: Any
    backend: Any
    clock: ManualClock

    async def ok(self, method: str, path: str, body: Any = None, **more: Any) -> Any:
        """The body of a request that succeeds."""
        status, document, _ = await self.call(method, path, body, **more)
        assert status in (200, 201, 204), document
        return document

    async def enrol(self, token: str = TOKEN, **message: Any) -> tuple[str, str]:
        """Client id and credential of a new device."""
        document = await self.ok("POST", "/v1/clients", message, token=token)
        return document["client_id"], document["credential"]

    async def credential(self) -> str:
        """The credential of a new device."""
        return (await self.enrol())[1]

    @property
    def run(self) -> ServedRun:
        """The run named ``run``."""
        return self.aggregator.service.runs["run"]


@asynccontextmanager
async def served(
    *specs: RunSpec, words: Vocabulary = WORDS, **settings: Any
) -> AsyncIterator[Server]:
    """Serve runs; the settings are those of `Aggregator`."""
    settings = {
        "backend": ScriptedBackend(),
        "store": MemoryStore(),
        "clock": ManualClock(),
        "enrolment_tokens": [TOKEN],
        "admin_token": ADMIN,
        **settings,
    }
    async with Aggregator(**settings) as aggregator, aiohttp.ClientSession() as session:
        url = await aggregator.listen()
        for spec in specs:
            await aggregator.add_run(spec, words)
        kept = {name: settings[name] for name in ("store", "backend", "clock")}
        yield Server(aggregator=aggregator, url=url, session=session, **kept)
