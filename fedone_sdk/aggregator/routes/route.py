"""A route, declared once: it is served, guarded and described from this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fedone_sdk.aggregator.http.docs_page import ASSETS, FILES
from fedone_sdk.aggregator.http.requests import Handler
from fedone_sdk.aggregator.routes import dashboard
from fedone_sdk.errors import PROBLEMS

__all__ = ["Access", "MAX_BODY_BYTES", "PARAMETERS", "Route", "SMALL_BODY_BYTES"]

MAX_BODY_BYTES = 32 * 1024 * 1024
"""Largest message; an alpha of 2^22 float32 in base64 is 22 MiB."""

SMALL_BODY_BYTES = 64 * 1024
"""Largest message where nothing large is expected."""

Access = Literal["public", "enrolment", "device", "member", "viewer", "operator", "admin"]
"""Who may call: anybody; who holds an enrolment token; an enrolled device; a device or a viewer;
a person with at least this role."""

PARAMETERS: dict[str, dict[str, Any]] = {
    "run_id": {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"},
    "assignment_id": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
    "client_id": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
    "token_name": {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}$"},
    "asset": {"type": "string", "enum": sorted([*ASSETS, *FILES])},
    "page_file": {"type": "string", "enum": sorted(dashboard.FILES)},
}
"""The JSON Schema of every name in a path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What is done for whom at a path.

    Attributes:
        method: HTTP method.
        path: With names in braces.
        handler: Answers; its docstring is the description.
        access: Who may call.
        tag: The group it is shown in.
        summary: One line.
        answers: HTTP status -> message type, media types, several of them, or None for no body.
        request: Message type of the body, its media type where it is no message, or None.
        max_body: Size of the largest body, bytes.
        problems: Codes of refusals that are this route's own; those that follow from its access,
            path and body are added.
        headers: HTTP status -> headers of that answer -> what they say.
        waits: Whether it may be given up when the caller hangs up, as it waits for long. All else
            that changes something is done to its end then.
        query: Parameters behind ``?``: name -> JSON Schema.
    """

    method: Literal["GET", "POST", "DELETE", "PUT"]
    path: str
    handler: Handler
    access: Access
    tag: str
    summary: str
    answers: Mapping[int, Any]
    request: Any = None
    max_body: int = SMALL_BODY_BYTES
    problems: tuple[str, ...] = ()
    headers: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    waits: bool = False
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The names in its path."""
        return [part[1:-1] for part in self.path.split("/") if part.startswith("{")]

    @property
    def refusals(self) -> tuple[str, ...]:
        """Codes of all refusals, in the order of `fedone_sdk.errors.PROBLEMS`."""
        codes = {"internal", "store_unavailable", *self.problems}
        if self.path.startswith("/v1/"):
            codes |= {"upgrade_required", "rate_limited"}
        if self.access != "public":
            codes.add("unauthorized")
        if self.access in ("device", "member"):
            codes |= {"clock_skew", "invalid_signature"}
            # Of those that sign, the body is read, also where none is wanted.
            codes |= {
                "body_too_large",
                "invalid_message",
                "request_timeout",
                "unsupported_encoding",
            }
        if self.access in ("viewer", "operator", "admin"):
            codes.add("forbidden")
        if self.names:
            codes.add("not_found")
        if self.request is not None:
            codes |= {"body_too_large", "request_timeout", "unsupported_encoding"}
            if not isinstance(self.request, str):
                codes |= {"invalid_message", "not_json"}
        return tuple(code for code in PROBLEMS if code in codes)
