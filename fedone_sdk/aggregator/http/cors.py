"""Web pages as devices: which origins a browser lets call the aggregator (Fetch standard, CORS)."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated, Any

from aiohttp import hdrs, web
from pydantic import AfterValidator, Field

from fedone_sdk.aggregator.http.requests import Handler
from fedone_sdk.messages import PROTOCOL_HEADER
from fedone_sdk.spec import Spec

__all__ = ["Cors", "CorsConfig", "NO_PAGES"]

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9.-]+|\[[0-9a-f:]+\])(:[0-9]{1,5})?")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}

_METHODS = "GET, POST"
_SENT = (
    *("Authorization", "Content-Type", PROTOCOL_HEADER, "X-Request-ID"),
    *("Content-Digest", "Signature", "Signature-Input"),
)
_READ = ("Retry-After", "Date", PROTOCOL_HEADER, "X-Request-ID")
_MAX_AGE_S = 7200
"""How long a browser may remember a preflight: the most that Chromium takes."""


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
    """Which web pages may take part as devices.

    Attributes:
        origins: Scheme, host and port of each; none by default. There is no wildcard.
    """

    origins: Annotated[
        tuple[Annotated[str, AfterValidator(_origin)], ...], Field(max_length=1000)
    ] = ()


NO_PAGES = CorsConfig()
"""No web page of another origin may call."""


class Cors:
    """Answers preflights, and lets pages of the origins read the answers.

    Credentials of the browser (cookies) are never allowed: tokens travel in ``Authorization``,
    which a page must hold itself.

    Args:
        config: The origins.
        reachable: Handlers that pages may call.
    """

    def __init__(self, config: CorsConfig, reachable: Collection[Handler]) -> None:
        self._origins = frozenset(config.origins)
        self._reachable = reachable

    def install(self, app: web.Application) -> None:
        """Adds the headers to all answers; without origins nothing is added."""
        if self._origins:
            app.on_response_prepare.append(self._stamp)

    @property
    def middleware(self) -> Any:
        """Answers preflights; they carry no token, so it stands before what asks for one."""

        @web.middleware
        async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
            wanted = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_METHOD, "")
            if request.method != "OPTIONS" or not wanted or not self._origin_of(request):
                return await handler(request)
            found = await request.app.router.resolve(request.clone(method=wanted))
            if found.handler not in self._reachable:
                return await handler(request)
            headers = {
                hdrs.ACCESS_CONTROL_ALLOW_METHODS: _METHODS,
                hdrs.ACCESS_CONTROL_ALLOW_HEADERS: ", ".join(_SENT),
                hdrs.ACCESS_CONTROL_MAX_AGE: str(_MAX_AGE_S),
                hdrs.ACCESS_CONTROL_ALLOW_ORIGIN: self._origin_of(request),
            }
            return web.Response(status=204, headers=headers)

        return preflight

    async def _stamp(self, request: web.Request, response: web.StreamResponse) -> None:
        # Also where the origin is none of ours: a cache must not give its answer to one that is.
        response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        origin = self._origin_of(request)
        if origin and request.match_info.handler in self._reachable:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = ", ".join(_READ)

    def _origin_of(self, request: web.Request) -> str:
        """The caller's origin if it is one of ours, else nothing."""
        origin = request.headers.get(hdrs.ORIGIN, "")
        return origin if origin in self._origins else ""
