"""The tables in SQLite and PostgreSQL; the version of their schema; copying of a database.

An empty database gets the tables and the newest version; `migrations` upgrade an older database.

A commit writes a whole row of ``runs``. Large columns that most commits do not change are therefore
in ``run_data``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from fedone_sdk.errors import FedOneError

HEAD = "0001"
"""Schema version of this code; a test compares it with the migrations."""

metadata = sa.MetaData()


class _Patterns(sa.TypeDecorator[tuple[str, ...]]):
    """Patterns of runs, as a JSON list."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: tuple[str, ...] | None, dialect: Any) -> str | None:
        return None if value is None else json.dumps(value)

    def process_result_value(self, value: str | None, dialect: Any) -> tuple[str, ...] | None:
        return None if value is None else tuple(json.loads(value))


# Named integers; at present only ``num_clients``.
meta = sa.Table(
    "meta",
    metadata,
    sa.Column("key", sa.String, primary_key=True),
    sa.Column("value", sa.Integer, nullable=False),
)
tokens = sa.Table(
    "tokens",
    metadata,
    sa.Column("seq", sa.Integer, primary_key=True),
    sa.Column("name", sa.String, nullable=False, unique=True),
    sa.Column("token_sha256", sa.String, nullable=False, unique=True),
    sa.Column("runs", _Patterns),
    sa.Column("uses_left", sa.Integer),
    sa.Column("expires_at", sa.Double),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("revoked_at", sa.Double),
)
clients = sa.Table(
    "clients",
    metadata,
    sa.Column("index", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("client_id", sa.String, nullable=False, unique=True),
    sa.Column("credential_sha256", sa.String, nullable=False),
    sa.Column("name", sa.Text),
    sa.Column("enrolled_at", sa.Double, nullable=False),
    sa.Column("enrolment_sha256", sa.String),
    sa.Column("token", sa.String),
    sa.Column("runs", _Patterns),
    sa.Column("previous_sha256", sa.String),
    sa.Column("revoked_at", sa.Double),
    sa.Column("seen_at", sa.Double),
    sa.Index("clients_credential_sha256", "credential_sha256"),
    sa.Index("clients_previous_sha256", "previous_sha256"),
    sa.Index("clients_enrolment_sha256", "enrolment_sha256", unique=True),
)
members = sa.Table(
    "members",
    metadata,
    sa.Column("client_index", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("num_examples", sa.Integer, nullable=False),
    sa.Column("run_id", sa.String),
    sa.Column("until", sa.Double, nullable=False),
)
runs = sa.Table(
    "runs",
    metadata,
    sa.Column("seq", sa.Integer, primary_key=True),
    sa.Column("run_id", sa.String, nullable=False, unique=True),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("document", sa.Text, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    # Names of the last commits, newest first; see `postgres`.
    sa.Column("commits", sa.Text, nullable=False, server_default=sa.text("''")),
)


def _run_key(*, primary_key: bool = True) -> sa.Column[str]:
    return sa.Column(
        "run_id", sa.String, sa.ForeignKey("runs.run_id"), primary_key=primary_key, nullable=False
    )


run_data = sa.Table(
    "run_data",
    metadata,
    _run_key(),
    sa.Column("spec", sa.Text, nullable=False),
    sa.Column("candidates", sa.Text, nullable=False),
    sa.Column("arrays", sa.LargeBinary, nullable=False),
)
closed_work = sa.Table(
    "closed_work",
    metadata,
    sa.Column("assignment_id", sa.String, primary_key=True),
    _run_key(primary_key=False),
    sa.Column("client_index", sa.Integer, nullable=False),
    sa.Column("outcome", sa.String, nullable=False),
    sa.Column("body_sha256", sa.String),
    sa.Column("receipt", sa.Text),
    sa.Index("closed_work_run_id", "run_id"),
)
log = sa.Table(
    "log",
    metadata,
    _run_key(),
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("position", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("kind", sa.String, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
)
memories = sa.Table(
    "memories",
    metadata,
    _run_key(),
    sa.Column("client_index", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("round", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("value", sa.LargeBinary, nullable=False),
)
# Ids of deleted runs, which stay reserved.
deleted_runs = sa.Table(
    "deleted_runs",
    metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("deleted_at", sa.Double, nullable=False),
)


class SchemaRefused(Exception):
    """The schema or the encoding of the database is not supported."""


def current(connection: sa.Connection) -> str | None:
    """Return the schema version of a database; None if it is empty.

    Raises:
        SchemaRefused: The database belongs to another program or a newer fedone-sdk.
    """
    tables = sa.inspect(connection).get_table_names()
    if not tables:
        return None
    revision = None
    if {"meta", "alembic_version"} <= set(tables):
        revision = MigrationContext.configure(connection).get_current_revision()
    if revision is None:
        raise SchemaRefused("the database belongs to another program")
    known = [script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()]
    if revision not in known:
        raise SchemaRefused(
            f"it has schema {revision} and this fedone-sdk knows schemas up to {HEAD}; "
            "upgrade fedone-sdk"
        )
    return revision


def prepare(connection: sa.Connection, *, upgrading: bool) -> None:
    """Create the tables of an empty database, or upgrade an old one, in the open transaction.

    Raises:
        SchemaRefused: As for `current`; or the database is old, and `upgrading` is false.
    """
    revision = current(connection)
    if revision == HEAD:
        return
    if revision is not None and not upgrading:
        raise SchemaRefused(
            f"it has schema {revision} and this fedone-sdk needs schema {HEAD}; "
            "run `fedone db upgrade`"
        )
    config = _config()
    config.attributes["connection"] = connection
    if revision is None:
        metadata.create_all(connection)
        connection.execute(sa.insert(meta), {"key": "num_clients", "value": 0})
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
    """The number of rows by table, and the digest of each run's arrays."""

    rows: dict[str, int]
    digests: dict[str, str]


def check_source(source: sa.Connection) -> None:
    """Raise `SchemaRefused` if a database is empty, or if its schema version is not `HEAD`."""
    if (known := current(source)) is None:
        raise SchemaRefused("it is empty; there is nothing to copy")
    if known != HEAD:
        raise SchemaRefused(f"it has schema {known}, a copy needs {HEAD}; run `fedone db upgrade`")


def copy(source: sa.Connection, target: sa.Connection, digest: Callable[[bytes], str]) -> Copied:
    """Copy all rows in the connections' transactions, then compare row counts and digests.

    Raises:
        FedOneError: The target is not empty, or the copy differs from the source.
    """
    tables = metadata.sorted_tables
    for table in tables:
        if table is not meta and _count(target, table):
            raise FedOneError(f"the target is not empty: it has rows in the table {table.name}")
    target.execute(sa.delete(meta))
    for table in tables:
        query = sa.select(table).execution_options(yield_per=_ROWS)
        for rows in source.execute(query).mappings().partitions():
            target.execute(sa.insert(table), [dict(row) for row in rows])
    if target.dialect.name == "postgresql":
        for table in tables:
            if "seq" in table.c:
                target.execute(sa.text(_SEQUENCE.format(table=table.name)))
    copied = _content(target, digest)
    if copied != _content(source, digest):
        raise FedOneError("the copy differs from the source")
    return copied


def _content(connection: sa.Connection, digest: Callable[[bytes], str]) -> Copied:
    arrays = sa.select(run_data.c.run_id, run_data.c.arrays).execution_options(yield_per=1)
    rows = {table.name: _count(connection, table) for table in metadata.sorted_tables}
    digests = dict[str, str]()
    for row in connection.execute(arrays):
        try:
            digests[row.run_id] = digest(row.arrays)
        except ValueError as exc:
            raise FedOneError(f"run {row.run_id!r} is damaged: {exc}") from exc
    return Copied(rows=rows, digests=digests)


def _count(connection: sa.Connection, table: sa.Table) -> int:
    query: Any = sa.select(sa.func.count()).select_from(table)
    return int(connection.execute(query).scalar_one())
