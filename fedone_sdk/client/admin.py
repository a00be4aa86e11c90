"""HTTP client for operators: runs, clients and enrolment tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar
from urllib.parse import quote

import aiohttp

from fedone_sdk import messages
from fedone_sdk.budget import Budget
from fedone_sdk.client.transport import Connection, Network, parsed, token_of
from fedone_sdk.errors import ArgumentError, TransportError
from fedone_sdk.spec import RunSpec, validate_spec

T = TypeVar("T")

_CONNECT_S, _PAGE_SIZE = 30.0, 1000


class AdminClient:
    """Manages an aggregator over HTTP with an admin token.

    All methods raise `TransportError` if the aggregator cannot be reached, `ProblemError` if it
    refuses, and `MessageError` if the answer does not follow the protocol. Nothing is retried.

    Example:
        ```python
        async with AdminClient("https://fedone.example", token) as admin:
            await admin.create(spec)
            async for event in admin.events("sst2"):
                print(event)
            await admin.delete("sst2")
        ```

    Args:
        network: Proxy and certificates. `timeout_s` limits the wait for the next bytes.

    Raises:
        SpecError: The URL, the token, the proxy or a certificate cannot be used.
    """

    def __init__(self, url: str, token: str, *, network: Network | None = None) -> None:
        self._connection = Connection(url, network=network)
        read_s = self._connection.network.timeout_s
        self._timeout = aiohttp.ClientTimeout(sock_connect=_CONNECT_S, sock_read=read_s)
        self._num_users = 0  # Requests and ``async with`` in progress.
        self._token = token_of(token) or ""
        if not self._token:
            raise ArgumentError("token: is required; it must be printable ASCII")

    def __repr__(self) -> str:
        return f"AdminClient({str(self._connection.base)!r})"

    async def __aenter__(self) -> Self:
        self._num_users += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self._num_users -= 1
        if not self._num_users:
            await self.aclose()

    async def aclose(self) -> None:
        """Close the connections; the next call opens new ones."""
        await self._connection.aclose()

    async def create(self, spec: RunSpec) -> messages.RunResult:
        """Create a run on the devices' data and the server's model.

        `spec` must not name files, modules or a model, because the server does not load them.

        Raises:
            ProblemError: ``invalid_run``, or ``run_conflict`` if the name is taken.
        """
        body = spec.model_dump_json().encode()
        return await self._call(messages.RunResult, "POST", "/v1/runs", body=body)

    async def list(self) -> tuple[messages.RunSummary, ...]:
        """Return the runs that the token may see, in the order they were created."""
        return await self._call(tuple[messages.RunSummary, ...], "GET", "/v1/runs")

    async def get(self, run_id: str) -> messages.RunResult:
        """Return the current or final state of a run."""
        return await self._call(messages.RunResult, "GET", _run(run_id))

    async def prompt(self, run_id: str) -> messages.PromptReport:
        """Return the prompt that would be deployed now."""
        return await self._call(messages.PromptReport, "GET", _run(run_id, "prompt"))

    async def log(self, run_id: str) -> bytes:
        """Return a run as JSON lines: its specification, its log, its result."""
        content = await self._read("GET", _run(run_id, "log"))
        for line in content.splitlines():
            parsed(dict[str, Any], line)
        return content

    async def stop(self, run_id: str) -> messages.RunResult:
        """End a run; return its result so far."""
        return await self._call(messages.RunResult, "POST", _run(run_id, "stop"))

    async def resume(self, run_id: str) -> messages.RunResult:
        """Resume a stopped, paused or failed run.

        Raises:
            ProblemError: ``run_conflict`` if the run is running or has ended permanently.
        """
        return await self._call(messages.RunResult, "POST", _run(run_id, "resume"))

    async def raise_caps(self, run_id: str, caps: Budget) -> messages.RunResult:
        """Raise the caps that are set in `caps`; a run whose budget was exhausted continues.

        Raises:
            ProblemError: ``run_conflict`` if a cap is below the present one, or new to the run.
        """
        body = caps.model_dump_json(exclude_none=True).encode()
        return await self._call(messages.RunResult, "POST", _run(run_id, "budget"), body=body)

    async def roll_back(self, run_id: str, to_round: int, reason: str) -> messages.RunResult:
        """Roll a run back to the start of a round; what it has spent stays counted.

        Args:
            run_id: The run.
            to_round: The first round to repeat, from 0.
            reason: For the log, 1 to 500 characters.

        Raises:
            ProblemError: ``run_conflict`` if the run has not finished that many rounds.
            SpecError: An argument is out of range.
        """
        arguments = {"to_round": to_round, "reason": reason}
        message = validate_spec(messages.RollBack, arguments, source="arguments")
        body = messages.encode(message)
        return await self._call(messages.RunResult, "POST", _run(run_id, "rollback"), body=body)

    async def delete(self, run_id: str, *, dry_run: bool = False) -> messages.Removal:
        """Delete an ended run and its log permanently; its name cannot be used again.

        Raises:
            ProblemError: ``run_conflict`` if the run has not ended.
        """
        params = {"dry_run": str(dry_run).lower()}
        return await self._call(messages.Removal, "DELETE", _run(run_id), params=params)

    async def clients_of(self, run_id: str) -> tuple[messages.ClientInfluence, ...]:
        """Return what each client has contributed to a run."""
        kind = tuple[messages.ClientInfluence, ...]
        return await self._call(kind, "GET", _run(run_id, "clients"))

    async def events(self, run_id: str) -> AsyncIterator[messages.RunEvent]:
        """Stream the finished rounds of a run from the first one on, then its result.

        If the prompt is evaluated after a round, the round is sent again with the metric.

        Raises:
            TransportError: The connection was lost before the run ended; a new stream starts with
                the first round again.
        """
        async with self._request("GET", _run(run_id, "events")) as response:
            async for name, data in _server_sent(response.content):
                if name == "end":
                    yield parsed(messages.RunResult, data)
                    return
                yield parsed(messages.RoundReport, data)
        raise TransportError(f"{self._connection.base}: closed the stream before the run ended")

    async def clients(self) -> tuple[messages.ClientInfo, ...]:
        """Return all enrolled clients."""
        clients, params = list[messages.ClientInfo](), {"limit": str(_PAGE_SIZE)}
        while True:
            page = await self._call(messages.ClientList, "GET", "/v1/clients", params=params)
            clients += page.clients
            if page.next is None:
                return tuple(clients)
            params["after"] = str(page.next)

    async def revoke_client(self, client_id: str) -> messages.ClientInfo:
        """Revoke a client permanently."""
        path = f"/v1/clients/{quote(client_id, safe='')}/revoke"
        return await self._call(messages.ClientInfo, "POST", path)

    async def tokens(self) -> tuple[messages.TokenInfo, ...]:
        """Return the enrolment tokens, without their secrets."""
        return (await self._call(messages.TokenList, "GET", "/v1/enrolment-tokens")).tokens

    async def create_token(self, token: messages.NewToken) -> messages.CreatedToken:
        """Create an enrolment token. Only this answer contains the token's secret."""
        body = messages.encode(token)
        return await self._call(messages.CreatedToken, "POST", "/v1/enrolment-tokens", body=body)

    async def revoke_token(self, name: str) -> messages.TokenInfo:
        """Revoke an enrolment token permanently; clients that enrolled with it stay enrolled."""
        path = f"/v1/enrolment-tokens/{quote(name, safe='')}"
        return await self._call(messages.TokenInfo, "DELETE", path)

    async def _call(self, kind: type[T], method: str, path: str, **options: Any) -> T:
        return parsed(kind, await self._read(method, path, **options))

    async def _read(self, method: str, path: str, **options: Any) -> bytes:
        async with self._request(method, path, **options) as response:
            return await response.read()

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        options["timeout"] = self._timeout
        async with self, self._connection.request(method, path, self._token, **options) as response:
            yield response


def _run(run_id: str, *rest: str) -> str:
    return "/".join(("/v1/runs", quote(run_id, safe=""), *rest))


async def _server_sent(stream: aiohttp.StreamReader) -> AsyncIterator[tuple[str, bytes]]:
    """Yield each server-sent event's name and data; the data is one line."""
    name, rest = "", b""
    # Not read line by line: the line with the run's result may be longer than aiohttp allows.
    async for chunk in stream.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            field, _, value = line.partition(b": ")
            if field == b"event":
                name = value.decode("utf-8", "replace")
            elif field == b"data":
                yield name, value
