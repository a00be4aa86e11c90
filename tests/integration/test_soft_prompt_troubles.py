"""Soft prompts with malicious, killed or moved clients and servers, and other sizes."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedone_sdk import EdgeClient
from fedone_sdk.aggregator import RoundMachine, Service
from fedone_sdk.aggregator.rounds.rules import Rules
from fedone_sdk.algorithms import (
    BBT,
    State,
    cma_es,
    dump_memory,
    make_method,
    stream,
)
from fedone_sdk.backends import EmbeddingSpace, LLMBackend
from fedone_sdk.client.transport import Idle
from fedone_sdk.errors import MessageError, MissingExtraError, ProblemError, SpecError
from fedone_sdk.local import MemoryTransport
from fedone_sdk.messages import (
    AlphaAssignment,
    AlphaUpdate,
    Claim,
    LossesAssignment,
    RunTask,
    Scored,
    encode,
)
from fedone_sdk.messages.ndarray import memory_to_wire, to_wire
from fedone_sdk.spec import OwnMethodSpec, RunSpec
from fedone_sdk.stores import MemoryStore
from fedone_sdk.task import Example
from fedone_sdk.testing import ScriptedBackend
from fedone_sdk.vocabulary import Vocabulary
from tests import runs
from tests.runs import DyingTransport, RecordingTransport, memory_client, run_spec

NOTHING = Vocabulary(candidates=())
SPACE = EmbeddingSpace(size=4, std=0.5)
DATA: list[Example] = [{"text": f"text {n}", "label": n % 2} for n in range(6)]
BBT_SPEC: dict[str, Any] = {
    "name": "bbt",
    "intrinsic_dim": 6,
    "num_samples": 40,
    "batch_size": 30,
}
TUNING: dict[str, Any] = {"name": "prompt-tuning", "hidden_size": 4, "batch_size": 2}


def spec_of(method: Mapping[str, Any], *, rounds: int = 3, length: int = 3, **part: Any) -> RunSpec:
    participation = {"exchange": "alpha", "min_clients": 1, **part}
    return run_spec(
        prompt={"length": length}, method=method, participation=participation, rounds=rounds
    )


def serving(
    spec: RunSpec, backend: LLMBackend | None, store: MemoryStore | None = None
) -> AbstractAsyncContextManager[Service]:
    return runs.serving(spec, backend=backend, store=store, words=NOTHING)


def client_of(service: Service, folder: Path | None = None, **more: Any) -> EdgeClient:
    return memory_client(service, **{"data": DATA, "state_dir": folder, **more})


def bbt_memory(size: int = 6) -> dict[str, np.ndarray]:
    method = make_method(
        "bbt", prompt_len=3, vocab_size=0, num_samples=4, seed=0, intrinsic_dim=size
    )
    asked = method.ask(method.init(), stream(0))
    return dict(method.tell(method.init(), asked, [1.0, 2.0, 3.0, 4.0]).memory)


class Trains:
    """Returns what a test gives it."""

    fingerprint = "scripted"

    def __init__(self, losses: tuple[float, ...] = (0.5,), error: Exception | None = None) -> None:
        self._losses, self._error = losses, error

    async def train(
        self, task: Any, method: Any, parameters: Any, batches: Any, seed: int
    ) -> tuple[np.ndarray, tuple[float, ...]]:
        if self._error is not None:
            raise self._error
        return parameters + np.float32(1.0), self._losses


class Lying(MemoryTransport):
    """A server with invalid assignments or tasks."""

    def __init__(
        self,
        service: Service,
        *,
        assignment: Callable[[AlphaAssignment], AlphaAssignment] = lambda found: found,
        task: Callable[[RunTask], RunTask] = lambda found: found,
    ) -> None:
        super().__init__(service)
        self._assignment, self._run_task = assignment, task

    async def claim(
        self, credential: str, message: Claim
    ) -> AlphaAssignment | LossesAssignment | Idle:
        found = await super().claim(credential, message)
        return self._assignment(found) if isinstance(found, AlphaAssignment) else found

    async def task(self, credential: str, run_id: str) -> RunTask:
        return self._run_task(await super().task(credential, run_id))


class TestHostileClients:
    @pytest.mark.parametrize(
        "change",
        [
            lambda memory: {"x": np.zeros(3)},
            lambda memory: bbt_memory(7),
            lambda memory: {**memory, "covariance": -memory["covariance"]},
            lambda memory: {**memory, "sigma": np.array(0.0)},
            lambda memory: {**memory, "sigma": np.array(1e14)},
            lambda memory: {**memory, "generation": np.array(-1)},
            lambda memory: {key: memory[key] for key in ("sigma", "covariance")},
        ],
        ids=["another", "another size", "covariance", "no step", "step", "past", "parts"],
    )
    async def test_an_unusable_memory_is_refused(
        self, change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]
    ) -> None:
        spec = spec_of({**BBT_SPEC, "memory": "run"})
        async with serving(spec, None) as service:
            run = service.runs["run"]
            device = client_of(service)
            await device.enrol()
            client = await service.client(device._session.credential)
            work = await service.claim(client, Claim(num_examples=6, wait_s=0))
            assert isinstance(work, AlphaAssignment)
            good = bbt_memory()

            async def send(memory: dict[str, np.ndarray]) -> None:
                update = AlphaUpdate(
                    num_examples=6,
                    scored=Scored(scored=6),
                    usage={},
                    model="m",
                    alpha=to_wire(np.ones((1, 6), np.float32)),
                    memory=memory_to_wire(memory),
                    mean_loss=0.5,
                )
                await service.update(client, work.assignment_id, update, "0" * 64)

            with pytest.raises(ProblemError) as excinfo:
                await send(change(good))
            assert excinfo.value.code == "invalid_message"
            assert run.state.round == 0
            await send(good)
            assert run.state.round == 1

    async def test_parameters_beyond_all_training_are_refused(self) -> None:
        async with serving(spec_of(TUNING, rounds=1), None) as service:
            device = client_of(service)
            await device.enrol()
            client = await service.client(device._session.credential)
            work = await service.claim(client, Claim(num_examples=6, wait_s=0))
            assert isinstance(work, AlphaAssignment)

            async def send(value: float) -> None:
                update = AlphaUpdate(
                    num_examples=6,
                    scored=Scored(scored=2),
                    usage={},
                    model="m",
                    alpha=to_wire(np.full((3, 4), value, np.float32)),
                    mean_loss=0.5,
                )
                await service.update(client, work.assignment_id, update, "0" * 64)

            for value in (3.4e38, -2e6):
                with pytest.raises(ProblemError, match="outside what the method allows"):
                    await send(value)
            await send(-1e6)
            assert service.runs["run"].state.status == "completed"


class TestHostileServers:
    @pytest.mark.parametrize("num_samples", [0, 1])
    async def test_too_few_prompts_are_declined(self, num_samples: int) -> None:
        def fewer(found: AlphaAssignment) -> AlphaAssignment:
            steps = tuple(
                step.model_copy(update={"num_samples": num_samples}) for step in found.steps
            )
            return found.model_copy(update={"steps": steps})

        await self.declined(BBT_SPEC, "does not fit its run", assignment=fewer)

    async def test_a_memory_of_another_method_is_declined(self) -> None:
        def another(found: AlphaAssignment) -> AlphaAssignment:
            return found.model_copy(
                update={"memory": memory_to_wire({"m": np.zeros(2, np.float32)})}
            )

        await self.declined({**BBT_SPEC, "memory": "run"}, "not a memory", assignment=another)

    async def test_a_method_of_a_newer_version_is_declined(self) -> None:
        """The seat passes to another client now, and not at its deadline."""

        def unknown(found: RunTask) -> RunTask:
            raise MessageError("the aggregator's answer is malformed: method: an unknown tag")

        await self.declined(TUNING, "cannot be understood", task=unknown)

    async def test_a_method_of_the_server_s_own_loads_nothing(self) -> None:
        def own(found: RunTask) -> RunTask:
            rows, columns = found.method.shape(found.prompt_len, found.vocab_size)
            method = OwnMethodSpec(name="own", object="antigravity:fly", num_samples=2)
            changes = {"method": method, "prompt_len": rows, "vocab_size": columns}
            return found.model_copy(update=changes)

        await self.declined(BBT_SPEC, "does not fit its run", task=own)
        assert "antigravity" not in sys.modules

    async def declined(self, method: dict[str, Any], reason: str, **lies: Any) -> None:
        events = []
        async with serving(spec_of(method), ScriptedBackend(space=SPACE)) as service:
            lying = Lying(service, **lies)
            async with client_of(service, transport=lying, on_event=events.append) as client:
                assert (await client.run_once()).outcome == "declined"
        assert [reason in event.reason for event in events if event.kind == "declined"] == [True]


class TestTrainers:
    @pytest.mark.parametrize(
        ("trainer", "reason"),
        [
            (Trains(losses=(float("nan"),)), "finite"),
            (Trains(losses=(1e9,)), "1000000"),
            (Trains(losses=()), "no step"),
            (Trains(error=ValueError("the loss\nis not finite")), "the loss is not finite"),
        ],
        ids=["NaN", "too large", "none", "raises"],
    )
    async def test_training_that_comes_to_nothing_is_declined(
        self, trainer: Trains, reason: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Rules, "MAX_LOST", 1)
        spec = spec_of(TUNING)
        async with serving(spec, None) as service, client_of(service, trainer=trainer) as client:
            assert (await client.run_once()).outcome == "declined"
            assert (await client.run_once()).outcome == "declined"
            result = service.runs["run"].result()
        assert result.status == "failed"
        assert reason in (result.reason or "")


class TestRestarts:
    @pytest.mark.parametrize("exchange", ["alpha", "losses"])
    async def test_a_restarted_device_requests_its_remaining_vectors(
        self, tmp_path: Path, exchange: str
    ) -> None:
        data = [{"text": f"text {n}", "label": n % 2} for n in range(40)]
        spec = spec_of(BBT_SPEC, rounds=2, exchange=exchange)
        async with serving(spec, ScriptedBackend(space=SPACE)) as service:
            async with client_of(service, data=data) as client:
                await client.run_forever()
            wanted = service.runs["run"].result()
        backend = ScriptedBackend(space=SPACE)
        async with serving(spec, backend) as service:
            dying = DyingTransport(service, dies_at=2)
            async with client_of(service, tmp_path, data=data, transport=dying) as client:
                with pytest.raises(asyncio.CancelledError):
                    await client.run_once()
            again = RecordingTransport(service)
            async with client_of(service, tmp_path, data=data, transport=again) as client:
                await client.run_once()
                assert again.scores[0] == dying.scores[-1]
                assert len(again.scores) == 2
                await client.run_forever()
            result = service.runs["run"].result()
        assert (result.alpha_sha256, result.spent) == (wanted.alpha_sha256, wanted.spent)
        assert len(backend.asked) == 2 * 40

    async def test_what_does_not_fit_the_run_is_not_remembered(self) -> None:
        spec = spec_of(BBT_SPEC, rounds=1)
        digests = set()
        for kept in (None, dump_memory(bbt_memory(7)), dump_memory({"m": np.zeros(3)}), b"junk"):
            async with serving(spec, ScriptedBackend(space=SPACE)) as service:
                async with client_of(service, None) as client:
                    if kept is not None:
                        client._worker._unfinished._memories["run"] = kept
                    assert (await client.run_once()).outcome == "worked"
                digests.add(service.runs["run"].result().alpha_sha256)
        assert len(digests) == 1

    async def test_another_identity_remembers_nothing(self, tmp_path: Path) -> None:
        """A server that lost its clients has other runs of the same names."""
        spec, backend = spec_of(BBT_SPEC, rounds=2), ScriptedBackend(space=SPACE)
        async with serving(spec, backend) as service, client_of(service, tmp_path) as client:
            await client.run_forever()
            first = service.runs["run"].result().alpha_sha256
        async with serving(spec, backend) as service, client_of(service, tmp_path) as client:
            assert client._worker._unfinished.memory("run")
            await client.run_forever()
            assert service.runs["run"].result().alpha_sha256 == first


class TestRollbacks:
    @pytest.mark.parametrize("memory", ["client", "run"])
    @pytest.mark.parametrize("exchange", ["alpha", "losses"])
    async def test_bbt_is_rolled_back(self, exchange: str, memory: str) -> None:
        backend = ScriptedBackend(space=SPACE)
        spec = spec_of({**BBT_SPEC, "memory": memory}, exchange=exchange)
        async with serving(spec, backend) as service, client_of(service) as client:
            assert (await client.run_once()).outcome == "worked"
            run = service.runs["run"]
            alpha = run.state.method.alpha
            assert (await client.run_once()).outcome == "worked"
            await service.steering.roll_back(run, 1, "to try again")
            assert run.state.round == 1
            assert np.array_equal(run.state.method.alpha, alpha)


class TestSizes:
    def test_a_memory_too_large_for_a_message_is_refused_at_the_start(self) -> None:
        largest = {**BBT_SPEC, "memory": "run", "intrinsic_dim": 2047, "num_samples": 2}
        RoundMachine("run", spec_of(largest), vocab_size=0)
        memory = to_wire(np.ones(2047 * 2048 // 2))
        assert len(encode(memory).content) < 32 * 1024 * 1024
        larger = {**largest, "intrinsic_dim": 2048}
        with pytest.raises(ValueError, match="the method's memory would hold"):
            RoundMachine("run", spec_of(larger), vocab_size=0)
        RoundMachine("run", spec_of(larger, exchange="losses"), vocab_size=0)
        RoundMachine("run", spec_of({**larger, "memory": "client"}), vocab_size=0)

    @pytest.mark.parametrize(("length", "size"), [(1000, 70_000), (1000, 1024)])
    async def test_a_projection_that_is_too_large_is_refused_at_the_start(
        self, length: int, size: int
    ) -> None:
        backend = ScriptedBackend(space=EmbeddingSpace(size=size, std=0.5))
        dimension = 2 if size > 65_536 else 1000
        spec = spec_of({**BBT_SPEC, "intrinsic_dim": dimension}, length=length)
        with pytest.raises(SpecError, match=r"prompt.length: .* is too large"):
            async with serving(spec, backend):
                pass

    def test_a_server_without_the_library_fails_at_the_start(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cma_es, "find_spec", lambda name: None)
        with pytest.raises(MissingExtraError, match=r"fedone-sdk\[bbt\]"):
            RoundMachine("run", spec_of(BBT_SPEC, exchange="losses"), vocab_size=0)
        RoundMachine("run", spec_of(BBT_SPEC), vocab_size=0)  # the devices compute

    def test_what_would_do_nothing_is_refused(self) -> None:
        document = spec_of(TUNING).model_dump(mode="json")
        with pytest.raises(ValueError, match=r"defence\.loss_clip: must be null for prompt-tuning"):
            RunSpec.model_validate({**document, "defence": {"loss_clip": 1.0}})
        with pytest.raises(ValueError, match="sigma"):
            spec_of({**BBT_SPEC, "sigma": 1e-40})  # vectors would overflow


async def test_the_search_does_not_block_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """CMA-ES takes tenths of a second: other requests are served meanwhile."""
    threads: list[tuple[str, int]] = []
    ask, tell = BBT.ask, BBT.tell

    def recording_ask(self: BBT, *args: Any) -> Any:
        threads.append(("ask", threading.get_ident()))
        return ask(self, *args)

    def recording_tell(self: BBT, state: State, candidates: Any, losses: Sequence[float]) -> State:
        threads.append(("tell", threading.get_ident()))
        return tell(self, state, candidates, losses)

    monkeypatch.setattr(BBT, "ask", recording_ask)
    monkeypatch.setattr(BBT, "tell", recording_tell)
    spec = spec_of(BBT_SPEC, rounds=2, exchange="losses")
    async with serving(spec, ScriptedBackend(space=SPACE)) as service:
        async with client_of(service) as client:
            await client.run_forever()
        assert service.runs["run"].state.status == "completed"
    assert [what for what, _ in threads] == ["ask", "tell"] * 2
    assert threading.get_ident() not in {thread for _, thread in threads}
