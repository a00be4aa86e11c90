"""The aiohttp application, its routes and middlewares, and the server that runs it."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler
from aiohttp.web_protocol import RequestHandler

from fedone_sdk.aggregator.concurrency import run_to_end
from fedone_sdk.aggregator.http import device_routes, guards, requests, run_routes, server_routes
from fedone_sdk.aggregator.http.openapi import MAX_BODY_BYTES, Route, openapi_document
from fedone_sdk.aggregator.service import Service
from fedone_sdk.aggregator.telemetry import NO_OBSERVERS, Observers

if TYPE_CHECKING:
    from fedone_sdk.aggregator.prometheus import Metrics

_PROBES = ("/healthz", "/readyz")

ROUTES: tuple[Route, ...] = (
    *device_routes.route.routes,
    *run_routes.route.routes,
    *server_routes.access.routes,
    *server_routes.machine.routes,
)
"""All routes of the server."""


def device_document() -> str:
    """Return the OpenAPI document of the routes for devices."""
    routes = [route for route in ROUTES if route.tag == "devices"]
    return json.dumps(openapi_document(routes), indent=1, ensure_ascii=False) + "\n"


def build_app(
    service: Service,
    *,
    observers: Observers = NO_OBSERVERS,
    limits: guards.Limits = guards.NO_LIMITS,
    cors: guards.CorsConfig = guards.NO_ORIGINS,
) -> web.Application:
    """Return the aiohttp application of a service."""
    limiter = guards.Limiter(limits)
    handlers = [(route, _handler_of(route)) for route in ROUTES]
    for_clients = {handler for route, handler in handlers if route.access in ("device", "member")}

    def known(request: web.Request) -> bool:
        # On routes that are not for clients, a client's requests count towards its address's limit.
        is_for_clients = request.match_info.handler in for_clients
        return is_for_clients and service.access.is_cached(requests.bearer_token(request))

    for_enrolment = {handler for route, handler in handlers if route.access == "enrolment"}
    pages = guards.Cors(cors.origins, for_clients | for_enrolment)
    app = web.Application(
        middlewares=[
            requests.observing(observers),
            *([pages.preflight] if cors.origins else []),
            requests.problems,
            guards.guarding(limiter, known, unlimited=_PROBES),
        ],
        client_max_size=MAX_BODY_BYTES,
    )
    app[requests.SERVICE] = service
    app[server_routes.READINESS] = server_routes.Readiness(service)
    app[server_routes.METRICS] = observers.metrics
    app[guards.LIMITER] = limiter
    app.on_response_prepare.append(requests.stamp_headers)
    if cors.origins:
        app.on_response_prepare.append(pages.stamp)
    app[server_routes.DOCUMENTS] = {
        "/openapi.json": json.dumps(openapi_document(ROUTES)).encode(),
        "/device.openapi.json": device_document().encode(),
    }
    for route, handler in handlers:
        app.router.add_route(route.method, route.path, handler)
    return app


def _handler_of(route: Route) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        context = requests.CONTEXT.get()
        await context.authorize(route)
        if route.method == "GET" or route.waits:
            return await route.handler(context)
        try:
            return await run_to_end(route.handler(context), owner=context.service.store)
        finally:
            context.bind()  # The handler ran in another task, with another log context.

    return handle


def build_metrics_app(metrics: Metrics) -> web.Application:
    """Return an application with only the metrics, for a separate port."""

    async def serve(request: web.Request) -> web.Response:
        return server_routes.exposition(metrics)

    app = web.Application(middlewares=[requests.problems])
    app.router.add_get("/metrics", serve)
    return app


@asynccontextmanager
async def listening(
    app: web.Application,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    ssl_context: ssl.SSLContext | None = None,
    handler_cancellation: bool = False,
    grace_s: float = 1.0,
    limits: guards.Limits = guards.NO_LIMITS,
) -> AsyncIterator[str]:
    """Serve an application while the ``with`` block runs; yield the base URL.

    At the end, pending requests have `grace_s` seconds to finish. Of `limits`, only `keepalive_s`
    and `first_request_s` are used.

    Raises:
        OSError: The address is in use or does not belong to this machine.
    """
    runner = web.AppRunner(
        app,
        handler_cancellation=handler_cancellation,
        access_log=None,
        shutdown_timeout=grace_s,
        keepalive_timeout=limits.keepalive_s,
        # `RequestContext.body` refuses compressed bodies, so aiohttp must not decompress them.
        auto_decompress=False,
        max_headers=64,
        logger=_quiet_logger(),
    )
    await runner.setup()
    try:
        # asyncio listens only on IPv6 for the host "::", and on IPv6 and IPv4 for the host None.
        address = None if host.strip("[]") == "::" else host.strip("[]")
        site = web.TCPSite(runner, address, port, ssl_context=ssl_context, backlog=1024)
        await site.start()
        bound = runner.addresses[0][1]
        scheme = "http" if ssl_context is None else "https"
        sweeper = asyncio.create_task(
            _close_silent(runner, limits.first_request_s), name="slow connections"
        )
        try:
            yield f"{scheme}://{f'[{host}]' if ':' in host else host}:{bound}"
        finally:
            sweeper.cancel()
            await asyncio.sleep(0)  # Without it, a connection accepted just now would stay open.
    finally:
        await runner.cleanup()


async def _close_silent(runner: web.AppRunner, first_request_s: float) -> None:
    """Close connections that send no request at all; aiohttp has no timeout for them."""
    waiting: set[RequestHandler] = set()
    while True:
        await asyncio.sleep(first_request_s)
        silent = {
            connection
            for connection in (runner.server.connections if runner.server else ())
            if connection.transport is not None and connection.transport not in requests.ACTIVE
        }
        for connection in silent & waiting:
            connection.force_close()
        waiting = silent - waiting


def _quiet_logger() -> logging.Logger:
    """Return a logger that drops the tracebacks of malformed requests: they could fill the log."""
    logger = logging.getLogger("fedone_sdk.http")
    if not logger.filters:
        logger.addFilter(
            lambda r: not isinstance(r.exc_info and r.exc_info[1], HttpProcessingError)
        )
    return logger
