"""CORS for web pages that take part as devices (Fetch standard)."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated

from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware
from pydantic import AfterValidator, Field

from fedone_sdk.aggregator.http.requests import Handler
from fedone_sdk.messages import PROTOCOL_HEADER
from fedone_sdk.spec import Spec

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9.-]+|\[[0-9a-f:]+\])(:[0-9]{1,5})?")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}

_METHODS = "GET, POST"
_SENT = ("Authorization", "Content-Type", PROTOCOL_HEADER, "X-Request-ID")
_READ = ("Retry-After", "Date", PROTOCOL_HEADER, "X-Request-ID")
_MAX_AGE_S = 7200
"""Lifetime of a preflight in the browser's cache: Chromium's maximum."""


def _origin(text: str) -> str:
    lowered = text.lower()
    if not _ORIGIN.fullmatch(lowered):
        raise ValueError(
            "must be an origin as a browser sends it, such as https://app.example or "
            f"capacitor://localhost: no path, and no * (got {text!r})"
        )
    scheme, _, _ = lowered.partition(":")
    return lowered.removesuffix(_DEFAULT_PORTS.get(scheme, " "))


class CorsConfig(Spec):
    """Origins of web pages that may take part as devices.

    Attributes:
        origins: Scheme, host and port of each; none by default. Wildcards are not supported.
    """

    origins: Annotated[
        tuple[Annotated[str, AfterValidator(_origin)], ...], Field(max_length=1000)
    ] = ()


NO_PAGES = CorsConfig()
"""No cross-origin requests."""


class Cors:
    """Answers preflights and sets the CORS headers.

    Browser credentials (cookies) are not allowed: pages send tokens in ``Authorization``.
    """

    def __init__(self, config: CorsConfig, reachable: Collection[Handler]) -> None:
        self._origins = frozenset(config.origins)
        self._reachable = reachable

    def install(self, app: web.Application) -> None:
        """Add the CORS headers to all responses, if origins are configured."""
        if self._origins:
            app.on_response_prepare.append(self._stamp)

    @property
    def middlewares(self) -> list[Middleware]:
        """The middleware that answers preflights, to run before authentication.

        Empty if no origins are configured.
        """

        @web.middleware
        async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
            wanted = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_METHOD, "")
            if request.method != "OPTIONS" or not wanted or not self._origin_of(request):
                return await handler(request)
            found = await request.app.router.resolve(request.clone(method=wanted))
            if not self._is_shared(found):
                return await handler(request)
            headers = {
                hdrs.ACCESS_CONTROL_ALLOW_METHODS: _METHODS,
                hdrs.ACCESS_CONTROL_ALLOW_HEADERS: ", ".join(_SENT),
                hdrs.ACCESS_CONTROL_MAX_AGE: str(_MAX_AGE_S),
                hdrs.ACCESS_CONTROL_ALLOW_ORIGIN: self._origin_of(request),
            }
            return web.Response(status=204, headers=headers)

        return [preflight] if self._origins else []

    async def _stamp(self, request: web.Request, response: web.StreamResponse) -> None:
        # Also for other origins: a cache must not reuse the response for an allowed one.
        response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        origin = self._origin_of(request)
        if origin and self._is_shared(request.match_info):
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = ", ".join(_READ)

    def _is_shared(self, found: web.UrlMappingMatchInfo) -> bool:
        # Of a path without a route the page reads a 404, instead of a failure of the network.
        refusal = found.http_exception
        return found.handler in self._reachable or getattr(refusal, "status", 0) == 404

    def _origin_of(self, request: web.Request) -> str:
        """Return the request's origin if it is allowed, else an empty string."""
        origin = request.headers.get(hdrs.ORIGIN, "")
        return origin if origin in self._origins else ""
