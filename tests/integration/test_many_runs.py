"""What a server keeps and asks for with many runs, and with runs that are bad or deleted."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from fedone_sdk.aggregator.config import RunToServe
from fedone_sdk.cli.serve import _add_runs
from fedone_sdk.errors import FedOneError
from fedone_sdk.local import MemoryTransport
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import MemoryStore
from fedone_sdk.testing import ScriptedBackend
from tests.by_hand import claim, device_of, enrol
from tests.integration.caller import served
from tests.runs import WORDS, memory_client, run_spec, serving, until

ROWS = [{"text": "fine", "label": 1}, {"text": "bad", "label": 0}]


def written(**changes: Any) -> RunSpec:
    """A search over a slot, whose proposer writes one candidate after each round."""
    slots = [{"name": "instruction", "candidates": ["", "Judge it. ", "Hm. "]}]
    proposer = {"backend": {"kind": "onnx"}, "slot": "instruction", "every": 1}
    return RunSpec.model_validate(
        {
            "name": "written",
            "task": {"template": "{instruction}{text}", "labels": {0: " no", 1: " yes"}},
            "prompt": {"slots": slots, "proposer": proposer},
            "method": {"name": "random", "num_samples": 2, "batch_size": 2},
            "participation": {"exchange": "losses", "own_models": "charged"},
            "evaluation": {"every": 0},
            "calibration": "none",
            **changes,
        }
    )


async def test_a_run_continues_after_an_accepted_proposal() -> None:
    """The candidates that a run has added are not part of what its file must equal."""
    spec, store = written(rounds=6), MemoryStore()
    proposer = ScriptedBackend(write=lambda inputs, most: '["Is it good?"]')
    words = spec.prompt.build(spec.task)
    async with serving(store=store, backend=ScriptedBackend()) as service:
        run = await service.add_run(spec, words, proposer=proposer)
        device = await device_of(service)
        while not run.state.proposed:
            if await device.claim() is not None:
                await device.update()
        assert await service.add_run(spec, words) is run
    async with serving(store=store, backend=ScriptedBackend()) as service:
        run = await service.add_run(spec, words)
        assert run.vocabulary.candidates_of("instruction")[-1] == "Is it good? "


async def test_the_result_has_the_cost_of_a_call_that_was_pending_at_the_end() -> None:
    answered, asked = asyncio.Event(), asyncio.Event()

    async def gate(query: object) -> None:
        asked.set()
        await answered.wait()

    spec = written(rounds=2)
    async with serving(backend=ScriptedBackend()) as service:
        run = await service.add_run(spec, proposer=ScriptedBackend(gate=gate))
        device = await device_of(service)
        for _ in range(2):
            await device.claim()
            await device.update()
            await asked.wait()  # After the first round.
        await run.ended.wait()
        result = asyncio.create_task(service.wait(run))
        await asyncio.wait({result}, timeout=0.05)
        assert not result.done()
        answered.set()
        await result
    found = run.result()
    assert found.evaluation.requests == 1
    assert found.spent.requests == run.state.account.spent.requests
    assert not run.state.account.leases


async def test_a_bad_run_does_not_keep_a_server_from_serving_the_others() -> None:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(served(run_spec(name="taken")))
        specs = [run_spec(name="taken", rounds=9), run_spec(name="next")]
        runs = [
            RunToServe(path=Path(f"{spec.name}.yaml"), spec=spec, vocabulary=WORDS)
            for spec in specs
        ]
        errors: list[FedOneError] = []
        await _add_runs(server.aggregator, runs, errors, stack)
        assert sorted(server.aggregator.service.runs) == ["next", "taken"]
    (error,) = errors
    assert "'taken' is taken by a different run (changed: rounds 3 -> 9)" in str(error)


async def test_ended_runs_that_were_requested_do_not_stay_in_memory() -> None:
    store = MemoryStore()
    async with serving(*(run_spec(name=f"run-{n}") for n in range(80)), store=store) as service:
        for number in range(1, 80):
            await service.stop_run(service.runs[f"run-{number}"])
    async with serving(store=store) as service:
        assert list(service.runs) == ["run-0"]
        for number in range(1, 80):
            assert (await service.registry.run(f"run-{number}")).state.status == "stopped"
        assert len(service.runs) == 65
        assert len(service.registry.summaries) == 80
        run = await service.registry.run("run-1")
        await service.resume_run(run)
        assert run.state.running
        assert service.runs["run-1"] is run


async def test_a_run_that_is_deleted_during_a_claim_is_passed_over() -> None:
    class Deleting(MemoryStore):
        service: Any = None

        async def join(self, *args: Any, **kwargs: Any) -> None:
            await super().join(*args, **kwargs)
            await self.delete_run("gone", self.service.runs["gone"].version, 0.0)
            await self.service.registry.remove("gone")

    store = Deleting()
    specs = run_spec(name="gone"), run_spec(name="kept")
    async with serving(*specs, store=store, backend=ScriptedBackend()) as service:
        store.service = service
        (client,) = await enrol(service)
        work = await claim(service, client)
        assert work is not None
        assert work.run_id == "kept"


async def test_a_new_device_asks_for_few_tasks() -> None:
    class Counting(MemoryTransport):
        tasks = 0

        async def task(self, credential: str, run_id: str) -> Any:
            Counting.tasks += 1
            return await super().task(credential, run_id)

    specs = (run_spec(name=f"run-{number}") for number in range(12))
    async with serving(*specs, backend=ScriptedBackend()) as service:
        transport = Counting(service)
        async with memory_client(service, data=ROWS, transport=transport) as client:
            working = asyncio.create_task(client.run_forever())
            await until(lambda: any(run.state.round for run in service.runs.values()))
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
        # At most 8 for the log, and one for each run that it worked for.
        worked = sum(bool(run.state.seats or run.state.round) for run in service.runs.values())
        assert Counting.tasks <= 8 + worked
