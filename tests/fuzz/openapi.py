"""Conformance of a live server to its OpenAPI document, by schemathesis.

Good and bad requests for every operation, by every kind of caller, with ids that exist and ids
that do not. No answer may be a 5xx, have a status or a type that the contract does not name, or a
body or headers other than it describes.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import CHECKS
from schemathesis.core.failures import FailureGroup
from schemathesis.generation import GenerationMode

from tests.fuzz.target import ADMIN, ENROLMENT, Device, Target, target

T = TypeVar("T")

_CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)

_ENDLESS = ("text/event-stream",)


@dataclass(slots=True)
class Conformance:
    """What became of the requests.

    Attributes:
        answers: By (operation, status).
        broken: How the contract was broken.
    """

    answers: Counter[tuple[str, int]] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)


def conformance(found: Target, examples: int, seed: int = 0) -> Conformance:
    """Asks every operation in each mode so often."""
    base = f"http://{found.host}:{found.port}"
    schema = schemathesis.openapi.from_url(f"{base}/openapi.json")
    result = Conformance()
    for each in schema.get_all_operations():
        operation = each.ok()
        label = operation.label
        if any(kind in _media_types(operation.definition.raw) for kind in _ENDLESS):
            continue
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            try:
                cases = operation.as_strategy(generation_mode=mode)
            except schemathesis.errors.InvalidSchema as exc:
                result.broken.append(f"{label}: {exc}")
                continue
            with suppress(Unsatisfiable):  # Where nothing is sent, nothing of it can be wrong.
                _ask(found, base, label, cases, examples, seed, result)
    return result


def _ask(
    found: Target, base: str, label: str, cases: Any, examples: int, seed: int, result: Conformance
) -> None:
    held = found.holders()
    others = [device for device in found.devices if device.held is None]
    known: dict[str, list[str]] = {
        "run_id": sorted({device.run for device in held}),
        "assignment_id": [device.held["assignment_id"] for device in held if device.held],
        "client_id": [device.client_id for device in others[1:]],  # it may be revoked
    }
    # Credentials may be changed, so those who hold work only call for their work.
    tokens = st.sampled_from([ADMIN, ENROLMENT, "none-such", None, *(d.credential for d in others)])

    @seeded(seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases, data=st.data())
    def ask(case: Any, data: st.DataObject) -> None:
        for name in case.path_parameters or {}:
            if name in known and data.draw(st.booleans()):
                case.path_parameters[name] = data.draw(st.sampled_from(known[name]))
        polls = label.endswith("/claim") and isinstance(case.body, dict)
        if polls and isinstance(case.body.get("wait_s", 0), (int, float)):
            case.body["wait_s"] = min(case.body.get("wait_s", 0), 0.05)  # or it waits a minute
        right = _right_token(label, case, held, others)
        token = data.draw(st.one_of(st.just(right), tokens))
        case.headers = case.headers or {}
        if token is not None:
            case.headers["Authorization"] = f"Bearer {token}"
        else:
            case.headers.pop("Authorization", None)
        response = case.call(base_url=base, timeout=30)
        result.answers[label, response.status_code] += 1
        try:
            case.validate_response(response, checks=[CHECKS.get_one(name) for name in _CHECKS])
        except FailureGroup as group:
            for failure in group.exceptions:
                shown = f"{type(failure).__name__}: {failure}"
                result.broken.append(f"{label} -> {response.status_code}: {shown}")

    ask()


def _right_token(label: str, case: Any, held: list[Device], others: list[Device]) -> str:
    """A token that permits a call."""
    path = label.partition(" ")[2]
    if path == "/v1/clients" and label.startswith("POST"):
        return ENROLMENT
    if path.startswith("/v1/assignments/{"):
        wanted = (case.path_parameters or {}).get("assignment_id")
        mine = [d for d in held if d.held is not None and d.held["assignment_id"] == wanted]
        return (mine or held)[0].credential
    if path == "/v1/score":
        return held[0].credential
    if path.startswith(("/v1/assignments/", "/v1/clients/me")):
        return others[0].credential
    return ADMIN


def _media_types(operation: dict[str, Any]) -> Iterator[str]:
    for response in operation.get("responses", {}).values():
        yield from response.get("content", {})


@dataclass(slots=True)
class Serving(Target):
    """A target for callers that are not asynchronous."""

    runner: asyncio.Runner = field(default_factory=asyncio.Runner)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a call to the server."""
        return self.runner.run(work)


@contextmanager
def serving(*, gateway: bool = False) -> Iterator[Serving]:
    """Start a live server for callers that are not asynchronous."""
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        context = target(Path(folder), gateway=gateway)
        found = runner.run(context.__aenter__())
        facts = {name.name: getattr(found, name.name) for name in fields(found)}
        try:
            yield Serving(**facts, runner=runner)
        finally:
            runner.run(context.__aexit__(None, None, None))
