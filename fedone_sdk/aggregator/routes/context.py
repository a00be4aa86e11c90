"""Context of a request: application keys, caller, run, and its line in the log."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import structlog
from aiohttp import web
from aiohttp.typedefs import Middleware
from structlog.contextvars import bind_contextvars, clear_contextvars

from fedone_sdk.aggregator.access.tokens import ROLES, AdminToken, may_see
from fedone_sdk.aggregator.http.limits import LIMITER
from fedone_sdk.aggregator.http.requests import (
    JSON,
    PROBLEM,
    Handler,
    bearer_token,
    body_of,
    parsed,
)
from fedone_sdk.aggregator.routes.route import Route
from fedone_sdk.aggregator.runtime import Drain
from fedone_sdk.aggregator.service import Service
from fedone_sdk.aggregator.serving.run import ServedRun
from fedone_sdk.aggregator.telemetry.observers import Observers
from fedone_sdk.errors import ProblemError
from fedone_sdk.stores import ClientRecord

if TYPE_CHECKING:
    from fedone_sdk.aggregator.routes.system import Readiness
    from fedone_sdk.aggregator.telemetry.metrics import Metrics

_log = structlog.get_logger(__name__)

_SANE = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HEADER = "X-Request-ID"

SERVICE: web.AppKey[Service] = web.AppKey("service", Service)
DRAIN: web.AppKey[Drain] = web.AppKey("drain", Drain)
READINESS: web.AppKey[Readiness] = web.AppKey("readiness")
METRICS: web.AppKey[Metrics | None] = web.AppKey("metrics")
DOCUMENTS: web.AppKey[dict[str, bytes]] = web.AppKey("documents")

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
        span = nullcontext() if tracing is None else tracing.request(request, context)
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


async def stamp(request: web.Request, response: web.StreamResponse) -> None:
    """Add the request id to every response, including streamed ones."""
    context = CONTEXT.get(None)
    if context is not None:
        response.headers[_HEADER] = context.request_id


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
        wanted = "the credential of an enrolled client"
        if route.access == "member":
            wanted = f"an admin token, or {wanted}"
        client = await access.client(token, wanted=wanted)
        context.set_client(client)
        request.app[LIMITER].client(client.index)
        await service.wait_until_open()
        if "assignment_id" in request.match_info:
            work = request.match_info["assignment_id"]
            context.set_run(service.traffic_run(work=(client, work)))


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
    run = await service.run(run_id)
    context.set_run(run)
    return run


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
