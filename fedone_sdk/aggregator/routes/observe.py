"""What is around every request: its id, its log line, its figures, its trace."""

from __future__ import annotations

import re
import time
import uuid
from contextlib import nullcontext

import structlog
from aiohttp import web
from aiohttp.typedefs import Middleware

from fedone_sdk.aggregator.http.requests import Handler
from fedone_sdk.aggregator.routes.exchange import EXCHANGE, SERVICE, Exchange
from fedone_sdk.aggregator.telemetry.observers import Observers
from fedone_sdk.errors import ProblemError, StoreUnavailable

__all__ = ["noted", "observing", "stamp"]

_log = structlog.get_logger(__name__)

_SANE = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HEADER = "X-Request-ID"


def observing(observers: Observers) -> Middleware:
    """The outermost middleware."""
    metrics, tracing, level = observers.metrics, observers.tracing, observers.request_level

    @web.middleware
    async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
        exchange = Exchange(request_id=_id_of(request))
        EXCHANGE.set(exchange)
        # A connection's requests share one context: what the last one was about is over.
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=exchange.request_id)
        began = time.perf_counter()
        span = nullcontext() if tracing is None else tracing.request(request, exchange)
        resource = request.match_info.route.resource
        route = "" if resource is None else resource.canonical
        with span, nullcontext() if metrics is None else metrics.answering(route):
            response = await handler(request)
            exchange.status = response.status
        if request.app[SERVICE].draining:
            # Whoever goes on does so on another connection: perhaps with another replica.
            response.force_close()
        seconds = time.perf_counter() - began
        path = "" if exchange.route is None else exchange.route.path
        if metrics is not None:
            metrics.answered(request.method, path, response.status, exchange.problem, seconds)
        if level != "off":
            line = {"method": request.method, "path": request.path, "status": response.status}
            if exchange.problem is not None:
                line["code"] = exchange.problem
            (_log.info if level == "info" else _log.debug)(
                "request", **line, wall_s=round(seconds, 6)
            )
        return response

    return observe


@web.middleware
async def noted(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Notes why a request is refused; inside of what makes an answer of it."""
    try:
        return await handler(request)
    except ProblemError as exc:
        EXCHANGE.get().problem = exc.code
        raise
    except web.HTTPRequestEntityTooLarge:
        EXCHANGE.get().problem = "body_too_large"
        raise
    except web.HTTPNotFound:
        EXCHANGE.get().problem = "not_found"
        raise
    except web.HTTPMethodNotAllowed:
        EXCHANGE.get().problem = "method_not_allowed"
        raise
    except StoreUnavailable:
        EXCHANGE.get().problem = "store_unavailable"
        raise
    except Exception:
        EXCHANGE.get().problem = "internal"
        raise


async def stamp(request: web.Request, response: web.StreamResponse) -> None:
    """Tells a caller the id of its request, also on answers that are sent as they are made."""
    exchange = EXCHANGE.get(None)
    if exchange is not None:
        response.headers[_HEADER] = exchange.request_id


def _id_of(request: web.Request) -> str:
    """The caller's own id if it is short and plain: it is written to the log and sent back."""
    given = request.headers.get(_HEADER, "")
    return given if _SANE.fullmatch(given) else uuid.uuid4().hex
