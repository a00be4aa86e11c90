"""Snapshots of runs, restored to another store, on every store."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from fedone_sdk.stores import (
    ClientRecord,
    ClosedWork,
    Commit,
    LogEntry,
    RunSnapshot,
    Store,
    TokenRecord,
)
from tests.contract import stores
from tests.contract.stores import RUN

WORK = replace(stores.WORK, client_index=1)
LATE = ClosedWork(assignment_id="work-2", run_id="run-1", client_index=0, outcome="expired")


def client_of(number: int, **more: Any) -> ClientRecord:
    fields: dict[str, Any] = {
        "index": number,
        "client_id": f"client-{number}",
        "credential_sha256": f"{number:064x}",
        "enrolled_at": 0.1,
        "runs": ("acme-*",),
        **more,
    }
    return ClientRecord(**fields)


CLIENTS = (client_of(0), client_of(1, name="Bé", revoked_at=3.5))
SNAPSHOT = RunSnapshot(
    record=replace(RUN, document='{"round": 2}', version=7),
    closed=(WORK, LATE),
    log=(
        LogEntry(kind="round", body="{}", version=3),
        LogEntry(kind="metric", body='"é"', version=3),
        LogEntry(kind="round", body="[]", version=6),
    ),
    memories=((0, b"\xff\0"), (1, b"")),
)


async def enrol(store: Store, client: ClientRecord) -> ClientRecord:
    await store.put_token(TokenRecord(name="t", token_sha256="t", created_at=0.0))
    return await store.enrol(replace(client, index=-1), "t", 0.0)


async def test_an_unknown_run_has_no_snapshot(store: Store) -> None:
    assert await store.snapshot("run-1") is None


async def test_it_comes_back(store: Store) -> None:
    await store.restore(SNAPSHOT, CLIENTS)
    assert await store.snapshot("run-1") == SNAPSHOT
    assert await store.run("run-1") == SNAPSHOT.record
    assert await store.clients() == list(CLIENTS)
    assert await store.closed("work-1") == WORK
    assert await store.log("run-1", "metric") == [SNAPSHOT.log[1]]
    assert await store.memories("run-1") == dict(SNAPSHOT.memories)


async def test_it_continues(store: Store) -> None:
    await store.restore(SNAPSHOT, CLIENTS)
    entry = LogEntry(kind="round", body="new")
    await store.commit("run-1", 7, Commit(document="3", log=(entry,), memories=((1, b"new"),)))
    assert await store.log("run-1", after=6) == [replace(entry, version=8)]
    assert await store.memory("run-1", 1) == b"new"
    assert (await enrol(store, client_of(2))).index == 2


async def test_without_clients(store: Store) -> None:
    await store.restore(SNAPSHOT)
    assert await store.clients() == []
    assert (await enrol(store, client_of(5))).index == 0


async def test_others_are_not_in_it(store: Store) -> None:
    await store.add_run(replace(RUN, run_id="run-2"))
    other = replace(LATE, run_id="run-2", assignment_id="work-9")
    await store.commit(
        "run-2",
        0,
        Commit(document="1", closed=(other,), log=SNAPSHOT.log, memories=((0, b"other"),)),
    )
    await store.restore(SNAPSHOT)
    assert await store.snapshot("run-1") == SNAPSHOT
    found = await store.snapshot("run-2")
    assert found is not None
    assert found.closed == (other,)
    assert found.memories == ((0, b"other"),)


async def test_clients_that_are_here_stay_as_they_are(store: Store) -> None:
    known = await enrol(store, client_of(0, name="mine", credential_sha256="c" * 64))
    await store.restore(SNAPSHOT, CLIENTS)
    assert await store.clients() == [known, CLIENTS[1]]


@pytest.mark.parametrize(
    ("snapshot", "clients", "match"),
    [
        (replace(SNAPSHOT, record=replace(RUN, run_id="run-0")), (), "not of run"),
        (replace(SNAPSHOT, closed=(WORK, WORK)), (), "closed only once"),
        (replace(SNAPSHOT, closed=(replace(WORK, assignment_id="work-0"),)), (), "closed only"),
        (SNAPSHOT, (client_of(2),), "gap"),
        (SNAPSHOT, (client_of(0, client_id="other"),), "client 0 is 'here' here, not 'other'"),
        (SNAPSHOT, (client_of(1, client_id="here"),), "'here' is enrolled already"),
        (SNAPSHOT, (client_of(1, credential_sha256="h" * 64),), "in use"),
    ],
    ids=["other work", "twice", "known work", "gap", "another", "known", "credential"],
)
async def test_refused_whole(
    store: Store, snapshot: RunSnapshot, clients: tuple[ClientRecord, ...], match: str
) -> None:
    await store.add_run(replace(RUN, run_id="run-0"))
    closed = replace(WORK, run_id="run-0", assignment_id="work-0")
    await store.commit("run-0", 0, Commit(document="1", closed=(closed,)))
    here = await enrol(store, client_of(0, client_id="here", credential_sha256="h" * 64))
    with pytest.raises(ValueError, match=match):
        await store.restore(snapshot, clients)
    assert await store.snapshot("run-1") is None
    assert [run.run_id for run in await store.runs()] == ["run-0"]
    assert await store.clients() == [here]
    assert await store.closed("work-1") is None
    assert (await enrol(store, client_of(7))).index == 1


async def test_a_known_run_is_refused(store: Store) -> None:
    await store.restore(SNAPSHOT)
    other = replace(SNAPSHOT, closed=(), record=replace(RUN, document="other"))
    with pytest.raises(ValueError, match="run-1"):
        await store.restore(other)
    assert await store.snapshot("run-1") == SNAPSHOT


async def test_it_is_of_one_moment(store: Store) -> None:
    """Whatever is committed meanwhile is in it whole, or not at all."""
    await store.add_run(RUN)
    done = False

    async def commit() -> None:
        nonlocal done
        for version in range(60):
            number = str(version)
            await store.commit(
                "run-1",
                version,
                Commit(
                    document=number,
                    closed=(replace(LATE, assignment_id=f"work-{number}"),),
                    log=(LogEntry(kind="round", body=number),),
                    memories=((0, number.encode()),),
                ),
            )
        done = True

    async def look() -> None:
        while not done:
            found = await store.snapshot("run-1")
            assert found is not None
            count = found.record.version
            assert (len(found.closed), len(found.log)) == (count, count)
            if count:
                assert found.record.document == found.log[-1].body
                assert found.memories == ((0, found.log[-1].body.encode()),)
            await asyncio.sleep(0)

    await asyncio.gather(commit(), look())
