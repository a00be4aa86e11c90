"""A SQLite file for one server; writes that wait at the same time share one transaction."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from os.path import samestat
from pathlib import Path
from shutil import disk_usage
from typing import Any, TypeVar, cast

import structlog
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL
from sqlalchemy.engine.interfaces import DBAPIConnection, ExceptionContext
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry, NullPool

from fedone_sdk.errors import FedOneError, SpecError, StoreUnavailable
from fedone_sdk.files import create_private, erase_log, lock_file, use_wal
from fedone_sdk.stores.base import Commit, SingleProcess, check_run_of, run_shielded
from fedone_sdk.stores.sql import schema, statements
from fedone_sdk.stores.sql.store import SqlStore

T = TypeVar("T")

_log = structlog.get_logger(__name__)

_BUSY_S = 5.0
"""Maximum wait of a write for another process, seconds."""

_MAX_BATCH = 128
"""Maximum number of writes per transaction; each is answered when all are on disk."""

_FILE_ERRORS = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
_NUM_READERS = 4
_MOUNTS = Path("/proc/self/mountinfo")  # The mounts of this process, one per line; only on Linux.
_MIN_FREE = 2**20
"""Minimum free space of the disk, bytes."""

_Outcomes = Sequence[tuple[Any, BaseException | None]]
"""The result or the exception of each write."""


@dataclass(eq=False, slots=True)
class _Write:
    work: Callable[[Connection], Any]
    done: asyncio.Future[Any] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class SqliteStore(SingleProcess, SqlStore, drivers=("sqlite", "sqlite+aiosqlite")):
    """A store in a SQLite file.

    Each transaction runs in a thread. All writes use one connection. Queued writes share one
    transaction, which is flushed to disk once; each write has its own savepoint. Reads use separate
    connections and never wait for a writer.
    """

    def __init__(self, url: URL, *, serving: bool = True) -> None:
        super().__init__()
        SqlStore.__init__(self, url.set(drivername="sqlite"), serving=serving)
        self.where = url.database or ":memory:"
        if self.where == ":memory:" or self.where.startswith("file:"):
            raise SpecError(f"{self.where!r} is not the path of a file", source="store")
        self._lock: int | None = None
        self._file: tuple[str, os.stat_result] | None = None  # absolute path, and the file there
        self._engine: Engine | None = None
        self._writer: Connection | None = None
        self._threads = _Threads()
        self._waiting: deque[_Write] = deque()
        self._writing: asyncio.Future[_Outcomes] | None = None

    async def _connect(self, *, serving: bool, upgrading: bool) -> None:
        if self._engine is not None:
            raise FedOneError(f"store {self.where} is open already")
        self._engine = create_engine(self._url, pool_size=_NUM_READERS + 1, max_overflow=0)
        self._threads = _Threads()

        def connect(engine: Engine) -> Connection:
            _check_file(self.where, create=serving)
            if serving or upgrading:
                self._lock = _lock(self.where)
            _configure(engine)
            writer = engine.connect().execution_options(fedone_write=True)
            _erase(writer)  # a killed process may have left deleted data in the log
            self._file = os.path.abspath(self.where), os.stat(self.where)
            return writer

        try:
            with self._translate_errors():
                self._writer = await self._threads.write(connect, self._engine)
            upgrading = upgrading or serving
            await self._write(lambda connection: schema.prepare(connection, upgrading=upgrading))
        except BaseException:
            await self.close()
            raise
        self._new_replica()

    @asynccontextmanager
    async def _alone(self, *, empty: bool) -> AsyncIterator[Connection]:
        with self._translate_errors():
            _check_file(self.where, create=empty)
            lock = _lock(self.where)
            engine = create_engine(self._url, poolclass=NullPool)
            _configure(engine)
            try:
                connection = engine.connect().execution_options(fedone_write=empty)
                with connection, connection.begin():
                    if empty:
                        schema.prepare(connection, upgrading=False)
                    yield connection
            finally:
                os.close(lock)

    async def close(self) -> None:
        """Disconnect after pending writes."""
        engine, self._engine, self._file = self._engine, None, None
        if engine is None:
            return
        if self._writing is not None:
            await asyncio.wait({self._writing})
        writer, self._writer = self._writer, None
        if writer is not None:
            await self._threads.write(writer.close)
        self._threads.close()
        engine.dispose()
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    async def schema(self) -> str | None:
        """Return the schema of the file, opened read-only."""
        with self._translate_errors():
            return await asyncio.to_thread(_read_schema, Path(self.where))

    async def ping(self) -> None:
        """Write a row, and check that the disk has space for a commit."""
        await self._write(statements.ping)
        with self._translate_errors():
            _check_free(self.where)

    async def _read(self, work: Callable[[Connection], T]) -> T:
        if self._engine is None:
            raise self._not_open()

        def transaction(engine: Engine) -> T:
            with engine.connect() as connection:
                return work(connection)

        with self._translate_errors():
            return await run_shielded(self._threads.read(transaction, self._engine))

    async def _write(self, work: Callable[[Connection], T], signals: Sequence[str] = ()) -> T:
        """See `SqlStore._write`. Queued writes share a transaction; signals have no listeners."""
        if self._engine is None:
            raise self._not_open()
        write = _Write(work)
        self._waiting.append(write)
        if self._writing is None:
            self._write_next()
        with self._translate_errors():
            try:
                result: T = await write.done
            except asyncio.CancelledError:
                # A write that is still queued is removed; a write that has started is completed.
                if write in self._waiting:
                    self._waiting.remove(write)
                elif self._writing is not None:
                    await asyncio.wait({self._writing})
                raise
        return result

    async def _erase(self) -> None:
        if self._engine is None:
            raise self._not_open()
        with self._translate_errors():
            await asyncio.shield(self._threads.write(_erase, self._writer))

    async def commit(self, run_id: str, version: int, commit: Commit) -> None:
        """See `Store.commit`; the signal has no listeners."""
        check_run_of(commit.closed, run_id)
        await self._write(lambda connection: statements.commit(connection, run_id, version, commit))

    def _write_next(self) -> None:
        """Run up to `_MAX_BATCH` queued writes in one transaction, in the writer thread."""
        size = min(len(self._waiting), _MAX_BATCH)
        batch = [self._waiting.popleft() for _ in range(size)]
        works = [write.work for write in batch]
        self._writing = self._threads.write(_run_batch, self._writer, works, self._file)
        self._writing.add_done_callback(partial(self._on_written, batch))

    def _on_written(self, batch: list[_Write], writing: asyncio.Future[_Outcomes]) -> None:
        self._writing = None
        if self._engine is None:
            while self._waiting:  # The store is being closed.
                done = self._waiting.popleft().done
                if not done.cancelled():
                    done.set_exception(self._not_open())
        elif self._waiting:
            self._write_next()
        error = asyncio.CancelledError() if writing.cancelled() else writing.exception()
        outcomes = [(None, error)] * len(batch) if error is not None else writing.result()
        for write, (result, failure) in zip(batch, outcomes, strict=True):
            if write.done.cancelled():
                continue
            if failure is None:
                write.done.set_result(result)
            else:
                write.done.set_exception(failure)

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except (SQLAlchemyError, sqlite3.Error, OSError, schema.SchemaRefused) as error:
            reason = error.orig if isinstance(error, DBAPIError) else error
            raise StoreUnavailable(f"store {self.where} cannot be used: {reason}") from error


def _read_schema(path: Path) -> str | None:
    """Return the schema version of a file without writing to it; None if it is missing."""
    if path.is_dir():
        raise OSError("it is a folder")
    if not os.access(path if path.exists() else path.parent, os.R_OK | os.W_OK):
        raise OSError("it cannot be read and written")
    if not path.exists():
        return None
    # `immutable` creates no files. It is safe if no process writes, so if there is no WAL file.
    how = "mode=ro" if path.with_name(f"{path.name}-wal").exists() else "mode=ro&immutable=1"
    uri = f"{path.absolute().as_uri()}?{how}"
    engine = create_engine(
        "sqlite://", creator=lambda: sqlite3.connect(uri, uri=True), poolclass=NullPool
    )
    with engine.connect() as connection:
        return schema.current(connection)


class _Threads:
    """One writer thread and several reader threads."""

    def __init__(self) -> None:
        self._writer = ThreadPoolExecutor(1, "store-write")
        self._readers = ThreadPoolExecutor(_NUM_READERS, "store-read")

    def write(self, work: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._writer, work, *arguments)

    async def read(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, work, *arguments)

    def close(self) -> None:
        self._writer.shutdown()
        self._readers.shutdown()


def _run_batch(
    connection: Connection,
    works: list[Callable[[Connection], Any]],
    file: tuple[str, os.stat_result],
) -> _Outcomes:
    """Run writes in one transaction; a write that fails does not affect the others.

    If a savepoint itself fails, the whole transaction is rolled back, and the error is raised.
    `file` is the path of the open database, and its status.
    """
    # SQLite would write to a file that was deleted, and all would be lost at the end.
    for path, opened in (file, connection.info["log"]):
        if not (os.path.exists(path) and samestat(opened, os.stat(path))):
            raise OSError(f"{path} was deleted or replaced while it was open; restart this process")
    try:
        with connection.begin():
            if len(works) == 1:
                return [(works[0](connection), None)]
            return [_run_in_savepoint(connection, work) for work in works]
    except BaseException:
        # A failed COMMIT can leave the transaction open.
        driver: Any = connection.connection.driver_connection
        if driver.in_transaction:
            driver.rollback()
        raise


def _erase(writer: Connection) -> None:
    driver: Any = writer.connection.driver_connection
    if not erase_log(driver):
        _log.warning("deleted data stays in the write-ahead log until its readers have ended")


def _run_in_savepoint(
    connection: Connection, work: Callable[[Connection], Any]
) -> tuple[Any, Exception | None]:
    savepoint = connection.begin_nested()
    try:
        result = work(connection)
    except Exception as error:
        savepoint.rollback()
        return None, error
    savepoint.commit()
    return result, None


def _check_file(path: str, *, create: bool) -> None:
    """Create a missing file, readable only by its owner; without `create`, raise an error."""
    if create:
        create_private(path)
    elif not os.path.isfile(path):
        raise OSError("there is no such file")


def _check_free(path: str) -> None:
    if disk_usage(os.path.dirname(os.path.realpath(path))).free < _MIN_FREE:
        raise OSError("the disk is full")


def _lock(path: str) -> int:
    """Lock a file next to a database; return its descriptor, whose closing releases the lock.

    The database itself is not locked: when a process closes any descriptor of a file, it loses all
    its locks on the file, and so SQLite's locks.
    """
    real = os.path.realpath(path)
    if os.stat(path).st_nlink > 1:
        raise OSError("it has a second hard link; each link would have its own lock and log")
    mounts = _MOUNTS.read_bytes().split() if _MOUNTS.exists() else ()
    if os.fsencode(real).replace(b" ", rb"\040") in mounts:
        raise OSError("it is mounted as a single file, without its log; mount its folder instead")
    try:
        return lock_file(f"{real}.lock")
    except BlockingIOError as exc:
        raise OSError("it is in use by another process") from exc


def _configure(engine: Engine) -> None:
    log = f"{os.path.realpath(engine.url.database or '')}-wal"
    pragmas = (
        # Required by the budget: an acknowledged commit survives a power failure.
        "synchronous=FULL",
        "fullfsync=ON",  # macOS, whose fsync alone leaves data in the drive's cache
        "foreign_keys=ON",
        "schema_version",  # reads the file, which creates the log
    )

    @event.listens_for(engine, "connect")
    def connect(connection: DBAPIConnection, entry: ConnectionPoolEntry) -> None:
        # Otherwise the module sqlite3 would start a transaction only at the first write.
        connection.isolation_level = None
        driver = cast(sqlite3.Connection, connection)
        driver.execute(f"PRAGMA busy_timeout={round(_BUSY_S * 1000)}")
        use_wal(driver, _BUSY_S)
        for pragma in pragmas:
            driver.execute(f"PRAGMA {pragma}")
        # Kept with the connection, because the next connection may create another log.
        entry.info["log"] = log, os.stat(log)

    @event.listens_for(engine, "handle_error")
    def replace_refusing(context: ExceptionContext) -> None:
        """Make the pool replace its connections after an error of the database file."""
        code = getattr(context.original_exception, "sqlite_errorcode", 0) & 0xFF
        context.is_disconnect = context.is_disconnect or code in _FILE_ERRORS

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # After a plain BEGIN, a write fails if another process wrote since the first read.
        writes = connection.get_execution_options().get("fedone_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
