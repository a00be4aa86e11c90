"""Requests of any kind to a real server."""

from __future__ import annotations

import io
import json
from typing import Any

import aiohttp

from fedone_sdk.errors import PROBLEMS
from fedone_sdk.messages import Problem

UPDATE = {
    "exchange": "losses",
    "num_examples": 5,
    "scored": {"scored": 2},
    "usage": {},
    "model": "scripted",
    "losses": [0.5, 0.25, 0.75, 0.5],
}


class Caller:
    """A server's address, and requests to it.

    Attributes:
        url: Its base URL.
        session: What asks it.
    """

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
