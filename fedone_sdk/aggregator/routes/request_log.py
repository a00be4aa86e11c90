"""Request id, log line, metrics and trace of every request."""

from __future__ import annotations

import re
import time
import uuid
from contextlib import nullcontext

import structlog
from aiohttp import web
from aiohttp.typedefs import Middleware

from fedone_sdk.aggregator.http.requests import Handler
from fedone_sdk.aggregator.routes.context import CONTEXT, SERVICE, RequestContext
from fedone_sdk.aggregator.telemetry.observers import Observers
from fedone_sdk.errors import ProblemError, StoreUnavailable

_log = structlog.get_logger(__name__)

_SANE = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HEADER = "X-Request-ID"


def observing(observers: Observers) -> Middleware:
    """Return the outermost middleware."""
    metrics, tracing, level = observers.metrics, observers.tracing, observers.request_level

    @web.middleware
    async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
        context = RequestContext(request_id=_id_of(request))
        CONTEXT.set(context)
        # Requests of a connection share one context: clear the previous request's values.
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=context.request_id)
        began = time.perf_counter()
        span = nullcontext() if tracing is None else tracing.request(request, context)
        resource = request.match_info.route.resource
        route = "" if resource is None else resource.canonical
        with span, nullcontext() if metrics is None else metrics.answering(route):
            response = await handler(request)
            context.status = response.status
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


@web.middleware
async def record_problem(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Record the problem code of a refused request (middleware inside of `problems`)."""
    try:
        return await handler(request)
    except ProblemError as exc:
        CONTEXT.get().problem = exc.code
        raise
    except web.HTTPRequestEntityTooLarge:
        CONTEXT.get().problem = "body_too_large"
        raise
    except web.HTTPNotFound:
        CONTEXT.get().problem = "not_found"
        raise
    except web.HTTPMethodNotAllowed:
        CONTEXT.get().problem = "method_not_allowed"
        raise
    except StoreUnavailable:
        CONTEXT.get().problem = "store_unavailable"
        raise
    except Exception:
        CONTEXT.get().problem = "internal"
        raise


async def stamp(request: web.Request, response: web.StreamResponse) -> None:
    """Add the request id to every response, including streamed ones."""
    context = CONTEXT.get(None)
    if context is not None:
        response.headers[_HEADER] = context.request_id


def _id_of(request: web.Request) -> str:
    """Return the caller's request id if it is short and safe to log, else a new one."""
    given = request.headers.get(_HEADER, "")
    return given if _SANE.fullmatch(given) else uuid.uuid4().hex
