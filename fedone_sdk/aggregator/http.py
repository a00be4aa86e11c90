"""What the SDK's HTTP servers share: tokens and bodies in, answers and problems out."""

from __future__ import annotations

import math
import ssl
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import structlog
from aiohttp import web
from pydantic import ValidationError

from fedone_sdk.errors import ProblemError
from fedone_sdk.messages import Message, Problem

__all__ = [
    "Handler",
    "RETRY_AFTER_S",
    "answer",
    "bearer_token",
    "listening",
    "problem",
    "problems",
    "read",
]

_log = structlog.get_logger(__name__)

RETRY_AFTER_S = 1
"""What a caller is told to wait where nothing says more."""

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every refusal leaves as problem+json with a stable code."""
    try:
        return await handler(request)
    except ProblemError as exc:
        return problem(exc)
    except web.HTTPRequestEntityTooLarge:
        limit = request.client_max_size
        return problem(ProblemError("body_too_large", f"the limit is {limit} bytes"))
    except web.HTTPNotFound:
        return problem(ProblemError("not_found", f"there is nothing at {request.path}"))
    except web.HTTPMethodNotAllowed as exc:
        allowed = exc.headers["Allow"]
        detail = f"{request.method} is not one of {allowed}"
        response = problem(ProblemError("method_not_allowed", detail))
        response.headers["Allow"] = allowed
        return response
    except Exception:
        # What went wrong is for the log; a stranger learns only that something did. Formatted
        # here, since some log renderers print local variables: tokens are among them.
        _log.error(
            "request failed",
            method=request.method,
            path=request.path,
            traceback=traceback.format_exc(),
        )
        return problem(ProblemError("internal", "see the server's log"))


def problem(error: ProblemError, document: Problem | None = None) -> web.Response:
    """The answer to a request that is refused.

    Args:
        error: Why.
        document: What says more than the error.
    """
    headers = {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status in (429, 503):
        headers["Retry-After"] = str(max(math.ceil(error.retry_after_s or 0), RETRY_AFTER_S))
    return web.Response(
        status=error.status,
        body=(document or Problem.of(error)).model_dump_json().encode(),
        content_type="application/problem+json",
        headers=headers,
    )


def bearer_token(request: web.Request) -> str | None:
    """The token that a request carries, if any."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token else None


async def read(request: web.Request, parse: Callable[[bytes], T]) -> tuple[T, bytes]:
    """The message in a request's body, and the body.

    Raises:
        ProblemError: ``not_json`` or ``invalid_message``.
    """
    if request.content_type != "application/json":
        raise ProblemError("not_json", f"the body is {request.content_type}")
    body = await request.read()
    try:
        return parse(body), body
    except ValidationError as exc:
        raise ProblemError("invalid_message", _first_error(exc)) from None


def _first_error(exc: ValidationError) -> str:
    # Neither the input nor a URL: an error must not echo what a device sent.
    error = exc.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(step) for step in error["loc"])
    return f"{where}: {error['msg']}" if where else error["msg"]


def answer(message: Message, status: int = 200) -> web.Response:
    """A message as the answer to a request."""
    return web.Response(
        status=status, body=message.model_dump_json().encode(), content_type="application/json"
    )


@asynccontextmanager
async def listening(
    app: web.Application,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    ssl_context: ssl.SSLContext | None = None,
    handler_cancellation: bool = False,
    grace_s: float = 1.0,
) -> AsyncIterator[str]:
    """Accepts requests while the body runs.

    Args:
        app: What answers them.
        host: Address to listen on.
        port: 0 picks a free one.
        ssl_context: Serves ``https``.
        handler_cancellation: Whether the work for a caller ends when the caller hangs up.
        grace_s: How long requests under way may take at the end, seconds.

    Yields:
        The base URL.

    Raises:
        OSError: The address is taken or not one of this machine.
    """
    runner = web.AppRunner(
        app,
        handler_cancellation=handler_cancellation,
        access_log=None,
        shutdown_timeout=grace_s,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, ssl_context=ssl_context, backlog=1024)
        await site.start()
        bound = runner.addresses[0][1]
        scheme = "http" if ssl_context is None else "https"
        yield f"{scheme}://{f'[{host}]' if ':' in host else host}:{bound}"
    finally:
        await runner.cleanup()
