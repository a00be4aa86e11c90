"""The HTTP contract as OpenAPI 3.1, from the same pydantic models that parse the messages."""

from __future__ import annotations

from functools import cache
from typing import Any

from fedone_sdk import __version__
from fedone_sdk.messages import json_schemas

__all__ = ["openapi_document"]

# (method, path, summary, request message, answer status, answer message, problem statuses)
_ROUTES: tuple[tuple[str, str, str, str | None, int, str | None, tuple[int, ...]], ...] = (
    ("post", "/v1/clients", "Enrol a device", "Enrol", 201, "Enrolled", (401, 413, 415, 422)),
    (
        "post",
        "/v1/assignments/claim",
        "Ask for work (long poll)",
        "Claim",
        200,
        "Assignment",
        (401, 404, 410, 413, 415, 422),
    ),
    (
        "post",
        "/v1/assignments/{assignment_id}/update",
        "Return finished work",
        "Update",
        200,
        "Receipt",
        (401, 404, 409, 413, 415, 422),
    ),
    (
        "post",
        "/v1/assignments/{assignment_id}/renew",
        "Ask for another deadline",
        None,
        200,
        "Assignment",
        (401, 404, 409),
    ),
    (
        "post",
        "/v1/assignments/{assignment_id}/decline",
        "Give work back",
        "Decline",
        204,
        None,
        (401, 404, 409, 413, 415, 422),
    ),
    (
        "post",
        "/v1/score",
        "Score prompts through the gateway",
        "Score",
        200,
        "Scores",
        (401, 404, 409, 413, 415, 422, 429, 502, 503),
    ),
    ("get", "/v1/runs/{run_id}/task", "What a client must know", None, 200, "RunTask", (401, 404)),
    (
        "get",
        "/v1/runs/{run_id}/vocabulary",
        "The candidates, in index order",
        None,
        200,
        "VocabularyList",
        (401, 404),
    ),
    ("get", "/v1/runs/{run_id}", "Where a run stands", None, 200, "RunResult", (401, 404)),
    ("get", "/v1/runs/{run_id}/prompt", "The prompt", None, 200, "PromptReport", (401, 404)),
    ("post", "/v1/runs/{run_id}/stop", "End a run", None, 200, "RunResult", (401, 403, 404, 409)),
    (
        "post",
        "/v1/runs/{run_id}/resume",
        "Let a stopped run go on",
        None,
        200,
        "RunResult",
        (401, 403, 404, 409),
    ),
)

_UNIONS = {
    "Assignment": ("AlphaAssignment", "LossesAssignment"),
    "Update": ("AlphaUpdate", "LossesUpdate"),
}


@cache
def openapi_document() -> dict[str, Any]:
    """The OpenAPI document of the service."""
    schemas = json_schemas(ref_template="#/components/schemas/{model}")
    for name, members in _UNIONS.items():
        schemas[name] = {
            "oneOf": [_ref(member) for member in members],
            "discriminator": {"propertyName": "exchange"},
        }
    paths: dict[str, Any] = {}
    for method, path, summary, request, status, answer, problems in _ROUTES:
        paths.setdefault(path, {})[method] = _operation(
            path, summary, request, status, answer, problems
        )
    return {
        "openapi": "3.1.0",
        "info": {"title": "FedOne aggregator", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"bearer": []}],
    }


def _operation(
    path: str,
    summary: str,
    request: str | None,
    status: int,
    answer: str | None,
    problems: tuple[int, ...],
) -> dict[str, Any]:
    responses: dict[str, Any] = {
        str(status): {"description": "Done"}
        if answer is None
        else {"description": "Done", "content": _content(answer)}
    }
    if path.endswith("/claim"):
        responses["204"] = {"description": "No work now; ask again after Retry-After seconds"}
    for code in problems:
        responses[str(code)] = {
            "description": "Refused",
            "content": {"application/problem+json": {"schema": _ref("Problem")}},
        }
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if request is not None:
        operation["requestBody"] = {"required": True, "content": _content(request)}
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    return operation


def _content(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": _ref(name)}}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}
