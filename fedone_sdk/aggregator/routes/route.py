"""Declaration of a route, from which it is served, guarded and documented."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from fedone_sdk.aggregator.http.requests import Handler
from fedone_sdk.aggregator.routes import dashboard
from fedone_sdk.errors import PROBLEMS

MAX_BODY_BYTES = 32 * 1024 * 1024
"""Maximal size of a message: an alpha of 2^22 float32 in base64 is 22 MiB."""

SMALL_BODY_BYTES = 64 * 1024
"""Maximal size of a small message."""

Access = Literal["public", "enrolment", "device", "member", "viewer", "operator", "admin"]
"""Required access: none, an enrolment token, a device's credential, a credential or a viewer's
token, or a user's token with at least this role."""

PARAMETERS: dict[str, dict[str, Any]] = {
    "run_id": {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"},
    "assignment_id": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
    "client_id": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
    "token_name": {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}$"},
    "page_file": {"type": "string", "enum": sorted(dashboard.FILES)},
}
"""JSON Schema of each path parameter."""


@dataclass(frozen=True, slots=True)
class Route:
    """A route of the HTTP API.

    Attributes:
        handler: The handler; its docstring is the description.
        answers: HTTP status -> message type, media type, a tuple of these, or None for no body.
        tag: Group in the documentation.
        request: Message type or media type of the body, or None.
        max_body: Maximal size of the body, bytes.
        problems: Problem codes specific to this route; those of its access, path and body are
            added.
        headers: HTTP status -> response header -> description.
        waits: Whether the handler is cancelled when the caller disconnects. Other handlers that
            change state run to completion.
        query: Query parameters: name -> JSON Schema.
    """

    endpoint: str
    handler: Handler
    _: KW_ONLY
    access: Access
    answers: Mapping[int, Any]
    tag: str
    request: Any = None
    max_body: int = SMALL_BODY_BYTES
    problems: tuple[str, ...] = ()
    headers: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    waits: bool = False
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def method(self) -> str:
        """HTTP method."""
        return self.endpoint.partition(" ")[0]

    @property
    def path(self) -> str:
        """Path with parameters in braces."""
        return self.endpoint.partition(" ")[2]

    @property
    def names(self) -> list[str]:
        """Names of the path parameters."""
        return [part[1:-1] for part in self.path.split("/") if part.startswith("{")]

    @property
    def refusals(self) -> tuple[str, ...]:
        """All problem codes, in the order of `fedone_sdk.errors.PROBLEMS`."""
        codes = {"internal", "store_unavailable", *self.problems}
        if self.path.startswith("/v1/"):
            codes |= {"upgrade_required", "rate_limited"}
        if self.access != "public":
            codes.add("unauthorized")
        if self.access in ("viewer", "operator", "admin"):
            codes.add("forbidden")
        if self.names:
            codes.add("not_found")
        if self.query:
            codes.add("invalid_message")
        if self.request is not None:
            codes |= {"body_too_large", "request_timeout", "unsupported_encoding"}
            if not isinstance(self.request, str):
                codes |= {"invalid_message", "not_json"}
        return tuple(code for code in PROBLEMS if code in codes)


class RouteTable:
    """The routes of one group. As a decorator, it adds a route to the function below.

    Example:
        ```python
        @route("GET /v1/me", "viewer", Me)
        async def me(request): ...
        ```
    """

    def __init__(self, tag: str) -> None:
        self._tag = tag
        self.routes: list[Route] = []

    def __call__(
        self, endpoint: str, access: Access, answers: Any, **options: Any
    ) -> Callable[[Handler], Handler]:
        """Return the decorator of a handler.

        Args:
            endpoint: Method and path.
            access: As in `Route`.
            answers: As in `Route`, or only that of status 200.
            options: Other fields of `Route`.
        """
        if not isinstance(answers, Mapping):
            answers = {200: answers}

        def add(handler: Handler) -> Handler:
            route = Route(
                endpoint, handler, access=access, answers=answers, tag=self._tag, **options
            )
            self.routes.append(route)
            return handler

        return add
