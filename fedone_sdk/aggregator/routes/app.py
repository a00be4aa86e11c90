"""The aiohttp application: every route with its guard, and what happens around all of them."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING

from aiohttp import web

from fedone_sdk.aggregator.http.cors import NO_PAGES, Cors, CorsConfig
from fedone_sdk.aggregator.http.drain import Drain
from fedone_sdk.aggregator.http.limits import LIMITER, NO_LIMITS, Limiter, Limits, guarding
from fedone_sdk.aggregator.http.requests import Handler, bearer_token, problems, stamp_headers
from fedone_sdk.aggregator.routes.access import ACCESS
from fedone_sdk.aggregator.routes.archives import ARCHIVES
from fedone_sdk.aggregator.routes.devices import DEVICES
from fedone_sdk.aggregator.routes.exchange import (
    DOCUMENT,
    DRAIN,
    EXCHANGE,
    METRICS,
    READINESS,
    SERVICE,
    admit,
)
from fedone_sdk.aggregator.routes.health import Readiness
from fedone_sdk.aggregator.routes.machines import MACHINES, metrics_route
from fedone_sdk.aggregator.routes.observe import noted, observing, stamp
from fedone_sdk.aggregator.routes.openapi import openapi_document
from fedone_sdk.aggregator.routes.people import PEOPLE
from fedone_sdk.aggregator.routes.route import MAX_BODY_BYTES, Route
from fedone_sdk.aggregator.routes.watch import WATCH
from fedone_sdk.aggregator.runtime.shielded import run_shielded
from fedone_sdk.aggregator.service import Service
from fedone_sdk.aggregator.telemetry.observers import NO_OBSERVERS, Observers

if TYPE_CHECKING:
    from fedone_sdk.aggregator.telemetry.metrics import Metrics

__all__ = ["build_app", "build_metrics_app", "routes"]


_PROBES = ("/healthz", "/readyz")


def routes(*, public_metrics: bool = False) -> tuple[Route, ...]:
    """Every route that is served.

    Args:
        public_metrics: Whether anybody may read the metrics.
    """
    metrics = metrics_route(public=public_metrics)
    return (*DEVICES, *PEOPLE, *WATCH, *ARCHIVES, *ACCESS, *MACHINES, metrics)


def build_app(
    service: Service,
    *,
    drain: Drain | None = None,
    readiness: Readiness | None = None,
    observers: Observers = NO_OBSERVERS,
    limits: Limits = NO_LIMITS,
    cors: CorsConfig = NO_PAGES,
    public_metrics: bool = False,
) -> web.Application:
    """The aiohttp application over a service.

    Args:
        service: Does the work.
        drain: Says when the service is about to end.
        readiness: Answers `/readyz`.
        observers: Told of every request; their metrics answer `/metrics`.
        limits: How often callers may ask.
        cors: Which web pages may take part as devices.
        public_metrics: Whether anybody may read the metrics.
    """
    limiter = Limiter(limits)
    served = routes(public_metrics=public_metrics)
    handlers = [(route, _guarded(route)) for route in served]
    of_clients = {handler for route, handler in handlers if route.access in ("device", "member")}

    def known(request: web.Request) -> bool:
        # A client that calls what is not for clients is anybody.
        is_for_clients = request.match_info.handler in of_clients
        return is_for_clients and service.access.known(bearer_token(request))

    of_devices = {handler for route, handler in handlers if route.access == "enrolment"}
    pages = Cors(cors, of_clients | of_devices)
    app = web.Application(
        middlewares=[
            observing(observers),
            pages.middleware,
            _traffic,
            problems,
            noted,
            guarding(limiter, known, free=_PROBES),
        ],
        client_max_size=MAX_BODY_BYTES,
    )
    drain = drain or Drain()
    app[SERVICE] = service
    app[DRAIN] = drain
    app[READINESS] = readiness or Readiness(service)
    app[METRICS] = observers.metrics
    app[LIMITER] = limiter
    app.on_response_prepare.append(stamp)
    app.on_response_prepare.append(stamp_headers)
    pages.install(app)
    app[DOCUMENT] = openapi_document(served)
    for route, handler in handlers:
        app.router.add_route(route.method, route.path, handler)
    return app


def _guarded(route: Route) -> Handler:
    """The handler, behind the access that its route declares."""

    @wraps(route.handler)
    async def handle(request: web.Request) -> web.StreamResponse:
        exchange = EXCHANGE.get()
        exchange.route = route
        await admit(request, route)
        if route.method == "GET" or route.waits:
            return await route.handler(request)
        try:
            return await run_shielded(_answered(route, request), of=request.app[SERVICE].store)
        finally:
            exchange.bind()  # What it has bound is another task's.

    return handle


async def _answered(route: Route, request: web.Request) -> web.StreamResponse:
    return await route.handler(request)


def build_metrics_app(metrics: Metrics) -> web.Application:
    """The figures alone, for a port that only Prometheus reaches."""
    app = web.Application(middlewares=[problems])
    app[METRICS] = metrics
    route = metrics_route(public=True)
    app.router.add_route(route.method, route.path, route.handler)
    return app


@web.middleware
async def _traffic(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Counts the bodies of federated messages for the report of the run they belong to."""
    exchange = EXCHANGE.get()
    response = await handler(request)
    federated = exchange.route is not None and exchange.route.tag == "devices"
    if federated and exchange.run is not None and isinstance(response, web.Response):
        download = len(response.body) if isinstance(response.body, bytes) else 0
        exchange.run.count_traffic(exchange.upload, download, gateway=request.path == "/v1/score")
    return response
