"""The schema of a store: created, upgraded with its data, or refused."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from fedone_sdk.errors import FedOneError
from fedone_sdk.stores import ClientRecord, ClosedWork, Commit, LogEntry, RunRecord, SqlStore
from fedone_sdk.stores.sql import schema
from fedone_sdk.stores.sql.schema import metadata
from tests.console import Fedone
from tests.contract.stores import RUN, enrol, opened
from tests.postgres import Cluster

# As `sqlite3 fedone.db .dump` shows a file of the release before Alembic, with rows of each kind.
RELEASED = """
CREATE TABLE meta (
    "key" VARCHAR NOT NULL,
    value INTEGER NOT NULL,
    PRIMARY KEY ("key")
);
INSERT INTO meta VALUES ('schema_version', 1), ('num_clients', 2);
CREATE TABLE clients (
    "index" INTEGER NOT NULL,
    client_id VARCHAR NOT NULL,
    credential_sha256 VARCHAR NOT NULL,
    name TEXT,
    enrolled_at DOUBLE NOT NULL,
    PRIMARY KEY ("index"),
    UNIQUE (client_id)
);
INSERT INTO clients VALUES
    (0, 'client-a', 'aa', 'Bé', 1700000000.25), (1, 'client-b', 'bb', NULL, 1700000001.5);
CREATE TABLE runs (
    seq INTEGER NOT NULL,
    run_id VARCHAR NOT NULL,
    version INTEGER NOT NULL,
    document TEXT NOT NULL,
    created_at DOUBLE NOT NULL,
    PRIMARY KEY (seq),
    UNIQUE (run_id)
);
INSERT INTO runs VALUES (1, 'sst2', 3, '{"round": 3}', 1700000002.0);
CREATE TABLE run_data (
    run_id VARCHAR NOT NULL,
    spec TEXT NOT NULL,
    candidates TEXT NOT NULL,
    arrays BLOB NOT NULL,
    PRIMARY KEY (run_id),
    FOREIGN KEY(run_id) REFERENCES runs (run_id)
);
INSERT INTO run_data VALUES ('sst2', '{}', '[" good"]', X'00FF10');
CREATE TABLE closed_work (
    assignment_id VARCHAR NOT NULL,
    run_id VARCHAR NOT NULL,
    client_index INTEGER NOT NULL,
    outcome VARCHAR NOT NULL,
    body_sha256 VARCHAR,
    receipt TEXT,
    PRIMARY KEY (assignment_id),
    FOREIGN KEY(run_id) REFERENCES runs (run_id)
);
INSERT INTO closed_work VALUES ('work-1', 'sst2', 1, 'accepted', 'cd', '{"round": 2}');
CREATE TABLE log (
    run_id VARCHAR NOT NULL,
    version INTEGER NOT NULL,
    position INTEGER NOT NULL,
    kind VARCHAR NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (run_id, version, position),
    FOREIGN KEY(run_id) REFERENCES runs (run_id)
);
INSERT INTO log VALUES
    ('sst2', 2, 0, 'round', '{"round": 1}'), ('sst2', 3, 0, 'round', '{"round": 2}'),
    ('sst2', 3, 1, 'metric', '0.5');
CREATE TABLE memories (
    run_id VARCHAR NOT NULL,
    client_index INTEGER NOT NULL,
    value BLOB NOT NULL,
    PRIMARY KEY (run_id, client_index),
    FOREIGN KEY(run_id) REFERENCES runs (run_id)
);
INSERT INTO memories VALUES ('sst2', 1, X'0102');
"""


def released(path: Path) -> Path:
    """A file of the release before Alembic."""
    with closing(sqlite3.connect(path)) as database, database:
        database.executescript(RELEASED)
    return path


def content(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as database:
        return sorted(database.iterdump())


async def check_released_content(store: SqlStore) -> None:
    clients = await store.clients()
    # When they were last seen is not known: as if it were at the upgrade.
    assert all(time.time() - 600 < (client.seen_at or 0.0) <= time.time() for client in clients)
    assert [replace(client, seen_at=None) for client in clients] == [
        ClientRecord(
            index=0,
            client_id="client-a",
            credential_sha256="aa",
            name="Bé",
            enrolled_at=1700000000.25,
        ),
        ClientRecord(
            index=1, client_id="client-b", credential_sha256="bb", enrolled_at=1700000001.5
        ),
    ]
    assert await store.runs() == [
        RunRecord(
            run_id="sst2",
            spec="{}",
            candidates='[" good"]',
            document='{"round": 3}',
            arrays=b"\0\xff\x10",
            version=3,
            created_at=1700000002.0,
        )
    ]
    assert await store.closed("work-1") == ClosedWork(
        assignment_id="work-1",
        run_id="sst2",
        client_index=1,
        outcome="accepted",
        body_sha256="cd",
        receipt='{"round": 2}',
    )
    assert await store.log("sst2") == [
        LogEntry(kind="round", body='{"round": 1}', version=2),
        LogEntry(kind="round", body='{"round": 2}', version=3),
        LogEntry(kind="metric", body="0.5", version=3),
    ]
    assert await store.memories("sst2") == {1: b"\1\2"}
    assert await store.tokens() == []
    assert await store.members() == []


def differences(connection: Connection) -> list[Any]:
    options = {"compare_type": True, "compare_server_default": True}
    context = MigrationContext.configure(connection, opts=options)
    return list(compare_metadata(context, metadata))


class TestSqlite:
    async def test_a_released_file_is_upgraded_with_all_it_holds(self, tmp_path: Path) -> None:
        path = released(tmp_path / "fedone.db")
        async with opened(path) as store:
            await check_released_content(store)
            assert (await enrol(store, 2)).index == 2
            await store.commit("sst2", 3, Commit(document="4"))
        async with opened(path) as store:
            assert await store.versions() == {"sst2": 4}
            assert len(await store.clients()) == 3

    async def test_an_upgraded_file_is_as_a_new_one(self, tmp_path: Path) -> None:
        old, new = released(tmp_path / "old.db"), tmp_path / "new.db"
        for path in (old, new):
            async with opened(path) as store:
                assert await store._database.read(differences) == []
                assert await store.schema() == schema.HEAD

    async def test_an_older_program_refuses_it(self, tmp_path: Path) -> None:
        path = released(tmp_path / "fedone.db")
        await SqlStore.sqlite(path).upgrade()
        with closing(sqlite3.connect(path)) as database:
            query = "SELECT value FROM meta WHERE key = 'schema_version'"
            assert database.execute(query).fetchone() == (2,)

    async def test_a_tool_upgrades_nothing(self, tmp_path: Path) -> None:
        path = released(tmp_path / "fedone.db")
        before = content(path)
        with pytest.raises(FedOneError, match=r"fedone\.db .*schema 0001.*fedone db upgrade"):
            await SqlStore.sqlite(path, serving=False).open()
        assert await SqlStore.sqlite(path).schema() == "0001"
        assert content(path) == before
        await SqlStore.sqlite(path).upgrade()
        async with opened(path, serving=False) as tool:
            await check_released_content(tool)

    async def test_a_failed_upgrade_changes_nothing(self, tmp_path: Path) -> None:
        path = released(tmp_path / "fedone.db")
        with closing(sqlite3.connect(path)) as database, database:
            # The last table that the upgrade makes.
            database.execute("CREATE TABLE members (theirs INTEGER)")
        before = content(path)
        with pytest.raises(FedOneError, match=r"fedone\.db.*members already exists"):
            await SqlStore.sqlite(path).open()
        assert content(path) == before

    async def test_looking_makes_no_file(self, tmp_path: Path) -> None:
        assert await SqlStore.sqlite(tmp_path / "fedone.db").schema() is None
        assert os.listdir(tmp_path) == []

    async def test_newer_schema_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "store.db"
        async with opened(path):
            pass
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("UPDATE alembic_version SET version_num = '1000'")
        for attempt in (SqlStore.sqlite(path).open, SqlStore.sqlite(path).upgrade):
            with pytest.raises(FedOneError, match=r"schema 1000.*up to 0003; upgrade fedone-sdk"):
                await attempt()

    @pytest.mark.parametrize(
        "statement",
        [
            "CREATE TABLE cookies (id)",
            "CREATE TABLE meta (key, value)",
            "CREATE TABLE alembic_version (version_num)",
        ],
    )
    async def test_other_database_is_refused(self, tmp_path: Path, statement: str) -> None:
        path = tmp_path / "store.db"
        with closing(sqlite3.connect(path)) as database, database:
            database.execute(statement)
        with pytest.raises(FedOneError, match=r"store\.db.*another program"):
            await SqlStore.sqlite(path).open()


class TestPostgres:
    async def test_an_empty_database_is_set_up(self, postgres: Cluster, database: str) -> None:
        url = postgres.url(database)
        assert await SqlStore(url).schema() is None
        async with opened(url) as store:
            assert await store._database.read(differences) == []
            assert await store.schema() == schema.HEAD

    async def test_stores_that_open_together(self, postgres: Cluster, database: str) -> None:
        stores = [SqlStore(postgres.url(database), num_connections=2) for _ in range(8)]
        await asyncio.gather(*(store.open() for store in stores))
        await stores[0].add_run(RUN)
        assert await stores[7].runs() == [RUN]
        for store in stores:
            await store.close()

    async def test_an_older_schema_must_be_upgraded(self, postgres: Cluster, database: str) -> None:
        url = postgres.url(database)
        async with opened(url) as store:
            await store._database.write(lambda c: downgrade(c.exec_driver_sql))
        for serving in (True, False):
            with pytest.raises(FedOneError, match=r"schema 0001.*run `fedone db upgrade`"):
                await SqlStore(url, serving=serving).open()
        await SqlStore(url).upgrade()
        async with opened(url) as store:
            await check_released_content(store)
            assert await store._database.read(differences) == []
            assert (await enrol(store, 2)).index == 2

    async def test_newer_schema_is_refused(self, postgres: Cluster, database: str) -> None:
        url = postgres.url(database)
        async with opened(url):
            pass
        postgres.execute("UPDATE alembic_version SET version_num = '1000'", database)
        for attempt in (SqlStore(url).open, SqlStore(url).upgrade):
            with pytest.raises(FedOneError, match=r"schema 1000.*up to 0003; upgrade fedone-sdk"):
                await attempt()

    async def test_other_database_is_refused(self, postgres: Cluster, database: str) -> None:
        postgres.execute("CREATE TABLE cookies (id integer)", database)
        with pytest.raises(FedOneError, match=rf"{database} .*another program"):
            await SqlStore(postgres.url(database)).open()


def downgrade(execute: Callable[[str], object]) -> None:
    """Puts the tables and rows of the first schema in place of the newest ones."""
    for table in ("alembic_version", *metadata.tables):
        execute(f'DROP TABLE "{table}" CASCADE')
    for statement in RELEASED.split(";\n"):
        words = statement.replace(" DOUBLE ", " DOUBLE PRECISION ").replace(" BLOB ", " BYTEA ")
        words = words.replace("seq INTEGER", "seq SERIAL").replace("X'", "'\\x")
        if words.strip():
            execute(words)


def test_the_head_is_the_newest_migration() -> None:
    config = Config()
    config.set_main_option("script_location", "fedone_sdk.stores:migrations")
    assert ScriptDirectory.from_config(config).get_heads() == [schema.HEAD]


class TestCommand:
    def test_file(self, fedone: Fedone, tmp_path: Path) -> None:
        path = str(released(tmp_path / "fedone.db"))
        for command, code, said in [
            ("current", 1, "schema 0001; run `fedone db upgrade` to get 0003"),
            ("upgrade", 0, "upgraded 0001 to 0003"),
            ("upgrade", 0, "schema 0003 is the newest"),
            ("current", 0, "schema 0003 is the newest"),
        ]:
            assert fedone("db", command, "--store", path) == (code, f"{said}\n", "")

    def test_server(self, fedone: Fedone, postgres: Cluster, database: str) -> None:
        url = postgres.tcp_url(database)
        for command, said in [
            ("current", "empty; schema 0003 is created when it is first opened"),
            ("upgrade", "created schema 0003"),
            ("current", "schema 0003 is the newest"),
        ]:
            assert fedone("db", command, "--store", url) == (0, f"{said}\n", "")

    def test_mistakes_are_one_line(self, fedone: Fedone, tmp_path: Path) -> None:
        config = tmp_path / "config.yaml"
        for arguments, said in [
            (["--store", "postgresql://me:sesame@127.0.0.1:1/db"], "store 127.0.0.1/db cannot"),
            (["--store", "mysql://me:sesame@host/db"], "mysql is not supported"),
            ([str(config), "--store", "x"], "not both"),
        ]:
            code, out, err = fedone("db", "upgrade", *arguments)
            assert code == 2
            assert said in err
            assert len(err.splitlines()) == 1
            assert "sesame" not in err + out
