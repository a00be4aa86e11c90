"""The schema: its tables, equal on every database, and its versions.

An empty database gets the tables and the newest version; `migrations` upgrade an older one.

Databases rewrite whole rows, so large columns that most commits do not change are in ``run_data``,
separate from ``runs``. The key of a log line is (run, version, position), so its order needs no
sequence.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import (
    Column,
    Connection,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    delete,
    func,
    insert,
    inspect,
    select,
    text,
)

from fedone_sdk.errors import FedOneError

HEAD = "0001"
"""Schema version of this code; a test compares it with the migrations."""

metadata = MetaData()


class _Patterns(TypeDecorator[tuple[str, ...]]):
    """Patterns of runs, as a JSON list."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: tuple[str, ...] | None, dialect: Any) -> str | None:
        return None if value is None else json.dumps(value)

    def process_result_value(self, value: str | None, dialect: Any) -> tuple[str, ...] | None:
        return None if value is None else tuple(json.loads(value))


# Integers by name: ``num_clients``.
meta = Table(
    "meta",
    metadata,
    Column("key", String, primary_key=True),
    Column("value", Integer, nullable=False),
)
tokens = Table(
    "tokens",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("name", String, nullable=False, unique=True),
    Column("token_sha256", String, nullable=False, unique=True),
    Column("runs", _Patterns),
    Column("uses_left", Integer),
    Column("expires_at", Double),
    Column("created_at", Double, nullable=False),
    Column("revoked_at", Double),
)
clients = Table(
    "clients",
    metadata,
    Column("index", Integer, primary_key=True, autoincrement=False),
    Column("client_id", String, nullable=False, unique=True),
    Column("credential_sha256", String, nullable=False),
    Column("name", Text),
    Column("enrolled_at", Double, nullable=False),
    Column("enrolment_sha256", String),
    Column("token", String),
    Column("runs", _Patterns),
    Column("previous_sha256", String),
    Column("revoked_at", Double),
    Column("seen_at", Double),
    Index("clients_credential_sha256", "credential_sha256"),
    Index("clients_previous_sha256", "previous_sha256"),
    Index("clients_enrolment_sha256", "enrolment_sha256", unique=True),
)
members = Table(
    "members",
    metadata,
    Column("client_index", Integer, primary_key=True, autoincrement=False),
    Column("num_examples", Integer, nullable=False),
    Column("run_id", String),
    Column("until", Double, nullable=False),
)
runs = Table(
    "runs",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("run_id", String, nullable=False, unique=True),
    Column("version", Integer, nullable=False),
    Column("document", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    # Names of the last commits, newest first, to resolve a commit whose connection broke
    # (PostgreSQL).
    Column("commits", Text, nullable=False, server_default=text("''")),
)


def _run_key(*, primary_key: bool = True) -> Column[str]:
    return Column(
        "run_id", String, ForeignKey("runs.run_id"), primary_key=primary_key, nullable=False
    )


run_data = Table(
    "run_data",
    metadata,
    _run_key(),
    Column("spec", Text, nullable=False),
    Column("candidates", Text, nullable=False),
    Column("arrays", LargeBinary, nullable=False),
)
closed_work = Table(
    "closed_work",
    metadata,
    Column("assignment_id", String, primary_key=True),
    _run_key(primary_key=False),
    Column("client_index", Integer, nullable=False),
    Column("outcome", String, nullable=False),
    Column("body_sha256", String),
    Column("receipt", Text),
    Index("closed_work_run_id", "run_id"),
)
log = Table(
    "log",
    metadata,
    _run_key(),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("kind", String, nullable=False),
    Column("body", Text, nullable=False),
)
memories = Table(
    "memories",
    metadata,
    _run_key(),
    Column("client_index", Integer, primary_key=True, autoincrement=False),
    Column("round", Integer, primary_key=True, autoincrement=False),
    Column("value", LargeBinary, nullable=False),
)
# Reserved ids of deleted runs, with their last versions.
deleted_runs = Table(
    "deleted_runs",
    metadata,
    Column("run_id", String, primary_key=True),
    Column("version", Integer, nullable=False),
    Column("deleted_at", Double, nullable=False),
)


class SchemaRefused(Exception):
    """The schema of the database is not supported; the message has the reason and a remedy."""


def current(connection: Connection) -> str | None:
    """Return the schema version of a database; None if it is empty.

    Raises:
        SchemaRefused: It belongs to another program or a newer fedone-sdk.
    """
    tables = inspect(connection).get_table_names()
    if not tables:
        return None
    found = None
    if {"meta", "alembic_version"} <= set(tables):
        found = MigrationContext.configure(connection).get_current_revision()
    if found is None:
        raise SchemaRefused("another program's database")
    known = [script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()]
    if found not in known:
        raise SchemaRefused(
            f"it has schema {found} and this fedone-sdk knows schemas up to {HEAD}; "
            "upgrade fedone-sdk"
        )
    return found


def prepare(connection: Connection, *, upgrading: bool) -> None:
    """Create the tables of an empty database; upgrade or refuse an old one.

    Runs within the open transaction.

    Raises:
        SchemaRefused: It belongs to another program or a newer fedone-sdk, or is old and must not
            be upgraded.
    """
    found = current(connection)
    if found == HEAD:
        return
    if found is not None and not upgrading:
        raise SchemaRefused(
            f"it has schema {found} and this fedone-sdk needs schema {HEAD}; "
            "run `fedone db upgrade`"
        )
    config = _config()
    config.attributes["connection"] = connection
    if found is None:
        metadata.create_all(connection)
        connection.execute(insert(meta), {"key": "num_clients", "value": 0})
        command.stamp(config, HEAD)
    else:
        command.upgrade(config, HEAD)


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", "fedone_sdk.stores:migrations")
    return config


_ROWS = 100
"""Number of rows that are read and written at once."""

_SEQUENCE = """
SELECT setval(pg_get_serial_sequence('{table}', 'seq'), coalesce(max(seq), 1), max(seq) IS NOT NULL)
FROM {table}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """The number of rows by table, and the digest of each run's state."""

    rows: dict[str, int]
    digests: dict[str, str]


def copy(source: Connection, target: Connection, digest: Callable[[bytes], str]) -> Copied:
    """Copy all rows, then compare the number of rows of each table and the digest of each run.

    Both connections are in a transaction, and no server holds either store. `digest` is that of a
    run's arrays.

    Raises:
        FedOneError: The target is not empty, or the copy differs from the source.
        SchemaRefused: The source has another
    """
    if (found := current(source)) != HEAD:
        raise SchemaRefused(f"it has schema {found}, a copy needs {HEAD}; run `fedone db upgrade`")
    tables = metadata.sorted_tables
    for table in tables:
        if table is not meta and _count(target, table):
            raise FedOneError(f"the target is not empty: it has rows in the table {table.name}")
    target.execute(delete(meta))
    for table in tables:
        query = select(table).execution_options(yield_per=_ROWS)
        for some in source.execute(query).mappings().partitions():
            target.execute(insert(table), [dict(row) for row in some])
    if target.dialect.name == "postgresql":
        for table in tables:
            if "seq" in table.c:
                target.execute(text(_SEQUENCE.format(table=table.name)))
    copied = _content(target, digest)
    if copied != _content(source, digest):
        raise FedOneError("the copy differs from the source")
    return copied


def _content(connection: Connection, digest: Callable[[bytes], str]) -> Copied:
    of_run = select(run_data.c.run_id, run_data.c.arrays).execution_options(yield_per=1)
    return Copied(
        rows={table.name: _count(connection, table) for table in metadata.sorted_tables},
        digests={row.run_id: digest(row.arrays) for row in connection.execute(of_run)},
    )


def _count(connection: Connection, table: Table) -> int:
    query: Any = select(func.count()).select_from(table)
    found: int = connection.execute(query).scalar_one()
    return found
