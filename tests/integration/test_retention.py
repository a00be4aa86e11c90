"""Deletion of runs, and retention by age."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from fedone_sdk.aggregator.config import RunToServe
from fedone_sdk.aggregator.replicas import Retention
from fedone_sdk.cli.serve import _add_runs
from fedone_sdk.errors import FedOneError, ProblemError
from fedone_sdk.messages import Removal
from fedone_sdk.stores import MemoryStore
from tests.integration.caller import ADMIN, TOKEN, Server, served
from tests.integration.test_dispatcher import Hub
from tests.integration.test_start import WORDS, spec_of

DAY_S = 86_400.0


async def round_of(
    server: Server, run_id: str = "run", token: str | None = None
) -> tuple[str, dict[str, Any]]:
    """A device, by default a new one, does a round; its credential and its work."""
    token = token or (await server.enrol(name="Bea"))[1]
    work = await server.claim(token, run_id=run_id)
    status, _ = await server.update(token, work)
    assert status == 200
    return token, work


async def server_of(
    stack: AsyncExitStack, retention: Retention, store: MemoryStore | None = None
) -> Server:
    start = served(retention=retention, store=store or MemoryStore())
    return await stack.enter_async_context(start)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def server(stack: AsyncExitStack) -> Server:
    server = await server_of(stack, Retention())
    await server.aggregator.add_run(spec_of("run"), WORDS)
    return server


class TestDelete:
    async def test_a_run_goes_with_all_that_belongs_to_it(self, server: Server) -> None:
        token, work = await round_of(server)
        await server.call("POST", "/v1/runs/run/stop", token=ADMIN)
        _, answer, _ = await server.call("DELETE", "/v1/runs/run?dry_run=true", token=ADMIN)
        dry = Removal.model_validate(answer)
        assert not dry.deleted
        assert dry.spent.queries == 4
        assert (await server.call("GET", "/v1/runs/run", token=ADMIN))[0] == 200
        status, answer, _ = await server.call("DELETE", "/v1/runs/run", token=ADMIN)
        assert (status, Removal.model_validate(answer)) == (
            200,
            dry.model_copy(update={"deleted": True}),
        )
        assert await server.refused("GET", "/v1/runs/run", token=ADMIN) == "not_found"
        assert (await server.call("GET", "/v1/runs", token=ADMIN))[1] == []
        assert await server.refused("DELETE", "/v1/runs/run", token=ADMIN) == "not_found"
        assert await server.store.log("run") == []
        assert (await server.update(token, work))[1]["code"] == "not_found"

    async def test_a_live_run_stays(self, server: Server) -> None:
        assert await server.refused("DELETE", "/v1/runs/run", token=ADMIN) == "run_conflict"
        run = await server.aggregator.service.registry.run("run")
        assert run.state.running
        await server.aggregator.service.stop_run(run)
        code = await server.refused("DELETE", "/v1/runs/run?dry_run=perhaps", token=ADMIN)
        assert code == "invalid_message"
        assert (await server.call("GET", "/v1/runs/run", token=ADMIN))[0] == 200

    @pytest.mark.parametrize("deaf", [False, True])
    async def test_the_other_replicas_drop_it(self, deaf: bool, stack: AsyncExitStack) -> None:
        hub = Hub()
        one = await server_of(stack, Retention(), hub.store())
        two = await server_of(stack, Retention(), hub.store())
        run = await one.aggregator.service.add_run(spec_of("run"), WORDS)
        await two.aggregator.service.registry.run("run")
        await one.aggregator.service.stop_run(run)
        hub.deaf = deaf
        await one.aggregator.service.delete_run(run)
        await two.aggregator.service.registry.refresh()
        with pytest.raises(ProblemError, match="there is no run"):
            await two.aggregator.service.registry.run("run")
        assert two.aggregator.service.registry.summaries == []


class TestConfigured:
    async def test_a_configured_run_that_was_deleted_is_passed_over(
        self, stack: AsyncExitStack
    ) -> None:
        server = await server_of(stack, Retention())
        service = server.aggregator.service
        run = await server.aggregator.service.add_run(spec_of("gone"), WORDS)
        await service.stop_run(run)
        await service.delete_run(run)
        runs = [
            RunToServe(path=Path(f"{name}.yaml"), spec=spec_of(name), vocabulary=WORDS)
            for name in ("gone", "next")
        ]
        errors: list[FedOneError] = []
        await _add_runs(server.aggregator, runs, errors, stack)
        assert not errors
        assert [summary.run_id for summary in service.registry.summaries] == ["next"]


class TestRetention:
    async def test_nothing_is_removed_by_default(self, server: Server) -> None:
        await round_of(server)
        run = await server.aggregator.service.registry.run("run")
        await server.aggregator.service.stop_run(run)
        before = await server.store.run("run"), await server.store.clients()
        server.clock.advance(1000 * DAY_S)
        await server.aggregator.service.replicas.sweep()
        assert (await server.store.run("run"), await server.store.clients()) == before

    async def test_ended_runs_are_deleted_by_age(self, stack: AsyncExitStack) -> None:
        server = await server_of(stack, Retention(ended_runs_days=30))
        service = server.aggregator.service
        for name in ("old", "new", "live"):
            await server.aggregator.add_run(spec_of(name), WORDS)
        await service.stop_run(await service.registry.run("old"))
        server.clock.advance(20 * DAY_S)
        await service.stop_run(await service.registry.run("new"))
        server.clock.advance(10 * DAY_S)
        await service.replicas.sweep()
        assert [run.run_id for run in service.registry.summaries] == ["old", "new", "live"]
        server.clock.advance(1)
        await service.replicas.sweep()
        assert [run.run_id for run in service.registry.summaries] == ["new", "live"]
        assert await server.store.deleted("old") == server.clock.now()

    async def test_logs_and_receipts_go_before_their_runs(self, stack: AsyncExitStack) -> None:
        kept = Retention(ended_runs_days=90, logs_days=30, closed_work_days=7)
        server = await server_of(stack, kept)
        service = server.aggregator.service
        for name in ("stopped", "done"):
            await server.aggregator.add_run(spec_of(name), WORDS)
        await round_of(server, "stopped")
        await service.stop_run(await service.registry.run("stopped"))
        token, _ = await round_of(server, "done")
        for _ in range(2):
            _, work = await round_of(server, "done", token)
        server.clock.advance(8 * DAY_S)
        await service.replicas.sweep()
        assert len(await server.store.log("stopped")) == 1
        assert len(await server.store.log("done")) == 3
        assert (await server.update(token, work))[1]["code"] == "not_found"
        server.clock.advance(30 * DAY_S)
        await service.replicas.sweep()
        # A run that can be resumed keeps its log: it may be rolled back.
        assert len(await server.store.log("stopped")) == 1
        assert len(await server.store.log("done")) == 0
        before = (await service.registry.run("done")).result()
        assert before.status == "completed"
        await service.replicas.sweep()
        server.clock.advance(60 * DAY_S)
        await service.replicas.sweep()
        assert service.registry.summaries == []

    async def test_idle_clients_are_retired(self, stack: AsyncExitStack) -> None:
        server = await server_of(stack, Retention(idle_clients_days=30))
        tokens = []
        for _ in range(3):
            _, enrolled, _ = await server.call("POST", "/v1/clients", {"name": "x"}, token=TOKEN)
            tokens.append(enrolled["credential"])
        run = await server.aggregator.service.add_run(spec_of("run"), WORDS)
        await server.aggregator.service.quarantine(
            run, (await server.store.clients())[2].client_id, "it lies"
        )
        await server.aggregator.service.stop_run(run)
        server.clock.advance(20 * DAY_S)
        claim = {"num_examples": 5, "wait_s": 0}
        await server.call("POST", "/v1/assignments/claim", claim, token=tokens[0])
        assert (await server.store.clients())[0].seen_at == server.clock.now()
        server.clock.advance(11 * DAY_S)
        await server.aggregator.service.replicas.sweep()
        clients = await server.store.clients()
        # The first was seen; a run keeps the third out by its index, which it must not change.
        assert [client.revoked_at is None for client in clients] == [True, False, True]
        assert clients[1].name is None
        path = "/v1/assignments/claim"
        assert await server.refused("POST", path, claim, token=tokens[1]) == "unauthorized"
        assert server.aggregator.service.access.num_clients == 3

    async def test_when_a_client_was_seen_is_written_once_a_day(self, server: Server) -> None:
        _, enrolled, _ = await server.call("POST", "/v1/clients", {}, token=TOKEN)
        token, claim = enrolled["credential"], {"num_examples": 5, "wait_s": 0}
        seen = []
        for hours in (0, 23, 2, 3, 25):
            server.clock.advance(hours * 3600.0)
            await server.call("POST", "/v1/assignments/claim", claim, token=token)
            seen.append((await server.store.clients())[0].seen_at)
        assert seen[:2] == [None, None]
        assert seen[2] is not None
        assert seen[3] == seen[2] == seen[4] - 28 * 3600.0
