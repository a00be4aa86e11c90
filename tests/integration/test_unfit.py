"""Devices that do not fit a run: the run continues with others, and users see the reason."""

from __future__ import annotations

import asyncio
import json
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from fedone_sdk import EdgeClient
from fedone_sdk.aggregator.authority import ROLES, AdminToken
from fedone_sdk.aggregator.prometheus import Metrics
from fedone_sdk.aggregator.telemetry import Observers
from fedone_sdk.client import ClientEvent
from fedone_sdk.client.transport import Call, Idle
from fedone_sdk.errors import ProblemError
from fedone_sdk.local import MemoryTransport
from fedone_sdk.spec import RunSpec
from fedone_sdk.testing import ScriptedBackend
from fedone_sdk.vocabulary import Vocabulary
from tests.edge import edge_client
from tests.integration.caller import TOKEN, Server, served
from tests.runs import TASK, run_spec

WORDS = Vocabulary(candidates=("x", "y"))
TICKETS = [{"text": f"text {n}", "label": ("billing", "login")[n % 2]} for n in range(8)]
WHY = "field 'label' is none of: low, high"
FOR_OWNER = "field 'label' is 'billing', not one of: low, high"


def spec_of(name: str, labels: tuple[str, ...], *, rounds: int = 4) -> RunSpec:
    return run_spec(
        name=name,
        task={**TASK, "labels": {label: f" {label}" for label in labels}},
        method={"num_samples": 2},
        rounds=rounds,
    )


def secret_of(role: str) -> str:
    return f"{role}-token-of-the-server"


def serving(*specs: RunSpec, **settings: Any) -> AbstractAsyncContextManager[Server]:
    people = [AdminToken(token=SecretStr(secret_of(role)), name=role, role=role) for role in ROLES]
    return served(*specs, words=WORDS, admin_tokens=people, **settings)


def client_of(server: Server, data: Any = TICKETS, **more: Any) -> EdgeClient:
    options = {"transport": MemoryTransport(server.aggregator.service), "wait_s": 0.0, **more}
    return edge_client("memory:", token=TOKEN, data=data, **options)


async def result_of(server: Server, role: str, run: str) -> Any:
    return await server.ok("GET", f"/v1/runs/{run}", token=secret_of(role))


async def test_devices_of_another_run_do_not_end_this_one() -> None:
    tickets, urgency = spec_of("tickets", ("billing", "login")), spec_of("urgency", ("low", "high"))
    async with serving(tickets, urgency) as server, AsyncExitStack() as stack:
        devices = [await stack.enter_async_context(client_of(server)) for _ in range(6)]
        outcomes = [(await device.run_once()).outcome for _ in range(12) for device in devices]
        runs = server.aggregator.service.runs
        assert runs["tickets"].state.status == "completed"
        assert runs["urgency"].state.status == "running"
        assert outcomes.count("declined") == 6  # each of them once
        assert runs["urgency"].state.account.held.queries == 0
        output = (await result_of(server, "operator", "urgency"))["devices"]
        assert output == {
            "connected": 6,
            "fit": 0,
            # Without a label of the rows.
            "unfit": [{"reason": "field 'label' is none of: low, high", "devices": 6}],
        }
        assert (await result_of(server, "viewer", "urgency"))["devices"]["unfit"] == []
        assert "devices" not in await result_of(server, "viewer", "tickets")  # it is over
        rows = [{"text": "a", "label": "low"}, {"text": "b", "label": "high"}]
        async with client_of(server, rows) as other:  # the run has waited for it
            assert (await other.run_once()).outcome == "worked"


async def test_the_figures_that_the_alert_of_a_starving_run_reads() -> None:
    specs = (
        spec_of("tickets", ("billing", "login"), rounds=100),
        spec_of("urgency", ("low", "high")),
    )
    metrics = Metrics()
    async with serving(*specs, observers=Observers(metrics=metrics)) as server:
        async with client_of(server) as one, client_of(server) as other, asyncio.timeout(30):
            while len(server.aggregator.service.runs["urgency"].state.unfit) < 2:
                await one.run_once()
                await other.run_once()
        lines = metrics.exposition()[0].decode().splitlines()
    for run, fit in (("tickets", 2), ("urgency", 0)):
        assert f'fedone_run_devices_connected{{run="{run}"}} 2.0' in lines
        assert f'fedone_run_devices_fit{{run="{run}"}} {fit}.0' in lines


async def test_new_data_is_offered_work_again() -> None:
    rows = TICKETS
    async with (
        serving(spec_of("urgency", ("low", "high"))) as server,
        client_of(server, lambda: rows) as client,
    ):
        assert (await client.run_once()).outcome == "declined"
        assert (await client.run_once()).outcome == "idle"
        rows = [{"text": "a", "label": "low"}, {"text": "b", "label": "high"}]
        assert (await client.run_once()).outcome == "worked"


async def test_a_restarted_device_is_queried_again(tmp_path: Any) -> None:
    async with serving(spec_of("urgency", ("low", "high"))) as server:
        async with client_of(server, state_dir=tmp_path) as client:
            assert (await client.run_once()).outcome == "declined"
        async with client_of(server, state_dir=tmp_path) as client:
            assert (await client.run_once()).outcome == "declined"
            assert (await client.run_once()).outcome == "idle"


async def test_unfit_devices_leave_their_places_to_others() -> None:
    """More of them than a run has places for."""
    async with (
        serving(spec_of("urgency", ("low", "high"))) as server,
        AsyncExitStack() as stack,
    ):
        for _ in range(70):
            device = await stack.enter_async_context(client_of(server))
            await device.run_once()
        rows = [{"text": "a", "label": "low"}, {"text": "b", "label": "high"}]
        async with client_of(server, rows) as other:
            assert (await other.run_once()).outcome == "worked"


async def test_a_run_without_any_backend_waits_and_spends_nothing() -> None:
    async with (
        serving(spec_of("tickets", ("billing", "login")), backend=None) as server,
        client_of(server) as client,
    ):
        for _ in range(6):
            await client.run_once()
        run = server.aggregator.service.runs["tickets"]
        assert (run.state.status, run.state.account.held.queries) == ("running", 0)
        found = server.aggregator.service.dispatcher.count_devices(run, reasons=True)
        assert found.unfit[0].reason.startswith("no backend: ")


class Swapped(MemoryTransport):
    """An aggregator whose labels reach the device in another order."""

    async def send(self, call: Call) -> bytes | Idle:
        answer = await super().send(call)
        if call.name == "task":
            assert isinstance(answer, bytes)
            run = json.loads(answer)
            run["task"]["labels"].reverse()
            answer = json.dumps(run).encode()
        return answer


@pytest.mark.parametrize(
    ("transport", "model", "reason"),
    [
        (MemoryTransport, "other", "the run scores with 'this', the device with 'other'"),
        (Swapped, "this",
         "the run cannot be understood: the aggregator's answer is malformed: task_crc32: "
         "must be 668269552, the CRC-32 of `task`"),
    ],
)  # fmt: skip
async def test_a_device_that_cannot_do_a_run_declines_once(
    transport: type[MemoryTransport], model: str, reason: str
) -> None:
    spec = spec_of("tickets", ("billing", "login")).model_dump(mode="json")
    spec["participation"]["model"] = "this"
    async with serving(RunSpec.model_validate(spec), backend=None) as server:
        backend, events = ScriptedBackend(fingerprint=model), list[ClientEvent]()
        options = {"transport": transport(server.aggregator.service), "on_event": events.append}
        async with client_of(server, backend=backend, **options) as client:
            assert [str(fit) for fit in await client.check()] == [
                f"tickets: 0 of 8, because {reason}"
            ]
            assert [(await client.run_once()).outcome for _ in range(3)] == [
                "declined",
                "idle",
                "idle",
            ]
        run = server.aggregator.service.runs["tickets"]
        (found,) = server.aggregator.service.dispatcher.count_devices(run, reasons=True).unfit
        assert found.reason == reason
        assert "offline" not in [event.kind for event in events]


class TestCheck:
    async def test_how_rows_fit(self) -> None:
        specs = spec_of("tickets", ("billing", "login")), spec_of("urgency", ("low", "high"))
        backend = ScriptedBackend()
        async with (
            serving(*specs, backend=backend) as server,
            client_of(server, [*TICKETS, {"text": "c"}]) as client,
        ):
            assert [str(fit) for fit in await client.check()] == [
                "tickets: 8 of 9, because field 'label' is missing (the row has: text)",
                f"urgency: 0 of 9, because {FOR_OWNER}",
            ]
        assert backend.asked == []

    async def test_a_run_that_is_not_there(self) -> None:
        async with (
            serving(spec_of("tickets", ("billing", "login"))) as server,
            client_of(server, run_id="tockets") as client,
        ):
            with pytest.raises(ProblemError, match="tockets"):
                await client.check()

    async def test_the_log_reports_the_start_of_a_client(self) -> None:
        async with (
            serving(spec_of("urgency", ("low", "high"))) as server,
            edge_client(server.url, token=TOKEN, data=TICKETS, wait_s=0.0) as client,
        ):
            with capture_logs() as logs:
                await client.run_once()
                await client.run_once()
        lines = [line["event"] for line in logs if line["log_level"] == "warning"]
        assert lines.count(f"rows that fit run urgency: 0 of 8, because {FOR_OWNER}") == 1
