"""Clients honour `Retry-After` of the gateway."""

from __future__ import annotations

import pytest

from fedone_sdk import EdgeClient
from fedone_sdk.aggregator import Aggregator
from fedone_sdk.client.session import StopSignal
from fedone_sdk.errors import BackendUnavailable
from fedone_sdk.testing import ScriptedBackend
from fedone_sdk.vocabulary import Vocabulary
from tests.runs import TOKEN, run_spec

WORDS = Vocabulary(candidates=(" good", " bad"))


async def test_a_client_honours_retry_after(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [BackendUnavailable("HTTP 429", retry_after_s=7.0)]

    def gate(query: object) -> None:
        if failures:
            raise failures.pop()

    waits: list[float] = []

    async def pause(self: StopSignal, seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(StopSignal, "sleep", pause)
    rows = [{"text": "a text", "label": 0}, {"text": "another", "label": 1}]
    async with Aggregator(
        backend=ScriptedBackend(gate=gate), enrolment_tokens=[TOKEN]
    ) as aggregator:
        run = await aggregator.add_run(run_spec(rounds=1), WORDS)
        url = await aggregator.listen()
        async with EdgeClient(url, token=TOKEN, data=rows) as client:
            await client.run_forever()
        assert run.result().status == "completed"
    assert any(7.0 <= wait <= 27.0 for wait in waits)
