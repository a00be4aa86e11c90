"""What a device pays for: what its lease names, and what its own budget has left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from fedone_sdk import Budget
from fedone_sdk.backends import Answer, Query
from fedone_sdk.budget import NOTHING, SqliteLedger, Usage
from fedone_sdk.client.transport import Idle
from fedone_sdk.errors import BackendRefused, SpecError
from fedone_sdk.messages import Claim
from fedone_sdk.testing import ScriptedBackend
from tests.edge import edge_client
from tests.integration.test_edge_resume import DATA, NUM_SAMPLES, serving, spec_of
from tests.runs import TOKEN, RecordingTransport, memory_client


class Stingy(RecordingTransport):
    """Leases less than it names."""

    leased = 0

    async def claim(self, credential: str, message: Claim) -> Any:
        work = await super().claim(credential, message)
        return work if isinstance(work, Idle) else work.model_copy(update=self.lies())

    def lies(self) -> dict[str, int]:
        return {"leased_queries": self.leased}


@pytest.mark.parametrize("own", [False, True], ids=["gateway", "own model"])
@pytest.mark.parametrize(
    ("exchange", "local_steps", "leased"),
    [("losses", 1, 0), ("losses", 1, NUM_SAMPLES - 1), ("alpha", 3, 3 * NUM_SAMPLES - 1)],
)
async def test_more_prompts_than_leased(
    exchange: str, local_steps: int, leased: int, own: bool
) -> None:
    gateway, model = ScriptedBackend(), ScriptedBackend()
    async with serving(spec_of(exchange, local_steps=local_steps), gateway) as service:
        transport = Stingy(service)
        transport.leased = leased
        options = {"backend": model} if own else {}
        async with edge_client(
            "memory:", token=TOKEN, data=DATA, transport=transport, wait_s=0.0, **options
        ) as client:
            assert (await client.run_once()).outcome == "declined"
    assert f"but reserves {leased} queries" in transport.declines[0].reason
    assert (gateway.asked, model.asked, transport.updates) == ([], [], [])


@pytest.mark.parametrize(
    ("own", "caps", "updates", "asked"),
    [
        (False, {"queries": NUM_SAMPLES}, 1, None),
        (False, {"queries": 2 * NUM_SAMPLES - 1}, 1, None),
        (True, {"queries": 2 * NUM_SAMPLES}, 2, None), (True, {"requests": 7}, 0, 7),
        (True, {"requests": NUM_SAMPLES + 7}, 1, NUM_SAMPLES + 7), (True, {"tokens": 1}, 0, 0),
    ],
)  # fmt: skip
async def test_a_budget_of_the_devices_own(
    tmp_path: Path, own: bool, caps: dict[str, int], updates: int, asked: int | None
) -> None:
    """It holds across restarts, and the run offers the device no more work."""
    gateway, model = ScriptedBackend(), ScriptedBackend()
    outcomes = []
    async with serving(spec_of("losses", rounds=4), gateway) as service:
        transport = RecordingTransport(service)
        for _ in range(4):  # a restart each time
            async with edge_client(
                "memory:",
                token=TOKEN,
                data=DATA,
                backend=model if own else None,
                state_dir=tmp_path,
                budget=Budget(**caps),
                transport=transport,
                wait_s=0.0,
            ) as client:
                outcomes.append((await client.run_once()).outcome)
    assert outcomes == ["worked"] * updates + ["declined"] * (4 - updates)
    assert len(transport.updates) == updates
    assert transport.declines[0].unfit
    assert transport.declines[0].reason == "the client's budget has nothing left for this"
    if asked is not None:
        assert len(model.asked) == asked


async def test_clients_that_share_a_budget_pay_for_their_own_work(tmp_path: Path) -> None:
    cap = Budget(requests=5000)
    async with serving(spec_of("losses"), ScriptedBackend()) as service:
        transport, other = RecordingTransport(service), SqliteLedger(tmp_path / "budget.sqlite3")
        other.reserve("other", Usage(requests=900), cap)

        def gate(query: Query) -> None:
            if len(model.asked) == 1:
                other.settle("other", NOTHING)

        model, options = ScriptedBackend(gate=gate), {"state_dir": tmp_path, "budget": cap}
        async with edge_client(
            "memory:", token=TOKEN, data=DATA, backend=model, transport=transport, **options
        ) as client:
            assert (await client.run_once()).outcome == "worked"
    assert transport.updates[0].usage.requests == len(model.asked)


async def test_a_device_learns_once_that_a_model_bills_more_than_its_quote() -> None:
    class Dear(ScriptedBackend):
        async def score(self, query: Query) -> Answer:
            answer = await super().score(query)
            return replace(answer, usage=answer.usage + Usage(completion_tokens=5))

    async with serving(spec_of("losses", rounds=2), None) as service:
        with capture_logs() as logs:
            async with memory_client(service, data=DATA, backend=Dear()) as client:
                assert [(await client.run_once()).outcome for _ in range(2)] == ["worked"] * 2
    assert sum("billed more than" in line["event"] for line in logs) == 1


async def test_a_device_asks_again_after_a_model_has_refused_everything() -> None:
    async def refuse(_: Query) -> None:
        if outcomes != ["declined", "declined"]:
            raise BackendRefused("no access", usage=NOTHING)

    model, outcomes = ScriptedBackend(gate=refuse), list[str]()
    async with (
        serving(spec_of("losses"), None) as service,
        memory_client(service, data=DATA, backend=model) as client,
    ):
        for _ in range(3):
            outcomes.append((await client.run_once()).outcome)
    assert outcomes == ["declined", "declined", "worked"]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("unit", ["requests", "tokens", "usd"])
def test_a_cap_that_cannot_be_kept(unit: str, own: bool) -> None:
    writer = ScriptedBackend()
    writer.bounds = frozenset()
    models = {"backend": ScriptedBackend(), "reflect": writer} if own else {}
    with pytest.raises(SpecError, match=rf"policy\.budget\.{unit}: .* can only cap queries"):
        edge_client("http://x", data=DATA, token=TOKEN, budget=Budget(**{unit: 1}), **models)
