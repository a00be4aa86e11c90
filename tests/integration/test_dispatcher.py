"""Replicas in one process, on a store that loses signals, fails and delays answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.engine import make_url
from structlog.testing import capture_logs

from fedone_sdk.aggregator import Service
from fedone_sdk.aggregator.dispatch.client_pool import RetryLater
from fedone_sdk.aggregator.rounds import RoundMachine
from fedone_sdk.aggregator.rounds.lifecycle import charge_lost_replicas
from fedone_sdk.aggregator.rounds.spending import reserve_evaluation
from fedone_sdk.aggregator.runs.changes import Change
from fedone_sdk.backends import ModelClient, Query
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.errors import BackendUnavailable, FedOneError, ProblemError
from fedone_sdk.messages import Claim, Enrol, LossesAssignment
from fedone_sdk.spec import RetrySpec, RunSpec
from fedone_sdk.stores import Commit, Member, MemoryStore, RunRecord, Store
from fedone_sdk.stores.base import Signals
from fedone_sdk.stores.sql.sqlite import SqliteStore
from fedone_sdk.task import Rendered
from fedone_sdk.testing import ManualClock, ScriptedBackend
from fedone_sdk.vocabulary import Vocabulary
from tests import runs
from tests.by_hand import claim, enrol, score, update, work_of
from tests.runs import TOKEN, run_spec, until

WORDS = Vocabulary(candidates=("x", "y"))


def spec_of(
    name: str = "run",
    *,
    rounds: int = 50,
    budget: Mapping[str, Any] | None = None,
    **participation: Any,
) -> RunSpec:
    return run_spec(
        name=name,
        method={"num_samples": 2},
        participation=participation,
        budget=budget,
        rounds=rounds,
    )


class Hub:
    """What the stores of several replicas share; while it is deaf, signals are lost."""

    def __init__(self) -> None:
        self.data = MemoryStore()
        self.stores: list[Shared] = []
        self.deaf = False

    def store(self) -> Shared:
        return Shared(self)


class Shared(MemoryStore):
    """One replica's view of a hub.

    Attributes:
        name: The replica.
        alive_now: Whether the others can see it.
        broken: How commits fail, though they were stored: all (``late``) or one (``late once``).
        broken_log: Whether the log cannot be read.
    """

    def __init__(self, hub: Hub) -> None:
        super().__init__()
        self.__dict__.update(hub.data.__dict__)
        self.hub = hub
        self.name = f"replica{len(hub.stores)}"
        self.alive_now = True
        self.broken: str | None = None
        self.broken_log = False
        self.signals: Signals = lambda text: None
        hub.stores.append(self)

    async def open(self) -> None:
        """It keeps its identity."""

    async def commit(self, run_id: str, version: int, commit: Commit) -> None:
        await super().commit(run_id, version, commit)
        await self.publish(commit.signal or "")
        if self.broken == "late once":
            self.broken = None
            raise FedOneError("the store went away")
        if self.broken == "late":
            raise FedOneError("the store went away")

    async def log(self, run_id: str, *args: Any, **kwargs: Any) -> list[Any]:
        if self.broken_log:
            raise FedOneError("the store is away")
        return await super().log(run_id, *args, **kwargs)

    @property
    def shared(self) -> bool:
        return True

    @property
    def replica(self) -> str:
        return self.name

    async def alive(self) -> frozenset[str]:
        alive = {store.name for store in self.hub.stores if store.alive_now}
        return frozenset(alive | {self.name})

    async def lead(self) -> bool:
        return next(store for store in self.hub.stores if store.alive_now) is self

    async def join(self, member: Member, signals: Sequence[str] = ()) -> None:
        await super().join(member)
        for signal in signals:
            await self.publish(signal)

    async def leave(self, client_indices: Collection[int], signals: Sequence[str] = ()) -> None:
        await super().leave(client_indices)
        for signal in signals:
            await self.publish(signal)

    async def publish(self, signal: str) -> None:
        if signal and not self.hub.deaf:
            for store in self.hub.stores:
                if store is not self:
                    store.signals(signal)

    def listen(self, signals: Signals) -> None:
        self.signals = signals


@asynccontextmanager
async def serving(
    *stores: Store, clock: ManualClock | None = None, backend: Any = None
) -> AsyncIterator[list[Service]]:
    clock = clock or ManualClock()
    async with AsyncExitStack() as stack:
        starts = (runs.serving(store=store, clock=clock, backend=backend) for store in stores)
        yield [await stack.enter_async_context(start) for start in starts]


class TestSignals:
    async def test_a_seat_without_a_signal_is_found(self) -> None:
        """The offering replica exits before its signal; then another signals the next event."""
        hub = Hub()
        async with serving(hub.store(), hub.store()) as (one, two):
            await one.add_run(spec_of(clients_per_round=2), WORDS)
            first, second = await enrol(one, 2)
            await until(lambda: "run" in two.runs)
            waits = asyncio.create_task(claim(one, first, wait_s=30))
            await until(lambda: first.index in two.dispatcher.pool)
            hub.deaf = True
            await work_of(two, second)  # the round begins there
            hub.deaf = False
            # A commit that offers nothing, and whose signal is heard.
            await two.runs["run"].record_metric(0, 0.5)
            async with asyncio.timeout(5):
                assert isinstance(await waits, LossesAssignment)

    async def test_a_run_that_is_being_loaded_has_not_ended(self) -> None:
        hub = Hub()
        store = hub.store()
        async with serving(hub.store(), store) as (one, two):
            (client,) = await enrol(one)
            read, may_load = store.run, asyncio.Event()

            async def late(run_id: str) -> RunRecord | None:
                await may_load.wait()
                return await read(run_id)

            store.run = late  # type: ignore[method-assign]
            await one.add_run(spec_of(), WORDS)
            await until(lambda: "run" in two.registry.stored)
            waits = asyncio.create_task(claim(two, client, wait_s=30))
            await asyncio.sleep(0.05)
            may_load.set()
            async with asyncio.timeout(5):
                assert isinstance(await waits, LossesAssignment)

    async def test_signals_during_a_read_are_not_lost(self) -> None:
        hub = Hub()
        store, other = hub.store(), hub.store()
        async with serving(store, other) as (one, two):
            run = await one.add_run(spec_of(), WORDS)
            await until(lambda: "run" in two.runs)
            read = store.run

            async def late(run_id: str) -> RunRecord | None:
                found = await read(run_id)
                await two.runs["run"].record_metric(0, 0.1)
                await asyncio.sleep(0.02)
                return found

            store.run = late  # type: ignore[method-assign]
            run.may_be_stale = True
            await run.catch_up()
            store.run = read  # type: ignore[method-assign]
            assert run.is_stale
            await run.catch_up()
            assert (run.is_stale, run.version) == (False, two.runs["run"].version)

    async def test_a_client_that_waits_here_is_not_lost_for_what_it_left_there(self) -> None:
        hub = Hub()
        async with serving(hub.store(), hub.store()) as (one, two):
            await one.add_run(spec_of(min_clients=2), WORDS)
            (client,) = await enrol(one)
            await until(lambda: "run" in two.runs)
            waits = asyncio.create_task(claim(two, client, wait_s=30))
            await until(lambda: 0 in two.dispatcher.pool)
            await one.dispatcher._remove_members([0])
            await until(lambda: not two.replicas._signals.qsize())
            await until(lambda: 0 in two.dispatcher.pool)
            assert [m.client_index for m in await hub.stores[0].members()] == [0]
            waits.cancel()

    async def test_what_is_not_understood_while_the_store_is_away_does_not_end_listening(
        self,
    ) -> None:
        class Away(Shared):
            away = False

            async def versions(self) -> dict[str, int]:
                if self.away:
                    asked.set()
                    raise FedOneError("the store is away")
                return await super().versions()

        hub, asked = Hub(), asyncio.Event()
        stores = hub.store(), Away(hub)
        async with serving(*stores) as (one, two):
            run = await one.add_run(spec_of(min_clients=2), WORDS)
            await until(lambda: "run" in two.runs)
            stores[1].away = True
            await stores[0].publish('{"kind": "of a newer version"}')
            async with asyncio.timeout(5):
                await asked.wait()
            stores[1].away = False
            (client,) = await enrol(one)
            await one.dispatcher._wait_in_pool(client, Claim(num_examples=5), [run])
            await until(lambda: client.index in two.dispatcher.pool)

    async def test_a_client_enrolled_at_one_replica_is_counted_by_the_other(self) -> None:
        """The number of clients decides whether another with epsilon left may come."""
        hub = Hub()
        async with serving(hub.store(), hub.store()) as (one, two):
            await enrol(one, 10)
            await until(lambda: two.access.num_clients == 10)

    async def test_a_flood_of_signals_causes_one_read(self) -> None:
        hub = Hub()
        store = hub.store()
        async with serving(store) as (one,):
            for _ in range(20_000):
                store.signals('{"kind": "left", "client_indices": []}')
            assert one.replicas._signals.qsize() <= 10_001


class TestBrokenRuns:
    async def test_the_others_deadlines_pass(self) -> None:
        class Broken(MemoryStore):
            broken = False

            async def commit(self, run_id: str, version: int, commit: Commit) -> None:
                if self.broken and run_id == "a":
                    raise FedOneError("the disk has a hole")
                await super().commit(run_id, version, commit)

        store, clock = Broken(), ManualClock()
        async with serving(store, clock=clock) as (service,):
            clients = await enrol(service, 2)
            for name, client in zip("ab", clients, strict=True):
                await service.add_run(spec_of(name), WORDS)
                await claim(service, client, run_id=name)
            store.broken = True
            clock.advance(101)
            with pytest.raises(ExceptionGroup):
                await service.replicas.tick()
            assert service.runs["b"].state.lost == 1
            store.broken = False
            await service.replicas.tick()
            assert service.runs["a"].state.lost == 1

    async def test_an_unreadable_run_does_not_stop_others(self) -> None:
        hub = Hub()
        async with serving(hub.store(), hub.store()) as (one, two):
            await one.add_run(spec_of("a"), WORDS)
            record = hub.data._runs["a"]
            hub.data._runs["of-the-future"] = RunRecord(
                run_id="of-the-future",
                spec='{"version": "next"}',
                candidates=record.candidates,
                document=record.document,
                arrays=record.arrays,
                version=0,
                created_at=0.0,
            )
            hub.data._logs["of-the-future"] = []
            hub.deaf = True
            await one.add_run(spec_of("b"), WORDS)
            (client,) = await enrol(one)
            work = await work_of(one, client)
            await update(two, client, work)
            assert two.runs[work.run_id].state.round == 1
            with pytest.raises(ProblemError, match="run_conflict: run 'of-the-future' is damaged"):
                await two.registry.run("of-the-future")


class TestStoreFailures:
    async def test_a_reload_that_fails_half_way_leaves_nothing_out(self) -> None:
        hub = Hub()
        stores = hub.store(), hub.store()
        async with serving(*stores) as (one, two):
            run = await one.add_run(spec_of(), WORDS)
            (client,) = await enrol(one)
            await until(lambda: "run" in two.runs)
            stores[1].broken_log = True
            await update(one, client, await work_of(one, client))
            two.runs["run"].may_be_stale = True
            with pytest.raises(FedOneError, match="away"):
                await two.runs["run"].catch_up()
            stores[1].broken_log = False
            work = await work_of(two, client)
            await update(two, client, work)
            assert [report.round for report in two.runs["run"].history] == [0, 1]
            await run.catch_up()
            assert [report.round for report in run.history] == [0, 1]

    async def test_a_commit_with_an_unknown_outcome(self) -> None:
        hub = Hub()
        store = hub.store()
        async with serving(store) as (service,):
            run = await service.add_run(spec_of(), WORDS)
            (client,) = await enrol(service)
            work = await work_of(service, client)
            store.broken = "late"
            with pytest.raises(FedOneError, match="went away"):
                await update(service, client, work)
            store.broken = None
            await update(service, client, work)  # the receipt
            assert (run.state.round, len(run.history)) == (1, 1)
            assert run.state.account.spent.queries == 2

    async def test_a_client_whose_join_failed_is_not_drawn(self) -> None:
        class Away(MemoryStore):
            async def join(self, member: Member, signals: Sequence[str] = ()) -> None:
                raise FedOneError("the store is away")

        async with serving(Away()) as (service,):
            await service.add_run(spec_of(min_clients=2), WORDS)
            (client,) = await enrol(service)
            with pytest.raises(FedOneError):
                await claim(service, client)
            assert len(service.dispatcher.pool) == 0
            assert service.dispatcher.num_polls == 0


class TestModels:
    async def test_a_replica_without_the_model_checks_it_before_it_assigns_work(self) -> None:
        """Another replica, with a working model, resumed the run."""

        class Model(ScriptedBackend):
            down = False

            async def check(self, label_words: tuple[str, ...], form: Rendered = ()) -> None:
                if self.down:
                    raise BackendUnavailable("the provider is away")
                await super().check(label_words, form)

        hub, backend = Hub(), Model()
        async with serving(hub.store(), backend=backend) as (before,):
            await before.add_run(spec_of(budget={"requests": 4}), WORDS)
            (client,) = await enrol(before)
        hub.stores[0].alive_now = False
        backend.down = True
        async with serving(hub.store(), hub.store(), backend=backend) as (one, two):
            assert one.runs["run"].state.paused
            backend.down = False
            await one.resume_run(one.runs["run"])
            await two.registry.refresh()
            backend.down = True
            with pytest.raises(ProblemError, match="is not available at the moment") as caught:
                await claim(two, client)
            assert caught.value.code == "backend_unavailable"
            assert caught.value.retry_after_s is None
            backend.down = False
            run = two.runs["run"]
            for _ in range(2):
                work = await work_of(two, client)
                assert run.state.account.leases[work.assignment_id].requests == 2
                await score(two, client, work)
                await update(two, client, work)
            await run.catch_up()
            assert run.state.status == "budget_exhausted"
            assert (run.state.round, run.state.account.spent.requests) == (2, 4)


class TestHangUps:
    async def test_a_client_that_disconnects_while_it_joins_has_joined(
        self, tmp_path: Path
    ) -> None:
        """The clients of a draw must be the same after a crash."""

        class Slow(SqliteStore):
            async def join(self, member: Member, signals: Sequence[str] = ()) -> None:
                joining.set()
                await go.wait()
                await super().join(member, signals)

        joining, go = asyncio.Event(), asyncio.Event()
        store = Slow(make_url(f"sqlite:///{tmp_path}/store.db"))
        async with serving(store) as (service,):
            run = await service.add_run(spec_of(min_clients=2), WORDS)
            (client,) = await enrol(service)
            asks = asyncio.create_task(claim(service, client, wait_s=30))
            await joining.wait()
            asks.cancel()
            await asyncio.gather(asks, return_exceptions=True)
            go.set()
            assert list(service.dispatcher.available(run)) == [client.index]
            async with asyncio.timeout(5):
                while not await store.members():
                    await asyncio.sleep(0.005)
            assert [member.client_index for member in await store.members()] == [client.index]

    @pytest.mark.parametrize(("polls", "warnings"), [(10, 0), (13, 1)])
    async def test_the_operator_is_told_of_copies_of_a_device(
        self, polls: int, warnings: int
    ) -> None:
        async with serving(MemoryStore()) as (service,):
            await service.add_run(spec_of(min_clients=2), WORDS)
            (client,) = await enrol(service)
            with capture_logs() as logs:
                asking = [
                    asyncio.create_task(claim(service, client, wait_s=30)) for _ in range(polls)
                ]
                await until(lambda: sum(task.done() for task in asking) == polls - 1)
                asking[-1].cancel()
                await asyncio.gather(*asking, return_exceptions=True)
            told = [log["client_id"] for log in logs if "one identity" in log["event"]]
            assert told == [client.client_id] * warnings

    @pytest.mark.parametrize("after", range(24))
    async def test_a_client_s_exit_at_any_time_loses_nothing(self, after: int) -> None:
        class Slow(MemoryStore):
            async def join(self, member: Member, signals: Sequence[str] = ()) -> None:
                await asyncio.sleep(0)
                await super().join(member)

            async def commit(self, run_id: str, version: int, commit: Commit) -> None:
                await asyncio.sleep(0)
                await super().commit(run_id, version, commit)
                await asyncio.sleep(0)

        async with serving(Slow()) as (service,):
            run = await service.add_run(spec_of(budget={"queries": 2}), WORDS)
            (client,) = await enrol(service)
            asks = asyncio.create_task(claim(service, client, wait_s=30))
            for _ in range(after):
                await asyncio.sleep(0)
            asks.cancel()
            await asyncio.gather(asks, return_exceptions=True)
            assert service.dispatcher.num_polls == 0
            await update(service, client, await work_of(service, client))
            assert run.state.status == "budget_exhausted"
            assert run.state.account.held.queries == 2


class TestEnds:
    async def test_resumed_by_one_that_is_behind(self) -> None:
        hub = Hub()
        async with serving(hub.store(), hub.store()) as (one, two):
            run = await one.add_run(spec_of(), WORDS)
            await until(lambda: "run" in two.runs)
            await two.stop_run(await two.registry.run("run"))
            await until(lambda: run.ended.is_set())
            hub.deaf = True
            await two.runs["run"].record_metric(0, 0.5)  # so that the first commit conflicts
            await one.resume_run(run)
            assert run.state.running
            assert not run.ended.is_set()

    async def test_a_revoked_client_s_poll_gives_it_no_work(self) -> None:
        async with serving(MemoryStore()) as (service,):
            run = await service.add_run(spec_of(clients_per_round=2), WORDS)
            first, second = await enrol(service, 2)
            waits = asyncio.create_task(claim(service, first, wait_s=30))
            await until(lambda: first.index in service.dispatcher.pool)
            for _ in range(20):
                await asyncio.sleep(0)

            def revoke(run: object, change: Change) -> None:
                if first.index in change.offered:
                    service.dispatcher.revoke(first)

            service.listeners.append(revoke)
            await work_of(service, second)
            assert await waits is None
            phases = {seat.client: seat.phase for seat in run.state.seats}
            assert phases == {first.index: "offered", second.index: "working"}

    async def test_a_revoked_client_does_not_wait_after_a_restart(self) -> None:
        store = MemoryStore()
        async with serving(store) as (service,):
            await service.add_run(spec_of(min_clients=2), WORDS)
            (client,) = await enrol(service)
            await claim(service, client)
            await service.access.revoke_client(client.client_id)
        async with serving(store) as (service,):
            assert len(service.dispatcher.pool) == 0

    async def test_a_revocation_counts_without_its_signal(self) -> None:
        hub = Hub()
        stores = hub.store(), hub.store()
        async with serving(*stores) as (one, two):
            await one.replicas.tick()
            enrolled = await one.access.enrol(TOKEN, Enrol())
            await one.access.authenticate(enrolled.credential)
            hub.deaf = True
            await two.access.revoke_client(enrolled.client_id)
            stores[1].alive_now = False
            await one.replicas.tick()
            with pytest.raises(ProblemError, match="revoked"):
                await one.access.authenticate(enrolled.credential)

    async def test_clients_gone_long_before_a_restart_are_not_waited_for(self) -> None:
        store, clock = MemoryStore(), ManualClock()
        async with serving(store, clock=clock) as (service,):
            await service.add_run(spec_of(min_clients=3), WORDS)
            first, second = await enrol(service, 2)
            await claim(service, first)
            clock.advance(3600)
            await claim(service, second)
        clock.advance(3600)
        async with serving(store, clock=clock) as (service,):
            assert [0 in service.dispatcher.pool, 1 in service.dispatcher.pool] == [False, True]
            assert [member.client_index for member in await store.members()] == [1]

    async def test_replicas_that_start_at_once_renew_deadlines(self) -> None:
        hub, clock = Hub(), ManualClock()
        async with serving(hub.store(), clock=clock) as (one,):
            await one.add_run(spec_of(), WORDS)
            (client,) = await enrol(one)
            work = await work_of(one, client)
        hub.stores[0].alive_now = False
        clock.advance(3600)
        stores = hub.store(), hub.store()  # both are there before either has started
        async with serving(*stores, clock=clock) as (one, two):
            await one.replicas.tick()
            await update(two, client, work)

    async def test_a_lazy_refresh_reads_no_served_run(self) -> None:
        hub = Hub()
        async with serving(hub.store(), hub.store()) as (one, two):
            await one.add_run(spec_of(), WORDS)
            (client,) = await enrol(one)
            await until(lambda: "run" in two.runs)
            await work_of(one, client)
            await until(lambda: two.runs["run"].is_stale)
            await two.registry.refresh(lazily=True)
            assert two.runs["run"].is_stale
            await two.registry.refresh()
            assert two.runs["run"].version == one.runs["run"].version

    async def test_what_ends_elsewhere_leaves_nothing_behind(self) -> None:
        hub = Hub()
        backend = ScriptedBackend()
        async with serving(hub.store(), hub.store(), backend=backend) as (one, two):
            await one.add_run(spec_of(), WORDS)
            (client,) = await enrol(one)
            await until(lambda: "run" in two.runs)
            work = await work_of(one, client)
            await score(one, client, work)
            gateway = one._gateway
            assert gateway is not None
            assert gateway._open
            await update(two, client, work)
            await until(lambda: not gateway._open)
            await until(lambda: one.runs["run"].state.round == 1)

    async def test_offers_end_with_the_round(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(RoundMachine, "MAX_LOST", 99)
        clock = ManualClock()
        async with serving(MemoryStore(), clock=clock) as (service,):
            await service.add_run(spec_of(), WORDS)
            for client in await enrol(service, 5):
                await update(service, client, await work_of(service, client))
                service.dispatcher.pool.remove([client.index])  # It never comes again.
                clock.advance(11)
                await service.replicas.tick()
            assert list(service.dispatcher._possible_seats) == [4]


class TestFairness:
    async def test_those_outside_of_one_replica_get_the_places_of_another(self) -> None:
        hub, clock = Hub(), ManualClock()
        async with serving(hub.store(), hub.store(), clock=clock) as (one, two):
            await one.add_run(spec_of(min_clients=64), WORDS)
            clients = await enrol(one, 66)
            await until(lambda: "run" in two.runs)
            for client in clients[:64]:
                await one.dispatcher._wait_in_pool(client, Claim(num_examples=5), [one.runs["run"]])
            await until(lambda: len(two.dispatcher.pool) == 64)
            found = await two.work.claim(clients[64], Claim(num_examples=5, wait_s=0))
            assert isinstance(found, RetryLater)
            assert found.retry_after_s > 0
            await until(lambda: one.dispatcher.pool._num_outside == 1)
            tired = one.dispatcher.pool.time_out(clients[0].index, clock.now())
            assert tired is not None
            assert clients[0].index not in one.dispatcher.pool


class TestBudget:
    async def test_a_replica_presumed_dead_during_a_call_stays_under_the_cap(self) -> None:
        """The other replica charges it in full; it continues under a new name."""
        hub = Hub()
        stores = hub.store(), hub.store()
        services: list[Service] = []
        failures = 2

        async def gate(query: Query) -> None:
            nonlocal failures
            if failures:
                failures -= 1
                # Its session is lost and comes back; the other sees that before it does.
                stores[1].name += "-again"
                services[0].runs["run"].may_be_stale = True  # Independent of signals so far.
                await services[0].replicas.tick()
                raise BackendUnavailable("busy", retry_after_s=0.0)

        backend = ModelClient(ScriptedBackend(gate=gate), retry=RetrySpec(max_wait_s=0.001))
        async with serving(*stores, backend=backend) as served:
            services += served
            one, two = served
            run = await one.add_run(spec_of(budget={"requests": 5}), WORDS)
            (client,) = await enrol(one)
            await until(lambda: "run" in two.runs)
            work = await work_of(two, client)
            await score(two, client, work)
            await run.catch_up()
            (seat,) = run.state.seats
            held = run.state.account.leases[work.assignment_id]
            assert not seat.sent
            # Two prompts and two retries.
            assert seat.used.requests == held.requests == 4

    async def test_a_replica_that_started_after_the_check_is_not_presumed_dead(self) -> None:
        hub = Hub()
        store = hub.store()
        async with serving(store) as (service,):
            run = await service.add_run(spec_of(), WORDS)
            before = await store.alive()
            hub.store()  # comes now
            await run.apply(reserve_evaluation, lease_id="replica1/a", worst=Usage(requests=3))
            await run.apply(reserve_evaluation, lease_id="gone/b", worst=Usage(requests=5))
            await run.apply(charge_lost_replicas, alive=before, down=False)
            assert set(run.state.evaluation.leases) == {"replica1/a"}
            assert run.state.account.spent == Usage(requests=5)

    async def test_unused_reservations_are_released(self) -> None:
        hub = Hub()
        store = hub.store()
        async with serving(store, backend=ScriptedBackend()) as (service,):
            run = await service.add_run(spec_of(), WORDS)
            (client,) = await enrol(service)
            work = await work_of(service, client)
            store.broken = "late once"
            with pytest.raises(FedOneError, match="went away"):
                await score(service, client, work)
            await run.catch_up()
            assert run.state.seats[0].max_pending == NOTHING
            assert run.state.seats[0].used.requests == 0
            await score(service, client, work)
            await run.catch_up()
            assert run.state.seats[0].used == Usage(queries=2, requests=2) + Usage(
                prompt_tokens=run.state.seats[0].used.prompt_tokens,
                completion_tokens=run.state.seats[0].used.completion_tokens,
            )

    async def test_pending_calls_of_a_dead_replica_are_charged_by_a_stale_one(self) -> None:
        hub = Hub()
        stores = hub.store(), hub.store()
        async with serving(*stores) as (one, two):
            run = await one.add_run(spec_of(), WORDS)
            await until(lambda: "run" in two.runs)
            await one.replicas.tick()
            worst = Usage(requests=3)
            await two.runs["run"].apply(reserve_evaluation, lease_id="replica1/a", worst=worst)
            await until(lambda: run.is_stale)
            assert not run.may_be_stale  # It was told of that; it only did not look.
            stores[1].alive_now = False
            await one.replicas.tick()
            assert run.state.account.spent == Usage(requests=3)


class TestEvaluation:
    @pytest.mark.parametrize("back", [False, True])
    async def test_a_measurement_that_is_overtaken_is_not_the_end_s(self, back: bool) -> None:
        """The run went on from where it stopped, or went back, and stopped again meanwhile."""
        gate = asyncio.Event()
        gate.set()
        backend = ScriptedBackend(gate=lambda query: gate.wait())
        dev = [{"text": f"dev {number}", "label": number % 2} for number in range(4)]
        async with serving(MemoryStore(), backend=backend) as (service,):
            run = await service.add_run(spec_of(own_models="charged"), WORDS, dev=dev)
            (client,) = await enrol(service)
            await until(lambda: run.state.metric.before is not None)
            per_measurement = len(backend.asked) // 2  # of no prompt, and of the first one
            await update(service, client, await work_of(service, client))
            gate.clear()
            await service.stop_run(run)
            began = len(backend.asked)
            await until(lambda: len(backend.asked) > began)
            if back:
                await service.roll_back(run, 0, "a lying client")
            else:
                await service.resume_run(run)
                await update(service, client, await work_of(service, client))
                await service.stop_run(run)
            assert run.state.metric.after is None
            gate.set()
            async with asyncio.timeout(5):
                await service.wait(run)
            assert run.state.metric.after is not None
            assert len(backend.asked) == began + 2 * per_measurement
            assert not run.state.evaluation.leases

    async def test_the_measuring_replica_sees_the_end(self) -> None:
        hub, backend = Hub(), ScriptedBackend()
        async with serving(hub.store(), hub.store(), backend=backend) as (one, two):
            dev = [{"text": "a dev text", "label": 0}]
            run = await one.add_run(spec_of(), WORDS, dev=dev)
            await until(lambda: "run" in two.runs)
            await until(lambda: run.state.metric.before is not None)
            await two.stop_run(await two.registry.run("run"))
            async with asyncio.timeout(5):
                await one.wait(run)
            assert run.state.metric.after is not None

    async def test_a_resume_at_one_replica_is_a_resume_at_all(self) -> None:
        class Refusing(ScriptedBackend):
            resets = 0

            def reset(self) -> None:
                self.resets += 1

        hub, backend = Hub(), Refusing()
        async with serving(hub.store(), hub.store(), backend=backend) as (one, two):
            run = await one.add_run(spec_of(), WORDS, dev=[{"text": "a dev text", "label": 0}])
            await until(lambda: "run" in two.runs and run.state.metric.before is not None)
            await run.pause("the key was revoked")
            await one.wait(run)
            await two.resume_run(other := await two.registry.run("run"))
            await until(lambda: run.state.running)
            assert backend.resets == 3  # At `two` before the check, and at both by the change.
            await two.stop_run(other)
            async with asyncio.timeout(5):
                await one.wait(run)
            assert run.state.metric.after is not None
