"""Methods that tune vectors, with the same aggregator, clients and messages."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import numpy as np
import pytest

from fedone_sdk.aggregator.rounds.prompts import candidates
from fedone_sdk.aggregator.rounds.rules import Rules
from fedone_sdk.algorithms import alpha_sha256
from fedone_sdk.algorithms.projection import projected
from fedone_sdk.backends import EmbeddingSpace
from fedone_sdk.errors import SpecError
from fedone_sdk.messages import Array, RunResult
from fedone_sdk.messages.ndarray import from_wire
from fedone_sdk.spec import RunSpec, TrainedSpec
from fedone_sdk.stores import MemoryStore
from fedone_sdk.task import Example, TaskSpec
from fedone_sdk.testing import LoopbackFederation, ScriptedBackend
from fedone_sdk.vocabulary import Vocabulary

NOTHING = Vocabulary(candidates=())
SPACE = EmbeddingSpace(size=4, std=0.5)
BBT = {"name": "bbt", "intrinsic_dim": 6, "num_samples": 5, "batch_size": 2}
TUNING = {"name": "prompt-tuning", "hidden_size": 4, "batch_size": 2, "local_steps": 3}


def spec_of(
    method: Mapping[str, Any],
    *,
    rounds: int = 4,
    prompt: Mapping[str, Any] | None = None,
    **part: Any,
) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "soft",
            "task": {"template": "{prompt} {text} {mask}", "labels": {0: " no", 1: " yes"}},
            "prompt": {"length": 3, **(prompt or {})},
            "method": dict(method),
            "participation": part,
            "rounds": rounds,
            "evaluation": {"every": 2},
            "seed": 3,
        }
    )


def shard(number: int) -> list[Example]:
    return [{"text": f"text {number} {row}", "label": row % 2} for row in range(4 + number)]


async def run(
    spec: RunSpec,
    *,
    clients: int = 3,
    own: bool = False,
    trainer: Shift | None = None,
    store: MemoryStore | None = None,
) -> tuple[RunResult, ScriptedBackend]:
    """A whole run over HTTP; the model is the gateway's, or each client's own."""
    backend = ScriptedBackend(space=SPACE)
    gateway = None if own else backend
    async with AsyncExitStack() as stack:
        federation = await stack.enter_async_context(
            LoopbackFederation(spec, NOTHING, backend=gateway, store=store)
        )
        devices = [
            await stack.enter_async_context(
                federation.client(shard(number), backend=backend if own else None, trainer=trainer)
            )
            for number in range(clients)
        ]
        for device in devices:
            await device.enrol()
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            for device in devices:
                group.create_task(device.run_forever())
        await federation.run.wait()
        return federation.run.result(), backend


class Shift:
    """Trains by arithmetic: adds to the parameters what the batches' labels say."""

    fingerprint = "scripted"

    def __init__(self, step: float = 0.25) -> None:
        self.step = step
        self.trained: list[Sequence[Sequence[Example]]] = []

    async def train(
        self,
        task: TaskSpec,
        method: TrainedSpec,
        parameters: np.ndarray,
        batches: Sequence[Sequence[Example]],
        seed: int,
    ) -> tuple[np.ndarray, tuple[float, ...]]:
        self.trained.append(batches)
        moved = sum(float(row["label"]) + 1.0 for batch in batches for row in batch)
        return (parameters + self.step * moved).astype(np.float32), tuple(
            1.0 / (number + 1) for number in range(len(batches))
        )


class TestBbt:
    @pytest.mark.parametrize("together", [1, 3])
    @pytest.mark.parametrize("own", [False, True], ids=["gateway", "own model"])
    async def test_both_exchanges_find_the_same(self, together: int, own: bool) -> None:
        seen = {}
        for exchange in ("alpha", "losses"):
            spec = spec_of(BBT, exchange=exchange, clients_per_round=together, min_clients=3)
            result, backend = await run(spec, own=own)
            assert result.status == "completed"
            assert result.spent.queries == 4 * together * 5
            seen[exchange] = result.alpha_sha256
            asked = {query.soft_prompt for query in backend.asked if query.soft_prompt}
            # Every candidate is another vector; evaluation adds the mean's where the server has
            # the model.
            assert len(asked) >= 4 * together * 5
            assert {(each.kind, each.shape) for each in asked} == {("embeddings", (3, 4))}
        assert seen["alpha"] == seen["losses"]

    async def test_queries_are_projections_of_the_draws(self) -> None:
        spec = spec_of({**BBT, "projection_seed": 9, "scale": 2.0}, rounds=1, exchange="losses")
        _, backend = await run(spec, clients=1)
        machine_prompts = {
            projected(row, prompt_len=3, size=4, scale=2.0 * 0.5, bound=5.0, seed=9).tobytes()
            for row in _drawn(spec)
        }
        asked = {query.soft_prompt.data for query in backend.asked if query.soft_prompt}
        assert machine_prompts <= asked

    async def test_memory_of_the_run_travels_with_alpha(self) -> None:
        results = {
            exchange: (await run(spec_of({**BBT, "memory": "run"}, exchange=exchange)))[0]
            for exchange in ("alpha", "losses")
        }
        assert results["alpha"].alpha_sha256 == results["losses"].alpha_sha256
        lonely = (await run(spec_of(BBT, exchange="losses")))[0]
        assert lonely.alpha_sha256 != results["losses"].alpha_sha256

    async def test_the_tuned_vector_can_be_fetched(self) -> None:
        spec = spec_of(BBT)
        async with LoopbackFederation(
            spec, NOTHING, backend=ScriptedBackend(space=SPACE)
        ) as federation:
            async with federation.client(shard(0)) as device, asyncio.timeout(60):
                await device.run_forever()
            url, headers = f"{federation.url}/v1/runs/soft", {"Authorization": "Bearer admin"}
            async with (
                aiohttp.ClientSession(headers=headers) as session,
                session.get(f"{url}/vectors") as answer,
            ):
                vector = from_wire(Array.model_validate_json(await answer.read()))
            result = federation.run.result()
        assert vector.shape == (1, 6)
        assert alpha_sha256(vector) == result.alpha_sha256

    async def test_a_model_without_embeddings_is_refused(self) -> None:
        with pytest.raises(SpecError, match="needs a backend that takes embeddings"):
            async with LoopbackFederation(spec_of(BBT), NOTHING, backend=ScriptedBackend()):
                pass


def _drawn(spec: RunSpec) -> np.ndarray:
    from fedone_sdk.aggregator import RoundMachine
    from fedone_sdk.aggregator.rounds.events import SeatsVacant, WorkRequested

    machine = RoundMachine(spec.name, spec, vocab_size=0)
    state, _ = machine.step(machine.initial_state(), SeatsVacant(available={0: 4}), 0.0)
    state, _ = machine.step(state, WorkRequested(client=0, assignment_id="a"), 0.0)
    return candidates(machine, state, state.seats[0]).prompts


class TestTrained:
    async def test_clients_train_and_the_server_takes_their_mean(self) -> None:
        trainer = Shift()
        spec = spec_of(TUNING, rounds=1, clients_per_round=3, min_clients=3, aggregation="plain")
        result, backend = await run(spec, trainer=trainer)
        assert (result.status, result.rounds, result.spent.queries) == ("completed", 1, 0)
        assert [len(batches) for batches in trainer.trained] == [3, 3, 3]
        assert all(len(batch) == 2 for batches in trainer.trained for batch in batches)
        assert result.history[0].mean_loss == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)
        assert backend.asked == []

    async def test_the_parameters_are_those_that_a_client_returned(self) -> None:
        trainer = Shift()
        store = MemoryStore()
        spec = spec_of(TUNING, rounds=2, min_clients=1)
        result, _ = await run(spec, clients=1, trainer=trainer, store=store)
        assert result.prompt.text == ""

    async def test_p_tuning_sends_keys_and_values(self) -> None:
        method = {**TUNING, "name": "p-tuning-v2", "num_layers": 2}
        spec = spec_of(method, rounds=1)
        backend = ScriptedBackend(space=SPACE)
        async with LoopbackFederation(spec, NOTHING, backend=backend) as federation:
            assert federation.run.machine.shape == (2 * 2 * 3, 4)
            async with federation.client(shard(0), trainer=Shift()) as device:
                async with asyncio.timeout(30):
                    await device.run_forever()
            assert federation.run.result().status == "completed"

    async def test_a_client_without_a_trainer_declines(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Rules, "MAX_LOST", 1)
        spec = spec_of(TUNING, rounds=1)
        async with LoopbackFederation(
            spec, NOTHING, backend=ScriptedBackend(space=SPACE)
        ) as federation:
            async with federation.client(shard(0)) as device:
                serving = asyncio.create_task(device.run_forever())
                async with asyncio.timeout(30):
                    while not federation.run.state.unfit:
                        await asyncio.sleep(0.01)
                # The run waits for a device that can train.
                assert (federation.run.state.status, federation.run.state.lost) == ("running", 0)
                (reason,) = federation.run.state.unfit.values()
                assert "no trainer" in reason
                async with federation.client(shard(1), trainer=Shift()) as able:
                    async with asyncio.timeout(30):
                        await able.run_forever()
                        await serving
            assert federation.run.result().status == "completed"

    async def test_training_that_leaves_all_bounds_is_declined(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Rules, "MAX_LOST", 1)
        spec = spec_of(TUNING, rounds=1)
        async with LoopbackFederation(
            spec, NOTHING, backend=ScriptedBackend(space=SPACE)
        ) as federation:
            async with federation.client(shard(0), trainer=Shift(step=np.inf)) as device:
                async with asyncio.timeout(30):
                    await device.run_forever()
            result = federation.run.result()
        assert result.status == "failed"
        assert "NaN or infinity" in (result.reason or "")

    async def test_another_width_than_the_models_is_refused(self) -> None:
        spec = spec_of({**TUNING, "hidden_size": 5})
        with pytest.raises(SpecError, match=r"hidden_size: is 5, the model's is 4"):
            async with LoopbackFederation(spec, NOTHING, backend=ScriptedBackend(space=SPACE)):
                pass


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        (BBT, {"prompt": {"vocabulary": {"kind": "top"}}}, "prompt.vocabulary: must be null for"),
        ({"name": "gs-bdpl"}, {}, "prompt.vocabulary or slots: required for method gs-bdpl"),
        (TUNING, {"exchange": "losses"}, "participation.exchange: must be alpha"),
        ({**BBT, "memory": "run"}, {"clients_per_round": 2}, "states of CMA-ES"),
    ],
)
def test_what_does_not_fit_is_one_clear_line(
    method: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        spec_of(method, **changes)
