"""Declarations of routes, and the OpenAPI 3.1 document that is generated from them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter

from fedone_sdk import __version__
from fedone_sdk.errors import PROBLEMS
from fedone_sdk.messages import Problem

if TYPE_CHECKING:
    from aiohttp.web import StreamResponse

    from fedone_sdk.aggregator.http.requests import RequestContext

Handler = Callable[["RequestContext"], Coroutine[Any, Any, "StreamResponse"]]

JSON = "application/json"
"""Content type of messages."""

MAX_BODY_BYTES = 32 * 1024 * 1024
"""Maximal size of a message. An assignment's largest array, in base64, has up to 22 MiB."""

SMALL_BODY_BYTES = 64 * 1024
"""Maximal size of a small message."""

Access = Literal["public", "enrolment", "device", "member", "viewer", "operator", "admin"]
"""What a route requires: ``public`` nothing, ``enrolment`` an enrolment token, ``device`` a
device's credential, ``member`` a device's credential or any user's token. The other values are
roles: a user's token with at least this role."""

PARAMETERS: dict[str, dict[str, Any]] = {
    "run_id": {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"},
    "assignment_id": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
    "client_id": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
    "token_name": {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}$"},
}
"""JSON Schema of each path parameter."""


@dataclass(frozen=True, slots=True)
class Route:
    """A route of the HTTP API.

    Attributes:
        endpoint: Method and path, with path parameters in braces.
        handler: The handler; its docstring is the route's description.
        answers: HTTP status -> message types and media types of the response body.
        request: Message type or media type of the request body; None without a body.
        max_body: Maximal size of the request body, bytes.
        problems: Problem codes besides those that follow from access, path and body.
        headers: HTTP status -> response header -> description.
        waits: Whether the handler is cancelled when the caller disconnects. Other handlers that
            change state run to their end.
        query: Query parameters: name -> JSON Schema.
    """

    endpoint: str
    handler: Handler
    _: KW_ONLY
    access: Access
    answers: Mapping[int, tuple[Any, ...]]
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
    def path_parameters(self) -> list[str]:
        """Names of the path parameters."""
        return re.findall(r"{(\w+)}", self.path)

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
        if self.path_parameters:
            codes.add("not_found")
        if self.query:
            codes.add("invalid_message")
        if self.request is not None:
            codes |= {"body_too_large", "request_timeout", "unsupported_encoding"}
            if not isinstance(self.request, str):
                codes |= {"invalid_message", "not_json"}
        return tuple(code for code in PROBLEMS if code in codes)


class RouteTable:
    """The routes of one group in the documentation. Called as a decorator, it adds a route.

    Example:
        ```python
        @route("GET /v1/me", "viewer", Me)
        async def me(context): ...
        ```
    """

    def __init__(self, tag: str) -> None:
        self._tag = tag
        self.routes: list[Route] = []

    def __call__(
        self, endpoint: str, access: Access, answers: Any, **options: Any
    ) -> Callable[[Handler], Handler]:
        """Return the decorator of a handler; the arguments are the fields of `Route`.

        `answers` may also be only the type (or types) of the body for status 200; None is no body.
        """
        if not isinstance(answers, Mapping):
            answers = {200: answers}
        types = {
            status: answer if isinstance(answer, tuple) else () if answer is None else (answer,)
            for status, answer in answers.items()
        }

        def add(handler: Handler) -> Handler:
            route = Route(endpoint, handler, access=access, answers=types, tag=self._tag, **options)
            self.routes.append(route)
            return handler

        return add


_SECURITY: dict[Access, tuple[str, ...]] = {
    "public": (),
    "enrolment": ("enrolment",),
    "device": ("device",),
    "member": ("device", "person"),
    "viewer": ("person",),
    "operator": ("person",),
    "admin": ("person",),
}

_SCHEMES = {
    "enrolment": "An enrolment token",
    "device": "The credential of an enrolled device",
    "person": "A user's token with the required role",
}

_TAGS = {
    "devices": "Routes for edge clients",
    "runs": "Start, watch and control runs",
    "access": "Enrolment tokens and clients",
    "machines": "Health, metrics and this document",
}

_PROBLEM_HEADERS = {
    401: {"WWW-Authenticate": "The authentication scheme"},
    429: {"Retry-After": "Seconds after which to retry"},
    503: {"Retry-After": "Seconds after which to retry"},
}

_ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)

_Mode = Literal["validation", "serialization"]
_Key = tuple[Any, _Mode]


def openapi_document(routes: Iterable[Route]) -> dict[str, Any]:
    """Return the OpenAPI document of the routes."""
    routes = tuple(routes)
    schemas, components = _schemas(routes)
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    _adapt(paths, components)
    used = {route.tag for route in routes}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "FedOne aggregator",
            "version": __version__,
            "description": "Devices poll the server; the server never calls them. Errors are "
            "RFC 9457 problems with a stable `code`.",
        },
        "servers": [{"url": "/"}],
        "tags": [
            {"name": name, "description": text} for name, text in _TAGS.items() if name in used
        ],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                name: {"type": "http", "scheme": "bearer", "description": text}
                for name, text in _SCHEMES.items()
                if any(name in _SECURITY[route.access] for route in routes)
            },
        },
    }


def _schemas(routes: Iterable[Route]) -> tuple[dict[_Key, Any], dict[str, Any]]:
    """Return the schema of each message, and the definitions that the schemas refer to.

    Fields with a default are optional in requests, and always present in responses. If a type is
    used in both, pydantic makes two schemas, named ``-Input`` and ``-Output``.
    """
    keys = dict.fromkeys(key for route in routes for key in _messages(route))
    schemas, document = TypeAdapter.json_schemas(
        [(index, mode, TypeAdapter(model)) for index, (model, mode) in enumerate(keys)],
        ref_template="#/components/schemas/{model}",
    )
    by_key = {key: schemas[index, key[1]] for index, key in enumerate(keys)}
    components = document["$defs"]
    for key, schema in by_key.items():
        if "discriminator" in schema:  # A union becomes a named component.
            components[schema["title"]] = schema
            by_key[key] = {"$ref": f"#/components/schemas/{schema['title']}"}
    for schema in components.values():
        for attribute in schema.get("properties", {}).values():
            attribute.pop("title", None)
        _adapt(schema, components)
        _describe(schema)
    return by_key, dict(sorted(components.items()))


_FORMATS = {"integer": "int64", "number": "double"}
_FIXED = {"const", "enum"}


def _adapt(schema: object, components: dict[str, Any]) -> None:
    """Change a schema in place to a form that generators of clients support.

    - A number gets a width; without it, generators choose 32 bits or arbitrary precision.
    - A tuple becomes a list of the type of its last element, which must include the other types.
    - A value that may be null gets two types instead of two schemas.
    - In the members of a union, the discriminator becomes a required property.
    """
    if isinstance(schema, list | dict):
        for part in schema if isinstance(schema, list) else schema.values():
            _adapt(part, components)
    if not isinstance(schema, dict):
        return
    match schema:
        case {"type": ("integer" | "number") as kind}:
            schema.setdefault("format", _FORMATS[kind])
        case {"prefixItems": [*_, last]}:
            del schema["prefixItems"]
            schema["items"] = last
        case {"anyOf": [{"type": str(kind), **keys}, {"type": "null"}]} if not keys.keys() & _FIXED:
            del schema["anyOf"]
            schema |= {**keys, "type": [kind, "null"]}
        case {"discriminator": {"propertyName": name}, "oneOf": members}:
            for member in members:
                component = components[member["$ref"].rpartition("/")[2]]
                required = {*component.get("required", ()), name}
                component["required"] = [n for n in component["properties"] if n in required]


def _describe(schema: dict[str, Any]) -> None:
    text, _, attributes = schema.get("description", "").partition("\n\nAttributes:\n")
    properties = schema.get("properties", {})
    for name, description in _ATTRIBUTE.findall(attributes):
        if name in properties:
            properties[name]["description"] = " ".join(description.split())
    if text:
        schema["description"] = text


def _messages(route: Route) -> Iterator[_Key]:
    yield Problem, "serialization"
    if _is_message(route.request):
        yield route.request, "validation"
    for kind in chain(*route.answers.values()):
        if _is_message(kind):
            yield kind, "serialization"


def _is_message(kind: object) -> bool:
    return kind is not None and not isinstance(kind, str)


def _content(kind: Any, schemas: dict[_Key, Any], mode: _Mode) -> dict[str, Any]:
    if _is_message(kind):
        return {JSON: {"schema": schemas[kind, mode]}}
    return {kind: {"schema": {"type": "string"}}}


def _operation(route: Route, schemas: dict[_Key, Any]) -> dict[str, Any]:
    text = inspect.getdoc(route.handler) or ""
    operation: dict[str, Any] = {
        "operationId": route.handler.__name__,
        "tags": [route.tag],
        "summary": text.partition("\n")[0].rstrip("."),
        "description": text,
        "security": [{scheme: []} for scheme in _SECURITY[route.access]],
    }
    if route.access in ("viewer", "operator", "admin"):
        operation["x-fedone-role"] = route.access
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": PARAMETERS[name]}
        for name in route.path_parameters
    ] + [
        {"name": name, "in": "query", "required": False, "schema": dict(schema)}
        for name, schema in route.query.items()
    ]
    if parameters:
        operation["parameters"] = parameters
    if route.request is not None:
        content = _content(route.request, schemas, "validation")
        operation["requestBody"] = {"required": True, "content": content}
    operation["responses"] = _responses(route, schemas)
    return operation


def _responses(route: Route, schemas: dict[_Key, Any]) -> dict[str, Any]:
    responses: dict[int, dict[str, Any]] = {}
    for status, kinds in route.answers.items():
        content: dict[str, Any] = {}
        for kind in kinds:
            content |= _content(kind, schemas, "serialization")
        text = "Done" if status < 300 else "Not modified" if status == 304 else "Unavailable"
        responses[status] = {"description": text, **({"content": content} if content else {})}
        _add_headers(responses[status], route.headers.get(status, {}))
    problem = schemas[Problem, "serialization"]
    by_status: dict[int, list[str]] = {}
    for code in route.refusals:
        by_status.setdefault(PROBLEMS[code][0], []).append(code)
    for status, codes in by_status.items():
        text = "; ".join(f"`{code}`: {PROBLEMS[code][1]}" for code in codes)
        content = {"application/problem+json": {"schema": problem}}
        if status in responses:  # The status also has a non-error response.
            responses[status]["content"] |= content
            responses[status]["description"] += f"; {text}"
        else:
            responses[status] = {"description": text, "content": content}
        _add_headers(responses[status], _PROBLEM_HEADERS.get(status, {}))
    return {str(status): responses[status] for status in sorted(responses)}


def _add_headers(response: dict[str, Any], headers: Any) -> None:
    for name, text in headers.items():
        response.setdefault("headers", {})[name] = {
            "description": text,
            "schema": {"type": "integer" if name == "Retry-After" else "string"},
        }
