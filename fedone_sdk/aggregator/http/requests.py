"""Requests and responses of the HTTP servers: tokens, bodies, problems, streams."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import ssl
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar
from weakref import WeakSet

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler
from pydantic import ValidationError

from fedone_sdk.aggregator.runtime import in_thread_if_large
from fedone_sdk.errors import ProblemError, StoreUnavailable
from fedone_sdk.messages import (
    PROTOCOL_HEADER,
    PROTOCOL_VERSION,
    Message,
    Problem,
    encode,
    first_error,
)

_log = structlog.get_logger(__name__)

RETRY_AFTER_S = 1
"""Default ``Retry-After``, seconds."""

_READ_TIMEOUT_S = 60.0
"""Maximal time to receive a request's body, seconds."""

MAX_PARTS = 1_000_000
"""Maximal number of commas, brackets and braces in a document, including those in strings."""

PROBLEM: Any = web.ResponseKey("problem", str) if hasattr(web, "ResponseKey") else "problem"
"""Key of the problem code of a response; aiohttp before 3.14 only supports text keys."""
_ACTIVE: WeakSet[asyncio.Transport] = WeakSet()
"""Connections that have sent a request."""

JSON = "application/json"
"""Content type of messages."""

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Convert errors to problem+json responses with stable codes (middleware)."""
    if request.transport is not None:
        _ACTIVE.add(request.transport)
    try:
        return await handler(request)
    except ProblemError as exc:
        return problem(exc)
    except web.HTTPRequestEntityTooLarge:
        return problem(_too_large(request.client_max_size))
    except web.HTTPNotFound:
        return problem(ProblemError("not_found", f"there is nothing at {request.path}"))
    except web.HTTPMethodNotAllowed as exc:
        allowed = exc.headers["Allow"]
        detail = f"{request.method} is not one of {allowed}"
        response = problem(ProblemError("method_not_allowed", detail))
        response.headers["Allow"] = allowed
        return response
    except StoreUnavailable as exc:
        _log.error("request failed", method=request.method, path=request.path, reason=str(exc))
        return problem(ProblemError("store_unavailable", "it may recover by itself; retry later"))
    except Exception:
        # The response has no details. Formatted here: some log renderers print local variables,
        # which include tokens.
        _log.error(
            "request failed",
            method=request.method,
            path=request.path,
            traceback=traceback.format_exc(),
        )
        return problem(ProblemError("internal", "see the server's log"))


def problem(error: ProblemError) -> web.Response:
    """Return the response to a refused request."""
    headers = {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.code == "unsupported_encoding":
        headers["Accept-Encoding"] = "identity"
    if error.status == 426:
        headers["Upgrade"] = f"fedone/{PROTOCOL_VERSION}"
        headers["Connection"] = "Upgrade"
    if error.status in (429, 503):
        headers["Retry-After"] = str(max(math.ceil(error.retry_after_s or 0), RETRY_AFTER_S))
    response = web.Response(
        status=error.status,
        body=Problem.of(error).model_dump_json().encode(),
        content_type="application/problem+json",
        headers=headers,
    )
    response[PROBLEM] = error.code
    return response


async def stamp_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Set the common headers of all responses (``on_response_prepare``)."""
    response.headers[PROTOCOL_HEADER] = str(PROTOCOL_VERSION)
    response.headers["Server"] = "FedOne"  # Without version numbers.
    response.headers["X-Content-Type-Options"] = "nosniff"
    # Responses contain credentials and states of runs, which proxies must not cache.
    response.headers.setdefault("Cache-Control", "no-store")


def bearer_token(request: web.Request) -> str | None:
    """Return the bearer token of a request, if any."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token else None


async def body_of(request: web.Request, *, max_bytes: int) -> bytes:
    """Return a request's body.

    Raises:
        ProblemError: ``unsupported_encoding``, ``body_too_large``, ``request_timeout``, or
            ``invalid_message`` for an incomplete body.
    """
    if request.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
        # The size after decompression is not known in advance.
        raise ProblemError("unsupported_encoding", "send the body as it is")
    if (request.content_length or 0) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(_READ_TIMEOUT_S):
            while chunk := await request.content.readany():
                body += chunk
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError:
        raise ProblemError(
            "request_timeout", f"the body did not arrive within {_READ_TIMEOUT_S:g} s"
        ) from None
    except (web.RequestPayloadError, ConnectionError):
        raise ProblemError("invalid_message", "the body ends early or is cut wrongly") from None
    return bytes(body)


async def parsed(body: bytes, validate: Callable[[Any], T]) -> T:
    """Return the message in a body; ``invalid_message`` if there is none."""
    try:
        return await in_thread_if_large(len(body), lambda: validate(load_json(body)))
    except ValidationError as exc:
        raise ProblemError("invalid_message", first_error(exc)) from None
    except ValueError as exc:
        raise ProblemError("invalid_message", str(exc)) from None


def load_json(body: bytes) -> Any:
    """Return the document of a body, which is parsed only here.

    Raises:
        ValueError: The document is not JSON in UTF-8, is nested too deeply, has too many parts, a
            duplicate key, or NaN or Infinity.
    """
    if sum(map(body.count, (b",", b"[", b"{"))) > MAX_PARTS:
        raise ValueError(f"more than {MAX_PARTS} commas, lists and objects")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise ValueError("the body is not UTF-8") from exc
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number)
    except _Refused:
        raise
    except RecursionError as exc:
        raise ValueError("lists and objects are nested too deeply") from exc
    except ValueError as exc:
        raise ValueError("Invalid JSON") from exc


class _Refused(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        raise _Refused("an object has the same key twice")
    return document


def _no_number(_name: str) -> NoReturn:
    raise _Refused("NaN and Infinity are no JSON numbers")


def _too_large(limit: int) -> ProblemError:
    return ProblemError("body_too_large", f"the limit is {limit} bytes")


def answer(message: Message, status: int = 200) -> web.Response:
    """Return a message as a response."""
    return web.Response(status=status, body=encode(message), content_type=JSON)


async def streamed(
    request: web.Request, pieces: AsyncIterator[bytes], *, content_type: str
) -> web.StreamResponse:
    """Stream a response with back-pressure.

    A failure before the first piece is a normal error response. A later failure closes the
    connection, so that the caller detects the incomplete body.
    """
    first = await anext(pieces, b"")
    response = web.StreamResponse()
    response.content_type = content_type
    await response.prepare(request)
    try:
        await response.write(first)
        async for piece in pieces:
            await response.write(piece)
    except ConnectionError:
        pass  # The caller has disconnected.
    except Exception as exc:
        _log.error("answer cut", method=request.method, path=request.path, error=type(exc).__name__)
        if request.transport is not None:
            request.transport.abort()
    return response


@asynccontextmanager
async def listening(
    app: web.Application,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    ssl_context: ssl.SSLContext | None = None,
    handler_cancellation: bool = False,
    grace_s: float = 1.0,
    keepalive_s: float = 75.0,
    first_request_s: float = 20.0,
) -> AsyncIterator[str]:
    """Serve an application while the body runs; yield the base URL.

    At the end, pending requests have `grace_s` to finish. `keepalive_s` and `first_request_s` are
    as in `Limits`.

    Raises:
        OSError: The address is in use or does not belong to this machine.
    """
    runner = web.AppRunner(
        app,
        handler_cancellation=handler_cancellation,
        access_log=None,
        shutdown_timeout=grace_s,
        keepalive_timeout=keepalive_s,
        # `body_of` refuses compressed bodies, so aiohttp must not decompress them.
        auto_decompress=False,
        max_headers=64,
        logger=_quiet_logger(),
    )
    await runner.setup()
    try:
        # asyncio's socket on "::" would be of IPv6 only; without a host it takes both families.
        address = None if host.strip("[]") == "::" else host.strip("[]")
        site = web.TCPSite(runner, address, port, ssl_context=ssl_context, backlog=1024)
        await site.start()
        bound = runner.addresses[0][1]
        scheme = "http" if ssl_context is None else "https"
        sweeper = asyncio.create_task(
            _close_silent(runner, first_request_s), name="slow connections"
        )
        try:
            yield f"{scheme}://{f'[{host}]' if ':' in host else host}:{bound}"
        finally:
            sweeper.cancel()
    finally:
        await runner.cleanup()


async def _close_silent(runner: web.AppRunner, first_request_s: float) -> None:
    """Close connections that do not send their first request; aiohttp has no timeout for it."""
    waiting: set[RequestHandler] = set()
    while True:
        await asyncio.sleep(first_request_s)
        silent = {
            connection
            for connection in (runner.server.connections if runner.server else ())
            if connection.transport is not None and connection.transport not in _ACTIVE
        }
        for connection in silent & waiting:
            connection.force_close()
        waiting = silent - waiting


def _quiet_logger() -> logging.Logger:
    """Return a logger that drops tracebacks of malformed requests, which could fill the log."""
    logger = logging.getLogger("fedone_sdk.http")
    if not logger.filters:
        logger.addFilter(_is_ours)
    return logger


def _is_ours(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)
