"""HTTP client of commands, for a server's routes for people, with an admin token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Annotated, TypeVar

import aiohttp
import typer
from pydantic import ValidationError
from yarl import URL

from fedone_sdk.cli._options import header_value
from fedone_sdk.errors import MessageError, SpecError, TransportError
from fedone_sdk.messages import PROTOCOL_HEADER, PROTOCOL_VERSION, Problem

__all__ = ["Server", "Token", "call", "parse", "request"]

T = TypeVar("T")

Server = Annotated[str, typer.Option(metavar="URL", help="The aggregator.")]
Token = Annotated[
    str,
    typer.Option(
        "--admin-token",
        metavar="T",
        envvar="FEDONE_ADMIN_TOKEN",
        show_default=False,
        callback=header_value,
        help="The server's admin token.",
    ),
]


def call(
    server: str,
    token: str,
    method: str,
    path: str,
    *,
    params: Mapping[str, str] | None = None,
    body: bytes | None = None,
    content_type: str = "application/json",
) -> bytes:
    """The body of a response; see `request`."""

    async def ask() -> bytes:
        asked = request(
            server, token, method, path, params=params, body=body, content_type=content_type
        )
        async with asked as response:
            return await response.read()

    return asyncio.run(ask())


@asynccontextmanager
async def request(
    server: str,
    token: str,
    method: str,
    path: str,
    *,
    params: Mapping[str, str] | None = None,
    body: bytes | None = None,
    content_type: str = "application/json",
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Sends a request; yields a successful response whose body is not read.

    Raises:
        SpecError: The URL is invalid.
        TransportError: The server cannot be reached.
        ProblemError: The server refused the request.
        MessageError: The server is not an aggregator.
    """
    base = _base(server)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)
    headers = {"Authorization": f"Bearer {token}", PROTOCOL_HEADER: str(PROTOCOL_VERSION)}
    if body is not None:
        headers["Content-Type"] = content_type
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            # A redirect would send the token to another server.
            session.request(
                method,
                base.joinpath(path.lstrip("/")),
                params=params,
                data=body,
                headers=headers,
                allow_redirects=False,
            ) as response,
        ):
            if response.status >= 300:
                problem = parse(Problem.model_validate_json, await response.read())
                raise problem.error()
            yield response
    except (aiohttp.ClientError, TimeoutError, OSError) as exc:
        raise TransportError(f"{server}: cannot be reached: {exc or type(exc).__name__}") from exc


def _base(server: str) -> URL:
    try:
        base = URL(server)
        (base.raw_host or "").encode("idna")  # as the DNS lookup does
    except ValueError:
        base = URL()
    if base.scheme not in ("http", "https") or not base.host:
        raise SpecError(f"--server: {server!r} is not an http(s) URL", source="arguments")
    if base.user is not None or base.password is not None:
        # aiohttp would send them instead of the token.
        raise SpecError("--server: must not hold a user or password", source="arguments")
    return base


def parse(parser: Callable[[bytes], T], body: bytes) -> T:
    """Parses a body.

    Raises:
        MessageError: It is not a response of an aggregator.
    """
    try:
        return parser(body)
    except ValidationError as exc:
        raise MessageError("the server does not answer as an aggregator does") from exc
