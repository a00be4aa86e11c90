"""The aiohttp application: routes, guards and middlewares."""

from __future__ import annotations

import json
from functools import wraps
from typing import TYPE_CHECKING

from aiohttp import web

from fedone_sdk.aggregator.http.cors import NO_PAGES, Cors, CorsConfig
from fedone_sdk.aggregator.http.limits import LIMITER, NO_LIMITS, Limiter, Limits, guarding
from fedone_sdk.aggregator.http.requests import Handler, bearer_token, problems, stamp_headers
from fedone_sdk.aggregator.routes import access, devices, runs, system
from fedone_sdk.aggregator.routes.context import (
    CONTEXT,
    DOCUMENTS,
    DRAIN,
    METRICS,
    READINESS,
    SERVICE,
    authorize,
    observing,
    stamp,
)
from fedone_sdk.aggregator.routes.route import MAX_BODY_BYTES, Route, openapi_document
from fedone_sdk.aggregator.routes.system import Readiness
from fedone_sdk.aggregator.runtime import Drain, run_shielded
from fedone_sdk.aggregator.service import Service
from fedone_sdk.aggregator.telemetry.observers import NO_OBSERVERS, Observers

if TYPE_CHECKING:
    from fedone_sdk.aggregator.telemetry.metrics import Metrics

_PROBES = ("/healthz", "/readyz")


ROUTES: tuple[Route, ...] = tuple(
    route for group in (devices, runs, access, system) for route in group.route.routes
)
"""All routes of the server."""


def device_document() -> str:
    """Return the OpenAPI document of the calls of devices: a contract without a server's rest."""
    routes = tuple(route for route in ROUTES if route.tag == "devices")
    return json.dumps(openapi_document(routes), indent=1, ensure_ascii=False) + "\n"


def build_app(
    service: Service,
    *,
    drain: Drain | None = None,
    observers: Observers = NO_OBSERVERS,
    limits: Limits = NO_LIMITS,
    cors: CorsConfig = NO_PAGES,
) -> web.Application:
    """Return the aiohttp application of a service."""
    limiter = Limiter(limits)
    handlers = [(route, _guarded(route)) for route in ROUTES]
    of_clients = {handler for route, handler in handlers if route.access in ("device", "member")}

    def known(request: web.Request) -> bool:
        # On routes for other callers, a client counts as unknown.
        is_for_clients = request.match_info.handler in of_clients
        return is_for_clients and service.access.is_cached(bearer_token(request))

    of_devices = {handler for route, handler in handlers if route.access == "enrolment"}
    pages = Cors(cors, of_clients | of_devices)
    app = web.Application(
        middlewares=[
            observing(observers),
            *pages.middlewares,
            _traffic,
            problems,
            guarding(limiter, known, free=_PROBES),
        ],
        client_max_size=MAX_BODY_BYTES,
    )
    drain = drain or Drain()
    app[SERVICE] = service
    app[DRAIN] = drain
    app[READINESS] = Readiness(service)
    app[METRICS] = observers.metrics
    app[LIMITER] = limiter
    app.on_response_prepare.append(stamp)
    app.on_response_prepare.append(stamp_headers)
    pages.install(app)
    app[DOCUMENTS] = {
        "/openapi.json": json.dumps(openapi_document(ROUTES)).encode(),
        "/device.openapi.json": device_document().encode(),
    }
    for route, handler in handlers:
        app.router.add_route(route.method, route.path, handler)
    return app


def _guarded(route: Route) -> Handler:
    """Return the handler of a route, guarded by its access rule."""

    @wraps(route.handler)
    async def handle(request: web.Request) -> web.StreamResponse:
        context = CONTEXT.get()
        context.route = route
        await authorize(request, route)
        if route.method == "GET" or route.waits:
            return await route.handler(request)
        try:
            return await run_shielded(_answered(route, request), of=request.app[SERVICE].store)
        finally:
            context.bind()  # The authorisation bound them in another task.

    return handle


async def _answered(route: Route, request: web.Request) -> web.StreamResponse:
    return await route.handler(request)


def build_metrics_app(metrics: Metrics) -> web.Application:
    """Return an application with only the metrics, for a separate port."""
    app = web.Application(middlewares=[problems])
    app[METRICS] = metrics
    app.router.add_get("/metrics", system.metrics)
    return app


@web.middleware
async def _traffic(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count the sizes of federated messages (middleware)."""
    context = CONTEXT.get()
    response = await handler(request)
    federated = context.route is not None and context.route.tag == "devices"
    if federated and isinstance(response, web.Response):
        download = len(response.body) if isinstance(response.body, bytes) else 0
        metrics = request.app[METRICS]
        if metrics is not None and context.route is not None:
            metrics.transferred(context.route.path, context.upload, download)
        if context.run is not None:
            context.run.count_traffic(context.upload, download, gateway=request.path == "/v1/score")
    return response
