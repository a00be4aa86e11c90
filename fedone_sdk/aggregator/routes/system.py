"""Routes for health, metrics, OpenAPI and dashboard."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog
from aiohttp import web

from fedone_sdk import __version__
from fedone_sdk.aggregator.http.requests import JSON, answer
from fedone_sdk.aggregator.routes import dashboard
from fedone_sdk.aggregator.routes.context import CONTEXT, DOCUMENTS, METRICS, READINESS
from fedone_sdk.aggregator.routes.route import RouteTable
from fedone_sdk.aggregator.service import Service
from fedone_sdk.errors import ProblemError
from fedone_sdk.messages import About, Check, Health

_log = structlog.get_logger(__name__)

route = RouteTable("machines")

_TIMEOUT_S = 2.0
"""Timeout of the store check, seconds."""


class Readiness:
    """Checks that the store is available and that the service is neither starting nor stopping.

    The response also reports the gateway's model, which does not affect readiness: updates and
    devices with their own models are served without it, and all replicas share it. Simultaneous
    probes share one check of the store, because anybody may send them.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._was_ok = self._model_was_ok = True
        self._checking: asyncio.Task[Check] | None = None

    async def look(self) -> Health:
        """Run all checks; the result is public, so details are only logged."""
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._store(), name="store check")
        checks = {"serving": self._serving(), "store": await asyncio.shield(self._checking)}
        ok = all(check.ok for check in checks.values())
        checks["model"] = self._model()
        if ok and not self._was_ok:
            _log.info("ready again")
        self._was_ok = ok
        return Health(status="ok" if ok else "unavailable", checks=checks)

    def _serving(self) -> Check:
        if self._service.draining:
            return Check(ok=False, detail="this process is stopping")
        if self._service.starting:
            return Check(ok=False, detail="this process is loading its runs")
        return Check(ok=True)

    async def _store(self) -> Check:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._service.store.ping()
        except TimeoutError:
            _log.error("not ready: the store does not answer", timeout_s=_TIMEOUT_S)
            return Check(ok=False, detail=f"no answer within {_TIMEOUT_S:g} s")
        except Exception as exc:
            _log.error("not ready: the store cannot be used", error=type(exc).__name__)
            return Check(ok=False, detail="it cannot be used; see the server's log")
        return Check(ok=True)

    def _model(self) -> Check:
        trouble = self._service.trouble
        if (trouble is None) is not self._model_was_ok:
            self._model_was_ok = trouble is None
            if trouble is None:
                _log.info("the model is available again")
            else:
                _log.warning("the model is not available", reason=trouble)
        if trouble is None:
            return Check(ok=True)
        return Check(ok=False, detail="it is not available at the moment; see the server's log")


@route("GET /", "public", {200: (About, "text/html"), 304: None})
async def about(request: web.Request) -> web.StreamResponse:
    """Return the dashboard to browsers, else the server's name and version."""
    if "text/html" in request.headers.get("Accept", ""):
        response: web.StreamResponse = dashboard.file_response(dashboard.PAGE)
    else:
        found = About(name="FedOne aggregator", version=__version__, openapi="/openapi.json")
        response = answer(found)
    response.headers["Vary"] = "Accept"
    return response


@route(
    "GET /dashboard/{page_file}",
    "public",
    {200: ("text/javascript", "text/css", "image/svg+xml"), 304: None},
)
async def dashboard_file(request: web.Request) -> web.StreamResponse:
    """Return a file of the dashboard."""
    name = request.match_info["page_file"]
    if name not in dashboard.FILES:
        raise ProblemError("not_found", f"the dashboard has no file {name!r}")
    return dashboard.file_response(dashboard.FILES[name])


@route("GET /healthz", "public", Health)
async def healthz(request: web.Request) -> web.Response:
    """Return 200 while the process is alive (liveness probe)."""
    return answer(Health(status="ok"))


@route("GET /readyz", "public", {200: Health, 503: Health})
async def readyz(request: web.Request) -> web.Response:
    """Return whether requests can be served (readiness probe).

    `checks.model` reports the gateway's model and does not affect the status.
    """
    health = await request.app[READINESS].look()
    return answer(health, status=200 if health.status == "ok" else 503)


@route("GET /metrics", "viewer", "text/plain", problems=("not_found",))
async def metrics(request: web.Request) -> web.Response:
    """Return metrics of this process and of all runs, in Prometheus' text format."""
    found, context = request.app[METRICS], CONTEXT.get(None)
    if context is not None and context.person is not None and context.person.runs is not None:
        raise ProblemError("forbidden", "metrics cover all runs; your token is valid for some")
    if found is None:
        raise ProblemError("not_found", "this server keeps no metrics here")
    text, content_type = found.exposition()
    return web.Response(body=text, headers={"Content-Type": content_type})


@route("GET /openapi.json", "public", dict[str, Any])
async def openapi(request: web.Request) -> web.Response:
    """Return this API's description as OpenAPI 3.1."""
    return web.Response(body=request.app[DOCUMENTS][request.path], content_type=JSON)


@route("GET /device.openapi.json", "public", dict[str, Any])
async def device_openapi(request: web.Request) -> web.Response:
    """Return the description of the calls of devices, for generators of clients."""
    return web.Response(body=request.app[DOCUMENTS][request.path], content_type=JSON)
