"""Routes about the server: health, metrics, OpenAPI, dashboard; tokens, clients and credentials."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from aiohttp import web

from fedone_sdk import __version__, messages
from fedone_sdk.aggregator.http.openapi import JSON, PARAMETERS, RouteTable
from fedone_sdk.aggregator.http.requests import RequestContext, answer
from fedone_sdk.aggregator.service import Service
from fedone_sdk.errors import ProblemError, StoreUnavailable
from fedone_sdk.stores import ClientRecord, TokenRecord

if TYPE_CHECKING:
    from fedone_sdk.aggregator.prometheus import Metrics

_log = structlog.get_logger(__name__)

machine, access = RouteTable("machines"), RouteTable("access")

_TIMEOUT_S = 2.0
"""Timeout of the store check, seconds."""
_MOST_CLIENTS = 1000
"""Maximal number of clients per page."""

_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_FOLDER = Path(__file__).parent / "dashboard"
_PAGE = _FOLDER / "index.html"

FILES = {
    path.name: path for path in sorted(_FOLDER.iterdir()) if path.suffix in _TYPES and path != _PAGE
}
"""The files of the dashboard besides its page, by name."""
PARAMETERS["page_file"] = {"type": "string", "enum": sorted(FILES)}

_HEADERS_OF_PAGE = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
}


def _file_response(path: Path) -> web.FileResponse:
    headers = {
        # Revalidated at each load, because a page must not mix files of two versions.
        "Cache-Control": "no-cache",
        "Content-Type": f"{_TYPES[path.suffix]}; charset=utf-8",
        **(_HEADERS_OF_PAGE if path == _PAGE else {}),
    }
    return web.FileResponse(path, headers=headers)


class Readiness:
    """Checks that the store is available and that the service is neither starting nor stopping.

    The state of the gateway's model is also reported. It does not affect readiness, because all
    replicas use the same model, and devices with their own models do not need it.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._was_ok = self._model_was_ok = True
        self._checking: asyncio.Task[messages.Check] | None = None

    async def check(self) -> messages.Health:
        """Run all checks. Because the result is public, details are only logged."""
        # Simultaneous probes share one check: they need no token, so anyone can send many of them.
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._store(), name="store check")
        checks = {"serving": self._serving(), "store": await asyncio.shield(self._checking)}
        ok = all(check.ok for check in checks.values())
        checks["model"] = self._model()
        if ok and not self._was_ok:
            _log.info("ready again")
        self._was_ok = ok
        return messages.Health(status="ok" if ok else "unavailable", checks=checks)

    def _serving(self) -> messages.Check:
        if self._service.draining:
            return messages.Check(ok=False, detail="this process is stopping")
        if self._service.starting:
            return messages.Check(ok=False, detail="this process is loading its runs")
        return messages.Check(ok=True)

    async def _store(self) -> messages.Check:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._service.store.ping()
        except TimeoutError:
            _log.error("not ready: the store does not answer", timeout_s=_TIMEOUT_S)
            return messages.Check(ok=False, detail=f"no answer within {_TIMEOUT_S:g} s")
        except Exception as exc:
            reason = str(exc) if isinstance(exc, StoreUnavailable) else type(exc).__name__
            _log.error("not ready: the store cannot be used", reason=reason)
            return messages.Check(ok=False, detail="the store cannot be used; see the server's log")
        return messages.Check(ok=True)

    def _model(self) -> messages.Check:
        trouble = self._service.trouble
        if (trouble is None) is not self._model_was_ok:
            self._model_was_ok = trouble is None
            if trouble is None:
                _log.info("the model is available again")
            else:
                _log.warning("the model is not available", reason=trouble)
        if trouble is None:
            return messages.Check(ok=True)
        return messages.Check(
            ok=False, detail="the model is not available at the moment; see the server's log"
        )


METRICS: web.AppKey[Metrics | None] = web.AppKey("metrics")
READINESS: web.AppKey[Readiness] = web.AppKey("readiness", Readiness)
DOCUMENTS: web.AppKey[dict[str, bytes]] = web.AppKey("documents")


@machine("GET /", "public", {200: (messages.About, "text/html"), 304: None})
async def about(context: RequestContext) -> web.StreamResponse:
    """Return the dashboard to browsers, and the server's name and version to other callers."""
    if "text/html" in context.request.headers.get("Accept", ""):
        response: web.StreamResponse = _file_response(_PAGE)
    else:
        message = messages.About(
            name="FedOne aggregator", version=__version__, openapi="/openapi.json"
        )
        response = answer(message)
    response.headers["Vary"] = "Accept"
    return response


@machine(
    "GET /dashboard/{page_file}",
    "public",
    {200: ("text/javascript", "text/css", "image/svg+xml"), 304: None},
)
async def dashboard_file(context: RequestContext) -> web.StreamResponse:
    """Return a file of the dashboard."""
    name = context.parameters["page_file"]
    if name not in FILES:
        raise ProblemError("not_found", f"the dashboard has no file {name!r}")
    return _file_response(FILES[name])


@machine("GET /healthz", "public", messages.Health)
async def healthz(context: RequestContext) -> web.Response:
    """Return 200 while the process is alive (liveness probe)."""
    return answer(messages.Health(status="ok"))


@machine("GET /readyz", "public", {200: messages.Health, 503: messages.Health})
async def readyz(context: RequestContext) -> web.Response:
    """Return whether requests can be served (readiness probe).

    `checks.model` is the state of the gateway's model. It does not affect the response's status.
    """
    health = await context.request.app[READINESS].check()
    return answer(health, status=200 if health.status == "ok" else 503)


@machine("GET /metrics", "viewer", "text/plain", problems=("not_found",))
async def metrics(context: RequestContext) -> web.Response:
    """Return metrics of this process and of all runs, in Prometheus' text format."""
    if context.person.runs is not None:
        raise ProblemError("forbidden", "metrics need a token that is valid for all runs")
    metrics = context.request.app[METRICS]
    if metrics is None:
        raise ProblemError("not_found", "metrics are disabled on this port")
    return exposition(metrics)


def exposition(metrics: Metrics) -> web.Response:
    """Return metrics in Prometheus' text format."""
    text, content_type = metrics.exposition()
    return web.Response(body=text, headers={"Content-Type": content_type})


@machine("GET /openapi.json", "public", dict[str, Any])
async def openapi(context: RequestContext) -> web.Response:
    """Return this API's description as OpenAPI 3.1."""
    return web.Response(
        body=context.request.app[DOCUMENTS][context.request.path], content_type=JSON
    )


@machine("GET /device.openapi.json", "public", dict[str, Any])
async def device_openapi(context: RequestContext) -> web.Response:
    """Return the OpenAPI document of the device routes; tools can generate clients from it."""
    return web.Response(
        body=context.request.app[DOCUMENTS][context.request.path], content_type=JSON
    )


@access("GET /v1/me", "viewer", messages.Me)
async def me(context: RequestContext) -> web.Response:
    """Return the name, role and runs of the caller's token."""
    person = context.person
    return answer(messages.Me(name=person.name, role=person.role, runs=person.runs))


@access(
    "POST /v1/enrolment-tokens",
    "admin",
    {201: messages.CreatedToken},
    request=messages.NewToken,
    problems=("token_conflict",),
)
async def create_token(context: RequestContext) -> web.Response:
    """Create an enrolment token.

    The response contains the token's secret. The server stores only a digest of it.
    """
    message = await context.message(messages.NewToken.model_validate)
    record, secret = await context.service.access.create_token(message)
    return answer(messages.CreatedToken(**_shown(record).model_dump(), token=secret), status=201)


@access("GET /v1/enrolment-tokens", "admin", messages.TokenList)
async def tokens(context: RequestContext) -> web.Response:
    """List all enrolment tokens, including expired and revoked ones, without their secrets."""
    records = await context.service.store.tokens()
    return answer(messages.TokenList(tokens=tuple(map(_shown, records))))


@access("DELETE /v1/enrolment-tokens/{token_name}", "admin", messages.TokenInfo)
async def revoke_token(context: RequestContext) -> web.Response:
    """Revoke an enrolment token permanently. Devices that enrolled with it stay enrolled."""
    name = context.parameters["token_name"]
    token = await context.service.access.revoke_token(name)
    return answer(_shown(token))


@access(
    "GET /v1/clients",
    "admin",
    messages.ClientList,
    query={
        "limit": {"type": "integer", "minimum": 1, "maximum": 2**31 - 1, "default": _MOST_CLIENTS},
        "after": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
    },
)
async def clients(context: RequestContext) -> web.Response:
    """List the enrolled clients in pages, including revoked ones, without their secrets.

    `limit` sets the page size, at most 1000. To get the next page, send the response's `next` as
    `after`. On the last page `next` is null.
    """
    after = context.query_number("after", -1)
    limit = min(context.query_number("limit", _MOST_CLIENTS, least=1), _MOST_CLIENTS)
    records = await context.service.store.clients(after, limit + 1)
    page = records[:limit]
    last = page[-1].index if len(page) < len(records) else None
    return answer(messages.ClientList(clients=tuple(map(_shown_client, page)), next=last))


@access("POST /v1/clients/{client_id}/revoke", "admin", messages.ClientInfo)
async def revoke_client(context: RequestContext) -> web.Response:
    """Revoke a client permanently. Its open work passes to other clients."""
    client_id = context.parameters["client_id"]
    return answer(_shown_client(await context.service.access.revoke_client(client_id)))


def _shown(token: TokenRecord) -> messages.TokenInfo:
    return messages.TokenInfo.model_validate(token, from_attributes=True)


def _shown_client(client: ClientRecord) -> messages.ClientInfo:
    return messages.ClientInfo.model_validate(client, from_attributes=True)
