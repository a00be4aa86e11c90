"""Routes for health, metrics, OpenAPI and dashboard."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from fedone_sdk import __version__
from fedone_sdk.aggregator.http.requests import answer
from fedone_sdk.aggregator.routes import dashboard
from fedone_sdk.aggregator.routes.context import CONTEXT, DOCUMENT, METRICS, READINESS
from fedone_sdk.aggregator.routes.dashboard import PageFile
from fedone_sdk.aggregator.routes.route import Route
from fedone_sdk.errors import ProblemError
from fedone_sdk.messages import About, Health


async def about(request: web.Request) -> web.Response:
    """Return the dashboard to browsers, else the server's name and version."""
    if "text/html" in request.headers.get("Accept", ""):
        response = _file(request, dashboard.PAGE)
        response.headers.update(dashboard.PAGE_HEADERS)
    else:
        found = About(name="FedOne aggregator", version=__version__, openapi="/openapi.json")
        response = answer(found)
    response.headers["Vary"] = "Accept"
    return response


async def dashboard_file(request: web.Request) -> web.Response:
    """Return a file of the dashboard."""
    name = request.match_info["page_file"]
    if name not in dashboard.FILES:
        raise ProblemError("not_found", f"the dashboard has no file {name!r}")
    return _file(request, dashboard.FILES[name])


def _file(request: web.Request, file: PageFile) -> web.Response:
    """Return a file, or 304 if the browser has it."""
    # Revalidated each time: a page must not mix files of two versions.
    headers = {"Cache-Control": "no-cache", "ETag": file.etag}
    if file.etag in request.headers.get("If-None-Match", ""):
        return web.Response(status=304, headers=headers)
    return web.Response(
        body=file.body, content_type=file.content_type, charset="utf-8", headers=headers
    )


async def healthz(request: web.Request) -> web.Response:
    """Return 200 while the process is alive (liveness probe)."""
    return answer(Health(status="ok"))


async def readyz(request: web.Request) -> web.Response:
    """Return whether requests can be served (readiness probe).

    `checks.model` reports the gateway's model and does not affect the status.
    """
    health = await request.app[READINESS].look()
    return answer(health, status=200 if health.status == "ok" else 503)


async def metrics(request: web.Request) -> web.Response:
    """Return metrics of this process and of all runs, in Prometheus' text format."""
    found, context = request.app[METRICS], CONTEXT.get(None)
    if context is not None and context.person is not None and context.person.runs is not None:
        raise ProblemError("forbidden", "metrics cover all runs; your token is valid for some")
    if found is None:
        raise ProblemError("not_found", "this server keeps no metrics here")
    text, content_type = found.exposition()
    return web.Response(body=text, headers={"Content-Type": content_type})


async def openapi(request: web.Request) -> web.Response:
    """Return this API's description as OpenAPI 3.1."""
    return web.json_response(request.app[DOCUMENT])


SYSTEM_ROUTES = (
    Route(
        "GET /",
        about,
        access="public",
        tag="machines",
        answers={200: (About, "text/html"), 304: None},
    ),
    Route(
        "GET /dashboard/{page_file}",
        dashboard_file,
        access="public",
        tag="machines",
        answers={200: ("text/javascript", "text/css", "image/svg+xml"), 304: None},
    ),
    Route("GET /healthz", healthz, access="public", tag="machines", answers={200: Health}),
    Route(
        "GET /readyz", readyz, access="public", tag="machines", answers={200: Health, 503: Health}
    ),
    Route(
        "GET /openapi.json", openapi, access="public", tag="machines", answers={200: dict[str, Any]}
    ),
)


def metrics_route(*, public: bool) -> Route:
    """Return the route of the metrics; it requires a viewer's token unless public."""
    return Route(
        "GET /metrics",
        metrics,
        access="public" if public else "viewer",
        tag="machines",
        answers={200: "text/plain"},
        problems=("not_found",),
    )
