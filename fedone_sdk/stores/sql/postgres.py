"""A PostgreSQL database, which several replicas of an aggregator may share.

A commit is one statement: one round trip and one transaction. Each commit has a random name. A
run's row has the names of its last commits. If the connection breaks during a commit, these names
show whether the commit was stored.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar
from urllib.parse import urlencode

import structlog
from sqlalchemy import Connection, event, select, text
from sqlalchemy.engine import URL
from sqlalchemy.engine.interfaces import DBAPIConnection, ExceptionContext
from sqlalchemy.exc import DBAPIError, DisconnectionError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry, PoolProxiedConnection
from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_random_exponential

from fedone_sdk.errors import FedOneError, MissingExtraError, StoreUnavailable, one_line
from fedone_sdk.stores.base import Commit, Signals, VersionConflict, check_run_of, run_shielded
from fedone_sdk.stores.sql import schema, statements
from fedone_sdk.stores.sql.replica_session import CHANNEL, REPLICAS, Session
from fedone_sdk.stores.sql.store import SqlStore

_log = structlog.get_logger(__name__)

T = TypeVar("T")

_NUM_CONNECTIONS = 16
"""Size of the connection pool for statements."""

_NAME_LENGTH = 8
_NUM_NAMES = 128
"""Number of commit names per run."""

_SETTINGS = {
    "application_name": "fedone",
    # Required by the budget: an acknowledged commit survives a power failure.
    "synchronous_commit": "on",
    # Compilation would take longer than our statements.
    "jit": "off",
    # Releases the locks of an unreachable host within about 15 s instead of hours.
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "3",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "15000",
    "idle_in_transaction_session_timeout": "15000",
}
_CONNECT_TIMEOUT_S = 5.0
_STATEMENT_TIMEOUT_S = 10.0
_MIGRATION_LOCK = 0x6665_646F_6E65  # "fedone"
_LOCK_MIGRATION = text(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})")
_TRY_LOCK_MIGRATION = text(f"SELECT pg_try_advisory_xact_lock({_MIGRATION_LOCK})")
_NO_IDLE_TIMEOUT = text("SET LOCAL idle_in_transaction_session_timeout = 0")

# Changes nothing unless the run has the expected version.
_COMMIT = text(f"""
WITH moved AS (
    UPDATE runs
    SET version = version + 1,
        document = :document,
        commits = left(:name || commits, {_NUM_NAMES * _NAME_LENGTH})
    WHERE run_id = :run_id AND version = :version
    RETURNING run_id, version
), arrays_set AS (
    UPDATE run_data SET arrays = :arrays FROM moved
    WHERE run_data.run_id = moved.run_id AND CAST(:arrays AS bytea) IS NOT NULL
), work_closed AS (
    INSERT INTO closed_work
        (assignment_id, run_id, client_index, outcome, body_sha256, receipt)
    SELECT w.assignment_id, moved.run_id, w.client_index, w.outcome, w.body_sha256, w.receipt
    FROM moved, unnest(
        CAST(:assignment_ids AS varchar[]), CAST(:client_indices AS integer[]),
        CAST(:outcomes AS varchar[]), CAST(:bodies_sha256 AS varchar[]), CAST(:receipts AS text[])
    ) AS w (assignment_id, client_index, outcome, body_sha256, receipt)
), appended AS (
    INSERT INTO log (run_id, version, position, kind, body)
    SELECT moved.run_id, moved.version, l.number - 1, l.kind, l.body
    FROM moved, unnest(CAST(:kinds AS varchar[]), CAST(:bodies AS text[]))
        WITH ORDINALITY AS l (kind, body, number)
), forgotten AS (
    DELETE FROM memories USING moved
    WHERE memories.run_id = moved.run_id AND memories.round > CAST(:back_to AS integer)
), remembered AS (
    INSERT INTO memories (run_id, client_index, round, value)
    SELECT moved.run_id, m.client_index, m.round, m.value
    FROM moved, unnest(
        CAST(:of_clients AS integer[]), CAST(:of_rounds AS integer[]), CAST(:memories AS bytea[])
    ) AS m (client_index, round, value)
    ON CONFLICT (run_id, client_index, round) DO UPDATE SET value = excluded.value
)
SELECT version FROM moved
""")
_NOTIFY = text(f"SELECT pg_notify('{CHANNEL}', s) FROM unnest(CAST(:signals AS text[])) AS s")
# PostgreSQL commits transactions with NOTIFY one at a time. This setting makes them fast: they are
# flushed to disk together with the next commit.
_ASYNC_COMMIT = text("SELECT set_config('synchronous_commit', 'off', true)")
_MAX_SIGNALS = 256


class PostgresStore(SqlStore, drivers=("postgresql", "postgresql+asyncpg")):
    """A store in PostgreSQL: a connection pool, and the connection of this replica (`Session`)."""

    shared = True

    def __init__(self, url: URL, *, serving: bool = True) -> None:
        super().__init__(url, serving=serving)
        self._server, self._parameters, self.where = _server_of(url)
        self._permits = asyncio.Semaphore(_NUM_CONNECTIONS)
        # Marks this process's signals, because PostgreSQL delivers them to their sender too.
        self._sender = secrets.token_hex(8)
        self._engine: AsyncEngine | None = None
        self._session = Session(self._sender)
        self._signals: deque[str] = deque()
        self._send_task: asyncio.Task[None] | None = None

    async def _connect(self, *, serving: bool, upgrading: bool) -> None:
        if self._engine is not None:
            raise FedOneError(f"store {self.where} is open already")
        self._engine = self._make_engine(
            _NUM_CONNECTIONS + serving + 1,  # one for the session, one for signals
            # An upgrade may take long.
            timeout_s=None if upgrading else _STATEMENT_TIMEOUT_S,
        )
        try:
            with self._translate_errors():
                async with self._connection("READ COMMITTED") as connection, connection.begin():
                    await connection.run_sync(_prepare, upgrading)
                if serving:
                    await self._session.open(self._engine)
        except BaseException:
            await self.close()
            raise

    @asynccontextmanager
    async def _alone(self, *, empty: bool) -> AsyncIterator[Connection]:
        async with (
            self._temporary_engine(1, timeout_s=None) as engine,
            engine.connect() as connection,
            connection.begin(),
        ):
            await connection.execute(_NO_IDLE_TIMEOUT)
            # No server starts meanwhile: it needs this lock to check or create the tables.
            if not await connection.scalar(_TRY_LOCK_MIGRATION):
                raise FedOneError(f"store {self.where} is in use by another process")
            await self._refuse_replicas(connection)
            if empty:
                await connection.run_sync(_prepare, False)
            if connection.sync_connection is None:
                raise self._not_open()
            yield connection.sync_connection
            await self._refuse_replicas(connection)

    async def _refuse_replicas(self, connection: AsyncConnection) -> None:
        rows = await connection.execute(REPLICAS)
        if any(row.replica != f"{_MIGRATION_LOCK:016x}" for row in rows):
            raise FedOneError(f"store {self.where} is in use by a server; stop it first")

    async def close(self) -> None:
        """Disconnect; the replica is no longer alive."""
        if self._send_task is not None:
            await asyncio.wait({self._send_task})
        engine, self._engine = self._engine, None
        await self._session.close()
        if engine is not None:
            await engine.dispose()

    async def _read(self, work: Callable[[Connection], T]) -> T:
        """See `SqlStore._read`; each statement has its own snapshot of the data."""

        async def read() -> T:
            async with self._connection() as connection:
                return await connection.run_sync(work)

        return await self._with_retries(read)

    async def schema(self) -> str | None:
        """Return the schema of the database; None if it is empty."""
        async with self._temporary_engine(1) as engine, engine.connect() as connection:
            return await connection.run_sync(schema.current)

    async def check(self) -> str:
        """See `SqlStore.check`; also opens a replica's session, creates the tables, writes a row.

        The transaction that writes is rolled back.
        """
        session = Session(self._sender)
        async with self._temporary_engine(2) as engine:
            try:
                await session.open(engine)
            finally:
                await session.close()
            state = await super().check()
            async with engine.connect() as connection:
                await connection.run_sync(_prepare, False)
                await connection.run_sync(statements.ping)
        return state

    async def ping(self) -> None:
        """Write a row, without retries."""
        with self._translate_errors():
            async with self._connection() as connection:
                await connection.run_sync(statements.ping)

    async def now(self) -> float:
        """Return the database's time."""
        return await self._read(statements.now)

    async def _write(self, work: Callable[[Connection], T], signals: Sequence[str] = ()) -> T:
        """See `SqlStore._write`; repeats a transaction whose outcome is unknown."""

        async def write() -> T:
            async with self._connection("READ COMMITTED") as connection, connection.begin():
                done = await connection.run_sync(work)
                if signals:
                    await connection.execute(_NOTIFY, self._row_of(signals))
                    await connection.execute(_ASYNC_COMMIT)
                return done

        return await self._with_retries(write)

    async def _erase(self) -> None:
        """Do nothing: this needs an administrator (``VACUUM FULL``)."""

    async def commit(self, run_id: str, version: int, commit: Commit) -> None:
        """See `Store.commit`. After a broken connection the commit is repeated.

        If the first attempt was stored, the second attempt finds a new version of the run, and the
        commit's name in the run's row.
        """
        check_run_of(commit.closed, run_id)
        name = secrets.token_urlsafe(_NAME_LENGTH * 6 // 8)
        row = {
            "run_id": run_id,
            "version": version,
            "name": name,
            "document": commit.document,
            "arrays": commit.arrays,
            "assignment_ids": [work.assignment_id for work in commit.closed],
            "client_indices": [work.client_index for work in commit.closed],
            "outcomes": [work.outcome for work in commit.closed],
            "bodies_sha256": [work.body_sha256 for work in commit.closed],
            "receipts": [work.receipt for work in commit.closed],
            "kinds": [entry.kind for entry in commit.log],
            "bodies": [entry.body for entry in commit.log],
            "back_to": commit.back_to,
            "of_clients": [memory.client_index for memory in commit.memories],
            "of_rounds": [memory.round for memory in commit.memories],
            "memories": [memory.value for memory in commit.memories],
        }
        tries = 0

        async def attempt() -> None:
            nonlocal tries
            tries += 1
            async with self._connection() as connection:
                with statements.refusing("work can be closed only once"):
                    if (await connection.execute(_COMMIT, row)).first() is not None:
                        return
                of_run = schema.runs.c.run_id == run_id
                query = select(schema.runs.c.version, schema.runs.c.commits).where(of_run)
                stored = (await connection.execute(query)).one_or_none()
            if stored is None:
                raise KeyError(run_id)
            places = range(0, len(stored.commits), _NAME_LENGTH)
            if name in {stored.commits[place : place + _NAME_LENGTH] for place in places}:
                return
            if tries > 1 and stored.version > version + _NUM_NAMES:
                raise StoreUnavailable(
                    f"store {self.where}: the connection broke in a commit to run {run_id!r}; "
                    "whether the commit was stored is unknown"
                )
            raise VersionConflict(f"run {run_id!r} is at version {stored.version}, not {version}")

        await self._with_retries(attempt)
        if commit.signal is not None:
            self._signals.append(commit.signal)
            if self._send_task is None:
                self._send_task = asyncio.create_task(self._send_signals(), name="store signals")

    @property
    def replica(self) -> str:
        """Id of this process among the replicas; new for every session."""
        return self._session.replica

    async def alive(self) -> frozenset[str]:
        """Return the ids of all replicas with a session, and the id of this replica."""

        def alive(connection: Connection) -> frozenset[str]:
            return frozenset(row.replica for row in connection.execute(REPLICAS))

        return await self._read(alive) | {self.replica}

    async def lead(self) -> bool:
        """Try to acquire the leader lock; return whether this replica's session holds it."""
        return await self._session.lead()

    async def publish(self, signal: str) -> None:
        """Publish a signal to the other replicas, after all earlier commits."""
        if self._send_task is not None:
            await asyncio.wait({self._send_task})
        await self._notify([signal])

    def listen(self, signals: Signals) -> None:
        """Set the listener for signals of other replicas."""
        self._session.listen(signals)

    async def _send_signals(self) -> None:
        """Send the queued signals of commits.

        They are sent after the commits, because PostgreSQL commits transactions with NOTIFY one
        after another.
        """
        try:
            while self._signals:
                size = min(len(self._signals), _MAX_SIGNALS)
                await self._notify([self._signals.popleft() for _ in range(size)])
        except FedOneError as error:
            _log.warning("signals lost", error=str(error))
        finally:
            self._send_task = None

    async def _notify(self, signals: Sequence[str]) -> None:
        if self._engine is None:
            raise self._not_open()
        engine = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        row = self._row_of(signals)

        async def notify() -> None:
            # Does not wait for `_permits`: the pool has a connection for signals.
            async with engine.connect() as connection:
                await connection.execute(_NOTIFY, row)

        await self._with_retries(notify)

    def _row_of(self, signals: Sequence[str]) -> dict[str, list[str]]:
        return {"signals": [f"{self._sender} {signal}" for signal in signals]}

    def _make_engine(self, num_connections: int, *, timeout_s: float | None) -> AsyncEngine:
        try:
            engine = create_async_engine(
                self._server,
                pool_size=num_connections,
                max_overflow=0,
                pool_use_lifo=True,
                connect_args={
                    "dsn": self._parameters,
                    "server_settings": _SETTINGS,
                    "timeout": _CONNECT_TIMEOUT_S,
                    "command_timeout": timeout_s,
                },
            )
        except ModuleNotFoundError as error:
            raise MissingExtraError("SqlStore", extra="server") from error
        event.listen(engine.sync_engine, "checkout", _refuse_closed)
        event.listen(engine.sync_engine, "handle_error", _replace_connections)
        return engine

    @asynccontextmanager
    async def _temporary_engine(
        self, num_connections: int, *, timeout_s: float | None = _STATEMENT_TIMEOUT_S
    ) -> AsyncIterator[AsyncEngine]:
        engine = self._make_engine(num_connections, timeout_s=timeout_s)
        try:
            with self._translate_errors():
                yield engine
        finally:
            await engine.dispose()

    @asynccontextmanager
    async def _connection(self, level: str = "AUTOCOMMIT") -> AsyncIterator[AsyncConnection]:
        """Yield a connection with an isolation level; calls are served in their order."""
        if self._engine is None:
            raise self._not_open()
        engine = self._engine.execution_options(isolation_level=level)
        # The semaphore serves waiting calls in their order; the pool does not.
        async with self._permits, engine.connect() as connection:
            yield connection

    async def _with_retries(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` shielded; retry while the server is unavailable or reports a conflict."""
        with self._translate_errors():
            return await run_shielded(_RETRYING.copy()(work))

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not _is_database_error(error):
                raise
            reason = error.orig if isinstance(error, DBAPIError) else error
            text = one_line(reason) or type(reason).__name__
            raise StoreUnavailable(f"store {self.where} cannot be used: {text}") from error


def _server_of(url: URL) -> tuple[URL, str, str]:
    """Return a server's URL for the driver asyncpg, its parameters, and its name for messages.

    The parameters are a URL too, because asyncpg accepts libpq's parameters only in a URL.
    """
    # Several hosts are a list in SQLAlchemy, and separated by commas in libpq.
    query = {
        key: ",".join((text,) if isinstance(text, str) else text) for key, text in url.query.items()
    }
    if re.fullmatch(r"[\da-fA-F.]*(:[\da-fA-F.]*){2,}", query.get("host", "")):
        query["host"] = f"[{query['host']}]"  # asyncpg needs the brackets.
    if "ssl" in query:  # asyncpg's name
        query["sslmode"] = query.pop("ssl")
    where = f"{url.host or query.get('host') or 'localhost'}/{url.database or ''}"
    parameters = f"postgresql://?{urlencode(query, doseq=True)}"
    return url.set(drivername="postgresql+asyncpg", query={}), parameters, where


def _prepare(connection: Connection, upgrading: bool) -> None:
    # Only one of several starting replicas may create the tables.
    connection.execute(_LOCK_MIGRATION)
    encoding = connection.scalar(text("SHOW server_encoding"))
    if encoding not in ("UTF8", "SQL_ASCII"):  # SQL_ASCII stores any bytes.
        command = "CREATE DATABASE ... ENCODING 'UTF8' LOCALE 'C' TEMPLATE template0"
        raise schema.SchemaRefused(f"its encoding {encoding} lacks characters; use: {command}")
    schema.prepare(connection, upgrading=upgrading)


def _refuse_closed(
    connection: DBAPIConnection, _: ConnectionPoolEntry, __: PoolProxiedConnection
) -> None:
    if connection.driver_connection.is_closed():
        raise DisconnectionError


def _replace_connections(context: ExceptionContext) -> None:
    """Make the pool replace its connections after an error that new connections may avoid.

    For example, a server that became a standby in a failover refuses writes.
    """
    code = getattr(context.original_exception, "sqlstate", None)
    context.is_disconnect = context.is_disconnect or code == _READ_ONLY


def _is_database_error(error: BaseException) -> bool:
    # Imported here: a missing driver is reported by `open`.
    import asyncpg

    kinds = (
        SQLAlchemyError,
        asyncpg.PostgresError,
        asyncpg.InterfaceError,
        asyncpg.InternalClientError,
        OSError,
        TimeoutError,
        schema.SchemaRefused,
    )
    return isinstance(error, kinds)


def _is_transient(error: BaseException) -> bool:
    """Return whether a retry may succeed: the server was down, or rolled the transaction back."""
    import asyncpg

    if isinstance(error, DBAPIError):
        if error.connection_invalidated:
            return True
        error = error.orig or error
    code = getattr(error, "sqlstate", None) or ""
    # asyncpg raises internal errors if a connection breaks during a response.
    broken = OSError | TimeoutError | asyncpg.InternalClientError
    return isinstance(error, broken) or code.startswith(_TRANSIENT)


# Error code of a write in a read-only transaction.
_READ_ONLY = "25006"
# Codes of broken connections, serialization and deadlock, too many connections, shutdown, start.
_TRANSIENT = ("08", "40001", "40P01", "53300", "57P01", "57P02", "57P03")
_RETRYING = AsyncRetrying(
    retry=retry_if_exception(_is_transient),
    stop=stop_after_delay(15.0),
    wait=wait_random_exponential(multiplier=0.05, max=1.0),
    reraise=True,
)
