"""Attackers are quarantined and reported; clients without epsilon get no more work."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import structlog
from pydantic import SecretStr

from fedone_sdk.aggregator.authority import AdminToken
from fedone_sdk.aggregator.prometheus import Metrics
from fedone_sdk.aggregator.telemetry import Observers
from fedone_sdk.local import MemoryTransport
from fedone_sdk.messages import ClientInfluence, LossesUpdate
from fedone_sdk.spec import RunSpec
from fedone_sdk.task import Example
from tests.console import invoked
from tests.edge import edge_client
from tests.integration.caller import TOKEN, served
from tests.runs import run_spec

VIEWER = "viewer-token-33d0"
DATA: tuple[Example, ...] = tuple({"text": f"text {n}", "label": n % 2} for n in range(4))
CLIENTS, ATTACKER = 5, 4


def spec_of(rounds: int, **more: Any) -> RunSpec:
    return run_spec(
        method={"num_samples": 8, "batch_size": 4},
        participation={"min_clients": CLIENTS, **more.pop("participation", {})},
        rounds=rounds,
        **more,
    )


class Loud(MemoryTransport):
    """Tells losses that are a hundred times as far apart."""

    async def update(self, credential: str, assignment_id: str, message: Any) -> Any:
        assert isinstance(message, LossesUpdate)
        answer = tuple(100 * loss for loss in message.losses)
        attack = message.model_copy(update={"losses": answer})
        return await super().update(credential, assignment_id, attack)


async def test_an_attacker_is_quarantined_and_users_see_it(tmp_path: Path) -> None:
    viewer = AdminToken(token=SecretStr(VIEWER), name="eyes", role="viewer")
    watched: dict[str, Any] = {"observers": Observers(metrics=(metrics := Metrics()))}
    spec = spec_of(40, defence="standard")
    async with served(spec, admin_tokens=[viewer], **watched) as server, AsyncExitStack() as stack:
        aggregator, run = server.aggregator, server.run
        clients = [
            await stack.enter_async_context(
                edge_client(
                    "memory:",
                    token=TOKEN,
                    data=DATA,
                    transport=(Loud if number == ATTACKER else MemoryTransport)(aggregator.service),
                )
            )
            for number in range(CLIENTS)
        ]
        for client in clients:
            await client.enrol()
        with structlog.testing.capture_logs() as lines:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(client.run_forever()) for client in clients]
                await run.ended.wait()
                for task in tasks:
                    task.cancel()
        assert run.state.status == "completed"
        assert run.state.quarantined == {ATTACKER}

        (liar,) = await aggregator.service.access.names([ATTACKER])
        (line,) = [line for line in lines if line["event"] == "client quarantined"]
        assert (line["client"], line["log_level"]) == (ATTACKER, "warning")
        reason = line["reason"]
        assert re.fullmatch(r"2 of its [23] updates were rejected", reason)
        entries = [
            json.loads(entry.body) for entry in await aggregator.service.store.log(run.run_id)
        ]
        (entry,) = [entry for entry in entries if entry["quarantined"]]
        assert entry["quarantined"] == [{"client": ATTACKER, "reason": reason}]
        assert entry["round"] == line["round"]

        path = "/v1/runs/run/clients"
        answer = await server.ok("GET", path, token=VIEWER)
        found = [ClientInfluence.model_validate(one) for one in answer]
        assert sum(one.rounds for one in found) == 40
        assert [one.client_id for one in found if one.quarantined] == [liar]
        assert min(found, key=lambda one: one.score).client_id == liar
        assert {one.epsilon for one in found} == {None}
        assert await server.refused("GET", path, token=TOKEN) == "unauthorized"
        other = await server.refused("GET", "/v1/runs/other/clients", token=VIEWER)
        assert other == "not_found"
        quarantined = 'fedone_clients_quarantined{run="run"} 1.0'
        assert quarantined in metrics.exposition()[0].decode().splitlines()

        file = tmp_path / "clients.json"
        command = ("runs", "show", "run", "--clients", "--server", server.url, "--json", str(file))
        shown = await invoked(*command, admin_token=VIEWER)
        assert re.search(rf"{liar} .* -\d+\.\d +- +yes\n", shown)
        assert json.loads(file.read_text()) == [one.model_dump(mode="json") for one in found]
