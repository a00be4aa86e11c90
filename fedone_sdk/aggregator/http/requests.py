"""Requests and responses: context, caller, tokens, bodies, problems, streams."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from weakref import WeakSet

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from pydantic import ValidationError
from structlog.contextvars import bind_contextvars, clear_contextvars

from fedone_sdk.aggregator.authority import ROLES, AdminToken, may_see
from fedone_sdk.aggregator.concurrency import in_thread_if_large
from fedone_sdk.aggregator.http.guards import LIMITER
from fedone_sdk.aggregator.http.openapi import JSON, Route
from fedone_sdk.aggregator.runs.served_run import ServedRun
from fedone_sdk.aggregator.service import Service
from fedone_sdk.aggregator.telemetry import Observers
from fedone_sdk.errors import ProblemError, StoreUnavailable
from fedone_sdk.messages import (
    PROTOCOL_HEADER,
    PROTOCOL_VERSION,
    Message,
    Problem,
    encode,
    first_error,
)
from fedone_sdk.stores import ClientRecord

if TYPE_CHECKING:
    from fedone_sdk.aggregator.prometheus import Metrics

_log = structlog.get_logger(__name__)

RETRY_AFTER_S = 1
"""Default ``Retry-After``, seconds."""

_READ_TIMEOUT_S = 60.0
"""Maximal time to receive a request's body, seconds."""

MAX_PARTS = 1_000_000
"""Maximal number of commas, brackets and braces in a document, including those in strings."""

PROBLEM: Any = web.ResponseKey("problem", str) if hasattr(web, "ResponseKey") else "problem"
"""Key of the problem code of a response; aiohttp before 3.14 only supports text keys."""
ACTIVE: WeakSet[asyncio.Transport] = WeakSet()
"""Connections that have sent a request."""

_SANE = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HEADER = "X-Request-ID"

SERVICE: web.AppKey[Service] = web.AppKey("service", Service)
METRICS: web.AppKey[Metrics | None] = web.AppKey("metrics")

T = TypeVar("T")


@dataclass(slots=True)
class RequestContext:
    """Facts about the current request, for the log, the metrics and the run's report.

    Attributes:
        route: The route; None if no route matched.
        upload: Size of the request body, bytes.
    """

    request_id: str
    route: Route | None = None
    run: ServedRun | None = None
    round: int = 0
    client: ClientRecord | None = None
    person: AdminToken | None = None
    upload: int = 0
    problem: str | None = None
    status: int | None = None

    def set_client(self, client: ClientRecord) -> None:
        """Set the calling device and bind it to the log."""
        self.client = client
        bind_contextvars(client_id=client.client_id)

    def may_see(self, run_id: str) -> bool:
        """Whether the caller may access a run."""
        asker = self.client or self.person
        return asker is not None and may_see(asker.runs, run_id)

    def set_run(self, run: ServedRun | None) -> None:
        """Set the run and bind it to the log."""
        self.run, self.round = run, 0 if run is None else run.state.round
        self.bind()

    def bind(self) -> None:
        """Bind the run to the log of the current task."""
        if self.run is not None:
            bind_contextvars(run_id=self.run.run_id, round=self.round)

    def facts(self) -> dict[str, str | int]:
        """Return the known facts by their names in a trace."""
        by_name = {
            "fedone.request_id": self.request_id,
            "http.route": None if self.route is None else self.route.path,
            "fedone.client_id": None if self.client is None else self.client.client_id,
            "fedone.run_id": None if self.run is None else self.run.run_id,
            "fedone.round": None if self.run is None else self.round,
            "error.type": self.problem,
            "http.response.status_code": self.status,
        }
        return {name: value for name, value in by_name.items() if value is not None}


CONTEXT: ContextVar[RequestContext] = ContextVar("exchange")


def observing(observers: Observers) -> Middleware:
    """Return the outermost middleware."""
    metrics, tracing, level = observers.metrics, observers.tracing, observers.request_level

    @web.middleware
    async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
        context = RequestContext(request_id=_id_of(request))
        CONTEXT.set(context)
        # Requests of a connection share one context: clear the previous request's values.
        clear_contextvars()
        bind_contextvars(request_id=context.request_id)
        began = time.perf_counter()
        span = nullcontext() if tracing is None else tracing.request(request, context.facts)
        resource = request.match_info.route.resource
        route = "" if resource is None else resource.canonical
        with span, nullcontext() if metrics is None else metrics.answering(route):
            response = await handler(request)
            context.status = response.status
            context.problem = response.get(PROBLEM)
        if request.app[SERVICE].draining:
            # Closes the connection, so that the caller reconnects to another replica.
            response.force_close()
        seconds = time.perf_counter() - began
        path = "" if context.route is None else context.route.path
        if metrics is not None:
            metrics.answered(request.method, path, response.status, context.problem, seconds)
        if level != "off":
            line = {"method": request.method, "path": request.path, "status": response.status}
            if context.problem is not None:
                line["code"] = context.problem
            (_log.info if level == "info" else _log.debug)(
                "request", **line, wall_s=round(seconds, 6)
            )
        return response

    return observe


def _id_of(request: web.Request) -> str:
    """Return the caller's request id if it is short and safe to log, else a new one."""
    given = request.headers.get(_HEADER, "")
    return given if _SANE.fullmatch(given) else uuid.uuid4().hex


async def authorize(request: web.Request, route: Route) -> None:
    """Authenticate and authorise a request.

    Raises:
        ProblemError: ``unauthorized``, ``forbidden``, ``rate_limited``, or ``store_unavailable``
            for a device while the service is starting.
    """
    service, token, context = request.app[SERVICE], bearer_token(request), CONTEXT.get()
    access = service.access
    if route.access == "enrolment":
        await access.check_token(token)
        limiter = request.app[LIMITER]
        limiter.enrolment(limiter.address(request))
    elif route.access in ROLES:
        context.person = access.authority.check(token, route.access)
    elif route.access == "member":
        context.person = access.authority.person(token)
    if route.access == "device" or (route.access == "member" and context.person is None):
        other = "an admin token, or " if route.access == "member" else ""
        client = await access.client(token, wanted=f"{other}the credential of an enrolled client")
        context.set_client(client)
        request.app[LIMITER].client(client.index)
        await service.wait_until_open()
        if "assignment_id" in request.match_info:
            work = request.match_info["assignment_id"]
            context.set_run(service.work.traffic_run(work=(client, work)))


def person_of(request: web.Request) -> AdminToken:
    """Return the authenticated user."""
    person = CONTEXT.get().person
    if person is None:
        raise LookupError(f"{request.path} is not restricted to users")
    return person


def client_of(request: web.Request) -> ClientRecord:
    """Return the authenticated device."""
    client = CONTEXT.get().client
    if client is None:
        raise LookupError(f"{request.path} is not restricted to devices")
    return client


async def run_of(request: web.Request) -> ServedRun:
    """Return the run of the path; ``not_found`` if it is unknown or hidden from the caller."""
    service, context, run_id = request.app[SERVICE], CONTEXT.get(), request.match_info["run_id"]
    if not context.may_see(run_id):
        raise ProblemError("not_found", f"there is no run {run_id!r}")
    run = await service.registry.run(run_id)
    context.set_run(run)
    return run


def query_number(
    request: web.Request, name: str, default: int, *, least: int = 0, most: int = 2**31 - 1
) -> int:
    """Return a number of the query; ``invalid_message`` if it is none or out of range."""
    given = request.query.get(name)
    if given is None:
        return default
    is_number = given.isascii() and given.isdigit() and len(given) <= 10
    if not (is_number and least <= int(given) <= most):
        raise ProblemError(
            "invalid_message", f"{name}: must be from {least} to {most}, not {given!r:.40}"
        )
    return int(given)


async def raw_body(request: web.Request) -> bytes:
    """Return the body of a message, which counts against the device's rate before it is read.

    One of unknown size counts as the longest.

    Raises:
        ProblemError: ``not_json``, ``rate_limited``, or one of `body_of`.
    """
    if request.content_type != JSON:
        raise ProblemError("not_json", f"the body is {request.content_type}, not {JSON}")
    context = CONTEXT.get()
    limit = request.client_max_size if context.route is None else context.route.max_body
    if context.client is not None:
        unknown = limit if request.can_read_body else 0
        size = unknown if request.content_length is None else request.content_length
        request.app[LIMITER].body(context.client.index, min(size, limit))
    body = await body_of(request, max_bytes=limit)
    context.upload = len(body)
    return body


async def message_of(
    request: web.Request, validate: Callable[[Any], T], body: bytes | None = None
) -> T:
    """Return the message in the body; `body` is a result of `raw_body`.

    Raises:
        ProblemError: ``invalid_message``, or one of `raw_body`; ``unauthorized`` if the device was
            revoked during the request.
    """
    message = await parsed(await raw_body(request) if body is None else body, validate)
    client = CONTEXT.get().client
    if client is not None:
        await request.app[SERVICE].access.check_active(client)
    return message


# Answers


@web.middleware
async def problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Convert errors to problem+json responses with stable codes (middleware)."""
    if request.transport is not None:
        ACTIVE.add(request.transport)
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
    context = CONTEXT.get(None)
    if context is not None:
        response.headers[_HEADER] = context.request_id
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
