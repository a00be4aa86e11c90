"""The public API: a served run's methods, the admin client, warnings about durability."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from fedone_sdk import Aggregator, EdgeClient
from fedone_sdk.budget import Budget
from fedone_sdk.client import AdminClient
from fedone_sdk.errors import ProblemError, SpecError, TransportError
from fedone_sdk.messages import RoundReport, RunEvent, RunResult
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import MemoryStore, SqlStore
from fedone_sdk.testing import ScriptedBackend
from tests.runs import run_spec

DATA = [{"text": f"text {number}", "label": number % 2} for number in range(8)]
DEV = [{"text": f"dev {number}", "label": number % 2} for number in range(6)]


def spec_of(name: str = "run", rounds: int = 3, **changes: Any) -> RunSpec:
    method = {"name": "bdpl", "num_samples": 4, "batch_size": 4}
    return run_spec(name=name, method=method, rounds=rounds, **changes)


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Aggregator, str]]:
    async with Aggregator(
        backend=ScriptedBackend(),
        store=MemoryStore(),
        enrolment_tokens=["token"],
        admin_token="admin",
    ) as aggregator:
        yield aggregator, await aggregator.listen()


class TestServedRun:
    async def test_events_are_the_rounds_then_the_result(self) -> None:
        async with serving() as (aggregator, url):
            run = await aggregator.add_run(spec_of(evaluation={"every": 1}), dev=DEV)
            early = asyncio.create_task(events_of(run.events()))
            async with EdgeClient(url, data=DATA, token="token") as client:
                await client.run_forever()
            seen = await early
            late = await events_of(run.events())
            assert aggregator.service.listeners == []
        for events in (seen, late):
            *rounds, result = events
            assert isinstance(result, RunResult)
            assert result.status == "completed"
            reports = {one.round: one for one in rounds if isinstance(one, RoundReport)}
            assert list(reports.values()) == list(result.history)
        assert len(late) == 4

    async def test_stop_ends_the_run(self) -> None:
        async with serving() as (aggregator, _):
            run = await aggregator.add_run(spec_of())
            waiting = asyncio.create_task(run.wait())
            stopped = await run.stop("enough")
            assert (stopped.status, stopped.reason) == ("stopped", "enough")
            assert (await waiting).status == "stopped"

    async def test_waits_end_when_the_aggregator_stops(self) -> None:
        async with serving() as (aggregator, _):
            run = await aggregator.add_run(spec_of(), dev=DEV)
            waiting = asyncio.gather(run.wait(), events_of(run.events()))
            await asyncio.sleep(0)
        result, events = await waiting
        assert (result.status, events) == ("running", [result])

    async def test_wrong_arguments(self) -> None:
        wrong: Any = {"vocabulary": ["a"], "score": "s3cret", "proposer": "s3cret"}
        async with serving() as (aggregator, _):
            with pytest.raises(SpecError, match=r"^add_run: vocabulary: is list; .*Vocabulary\n"):
                await aggregator.add_run(spec_of(), **wrong)


async def events_of(stream: AsyncIterator[RunEvent]) -> list[RunEvent]:
    return [event async for event in stream]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"enrolment_tokens": "s3cret"}, "enrolment_tokens: must be a list of tokens"),
        ({"store": "s3cret"}, "store: is str; it must be a Store, such as SqlStore.sqlite(path)"),
        ({"backend": "s3cret"}, "backend: is str; it must be LLMBackend"),
        ({"clock": 0}, "clock: is int; it must be Clock"),
        ({"limits": None}, "limits: is NoneType; it must be Limits"),
        ({"retention": {"logs_days": 3}}, "retention: is dict; it must be Retention"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        Aggregator(**arguments)
    assert str(caught.value) == f"Aggregator: {problem}"


class TestDurability:
    async def test_the_default_store_reports_what_a_restart_loses(self) -> None:
        aggregator = Aggregator()
        assert "not durable" in repr(aggregator)
        with capture_logs() as logs:
            async with aggregator:
                pass
        (warning,) = [line for line in logs if line["log_level"] == "warning"]
        assert "a restart loses runs, clients and spending" in warning["event"]

    async def test_a_chosen_store_is_no_warning(self, tmp_path: object) -> None:
        assert "not durable" not in repr(Aggregator(store=SqlStore.sqlite(f"{tmp_path}/s.db")))
        with capture_logs() as logs:
            async with Aggregator(store=MemoryStore()) as aggregator:
                assert "not durable" in repr(aggregator)
        assert [line for line in logs if line["log_level"] == "warning"] == []


class TestAdminClient:
    async def test_each_call_may_have_a_loop_of_its_own(self) -> None:
        async with serving() as (_, url):
            admin = AdminClient(url, "admin")
            for _ in range(2):
                assert await asyncio.to_thread(asyncio.run, admin.list()) == ()

    async def test_a_run_from_its_creation_to_its_deletion(self) -> None:
        async with (
            serving() as (_, url),
            AdminClient(url, "admin") as admin,
            EdgeClient(url, data=DATA, token="token") as client,
        ):
            created = await admin.create(spec_of(rounds=20, budget={"queries": 8}))
            assert (created.run_id, created.status) == ("run", "running")
            await client.run_forever()
            assert (await admin.get("run")).status == "budget_exhausted"
            assert (await admin.raise_caps("run", Budget(queries=16))).status == "running"
            with pytest.raises(ProblemError, match="run_conflict"):
                await admin.delete("run")
            assert (await admin.stop("run")).status == "stopped"
            assert (await admin.resume("run")).status == "running"
            following = asyncio.create_task(events_of(admin.events("run")))
            await client.run_forever()
            *rounds, result = await following
            assert isinstance(result, RunResult)
            assert [one.round for one in rounds if isinstance(one, RoundReport)] == [0, 1, 2, 3]
            assert result.history == (await admin.get("run")).history
            assert (await admin.prompt("run")).text == result.prompt.text
            assert (await admin.log("run")).count(b'"kind": "round"') == 4
            assert [run.run_id for run in await admin.list()] == ["run"]
            assert not (await admin.delete("run", dry_run=True)).deleted
            assert (await admin.delete("run")).deleted
            assert await admin.list() == ()

    async def test_a_rollback_is_checked_before_it_is_sent(self) -> None:
        admin = AdminClient("http://127.0.0.1:9", "admin")
        with pytest.raises(SpecError, match="arguments: reason"):
            await admin.roll_back("run", 0, "")

    @pytest.mark.parametrize(
        ("url", "token", "message"),
        [
            *((url, "admin", "is not an http") for url in ("ftp://host", "x", "h:80", "http://")),
            ("https://[", "admin", "server: "),
            ("http://user:secret@host", "admin", "must not have a user"),
            ("http://host", "", "printable ASCII"),
            ("http://host", "two\nlines", "printable ASCII"),
        ],
    )
    def test_bad_arguments(self, url: str, token: str, message: str) -> None:
        with pytest.raises(SpecError, match=message) as caught:
            AdminClient(url, token)
        assert "secret" not in str(caught.value)

    async def test_failures(self) -> None:
        async with serving() as (_, url):
            async with AdminClient(url, "wrong") as admin:
                with pytest.raises(ProblemError, match="unauthorized"):
                    await admin.list()
            async with AdminClient(url, "admin") as admin:
                with pytest.raises(ProblemError, match="not_found"):
                    await admin.get("../clients")
        async with AdminClient("http://127.0.0.1:9", "admin") as admin:
            with pytest.raises(TransportError, match="cannot be reached"):
                await admin.list()
