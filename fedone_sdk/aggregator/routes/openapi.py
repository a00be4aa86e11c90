"""The OpenAPI 3.1 document, generated from the routes and their messages."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from pydantic import TypeAdapter

from fedone_sdk import __version__
from fedone_sdk.aggregator.http.requests import JSON
from fedone_sdk.aggregator.routes.route import PARAMETERS, Access, Route
from fedone_sdk.errors import PROBLEMS
from fedone_sdk.messages import Problem

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

_Key = tuple[Any, Literal["validation", "serialization"]]


def openapi_document(routes: Iterable[Route]) -> dict[str, Any]:
    """Return the OpenAPI document of the routes."""
    routes = tuple(routes)
    schemas, components = _schemas(routes)
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
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
            },
        },
    }


def _schemas(routes: Iterable[Route]) -> tuple[dict[_Key, Any], dict[str, Any]]:
    """Return the schema of each message, and the definitions that they refer to.

    Fields with a default are optional in requests and always present in responses. If the schemas
    differ, pydantic names them ``-Input`` and ``-Output``.
    """
    keys = dict.fromkeys(key for route in routes for key in _messages(route))
    found, document = TypeAdapter.json_schemas(
        [(index, mode, TypeAdapter(model)) for index, (model, mode) in enumerate(keys)],
        ref_template="#/components/schemas/{model}",
    )
    by_key = {key: found[index, key[1]] for index, key in enumerate(keys)}
    components = document["$defs"]
    for schema in components.values():
        _describe(schema)
    return by_key, dict(sorted(components.items()))


def _describe(schema: dict[str, Any]) -> None:
    """Move the attribute descriptions of a docstring to the properties."""
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
    for answer in route.answers.values():
        for kind in _kinds(answer):
            if _is_message(kind):
                yield kind, "serialization"


def _kinds(answer: Any) -> tuple[Any, ...]:
    if answer is None:
        return ()
    return answer if isinstance(answer, tuple) else (answer,)


def _is_message(kind: object) -> bool:
    return kind is not None and not isinstance(kind, str)


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
        for name in route.names
    ] + [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in route.query.items()
    ]
    if parameters:
        operation["parameters"] = parameters
    if route.request is not None:
        content: dict[str, Any] = {str(route.request): {"schema": {"type": "string"}}}
        if _is_message(route.request):
            content = {JSON: {"schema": schemas[route.request, "validation"]}}
        operation["requestBody"] = {"required": True, "content": content}
    operation["responses"] = _responses(route, schemas)
    return operation


def _responses(route: Route, schemas: dict[_Key, Any]) -> dict[str, Any]:
    responses: dict[int, dict[str, Any]] = {}
    for status, model in route.answers.items():
        content: dict[str, Any] = {}
        for kind in _kinds(model):
            if _is_message(kind):
                content[JSON] = {"schema": schemas[kind, "serialization"]}
            else:
                content[kind] = {"schema": {"type": "string"}}
        text = "Done" if status < 300 else "As before" if status == 304 else "Not now"
        responses[status] = _response(text, content)
        _add_headers(responses[status], route.headers.get(status, {}))
    problem = schemas[Problem, "serialization"]
    by_status: dict[int, list[str]] = {}
    for code in route.refusals:
        by_status.setdefault(PROBLEMS[code][0], []).append(code)
    for status, codes in by_status.items():
        text = "; ".join(f"`{code}`: {PROBLEMS[code][1]}" for code in codes)
        schema = {"allOf": [problem, {"properties": {"code": {"enum": codes}}}]}
        content = {"application/problem+json": {"schema": schema}}
        if status in responses:  # The status also has a non-error response.
            responses[status]["content"] |= content
            responses[status]["description"] += f"; {text}"
        else:
            responses[status] = _response(text, content)
        _add_headers(responses[status], _PROBLEM_HEADERS.get(status, {}))
    return {str(status): responses[status] for status in sorted(responses)}


def _response(description: str, content: dict[str, Any]) -> dict[str, Any]:
    return {"description": description} | ({"content": content} if content else {})


def _add_headers(response: dict[str, Any], headers: Any) -> None:
    for name, text in headers.items():
        response.setdefault("headers", {})[name] = {
            "description": text,
            "schema": {"type": "integer" if name == "Retry-After" else "string"},
        }
