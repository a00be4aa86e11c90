"""Bad requests to a live server with open work."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from fedone_sdk.errors import PROBLEMS
from fedone_sdk.messages import UPDATE, Claim, Decline, Enrol, Problem, Score
from tests.fuzz.damage import damaged, messages
from tests.fuzz.openapi import conformance, serving
from tests.fuzz.target import ENROLMENT, Target

EXAMPLES = int(os.environ.get("FEDONE_FUZZ_EXAMPLES", "8"))


def test_every_answer_is_one_that_the_contract_names() -> None:
    with serving() as found:
        result = conformance(found, EXAMPLES)
    assert not result.broken
    assert {status for _, status in result.answers} >= {200, 401, 404, 422}
    assert not [key for key in result.answers if key[1] >= 500]


@pytest.mark.parametrize("gateway", [False, True], ids=["own models", "gateway"])
def test_bad_messages_change_nothing(gateway: bool) -> None:
    with serving(gateway=True) as undisturbed:
        expected = undisturbed.run(undisturbed.finish())
    with serving(gateway=gateway) as found:
        before, calls = found.content(), _calls(found)

        @settings(max_examples=40 * EXAMPLES, deadline=None, suppress_health_check=[*HealthCheck])
        @given(data=st.data())
        def ask(data: st.DataObject) -> None:
            path, body, token, parse = data.draw(st.sampled_from(calls))
            body = data.draw(damaged(body))
            assume(not _is_valid(parse, body))
            answer = found.run(found.ask("POST", path, body, token=token))
            assert 400 <= answer.status < 500, answer
            problem = Problem.model_validate_json(answer.body)
            assert PROBLEMS[problem.code][0] == answer.status

        ask()
        assert found.content() == before
        assert found.run(found.finish()) == expected


Call = tuple[str, bytes, str, Callable[[bytes], object]]


def _calls(found: Target) -> list[Call]:
    """Return valid messages, each with the token of a caller that may send it."""
    stranger = next(device for device in found.devices if device.held is None)
    calls: list[Call] = []

    def add(
        kind: type[Any], path: str, token: str, change: Callable[[str], str] = lambda body: body
    ) -> None:
        parse = TypeAdapter(kind).validate_json
        for vector in messages(kind.__name__):
            calls.append((path, change(vector["body"]).encode(), token, parse))

    add(Enrol, "/v1/clients", ENROLMENT)
    add(Claim, "/v1/assignments/claim", stranger.credential)
    for device in found.holders():
        assert device.held is not None
        work_id = device.held["assignment_id"]
        path, token = f"/v1/assignments/{work_id}", device.credential
        update = json.dumps(device.update(device.held)).encode()
        calls.append((f"{path}/update", update, token, UPDATE.validate_json))
        add(Decline, f"{path}/decline", token)
        add(Score, "/v1/score", token, partial(_named, work_id))
    return calls


def _named(assignment_id: str, body: str) -> str:
    return json.dumps({**json.loads(body), "assignment_id": assignment_id})


def _is_valid(parse: Callable[[bytes], object], body: bytes) -> bool:
    try:
        parse(body)
    except ValidationError:
        return False
    return True
