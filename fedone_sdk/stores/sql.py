"""A store in a SQL database: SQLite today, PostgreSQL through the same statements later.

The layout follows from what one commit touches. SQLite rewrites a row whole, so the bulky
columns that most commits leave alone sit in ``run_data``, apart from ``runs``. A log line is
keyed by (run, version, position), so its order needs no sequence.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sqlite3
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Self, TypeVar

from sqlalchemy import (
    Column,
    Connection,
    Double,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    RowMapping,
    Select,
    String,
    Table,
    Text,
    bindparam,
    delete,
    event,
    insert,
    inspect,
    select,
    update,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from fedone_sdk.errors import FedOneError, MissingExtraError, SpecError
from fedone_sdk.stores.base import (
    ClientRecord,
    ClosedWork,
    Commit,
    LogEntry,
    RunRecord,
    VersionConflict,
)

__all__ = ["SqlStore"]

T = TypeVar("T")

SCHEMA_VERSION = 1

_metadata = MetaData()

# Integers by name: ``schema_version`` and ``num_clients``.
_meta = Table(
    "meta",
    _metadata,
    Column("key", String, primary_key=True),
    Column("value", Integer, nullable=False),
)
_clients = Table(
    "clients",
    _metadata,
    Column("index", Integer, primary_key=True, autoincrement=False),
    Column("client_id", String, nullable=False, unique=True),
    Column("credential_sha256", String, nullable=False),
    Column("name", Text),
    Column("enrolled_at", Double, nullable=False),
)
_runs = Table(
    "runs",
    _metadata,
    Column("seq", Integer, primary_key=True),
    Column("run_id", String, nullable=False, unique=True),
    Column("version", Integer, nullable=False),
    Column("document", Text, nullable=False),
    Column("created_at", Double, nullable=False),
)


def _run_key(*, primary_key: bool = True) -> Column[str]:
    return Column(
        "run_id", String, ForeignKey("runs.run_id"), primary_key=primary_key, nullable=False
    )


_run_data = Table(
    "run_data",
    _metadata,
    _run_key(),
    Column("spec", Text, nullable=False),
    Column("candidates", Text, nullable=False),
    Column("arrays", LargeBinary, nullable=False),
)
_closed_work = Table(
    "closed_work",
    _metadata,
    Column("assignment_id", String, primary_key=True),
    _run_key(primary_key=False),
    Column("client_index", Integer, nullable=False),
    Column("outcome", String, nullable=False),
    Column("body_sha256", String),
    Column("receipt", Text),
)
_log = Table(
    "log",
    _metadata,
    _run_key(),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("kind", String, nullable=False),
    Column("body", Text, nullable=False),
)
_memories = Table(
    "memories",
    _metadata,
    _run_key(),
    Column("client_index", Integer, primary_key=True, autoincrement=False),
    Column("value", LargeBinary, nullable=False),
)

# The statements of a commit, built once rather than each time.
_ADVANCE = (
    update(_runs)
    .where(_runs.c.run_id == bindparam("of_run"), _runs.c.version == bindparam("at_version"))
    .values(version=_runs.c.version + 1, document=bindparam("new_document"))
)
_SET_ARRAYS = (
    update(_run_data)
    .where(_run_data.c.run_id == bindparam("of_run"))
    .values(arrays=bindparam("new_arrays"))
)
_FORGET = delete(_memories).where(
    _memories.c.run_id == bindparam("of_run"), _memories.c.client_index == bindparam("of_client")
)
_CLOSE, _APPEND, _REMEMBER = insert(_closed_work), insert(_log), insert(_memories)


class SqlStore:
    """A `Store` in a SQL database.

    All writes go through one connection that stays open, which saves a fifth or more of a
    commit; reads go through the pool, where they never wait for a writer.
    A write that has begun is carried out even if the caller is cancelled meanwhile.
    """

    def __init__(self, url: str | URL, *, busy_timeout_s: float = 5.0) -> None:
        """Describes a store; `open` connects.

        Args:
            url: A SQLAlchemy URL such as ``sqlite+aiosqlite:///fedone.db``.
            busy_timeout_s: How long a write waits for another process's to end.

        Raises:
            SpecError: The URL is malformed or does not name a SQLite file.
        """
        try:
            self._url = make_url(url)
        except ArgumentError as error:
            raise SpecError(f"not a database URL: {error}", source="store") from error
        if self._url.get_backend_name() != "sqlite":
            raise SpecError(
                f"{self._url.get_backend_name()} is not supported, only sqlite", source="store"
            )
        if self._url.drivername == "sqlite":
            self._url = self._url.set(drivername="sqlite+aiosqlite")
        self._path = self._url.database or ":memory:"
        if self._path == ":memory:" or self._path.startswith("file:"):
            raise SpecError(f"{self._path!r} is not the path of a file", source="store")
        self._busy_timeout_s = busy_timeout_s
        self._engine: AsyncEngine | None = None
        self._writer: AsyncConnection | None = None
        self._write_lock = asyncio.Lock()

    @classmethod
    def sqlite(cls, path: str | os.PathLike[str], *, busy_timeout_s: float = 5.0) -> Self:
        """A store in the SQLite file `path`, whatever characters its name has."""
        url = URL.create("sqlite+aiosqlite", database=os.fspath(path))
        return cls(url, busy_timeout_s=busy_timeout_s)

    def __repr__(self) -> str:
        return f"SqlStore({self._url.render_as_string(hide_password=True)!r})"

    async def open(self) -> None:
        """Connects, and creates what is missing.

        Raises:
            FedOneError: The file cannot be used: not writable, locked, not a database, another
                program's, or written by a newer version of the SDK.
        """
        if self._engine is not None:
            raise FedOneError(f"{self!r} is open already")
        try:
            self._engine = create_async_engine(self._url)
        except ModuleNotFoundError as error:
            raise MissingExtraError("SqlStore", extra="server") from error
        try:
            with self._translated():
                _create_private(self._path)
                _configure_sqlite(self._engine, self._busy_timeout_s)
                self._writer = await self._engine.connect()
                await self._writer.execution_options(fedone_write=True)
            await self._write(self._prepare)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Disconnects, after the write under way."""
        async with self._write_lock:
            engine, writer = self._engine, self._writer
            self._engine = self._writer = None
            if writer is not None:
                await writer.close()
            if engine is not None:
                await engine.dispose()

    async def ping(self) -> None:
        """Raises `FedOneError` if the database cannot be read now."""
        await self._read(lambda connection: connection.execute(select(_meta.c.value)).all())

    async def add_client(
        self, *, client_id: str, credential_sha256: str, name: str | None, now: float
    ) -> ClientRecord:
        """Enrols a client under the next index; a known id is a ``ValueError``."""

        def enrol(connection: Connection) -> ClientRecord:
            # The update comes first for its lock on the row: on any database, the next
            # enrolment waits here, and a rollback gives the index back.
            counter = _meta.c.key == "num_clients"
            connection.execute(update(_meta).where(counter).values(value=_meta.c.value + 1))
            record = ClientRecord(
                index=connection.execute(select(_meta.c.value).where(counter)).scalar_one() - 1,
                client_id=client_id,
                credential_sha256=credential_sha256,
                name=name,
                enrolled_at=now,
            )
            with _refusing(f"client {client_id!r} is enrolled already"):
                connection.execute(insert(_clients), asdict(record))
            return record

        return await self._write(enrol)

    async def clients(self) -> list[ClientRecord]:
        """All clients in index order."""
        rows = await self._read(_all(select(_clients).order_by(_clients.c.index)))
        return [ClientRecord(**row) for row in rows]

    async def add_run(self, record: RunRecord) -> None:
        """Adds a run; a known id is a ``ValueError``."""
        fields = asdict(record)

        def add(connection: Connection) -> None:
            with _refusing(f"run {record.run_id!r} exists already"):
                for table in (_runs, _run_data):
                    row = {c.name: fields[c.name] for c in table.c if c.name in fields}
                    connection.execute(insert(table), row)

        await self._write(add)

    async def runs(self) -> list[RunRecord]:
        """All runs in the order they were added."""
        names = (field.name for field in dataclasses.fields(RunRecord))
        columns = [_runs.c[name] if name in _runs.c else _run_data.c[name] for name in names]
        query = select(*columns).join_from(_runs, _run_data).order_by(_runs.c.seq)
        return [RunRecord(**row) for row in await self._read(_all(query))]

    async def commit(self, run_id: str, version: int, commit: Commit) -> None:
        """Stores an event's changes on top of `version`; see `Store.commit`."""
        await self._write(lambda connection: _commit(connection, run_id, version, commit))

    async def closed(self, assignment_id: str) -> ClosedWork | None:
        """How work ended, or None if it is not closed or not known."""
        query = select(_closed_work).where(_closed_work.c.assignment_id == assignment_id)
        rows = await self._read(_all(query))
        return ClosedWork(**rows[0]) if rows else None

    async def memory(self, run_id: str, client_index: int) -> bytes | None:
        """What a client's method remembers."""
        query = select(_memories.c.value).where(
            _memories.c.run_id == run_id, _memories.c.client_index == client_index
        )
        return await self._read(lambda connection: connection.execute(query).scalar())

    async def log(self, run_id: str, kind: str | None = None) -> list[LogEntry]:
        """A run's log in the order it was written, all kinds or one."""
        query = select(_log.c.kind, _log.c.body).where(_log.c.run_id == run_id)
        if kind is not None:
            query = query.where(_log.c.kind == kind)
        rows = await self._read(_all(query.order_by(_log.c.version, _log.c.position)))
        return [LogEntry(**row) for row in rows]

    async def _read(self, work: Callable[[Connection], T]) -> T:
        """Does `work` on one of the pool's connections; all it reads is of one moment."""
        if self._engine is None:
            raise FedOneError(f"{self!r} is not open")
        engine = self._engine

        async def transaction() -> T:
            with self._translated():
                async with engine.connect() as connection:
                    return await connection.run_sync(work)

        return await _to_the_end(transaction())

    async def _write(self, work: Callable[[Connection], T]) -> T:
        """Does `work` on the writing connection, in a transaction that an error rolls back."""

        async def transaction() -> T:
            try:
                if self._writer is None:
                    raise FedOneError(f"{self!r} is not open")
                with self._translated():
                    async with self._writer.begin():
                        return await self._writer.run_sync(work)
            finally:
                self._write_lock.release()

        # Who goes away while others write leaves the queue: otherwise callers that give up and
        # ask again, as devices do, would make it longer than it can ever be worked off.
        await self._write_lock.acquire()
        return await _to_the_end(transaction())

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Makes one error of all that the database and its driver raise."""
        try:
            yield
        except (SQLAlchemyError, sqlite3.Error, OSError) as error:
            reason = error.orig if isinstance(error, DBAPIError) else error
            raise FedOneError(f"store {self._path} cannot be used: {reason}") from error

    def _prepare(self, connection: Connection) -> None:
        """Creates the tables in an empty database; refuses one that is not ours."""
        tables = inspect(connection).get_table_names()
        if not tables:
            _metadata.create_all(connection)
            values = {"schema_version": SCHEMA_VERSION, "num_clients": 0}
            connection.execute(
                insert(_meta), [{"key": key, "value": value} for key, value in values.items()]
            )
            return
        query = select(_meta.c.value).where(_meta.c.key == "schema_version")
        if "meta" not in tables or (version := connection.execute(query).scalar()) is None:
            raise FedOneError(f"store {self._path} cannot be used: another program's database")
        if version > SCHEMA_VERSION:
            raise FedOneError(
                f"store {self._path} cannot be used: it has schema version {version} and this "
                f"fedone-sdk knows versions up to {SCHEMA_VERSION}; upgrade fedone-sdk"
            )
        # Migrations from older versions go here, in the same transaction.


async def _to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`, which goes on to its end when the caller is cancelled.

    SQLAlchemy drops a connection in which a call to aiosqlite was cancelled, but the driver's
    thread still holds it, and with it SQLite's only write lock: all later writes would fail.
    """
    task = asyncio.create_task(work, name="store transaction")
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


def _all(query: Select[Any]) -> Callable[[Connection], Sequence[RowMapping]]:
    """Work that reads all rows of a query."""
    return lambda connection: connection.execute(query).mappings().all()


@contextmanager
def _refusing(message: str) -> Iterator[None]:
    """Makes a ``ValueError`` of a key that is taken."""
    try:
        yield
    except IntegrityError as error:
        raise ValueError(message) from error


def _commit(connection: Connection, run_id: str, version: int, commit: Commit) -> None:
    """The statements of `SqlStore.commit`."""
    advanced = connection.execute(
        _ADVANCE, {"of_run": run_id, "at_version": version, "new_document": commit.document}
    )
    if advanced.rowcount != 1:
        query = select(_runs.c.version).where(_runs.c.run_id == run_id)
        found = connection.execute(query).scalar_one_or_none()
        if found is None:
            raise KeyError(run_id)
        raise VersionConflict(f"run {run_id!r} is at version {found}, not {version}")
    if commit.arrays is not None:
        connection.execute(_SET_ARRAYS, {"of_run": run_id, "new_arrays": commit.arrays})
    if any(work.run_id != run_id for work in commit.closed):
        raise ValueError(f"closed work is not of run {run_id!r}")
    if commit.closed:
        with _refusing("work can be closed only once"):
            connection.execute(_CLOSE, [asdict(work) for work in commit.closed])
    if commit.log:
        lines = [
            {"version": version + 1, "position": position, **asdict(entry)}
            for position, entry in enumerate(commit.log)
        ]
        connection.execute(_APPEND, [{"run_id": run_id, **line} for line in lines])
    if commit.memories:
        newest = dict(commit.memories)
        # No upsert: its syntax is not portable.
        connection.execute(_FORGET, [{"of_run": run_id, "of_client": client} for client in newest])
        connection.execute(
            _REMEMBER,
            [
                {"run_id": run_id, "client_index": client, "value": value}
                for client, value in newest.items()
            ],
        )


def _create_private(path: str) -> None:
    """Creates a missing file that only its owner may read.

    SQLite gives its ``-wal`` and ``-shm`` files the mode of the database file.
    """
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))


def _configure_sqlite(engine: AsyncEngine, busy_timeout_s: float) -> None:
    """Sets up every connection, and transactions that begin when we say so."""
    pragmas = (
        f"busy_timeout={round(busy_timeout_s * 1000)}",
        "journal_mode=WAL",
        # The budget rests on it: a commit that was acknowledged survives a loss of power.
        "synchronous=FULL",
        "fullfsync=ON",  # macOS, whose fsync alone leaves data in the drive's cache
        "foreign_keys=ON",
    )

    @event.listens_for(engine.sync_engine, "connect")
    def connect(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        # sqlite3 would begin transactions late, after the reads of a read-then-write one.
        connection.isolation_level = None
        cursor = connection.cursor()
        give_up = time.monotonic() + busy_timeout_s
        for pragma in pragmas:
            while True:
                try:
                    cursor.execute(f"PRAGMA {pragma}")
                    break
                except sqlite3.OperationalError:
                    # Unlike all else, the first change to WAL does not wait for others.
                    if time.monotonic() > give_up:
                        raise
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def begin(connection: Connection) -> None:
        # A deferred write could fail halfway, when another process wrote after it began.
        writes = connection.get_execution_options().get("fedone_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
