"""Removal of data, and what stays of it: memory, SQLite, PostgreSQL."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedone_sdk.stores import (
    NO_CREDENTIAL,
    Commit,
    LogEntry,
    RunDeleted,
    Store,
    StoredMemory,
    TokenRefused,
    VersionConflict,
)
from tests.contract.stores import RUN, TOKEN, WORK, device, enrol

OTHER = replace(RUN, run_id="other")
OTHERS = replace(WORK, assignment_id="work-2", run_id="other")
LINE = LogEntry(kind="round", body="{}")
MEMORY = StoredMemory(client_index=3, round=1, value=b"m")


async def fill(store: Store) -> None:
    for record, work in ((RUN, WORK), (OTHER, OTHERS)):
        await store.add_run(record)
        commit = Commit(document="1", closed=(work,), log=(LINE, LINE), memories=(MEMORY,))
        await store.commit(record.run_id, 0, commit)


class TestRuns:
    async def test_a_run_goes_with_all_that_belongs_to_it(self, store: Store) -> None:
        await fill(store)
        assert await store.deleted("run-1") is None
        await store.delete_run("run-1", 1, 7.5)
        assert await store.run("run-1") is None
        assert await store.closed("work-1") is None
        assert await store.log("run-1") == []
        assert await store.memory("run-1", 3) is None
        assert await store.memory("other", 3) == b"m"
        assert await store.deleted("run-1") == 7.5
        assert await store.versions() == {"other": 1}
        assert (len(await store.log("other")), await store.closed("work-2")) == (2, OTHERS)

    async def test_its_name_stays_taken(self, store: Store) -> None:
        await fill(store)
        await store.delete_run("run-1", 1, 7.5)
        with pytest.raises(RunDeleted, match="run-1"):
            await store.add_run(RUN)
        assert await store.versions() == {"other": 1}
        with pytest.raises(KeyError):
            await store.commit("run-1", 1, Commit(document="2"))
        with pytest.raises(KeyError):
            await store.delete_run("run-1", 1, 8.0)

    async def test_only_the_run_that_was_looked_at_is_deleted(self, store: Store) -> None:
        await fill(store)
        before = await store.run("run-1"), await store.log("run-1")
        with pytest.raises(VersionConflict):
            await store.delete_run("run-1", 0, 7.5)
        assert (await store.run("run-1"), await store.log("run-1")) == before
        assert await store.deleted("run-1") is None

    async def test_a_run_is_trimmed(self, store: Store) -> None:
        await fill(store)
        record = await store.run("run-1")
        await store.trim("run-1", closed=True)
        assert (len(await store.log("run-1")), await store.closed("work-1")) == (2, None)
        assert await store.memory("run-1", 3) == b"m"
        await store.trim("run-1", log=True)
        assert await store.log("run-1") == []
        assert await store.memory("run-1", 3) is None
        assert await store.run("run-1") == record
        assert (len(await store.log("other")), await store.closed("work-2")) == (2, OTHERS)


class TestClients:
    async def test_a_client_without_requests_is_idle(self, store: Store) -> None:
        for number, at in enumerate((10.0, 20.0, 30.0)):
            await enrol(store, number, enrolled_at=at)
        assert await store.idle_clients(25.0, 10) == [0, 1]
        assert await store.idle_clients(25.0, 1) == [0]
        await store.change_client(0, seen_at=40.0)
        assert await store.idle_clients(25.0, 10) == [1]
        assert (await store.clients())[0].seen_at == 40.0

    async def test_a_retired_client_keeps_its_place_and_its_name(self, store: Store) -> None:
        client = await enrol(store, 0, name="Bea's phone", enrolment_sha256="5" * 64)
        await store.retire_client(0, 9.0)
        (kept,) = await store.clients()
        assert kept == device(
            0, index=0, credential_sha256=f"{NO_CREDENTIAL}{client.client_id}", revoked_at=9.0
        )
        assert await store.client(client.credential_sha256) is None
        assert await store.idle_clients(1e9, 10) == []
        assert (await enrol(store, 1)).index == 1

    async def test_its_device_comes_back_as_another(self, store: Store) -> None:
        await enrol(store, 0, enrolment_sha256="5" * 64)
        await store.change_client(0, revoked_at=3.0)
        with pytest.raises(TokenRefused, match="revoked"):
            await enrol(store, 0, client_id="again", enrolment_sha256="5" * 64)
        await store.retire_client(0, 9.0)
        assert (await store.clients())[0].revoked_at == 3.0
        again = device(1, enrolment_sha256="5" * 64)
        assert (await store.enrol(again, TOKEN.token_sha256, 1.0)).index == 1
