"""The schema of a store: created, upgraded with its data, or refused."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from fedone_sdk.errors import FedOneError
from fedone_sdk.stores import SqlStore
from fedone_sdk.stores.sql import schema
from fedone_sdk.stores.sql.schema import metadata
from tests.console import Fedone
from tests.contract.stores import RUN, opened
from tests.postgres import Cluster


def differences(connection: Connection) -> list[Any]:
    options = {"compare_type": True, "compare_server_default": True}
    context = MigrationContext.configure(connection, opts=options)
    return list(compare_metadata(context, metadata))


class TestSqlite:
    async def test_a_new_file(self, tmp_path: Path) -> None:
        async with opened(tmp_path / "new.db") as store:
            assert await store._read(differences) == []
            assert await store.schema() == schema.HEAD

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
            with pytest.raises(FedOneError, match=r"schema 1000.*up to 0001; upgrade fedone-sdk"):
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
        assert await SqlStore.at(url).schema() is None
        async with opened(url) as store:
            assert await store._read(differences) == []
            assert await store.schema() == schema.HEAD

    async def test_stores_that_open_together(self, postgres: Cluster, database: str) -> None:
        stores = [SqlStore.at(postgres.url(database)) for _ in range(8)]
        await asyncio.gather(*(store.open() for store in stores))
        await stores[0].add_run(RUN)
        assert await stores[7].run("run-1") == RUN
        for store in stores:
            await store.close()

    async def test_newer_schema_is_refused(self, postgres: Cluster, database: str) -> None:
        url = postgres.url(database)
        async with opened(url):
            pass
        postgres.execute("UPDATE alembic_version SET version_num = '1000'", database)
        for attempt in (SqlStore.at(url).open, SqlStore.at(url).upgrade):
            with pytest.raises(FedOneError, match=r"schema 1000.*up to 0001; upgrade fedone-sdk"):
                await attempt()

    async def test_other_database_is_refused(self, postgres: Cluster, database: str) -> None:
        postgres.execute("CREATE TABLE cookies (id integer)", database)
        with pytest.raises(FedOneError, match=rf"{database} .*another program"):
            await SqlStore.at(postgres.url(database)).open()


def test_the_head_is_the_newest_migration() -> None:
    config = Config()
    config.set_main_option("script_location", "fedone_sdk.stores:migrations")
    assert ScriptDirectory.from_config(config).get_heads() == [schema.HEAD]


class TestCommand:
    def test_file(self, fedone: Fedone, tmp_path: Path) -> None:
        path = str(tmp_path / "fedone.db")
        code, _, err = fedone("db", "upgrade", "--store", path)
        assert (code, err) == (2, f"store {path} cannot be used: there is no such file\n")
        assert not [*tmp_path.iterdir()]
        assert fedone("db", "copy", str(tmp_path), path).err.endswith(": there is no such file\n")
        Path(path).touch()
        for said in ("created schema 0001", "the store has the newest schema, 0001"):
            assert fedone("db", "upgrade", "--store", path) == (0, f"{said}\n", "")

    def test_server(self, fedone: Fedone, postgres: Cluster, database: str) -> None:
        url = postgres.tcp_url(database)
        for said in ("created schema 0001", "the store has the newest schema, 0001"):
            assert fedone("db", "upgrade", "--store", url) == (0, f"{said}\n", "")

    def test_mistakes_are_one_line(self, fedone: Fedone, tmp_path: Path) -> None:
        config, database = tmp_path / "config.yaml", tmp_path / "fedone.db"
        database.touch()
        assert fedone("db", "upgrade", "--store", str(database))[0] == 0
        for arguments, said in [
            (["--store", "postgresql://me:sesame@127.0.0.1:1/db"], "store 127.0.0.1/db cannot"),
            (["--store", "mysql://me:sesame@host/db"], "mysql is not supported"),
            ([str(config), "--store", "x"], "not both"),
            ([str(database)], "is a database, not a CONFIG.yaml; use --store"),
        ]:
            code, out, err = fedone("db", "upgrade", *arguments)
            assert code == 2
            assert said in err
            assert len(err.splitlines()) == 1
            assert "sesame" not in err + out
