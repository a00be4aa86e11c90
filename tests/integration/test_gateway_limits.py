"""Limits of texts at the gateway, over real sockets; clients honour `Retry-After`."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from fedone_sdk import EdgeClient
from fedone_sdk.aggregator import Aggregator
from fedone_sdk.client.session import StopSignal
from fedone_sdk.client.transport import HttpTransport
from fedone_sdk.errors import BackendUnavailable, ProblemError
from fedone_sdk.messages import Claim, Enrol, LossesAssignment, Score
from fedone_sdk.spec import RunSpec
from fedone_sdk.testing import ScriptedBackend
from fedone_sdk.vocabulary import Vocabulary
from tests.runs import TOKEN, run_spec

WORDS = Vocabulary(candidates=(" good", " bad"))


def spec_of(clients: int = 1) -> RunSpec:
    return run_spec(participation={"clients_per_round": clients}, rounds=1)


@dataclass
class Device:
    """An enrolled client with work, by hand."""

    transport: HttpTransport
    credential: str
    work: str

    async def score(self, *texts: str) -> None:
        examples = tuple({"text": text} for text in texts)
        message = Score(assignment_id=self.work, examples=examples)
        await self.transport.score(self.credential, message)

    async def refused(self, *texts: str) -> ProblemError:
        with pytest.raises(ProblemError) as excinfo:
            await self.score(*texts)
        return excinfo.value


async def devices(transport: HttpTransport, count: int) -> list[Device]:
    credentials = [(await transport.enrol(TOKEN, Enrol())).credential for _ in range(count)]
    # All must be seen before the round is seated.
    for credential in credentials:
        await transport.claim(credential, Claim(num_examples=5, wait_s=0))
    found = []
    for credential in credentials:
        work = await transport.claim(credential, Claim(num_examples=5, wait_s=0))
        assert isinstance(work, LossesAssignment)
        found.append(Device(transport, credential, work.assignment_id))
    return found


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
        run = await aggregator.add_run(spec_of(), WORDS)
        url = await aggregator.listen()
        async with EdgeClient(url, token=TOKEN, data=rows) as client:
            await client.run_forever()
        assert run.result().status == "completed"
    assert any(7.0 <= wait <= 27.0 for wait in waits)
