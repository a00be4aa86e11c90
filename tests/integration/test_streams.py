"""Long logs and many clients: streamed, and counted without being read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from fedone_sdk.aggregator.replicas import Retention
from fedone_sdk.aggregator.runs.run_view import export_run
from fedone_sdk.errors import StoreUnavailable
from fedone_sdk.messages import ClientList
from fedone_sdk.stores import ClientRecord, LogEntry, MemoryStore
from tests.contract.stores import device
from tests.integration.caller import Server
from tests.integration.test_retention import round_of, server_of
from tests.integration.test_start import ADMIN, TOKEN, WORDS, spec_of

LINE_BYTES, LINES = 50_000, 200


class Large(MemoryStore):
    """Keeps a long log, and the most bytes that one call has read of it."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.broken = -1

    def lengthen(self, run_id: str) -> None:
        """Add lines, each with its own commit."""
        body = json.dumps({"of": "nothing", "examples": "x" * LINE_BYTES})
        version = self._runs[run_id].version
        self._logs[run_id] += [
            LogEntry(kind="outcomes", body=body, version=version + number)
            for number in range(1, LINES + 1)
        ]
        self._runs[run_id] = replace(self._runs[run_id], version=version + LINES)

    async def log(self, *args: Any, **kwargs: Any) -> list[LogEntry]:
        self.broken -= 1
        if self.broken == 0:
            raise StoreUnavailable("the store is away")
        found = await super().log(*args, **kwargs)
        self.largest = max(self.largest, sum(len(entry.body) for entry in found))
        return found

    async def clients(self, after: int = -1, limit: int | None = None) -> list[ClientRecord]:
        assert limit is not None or after >= 0, "all clients were read at once"
        return await super().clients(after, limit)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with AsyncExitStack() as stack:
        server = await server_of(stack, Retention(), Large())
        run = await server.aggregator.service.add_run(spec_of("run"), WORDS)
        token, _ = await round_of(server)
        await round_of(server, "run", token)
        await server.call("POST", "/v1/clients", {}, token=TOKEN)
        store = server.store
        assert isinstance(store, Large)
        store.lengthen("run")
        run.may_be_stale = True
        await run.catch_up()
        yield server


def store_of(server: Server) -> Large:
    store = server.store
    assert isinstance(store, Large)
    store.largest = 0
    return store


class TestLogs:
    async def test_a_log_is_read_in_pages(self, server: Server) -> None:
        store = store_of(server)
        headers = {"Authorization": f"Bearer {ADMIN}"}
        async with server.session.get(f"{server.url}/v1/runs/run/log", headers=headers) as found:
            assert found.content_type == "application/jsonl"
            lines = [json.loads(line) for line in (await found.read()).splitlines()]
        kinds = ["run", "round", "round", *["outcomes"] * LINES, "result"]
        assert [line["kind"] for line in lines] == kinds
        assert lines[1]["report"]["round"] == 0
        assert lines[-1]["rounds"] == 2
        assert store.largest < 2 * 1024 * 1024 < LINES * LINE_BYTES

    async def test_a_rollback_reads_no_log(self, server: Server) -> None:
        store = store_of(server)
        body = {"to_round": 1, "reason": "a client lied"}
        status, answer, _ = await server.call("POST", "/v1/runs/run/rollback", body, token=ADMIN)
        assert (status, answer["rounds"]) == (200, 1)
        assert store.largest == 0

    async def test_a_part_is_not_taken_for_the_whole(self, server: Server) -> None:
        store = store_of(server)
        headers = {"Authorization": f"Bearer {ADMIN}"}
        url = f"{server.url}/v1/runs/run/log"
        store.broken = 1
        async with server.session.get(url, headers=headers) as found:
            assert found.status == 503
        store.broken = 3
        async with server.session.get(url, headers=headers) as found:
            assert found.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await found.read()

    async def test_what_is_written_meanwhile_is_of_a_later_state(self, server: Server) -> None:
        store, service = store_of(server), server.aggregator.service
        run = await service.registry.run("run")
        before = len(await store.log("run"))
        pieces = export_run(service.store, run)
        data = await anext(pieces)
        await run.record_metric(1, 0.5)
        data += b"".join([piece async for piece in pieces])
        assert len(data.splitlines()) == before + 2
        assert json.loads(data.splitlines()[-1])["history"][1]["metric"] is None


class TestClients:
    async def test_clients_come_in_pages(self, server: Server) -> None:
        for number in range(2, 5):
            await server.store.enrol(
                device(number), (await server.store.tokens())[0].token_sha256, 1.0
            )
        found, path = [], "/v1/clients?limit=2"
        while True:
            status, answer, _ = await server.call("GET", path, token=ADMIN)
            page = ClientList.model_validate(answer)
            assert (status, len(page.clients) <= 2) == (200, True)
            found += page.clients
            if page.next is None:
                break
            path = f"/v1/clients?limit=2&after={page.next}"
        assert len(found) == 5
        _, answer, _ = await server.call("GET", "/v1/clients", token=ADMIN)
        assert ClientList.model_validate(answer) == ClientList(clients=tuple(found))
        _, answer, _ = await server.call("GET", "/v1/clients?after=4", token=ADMIN)
        assert answer == {"clients": [], "next": None}

    @pytest.mark.parametrize("query", ["limit=0", "limit=x", "after=-1", "limit=" + "9" * 5000])
    async def test_what_is_no_number_is_refused(self, query: str, server: Server) -> None:
        code = await server.refused("GET", f"/v1/clients?{query}", token=ADMIN)
        assert code == "invalid_message"

    async def test_clients_are_counted_and_not_read(self, server: Server) -> None:
        access = server.aggregator.service.access
        await access.open()
        await access.reload_all()
        assert access.num_clients == 2
