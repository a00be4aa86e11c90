"""Routes about the server: health, metrics, OpenAPI, dashboard; tokens, clients and credentials."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog
from aiohttp import web

from fedone_sdk import __version__
from fedone_sdk.aggregator.http.openapi import JSON, PARAMETERS, RouteTable
from fedone_sdk.aggregator.http.requests import (
    CONTEXT,
    METRICS,
    SERVICE,
    answer,
    message_of,
    person_of,
    query_number,
)
from fedone_sdk.aggregator.service import Service
from fedone_sdk.errors import ProblemError
from fedone_sdk.messages import (
    About,
    Check,
    ClientInfo,
    ClientList,
    CreatedToken,
    Health,
    Me,
    NewToken,
    TokenInfo,
    TokenList,
)
from fedone_sdk.stores import ClientRecord, TokenRecord

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
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def _file_response(path: Path) -> web.FileResponse:
    headers: Mapping[str, str] = {
        # Revalidated each time: a page must not mix files of two versions.
        "Cache-Control": "no-cache",
        "Content-Type": f"{_TYPES[path.suffix]}; charset=utf-8",
        **(_HEADERS_OF_PAGE if path == _PAGE else {}),
    }
    return web.FileResponse(path, headers=headers)


class Readiness:
    """Checks that the store is available and that the service is neither starting nor stopping.

    The response also reports the gateway's model, which does not affect readiness: updates and
    devices with their own models are served without it, and all replicas share it. Simultaneous
    probes share one check of the store, because probes need no token.
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


READINESS: web.AppKey[Readiness] = web.AppKey("readiness", Readiness)
DOCUMENTS: web.AppKey[dict[str, bytes]] = web.AppKey("documents")


@machine("GET /", "public", {200: (About, "text/html"), 304: None})
async def about(request: web.Request) -> web.StreamResponse:
    """Return the dashboard to browsers, else the server's name and version."""
    if "text/html" in request.headers.get("Accept", ""):
        response: web.StreamResponse = _file_response(_PAGE)
    else:
        message = About(name="FedOne aggregator", version=__version__, openapi="/openapi.json")
        response = answer(message)
    response.headers["Vary"] = "Accept"
    return response


@machine(
    "GET /dashboard/{page_file}",
    "public",
    {200: ("text/javascript", "text/css", "image/svg+xml"), 304: None},
)
async def dashboard_file(request: web.Request) -> web.StreamResponse:
    """Return a file of the dashboard."""
    name = request.match_info["page_file"]
    if name not in FILES:
        raise ProblemError("not_found", f"the dashboard has no file {name!r}")
    return _file_response(FILES[name])


@machine("GET /healthz", "public", Health)
async def healthz(request: web.Request) -> web.Response:
    """Return 200 while the process is alive (liveness probe)."""
    return answer(Health(status="ok"))


@machine("GET /readyz", "public", {200: Health, 503: Health})
async def readyz(request: web.Request) -> web.Response:
    """Return whether requests can be served (readiness probe).

    `checks.model` reports the gateway's model and does not affect the status.
    """
    health = await request.app[READINESS].look()
    return answer(health, status=200 if health.status == "ok" else 503)


@machine("GET /metrics", "viewer", "text/plain", problems=("not_found",))
async def metrics(request: web.Request) -> web.Response:
    """Return metrics of this process and of all runs, in Prometheus' text format."""
    found, context = request.app[METRICS], CONTEXT.get(None)
    if context is not None and context.person is not None and context.person.runs is not None:
        raise ProblemError("forbidden", "metrics cover all runs; your token is valid for some")
    if found is None:
        raise ProblemError("not_found", "this server keeps no metrics here")
    text, content_type = found.exposition()
    return web.Response(body=text, headers={"Content-Type": content_type})


@machine("GET /openapi.json", "public", dict[str, Any])
async def openapi(request: web.Request) -> web.Response:
    """Return this API's description as OpenAPI 3.1."""
    return web.Response(body=request.app[DOCUMENTS][request.path], content_type=JSON)


@machine("GET /device.openapi.json", "public", dict[str, Any])
async def device_openapi(request: web.Request) -> web.Response:
    """Return the description of the calls of devices, for generators of clients."""
    return web.Response(body=request.app[DOCUMENTS][request.path], content_type=JSON)


# Tokens, clients, credentials


@access("GET /v1/me", "viewer", Me)
async def me(request: web.Request) -> web.Response:
    """Return the name, role and runs of the caller's token."""
    person = person_of(request)
    return answer(Me(name=person.name, role=person.role, runs=person.runs))


@access(
    "POST /v1/enrolment-tokens",
    "admin",
    {201: CreatedToken},
    request=NewToken,
    problems=("token_conflict",),
)
async def create_token(request: web.Request) -> web.Response:
    """Create an enrolment token.

    The response contains its secret, of which the server only stores a digest.
    """
    message = await message_of(request, NewToken.model_validate)
    record, secret = await request.app[SERVICE].access.create_token(message)
    return answer(CreatedToken(**_shown(record).model_dump(), token=secret), status=201)


@access("GET /v1/enrolment-tokens", "admin", TokenList)
async def tokens(request: web.Request) -> web.Response:
    """List all enrolment tokens, including expired and revoked ones, without their secrets."""
    records = await request.app[SERVICE].store.tokens()
    return answer(TokenList(tokens=tuple(map(_shown, records))))


@access("DELETE /v1/enrolment-tokens/{token_name}", "admin", TokenInfo)
async def revoke_token(request: web.Request) -> web.Response:
    """Revoke an enrolment token permanently. Devices that enrolled with it stay."""
    name = request.match_info["token_name"]
    token = await request.app[SERVICE].access.revoke_token(name)
    return answer(_shown(token))


@access(
    "GET /v1/clients",
    "admin",
    ClientList,
    query={
        "limit": {"type": "integer", "minimum": 1, "maximum": 2**31 - 1, "default": _MOST_CLIENTS},
        "after": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
    },
)
async def clients(request: web.Request) -> web.Response:
    """List the enrolled clients in pages, including revoked ones, without their secrets.

    `limit` sets the page size, at most 1000. `next` in the response is the `after` of the next
    page, or null on the last one.
    """
    after = query_number(request, "after", -1)
    limit = min(query_number(request, "limit", _MOST_CLIENTS, least=1), _MOST_CLIENTS)
    records = await request.app[SERVICE].store.clients(after, limit + 1)
    page = records[:limit]
    last = page[-1].index if len(page) < len(records) else None
    return answer(ClientList(clients=tuple(map(_shown_client, page)), next=last))


@access("POST /v1/clients/{client_id}/revoke", "admin", ClientInfo)
async def revoke_client(request: web.Request) -> web.Response:
    """Revoke a client permanently. Its open work passes to other clients."""
    client_id = request.match_info["client_id"]
    return answer(_shown_client(await request.app[SERVICE].access.revoke_client(client_id)))


def _shown(token: TokenRecord) -> TokenInfo:
    return TokenInfo.model_validate(token, from_attributes=True)


def _shown_client(client: ClientRecord) -> ClientInfo:
    return ClientInfo.model_validate(client, from_attributes=True)
