"""A device does not pay twice: it resumes within its work."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any

import pytest

from fedone_sdk.aggregator import Service
from fedone_sdk.backends import LLMBackend, Query
from fedone_sdk.client import EdgeClient
from fedone_sdk.client.session import StopSignal
from fedone_sdk.client.work import request_ranges
from fedone_sdk.errors import MessageError, ProblemError, TransportError
from fedone_sdk.messages import Decline, Receipt, RunResult, Score, Scores
from fedone_sdk.spec import RunSpec
from fedone_sdk.testing import ScriptedBackend
from fedone_sdk.vocabulary import Vocabulary
from tests import runs
from tests.edge import stored
from tests.runs import PROMPT, RecordingTransport, memory_client, run_spec

WORDS = Vocabulary(candidates=tuple(f" word{n}" for n in range(20)))
DATA: list[dict[str, Any]] = [{"text": f"text {n}", "label": n % 2} for n in range(40)]
NUM_SAMPLES, BATCH_SIZE = 40, 30


def spec_of(exchange: str, *, rounds: int = 1, local_steps: int = 1) -> RunSpec:
    few = {"num_samples": NUM_SAMPLES, "batch_size": BATCH_SIZE, "local_steps": local_steps}
    return run_spec(
        prompt={**PROMPT, "length": 4},
        method=few,
        participation={"exchange": exchange, "own_models": "trusted"},
        rounds=rounds,
    )


def serving(spec: RunSpec, backend: LLMBackend | None) -> AbstractAsyncContextManager[Service]:
    return runs.serving(spec, backend=backend, words=WORDS)


def client_of(service: Service, folder: Path | None, **more: Any) -> EdgeClient:
    return memory_client(service, **{"data": DATA, "state_dir": folder, **more})


def result_of(service: Service) -> RunResult:
    return service.runs["run"].result()


def test_the_parts_of_a_step() -> None:
    assert request_ranges(20, 16) == [range(20)]
    assert request_ranges(20, 32) == [range(10), range(10, 20)]
    assert request_ranges(3, 100_000) == [range(1), range(1, 2), range(2, 3)]
    for num_prompts in range(1, 70):
        for num_examples in (1, 7, 100, 512, 1024):
            parts = request_ranges(num_prompts, num_examples)
            assert [place for part in parts for place in part] == list(range(num_prompts))
            assert all(len(part) * num_examples <= 2 * 512 or len(part) == 1 for part in parts)


def journal_in(folder: Path) -> list[tuple[Any, ...]]:
    return stored(folder, "SELECT kind FROM entries WHERE assignment_id != ''")


@pytest.mark.parametrize(("exchange", "local_steps"), [("losses", 1), ("alpha", 2)])
@pytest.mark.parametrize("answered_before", [0, 1, 17])
async def test_with_its_own_model(
    tmp_path: Path, exchange: str, local_steps: int, answered_before: int
) -> None:
    """Only queries that were pending at the kill are repeated, and they count twice."""
    spec = spec_of(exchange, local_steps=local_steps)
    async with serving(spec, None) as service:
        async with client_of(service, None, backend=ScriptedBackend()) as client:
            await client.run_forever()
        wanted = result_of(service)

    second = ScriptedBackend()
    async with serving(spec, None) as service:
        first = await died_after(answered_before, service, tmp_path)
        async with client_of(service, tmp_path, backend=second) as client:
            assert (await client.run_once()).outcome == "worked"
        result = result_of(service)
    assert result.alpha_sha256 == wanted.alpha_sha256
    done = {_prompt(query) for query in first.asked[:answered_before]}
    assert not done & {_prompt(query) for query in second.asked}
    held_up = len(first.asked) - answered_before
    unique = wanted.spent.requests
    assert len(second.asked) == unique - answered_before
    # What may have been sent when the device died was charged in full.
    assert result.spent.queries == wanted.spent.queries
    assert held_up <= result.spent.requests - len(second.asked) - answered_before <= unique
    assert result.spent.requests >= len(first.asked) + len(second.asked)


async def died_after(answers: int, service: Service, folder: Path) -> ScriptedBackend:
    """A device whose own model answers a number of queries, until the device is killed."""
    reached = asyncio.Event()

    async def hangs(query: Query) -> None:
        if len(own.asked) > answers:
            reached.set()
            await asyncio.Event().wait()

    own = ScriptedBackend(gate=hangs)
    async with client_of(service, folder, backend=own) as client:
        working = asyncio.create_task(client.run_once())
        async with asyncio.timeout(10):
            await reached.wait()
        for _ in range(100):
            await asyncio.sleep(0)  # others of the same moment come to their end
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
    return own


def _prompt(query: Query) -> tuple[str, ...]:
    return tuple(part.text for part in query.inputs[0])


async def test_losses_on_other_examples_do_not_mix(tmp_path: Path) -> None:
    """The app's data have changed meanwhile: what was scored is of no use."""
    spec, own = spec_of("losses"), ScriptedBackend()
    async with serving(spec, None) as service:
        await died_after(5, service, tmp_path)
        others = [{**row, "text": row["text"] + "!"} for row in DATA]
        async with client_of(service, tmp_path, backend=own, data=others) as client:
            assert (await client.run_once()).outcome == "worked"
    everything = {text for query in own.asked for text in _prompt(query)}
    assert not everything & {row["text"] for row in DATA}
    prompts = {_prompt(query)[0] for query in own.asked}
    assert len(own.asked) == len(prompts)


async def test_another_model_than_before(tmp_path: Path) -> None:
    """Scores of two models are never mixed: the work is declined, with its cost."""
    spec = spec_of("losses")
    async with serving(spec, None) as service:
        await died_after(5, service, tmp_path)
        other = ScriptedBackend(fingerprint="other")
        transport = RecordingTransport(service)
        async with client_of(service, tmp_path, backend=other, transport=transport) as client:
            assert (await client.run_once()).outcome == "declined"
    (message,) = transport.declines
    assert message.reason == "the run scores with 'scripted', the device with 'other'"
    assert message.usage.requests >= 5
    assert other.asked == []
    assert journal_in(tmp_path) == []


async def test_a_server_that_is_overloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work is kept for later, and what was scored with it."""

    class Busy(RecordingTransport):
        busy = True

        async def score(self, credential: str, message: Score) -> Scores:
            if self.busy and len(self.scores) == 1:
                raise ProblemError("rate_limited", "too many requests")
            return await super().score(credential, message)

    monkeypatch.setattr(StopSignal, "sleep", lambda self, seconds: asyncio.sleep(0))
    backend = ScriptedBackend()
    async with serving(spec_of("losses"), backend) as service:
        transport = Busy(service)
        async with client_of(service, None, transport=transport) as client:
            assert (await client.run_once()).outcome == "offline"
            assert len(backend.asked) == len(request_ranges(NUM_SAMPLES, BATCH_SIZE)[0])
            transport.busy = False
            await client.run_forever()
        assert result_of(service).status == "completed"
    assert len(backend.asked) == NUM_SAMPLES


class TestPrivacy:
    def spec(self, exchange: str, target: str, clip: float) -> RunSpec:
        document = spec_of(exchange, rounds=1).model_dump(mode="json")
        noise = {"target": target, "clip": clip, "noise_multiplier": 0.1}
        return RunSpec.model_validate({**document, "privacy": noise})

    @pytest.mark.parametrize("exchange", ["losses", "alpha"])
    async def test_losses_are_clipped_and_noised(self, exchange: str) -> None:
        """Nearly every loss is over the clip: what is left of it is the clip and the noise."""
        sent = await self.sent(self.spec(exchange, "losses", 0.05))
        values = sent.losses if exchange == "losses" else (sent.mean_loss,)
        assert values == pytest.approx([0.05] * len(values), abs=0.1)
        assert all(value != 0.05 for value in values)

    async def test_a_step_is_clipped_and_noised(self) -> None:
        sent = await self.sent(self.spec("alpha", "alpha", 0.05))
        assert sent.mean_loss == 0.0
        values = sent.alpha.values()
        # Without noise a token that no prompt drew keeps its row's value; among 80 float32 so
        # close together two that are equal by chance are no sign of it.
        assert len(set(values)) >= len(values) - 4

    async def sent(self, spec: RunSpec) -> Any:
        async with serving(spec, ScriptedBackend()) as service:
            transport = RecordingTransport(service)
            async with client_of(service, None, transport=transport) as client:
                assert (await client.run_once()).outcome == "worked"
        return transport.updates[0]


class FailingTransport(RecordingTransport):
    """Raise an error at the first call of one method, before the server gets it or after.

    Attributes:
        error: The error, until it was raised.
        ended: Assignments of which the server has an update or a decline.
    """

    def __init__(self, service: Service, method: str, error: BaseException, *, after: bool) -> None:
        super().__init__(service)
        self.error: BaseException | None = error
        self.ended: set[str] = set()
        call = getattr(self, method)

        async def failing(*args: Any) -> Any:
            error, self.error = self.error, None
            answer = None if error is not None and not after else await call(*args)
            if error is not None:
                raise error
            return answer

        setattr(self, method, failing)

    async def update(self, credential: str, assignment_id: str, message: Any) -> Receipt:
        receipt = await super().update(credential, assignment_id, message)
        self.ended.add(assignment_id)
        return receipt

    async def decline(self, credential: str, assignment_id: str, message: Decline) -> None:
        await super().decline(credential, assignment_id, message)
        self.ended.add(assignment_id)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        TransportError("the network is away"), MessageError("a login page"),
        ProblemError("invalid_message", "refused"), ProblemError("store_unavailable", "no disk"),
        RuntimeError("a bug"), asyncio.CancelledError(),
    ],
    ids=lambda error: getattr(error, "code", type(error).__name__),
)  # fmt: skip
@pytest.mark.parametrize("method", ["task", "vocabulary", "score", "update", "decline"])
async def test_no_lease_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, error: BaseException, after: bool
) -> None:
    """The server gets an update or a decline of each assignment."""
    monkeypatch.setattr(StopSignal, "sleep", lambda self, seconds: asyncio.sleep(0))
    bugs = [RuntimeError("a bug of the model")] if method == "decline" else []

    async def model(query: Query) -> None:
        if bugs:
            raise bugs.pop()

    backend = ScriptedBackend(gate=model)
    own = None if method == "score" else backend
    async with serving(spec_of("losses", rounds=2), None if own else backend) as service:
        run = service.runs["run"]
        transport = FailingTransport(service, method, error, after=after)
        options = {"backend": own, "transport": transport, "wait_s": 0}
        async with asyncio.timeout(20):
            while run.state.running:  # The device restarts after each turn.
                async with client_of(service, tmp_path, **options) as client:
                    with suppress(RuntimeError, asyncio.CancelledError):
                        await client.run_once()
        assert transport.error is None
        assert transport.ended == {work.assignment_id for work in transport.works}
        assert run.state.account.leases == {}
        if not transport.declines:  # No answer is paid twice.
            assert len(backend.asked) <= 2 * NUM_SAMPLES
        if method == "update" and str(error) == "invalid_message: refused" and not after:
            # Otherwise the next claim gets the same assignment, which is paid again.
            assert [decline.reason for decline in transport.declines] == [str(error)]
