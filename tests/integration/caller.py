"""Sends a real server anything, and reads what comes back."""

from __future__ import annotations

import io
import json
from typing import Any

import aiohttp

from fedone_sdk.errors import PROBLEMS
from fedone_sdk.messages import Problem


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

    async def refused(self, method: str, path: str, body: object = None, **more: Any) -> str:
        """The code of a refusal, which must be a well-formed problem."""
        status, document, response = await self.call(method, path, body, **more)
        assert response.content_type == "application/problem+json"
        problem = Problem.model_validate(document)
        assert problem.status == status == PROBLEMS[problem.code][0]
        assert problem.type == f"urn:fedone:problem:{problem.code}"
        return problem.code
