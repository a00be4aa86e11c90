"""Copies of whole stores, between SQLite and PostgreSQL, and removals from them."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from fedone_sdk.algorithms import alpha_sha256
from fedone_sdk.backends import LLMBackend
from fedone_sdk.errors import FedOneError
from fedone_sdk.local import Federation, simulate
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import (
    NO_CREDENTIAL,
    Commit,
    LogEntry,
    RunDeleted,
    SqlStore,
    Store,
    StoredMemory,
    TokenRefused,
    VersionConflict,
)
from fedone_sdk.stores.sql import schema
from fedone_sdk.testing import ScriptedBackend
from fedone_sdk.vocabulary import Vocabulary
from tests.console import Fedone
from tests.contract.stores import RUN, TOKEN, WORK, device, enrol, everything, opened
from tests.integration.tuned import ROWS, SPEC
from tests.postgres import PASSWORD, Cluster


async def tune(store: Store, *, rounds: int | None = None, state: Path | None = None) -> str:
    """Tune a run in a store to its end, or until some rounds are done; the digest of alpha."""
    spec = RunSpec.model_validate(SPEC)
    vocabulary = Vocabulary(candidates=(" good", " bad", " really", " so"))
    federation = Federation(
        spec=spec,
        shards=(tuple(ROWS[:6]), tuple(ROWS[6:12])),
        dev=(),
        vocabulary=vocabulary,
        reused_rows=False,
    )
    stop = asyncio.Event()

    def watch(run: object, _: object) -> None:
        if rounds is not None and run.state.round >= rounds:  # type: ignore[attr-defined]
            stop.set()

    backend: LLMBackend = ScriptedBackend()
    result = await simulate(
        federation, backend=backend, store=store, state_dir=state, watch=watch, stop=stop
    )
    return result.alpha_sha256


class TestCommand:
    def test_there_and_back_and_the_run_goes_on(
        self, fedone: Fedone, tmp_path: Path, postgres: Cluster, database: str
    ) -> None:
        whole = asyncio.run(tune(SqlStore.sqlite(tmp_path / "whole.db"), state=tmp_path / "w"))
        first, last = tmp_path / "first.db", tmp_path / "last.db"
        partial = asyncio.run(tune(SqlStore.sqlite(first), rounds=3, state=tmp_path / "clients"))
        assert partial != whole
        url = postgres.tcp_url(database)
        for source, target in ((str(first), url), (url, str(last))):
            code, out, err = fedone("db", "copy", source, target)
            assert (code, err) == (0, ""), (source, err)
            assert f"run small: alpha_sha256 {partial}\n" in out
            assert "copied 1 run, " in out
            assert PASSWORD not in out
        shutil.copytree(tmp_path / "clients", tmp_path / "same clients")
        assert asyncio.run(tune(SqlStore.at(url), state=tmp_path / "clients")) == whole
        assert asyncio.run(tune(SqlStore.sqlite(last), state=tmp_path / "same clients")) == whole

    def test_a_store_with_rows_is_no_target(
        self, fedone: Fedone, tmp_path: Path, postgres: Cluster, database: str
    ) -> None:
        path, url = tmp_path / "fedone.db", postgres.tcp_url(database)

        async def fill(where: Path | str) -> None:
            async with opened(where) as store:
                await enrol(store, 0)

        for where in (path, url):
            asyncio.run(fill(where))
        for source, target in ((str(path), url), (url, str(path))):
            code, _, err = fedone("db", "copy", source, target)
            assert (code, len(err.splitlines())) == (2, 1)
            assert "the target is not empty: it has rows in the table" in err
            assert PASSWORD not in err

    def test_a_database_is_not_copied_onto_itself(
        self, fedone: Fedone, postgres: Cluster, database: str
    ) -> None:
        url = postgres.tcp_url(database)
        assert fedone("db", "upgrade", "--store", url)[0] == 0
        code, _, err = fedone("db", "copy", url, url)
        assert code == 2
        assert err.endswith("is in use by another process\n")

    def test_a_damaged_run_is_one_line(self, fedone: Fedone, tmp_path: Path) -> None:
        store = str(tmp_path / "first.db")
        asyncio.run(tune(SqlStore.sqlite(store), rounds=1, state=tmp_path))
        with closing(sqlite3.connect(store)) as db, db:
            db.execute("UPDATE run_data SET arrays = x''")
        for call in (("db", "copy", store, "copy.db"), ("report", "small", "--store", store)):
            code, _, err = fedone(*call)
            assert (code, len(err.splitlines())) == (2, 1)
            assert "run 'small' is damaged" in err


class TestLocks:
    async def test_a_served_store_is_neither_source_nor_target(
        self, tmp_path: Path, postgres: Cluster, database: str
    ) -> None:
        url, other = postgres.url(database), tmp_path / "other.db"
        async with opened(other):
            pass
        async with opened(tmp_path / "fedone.db"), opened(url):
            served = SqlStore.sqlite(tmp_path / "fedone.db"), SqlStore.at(url)
            for store, said in zip(
                served, ("in use by another process", "by a server"), strict=True
            ):
                with pytest.raises(FedOneError, match=said):
                    await store.copy_to(SqlStore.sqlite(tmp_path / "new.db"), alpha_sha256)
                with pytest.raises(FedOneError, match=said):
                    await SqlStore.sqlite(other).copy_to(store, alpha_sha256)
        async with opened(url) as store:
            assert await store.versions() == {}

    async def test_an_empty_source(self, tmp_path: Path) -> None:
        source, target = tmp_path / "empty.db", tmp_path / "new.db"
        source.touch()
        with pytest.raises(FedOneError, match=r"empty\.db cannot be used: it is empty"):
            await SqlStore.sqlite(source).copy_to(SqlStore.sqlite(target), alpha_sha256)
        assert not target.exists()

    async def test_a_copy_that_differs_leaves_the_target_empty(
        self, tmp_path: Path, postgres: Cluster, database: str
    ) -> None:
        url = postgres.url(database)
        async with opened(tmp_path / "fedone.db") as store:
            await enrol(store, 0)
            await store.add_run(RUN)
            await store.commit("run-1", 0, everything())
        digests = iter("abcd")
        for target in (SqlStore.at(url), SqlStore.sqlite(tmp_path / "new.db")):
            with pytest.raises(FedOneError, match="the copy differs from the source"):
                await SqlStore.sqlite(tmp_path / "fedone.db").copy_to(
                    target, lambda arrays: next(digests)
                )
            await target.open()
            assert (await target.versions(), await target.clients()) == ({}, [])
            await target.close()

    async def test_everything_is_copied_in_small_pieces(
        self, tmp_path: Path, postgres: Cluster, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(schema, "_ROWS", 2)
        url = postgres.url(database)
        async with opened(tmp_path / "fedone.db") as store:
            known = [await enrol(store, number) for number in range(5)]
            await store.add_run(RUN)
            await store.commit("run-1", 0, everything())
            tokens, run = await store.tokens(), await store.run("run-1")
            log = await store.log("run-1")
        await SqlStore.sqlite(tmp_path / "fedone.db").copy_to(SqlStore.at(url), lambda arrays: "")
        async with opened(url) as store:
            assert (await store.tokens(), await store.run("run-1")) == (tokens, run)
            assert (await store.clients(), await store.log("run-1")) == (known, log)
            # Sequences go on behind the copied rows.
            assert (await enrol(store, 5)).index == 5
            await store.add_run(replace(RUN, run_id="run-2"))
            assert list(await store.versions()) == ["run-1", "run-2"]


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
