"""Requests and responses: the caller, bodies, log lines, problems, streams."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar
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

_log = structlog.get_logger(__name__)

RETRY_AFTER_S = 1
"""Default ``Retry-After``, seconds."""

_READ_TIMEOUT_S = 60.0
"""Maximal time to receive a request's body, seconds."""

MAX_PARTS = 1_000_000
"""Maximal number of commas, brackets and braces in a document, inside and outside strings."""

PROBLEM: Any = web.ResponseKey("problem", str) if hasattr(web, "ResponseKey") else "problem"
"""Key of a response's problem code; aiohttp before 3.14 supports only strings as keys."""
ACTIVE: WeakSet[asyncio.Transport] = WeakSet()
"""Connections that have sent a request."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_REQUEST_ID_HEADER = "X-Request-ID"

SERVICE: web.AppKey[Service] = web.AppKey("service", Service)

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class RequestContext:
    """A request and the facts that are known about it, for handler, log, metrics and trace.

    Attributes:
        route: The route; None if no route matched.
        upload: Size of the request body, bytes.
    """

    request: web.Request
    request_id: str
    route: Route | None = None
    caller: ClientRecord | AdminToken | None = None
    run: ServedRun | None = None
    round: int = 0
    upload: int = 0
    problem: str | None = None
    status: int | None = None

    @property
    def service(self) -> Service:
        """The service that answers the request."""
        return self.request.app[SERVICE]

    @property
    def parameters(self) -> Mapping[str, str]:
        """The parameters in the path."""
        return self.request.match_info

    @property
    def client(self) -> ClientRecord:
        """The authenticated device."""
        if not isinstance(self.caller, ClientRecord):
            raise LookupError(f"{self.request.path} is not restricted to devices")
        return self.caller

    @property
    def person(self) -> AdminToken:
        """The authenticated user."""
        if not isinstance(self.caller, AdminToken):
            raise LookupError(f"{self.request.path} is not restricted to users")
        return self.caller

    async def authorize(self, route: Route) -> None:
        """Set the route, and authenticate and authorise the caller.

        Raises:
            ProblemError: ``unauthorized``, ``forbidden``, ``rate_limited``, or
                ``store_unavailable`` for a device while the service is starting.
        """
        self.route = route
        request, service, token = self.request, self.service, bearer_token(self.request)
        if route.access == "enrolment":
            await service.access.check_token(token)
            limiter = request.app[LIMITER]
            limiter.enrolments.admit(limiter.address(request))
        elif route.access in ROLES:
            self.caller = service.authority.check(token, route.access)
        elif route.access == "member":
            self.caller = service.authority.person(token)
        if route.access == "device" or (route.access == "member" and self.caller is None):
            other = "an admin token, or " if route.access == "member" else ""
            wanted = f"{other}the credential of an enrolled client"
            self.caller = await service.access.authenticate(token, wanted=wanted)
            bind_contextvars(client_id=self.caller.client_id)
            request.app[LIMITER].clients.admit(self.caller.index)
            await service.wait_until_admitting()
            if "assignment_id" in self.parameters:
                self.set_run(work=(self.caller, self.parameters["assignment_id"]))

    def may_see(self, run_id: str) -> bool:
        """Whether the caller may access a run."""
        return self.caller is not None and may_see(self.caller.runs, run_id)

    async def find_run(self) -> ServedRun:
        """Return the run of the path; ``not_found`` if it is unknown or hidden from the caller."""
        run_id = self.parameters["run_id"]
        if not self.may_see(run_id):
            raise ProblemError("not_found", f"there is no run {run_id!r}")
        run = await self.service.registry.run(run_id)
        self._set_run(run)
        return run

    def set_run(
        self, *, run_id: str | None = None, work: tuple[ClientRecord, str] | None = None
    ) -> None:
        """Set the run for which traffic is counted (`traffic_run`), if the caller may see it."""
        run = self.service.work.traffic_run(run_id=run_id, work=work)
        if run is None or self.caller is None or self.may_see(run.run_id):
            self._set_run(run)

    def _set_run(self, run: ServedRun | None) -> None:
        self.run, self.round = run, 0 if run is None else run.state.round
        self.bind()

    def bind(self) -> None:
        """Bind the run to the log of the current task."""
        if self.run is not None:
            bind_contextvars(run_id=self.run.run_id, round=self.round)

    def facts(self) -> dict[str, str | int]:
        """Return the known facts as attributes of the request's span in a trace."""
        client = self.caller if isinstance(self.caller, ClientRecord) else None
        by_name = {
            "fedone.request_id": self.request_id,
            "http.route": None if self.route is None else self.route.path,
            "fedone.client_id": None if client is None else client.client_id,
            "fedone.run_id": None if self.run is None else self.run.run_id,
            "fedone.round": None if self.run is None else self.round,
            "error.type": self.problem,
            "http.response.status_code": self.status,
        }
        return {name: value for name, value in by_name.items() if value is not None}

    def query_number(
        self, name: str, default: int, *, least: int = 0, most: int = 2**31 - 1
    ) -> int:
        """Return a number from the URL's query, or refuse another value (``invalid_message``)."""
        text = self.request.query.get(name)
        if text is None:
            return default
        is_number = text.isascii() and text.isdigit() and len(text) <= 10
        if not (is_number and least <= int(text) <= most):
            raise _invalid(f"{name}: must be from {least} to {most}, not {text!r:.40}")
        return int(text)

    def query_flag(self, name: str, *, default: bool) -> bool:
        """Return a boolean from the URL's query, or refuse another value (``invalid_message``)."""
        text = self.request.query.get(name, str(default).lower())
        if text not in ("true", "false"):
            raise _invalid(f"{name}: must be true or false")
        return text == "true"

    async def body(self) -> bytes:
        """Count the size of the body towards the device's rate limit, then read the body.

        A body of unknown size counts as if it had the maximal size.

        Raises:
            ProblemError: ``not_json``, ``rate_limited``, ``unsupported_encoding``,
                ``body_too_large``, ``request_timeout``, or ``invalid_message`` for an incomplete
                body.
        """
        request = self.request
        if request.content_type != JSON:
            raise ProblemError("not_json", f"the body is {request.content_type}, not {JSON}")
        limit = request.client_max_size if self.route is None else self.route.max_body
        if isinstance(self.caller, ClientRecord):
            unknown = limit if request.can_read_body else 0
            size = unknown if request.content_length is None else request.content_length
            request.app[LIMITER].body(self.caller.index, min(size, limit))
        body = await _read_body(request, limit)
        self.upload = len(body)
        return body

    async def message(self, validate: Callable[[Any], T], body: bytes | None = None) -> T:
        """Return the message in `body`, or in the request's body if `body` is None.

        Raises:
            ProblemError: ``invalid_message``; ``unauthorized`` if the device was revoked during the
                request; or a problem that the method `body` raises.
        """
        text = await self.body() if body is None else body
        try:
            message = await in_thread_if_large(len(text), lambda: validate(load_json(text)))
        except ValidationError as exc:
            raise _invalid(first_error(exc)) from None
        if isinstance(self.caller, ClientRecord):
            await self.service.access.check_active(self.caller)
        return message


CONTEXT: ContextVar[RequestContext] = ContextVar("request context")


def observing(observers: Observers) -> Middleware:
    """Return the outermost middleware, which logs, measures and traces requests."""
    metrics, tracing, level = observers.metrics, observers.tracing, observers.request_level

    @web.middleware
    async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
        # The caller's request id is used if it is safe to log.
        sent = request.headers.get(_REQUEST_ID_HEADER, "")
        context = RequestContext(request, sent if _REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex)
        CONTEXT.set(context)
        # Requests of a connection share a context, so the previous request's values are cleared.
        clear_contextvars()
        bind_contextvars(request_id=context.request_id)
        began = time.perf_counter()
        span = nullcontext() if tracing is None else tracing.request(request, context.facts)
        resource = request.match_info.route.resource
        route = "" if resource is None else resource.canonical
        with span, nullcontext() if metrics is None else metrics.track_request(route):
            response = await handler(request)
            context.status = response.status
            context.problem = response.get(PROBLEM)
        if context.service.draining:
            # Closes the connection, so that the caller reconnects to another replica.
            response.force_close()
        seconds = time.perf_counter() - began
        path = "" if context.route is None else context.route.path
        if metrics is not None:
            metrics.count_response(request.method, path, response.status, context.problem, seconds)
        is_federated = context.route is not None and context.route.tag == "devices"
        if is_federated and isinstance(response, web.Response):
            download = len(response.body) if isinstance(response.body, bytes) else 0
            if metrics is not None:
                metrics.count_bytes(path, context.upload, download)
            if context.run is not None:
                gateway = request.path == "/v1/score"
                context.run.count_traffic(context.upload, download, gateway=gateway)
        if level != "off":
            line = {"method": request.method, "path": request.path, "status": response.status}
            if context.problem is not None:
                line["code"] = context.problem
            (_log.info if level == "info" else _log.debug)(
                "request", **line, wall_s=round(seconds, 6)
            )
        return response

    return observe


@web.middleware
async def problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Convert errors to problem+json responses with stable codes (middleware)."""
    if request.transport is not None:
        ACTIVE.add(request.transport)
    try:
        return await handler(request)
    except ProblemError as exc:
        return problem(exc)
    except web.HTTPNotFound:
        return problem(ProblemError("not_found", f"there is nothing at {request.path}"))
    except web.HTTPMethodNotAllowed as exc:
        allowed = exc.headers["Allow"]
        detail = f"this path does not support {request.method}, only {allowed}"
        response = problem(ProblemError("method_not_allowed", detail))
        response.headers["Allow"] = allowed
        return response
    except StoreUnavailable as exc:
        _log.error("request failed", method=request.method, path=request.path, reason=str(exc))
        return problem(ProblemError("store_unavailable", "the store may recover; retry later"))
    except Exception:
        # Formatted here, because some log renderers print local variables, which include tokens.
        lines = traceback.format_exc()
        _log.error("request failed", method=request.method, path=request.path, traceback=lines)
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
        response.headers[_REQUEST_ID_HEADER] = context.request_id
    response.headers[PROTOCOL_HEADER] = str(PROTOCOL_VERSION)
    response.headers["Server"] = "FedOne"  # Must not reveal version numbers.
    response.headers["X-Content-Type-Options"] = "nosniff"
    # Responses contain credentials and states of runs, which proxies must not cache.
    response.headers.setdefault("Cache-Control", "no-store")


def bearer_token(request: web.Request) -> str | None:
    """Return the bearer token of a request, if any."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token else None


async def _read_body(request: web.Request, max_bytes: int) -> bytes:
    if request.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
        # A small compressed body may become very large.
        raise ProblemError("unsupported_encoding", "send the body without Content-Encoding")
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
        raise _invalid("the body is incomplete or damaged") from None
    return bytes(body)


def load_json(body: bytes) -> Any:
    """Parse a body as JSON.

    Raises:
        ProblemError: ``invalid_message``: the document is not JSON in UTF-8, is nested too deeply,
            has too many parts, a duplicate key, or NaN or Infinity.
    """
    if sum(map(body.count, (b",", b"[", b"{"))) > MAX_PARTS:
        raise _invalid(f"the body has more than {MAX_PARTS} commas, lists and objects")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise _invalid("the body is not UTF-8") from exc
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError as exc:
        raise _invalid("lists and objects are nested too deeply") from exc
    except ValueError as exc:
        raise _invalid("Invalid JSON") from exc


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        raise _invalid("an object has the same key twice")
    return document


def _refuse_constant(_name: str) -> NoReturn:
    raise _invalid("NaN and Infinity are not JSON numbers")


def _invalid(detail: str) -> ProblemError:
    return ProblemError("invalid_message", detail)


def _too_large(limit: int) -> ProblemError:
    return ProblemError("body_too_large", f"the limit is {limit} bytes")


def answer(message: Message, status: int = 200) -> web.Response:
    """Return a message as a response."""
    return web.Response(status=status, body=encode(message), content_type=JSON)


async def streamed(
    request: web.Request, pieces: AsyncIterator[bytes], *, content_type: str
) -> web.StreamResponse:
    """Stream a response with back-pressure.

    If the first piece fails, the response is a normal error response. A later failure closes the
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
        kind = type(exc).__name__
        _log.error("response incomplete", method=request.method, path=request.path, error=kind)
        if request.transport is not None:
            request.transport.abort()
    return response
