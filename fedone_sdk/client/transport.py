"""How an edge client reaches its aggregator: messages in, messages out, over HTTP."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import aiohttp
from pydantic import ValidationError
from yarl import URL

from fedone_sdk.errors import MessageError, SpecError, TransportError
from fedone_sdk.messages import (
    ASSIGNMENT,
    AlphaAssignment,
    AlphaUpdate,
    Claim,
    Decline,
    Enrol,
    Enrolled,
    LossesAssignment,
    LossesUpdate,
    Message,
    Problem,
    Receipt,
    RunTask,
    Score,
    Scores,
    VocabularyList,
)

__all__ = ["HttpTransport", "Idle", "Transport"]

T = TypeVar("T")

_MAX_ANSWER_BYTES = 64 * 1024 * 1024


class Idle(Message):
    """There is no work now; ask again after `retry_after_s` seconds."""

    retry_after_s: float


class Transport(Protocol):
    """The calls of the protocol. All but `enrol` act for the client whose credential is given.

    Each raises `TransportError` when the aggregator cannot be reached, and `ProblemError` when it
    refuses.
    """

    async def enrol(self, token: str, message: Enrol) -> Enrolled:
        """Makes an identity."""
        ...

    async def claim(
        self, credential: str, message: Claim
    ) -> AlphaAssignment | LossesAssignment | Idle:
        """Asks for work."""
        ...

    async def task(self, credential: str, run_id: str) -> RunTask:
        """Fetches what must be known of a run."""
        ...

    async def vocabulary(self, credential: str, run_id: str) -> VocabularyList:
        """Fetches a run's candidates."""
        ...

    async def score(self, credential: str, message: Score) -> Scores:
        """Asks the gateway."""
        ...

    async def update(
        self, credential: str, assignment_id: str, message: AlphaUpdate | LossesUpdate
    ) -> Receipt:
        """Returns finished work."""
        ...

    async def renew(self, credential: str, assignment_id: str) -> None:
        """Asks for another deadline."""
        ...

    async def decline(self, credential: str, assignment_id: str, message: Decline) -> None:
        """Gives work back."""
        ...

    async def aclose(self) -> None:
        """Frees connections."""
        ...


class HttpTransport:
    """The protocol over HTTP.

    Args:
        server: Base URL of the aggregator.
        ssl_context: Trust for ``https``; the system's by default.
        timeout_s: Longest wait for an answer, on top of what a long poll asks for.
    """

    def __init__(
        self, server: str, *, ssl_context: ssl.SSLContext | None = None, timeout_s: float = 60.0
    ) -> None:
        self._base = URL(server)
        if self._base.scheme not in ("http", "https") or not self._base.host:
            raise SpecError(f"server: {server!r} is not an http(s) URL", source="arguments")
        self._ssl = ssl_context
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def enrol(self, token: str, message: Enrol) -> Enrolled:
        """Makes an identity."""
        body = await self._call("POST", "/v1/clients", token, message)
        return _parse(Enrolled.model_validate_json, body)

    async def claim(
        self, credential: str, message: Claim
    ) -> AlphaAssignment | LossesAssignment | Idle:
        """Asks for work."""
        path = "/v1/assignments/claim"
        status, headers, body = await self._request(
            "POST", path, credential, message, patience_s=message.wait_s
        )
        if status == 204:
            return Idle(retry_after_s=_retry_after_s(headers))
        return _parse(ASSIGNMENT.validate_json, body)

    async def task(self, credential: str, run_id: str) -> RunTask:
        """Fetches what must be known of a run."""
        body = await self._call("GET", f"/v1/runs/{run_id}/task", credential)
        return _parse(RunTask.model_validate_json, body)

    async def vocabulary(self, credential: str, run_id: str) -> VocabularyList:
        """Fetches a run's candidates."""
        body = await self._call("GET", f"/v1/runs/{run_id}/vocabulary", credential)
        return _parse(VocabularyList.model_validate_json, body)

    async def score(self, credential: str, message: Score) -> Scores:
        """Asks the gateway."""
        # A model takes its time; the assignment's own deadline bounds it.
        _, _, body = await self._request("POST", "/v1/score", credential, message, patience_s=600.0)
        return _parse(Scores.model_validate_json, body)

    async def update(
        self, credential: str, assignment_id: str, message: AlphaUpdate | LossesUpdate
    ) -> Receipt:
        """Returns finished work."""
        path = f"/v1/assignments/{assignment_id}/update"
        return _parse(
            Receipt.model_validate_json, await self._call("POST", path, credential, message)
        )

    async def renew(self, credential: str, assignment_id: str) -> None:
        """Asks for another deadline."""
        await self._call("POST", f"/v1/assignments/{assignment_id}/renew", credential)

    async def decline(self, credential: str, assignment_id: str, message: Decline) -> None:
        """Gives work back."""
        await self._call("POST", f"/v1/assignments/{assignment_id}/decline", credential, message)

    async def aclose(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()

    async def _call(
        self, method: str, path: str, token: str, message: Message | None = None
    ) -> bytes:
        _, _, body = await self._request(method, path, token, message)
        return body

    async def _request(
        self,
        method: str,
        path: str,
        token: str,
        message: Message | None = None,
        *,
        patience_s: float = 0.0,
    ) -> tuple[int, Mapping[str, str], bytes]:
        if self._session is None:
            # Created here, not in __init__: a session belongs to the loop that uses it.
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None), trust_env=True
            )
        headers = {"Authorization": f"Bearer {token}"}
        if message is not None:
            headers["Content-Type"] = "application/json"
        options: dict[str, Any] = {} if self._ssl is None else {"ssl": self._ssl}
        try:
            async with self._session.request(
                method,
                self._base.joinpath(path.lstrip("/"), encoded=True),
                data=None if message is None else message.model_dump_json().encode(),
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=self._timeout_s + patience_s),
                allow_redirects=False,  # a redirect would carry the credential elsewhere
                **options,
            ) as response:
                body = bytearray()
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > _MAX_ANSWER_BYTES:
                        raise MessageError(f"{path}: the answer is over {_MAX_ANSWER_BYTES} bytes")
                if response.status >= 300:
                    raise _refusal(path, response.status, response.headers, bytes(body))
                return response.status, response.headers, bytes(body)
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            reason = str(exc) or type(exc).__name__
            raise TransportError(f"{self._base}: cannot be reached: {reason}") from exc


def _refusal(path: str, status: int, headers: Mapping[str, str], body: bytes) -> Exception:
    wait_s = _retry_after_s(headers) if "Retry-After" in headers else None
    try:
        error = Problem.model_validate_json(body).error()
    except ValidationError:
        # Not ours: a proxy between here and there. Its 5xx will pass.
        if status >= 500 or status == 429:
            return TransportError(f"{path}: answered {status}", retry_after_s=wait_s)
        return MessageError(f"{path}: answered {status}, and not as an aggregator does")
    error.retry_after_s = wait_s
    return error


def _parse(parse: Callable[[bytes], T], body: bytes) -> T:
    try:
        return parse(body)
    except ValidationError as exc:
        raise MessageError(f"the aggregator's answer is malformed: {exc}") from exc


def _retry_after_s(headers: Mapping[str, str]) -> float:
    try:
        return min(max(float(headers["Retry-After"]), 0.0), 3600.0)
    except (KeyError, ValueError):
        return 1.0
