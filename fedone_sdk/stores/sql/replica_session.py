"""The PostgreSQL connection that represents a replica (one process of the aggregator).

Its advisory locks show that the replica is alive, and whether it is the leader. The database
releases them when the connection ends. The connection also receives the signals of other replicas.
"""

from __future__ import annotations

import asyncio
import secrets
import traceback
import uuid
from contextlib import suppress
from typing import Any

import structlog
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from tenacity import AsyncRetrying, wait_random_exponential

from fedone_sdk.errors import FedOneError
from fedone_sdk.stores.base import Signals

CHANNEL = "fedone"
"""NOTIFY channel of the signals; a payload is the sender, a space and the signal."""

REPLICAS = text("""
SELECT lpad(to_hex((CAST(classid AS bigint) << 32) | CAST(objid AS bigint)), 16, '0') AS replica
FROM pg_locks JOIN pg_database ON pg_database.oid = pg_locks.database
WHERE locktype = 'advisory' AND objsubid = 1 AND granted AND datname = current_database()
""")
"""Query of the running replicas: each holds an advisory lock on its id, a 64-bit number.

``objsubid = 1`` excludes locks on two 32-bit numbers, such as the leader lock.
"""

_PROCESS = "SELECT pg_backend_pid()"

_IDLE_TIMEOUT = "SELECT set_config(name, '15s', false) FROM pg_settings WHERE name = $1"
"""Releases the locks of a frozen process, which sends no heartbeats. Needs PostgreSQL 14."""

_LEADER = (0x0FED_0001, 1)
_HEARTBEAT_S = 2.0
_HEARTBEAT_TIMEOUT_S = 5.0

_log = structlog.get_logger(__name__)


class Session:
    """The connection of this replica.

    After a lost connection, `replica` is a new id, because for other replicas the old id has ended.
    """

    def __init__(self, sender: str) -> None:
        """Initialise without connecting; signals of `sender`, this process, are ignored."""
        self._sender = sender
        self.replica = uuid.uuid4().hex
        self._connection: AsyncConnection | None = None
        self._driver: Any = None
        self._process: int | None = None
        self._lost = asyncio.Event()
        # The driver allows one operation at a time.
        self._busy = asyncio.Lock()
        self._is_leader = False
        self._signals: Signals | None = None
        self._watch_task: asyncio.Task[None] | None = None

    def listen(self, signals: Signals) -> None:
        """Set the listener for signals of other replicas."""
        self._signals = signals

    async def open(self, engine: AsyncEngine) -> None:
        """Connect, and reconnect until `close`."""
        await self._connect(engine)
        self._watch_task = asyncio.create_task(self._watch(engine), name="store session")

    async def close(self) -> None:
        """Disconnect, which releases the locks."""
        if self._watch_task is not None:
            self._watch_task.cancel()
            await asyncio.wait({self._watch_task})
            self._watch_task = None
        await self._disconnect()

    async def lead(self) -> bool:
        """Try to acquire the leader lock; return whether this replica holds it."""
        async with self._busy:
            if self._driver is None or self._lost.is_set():
                return False
            if not self._is_leader:
                try:
                    self._is_leader = await self._driver.fetchval(
                        "SELECT pg_try_advisory_lock($1, $2)",
                        *_LEADER,
                        timeout=_HEARTBEAT_TIMEOUT_S,
                    )
                except Exception:
                    # `_watch` then replaces the connection.
                    self._lost.set()
            return self._is_leader

    async def _connect(self, engine: AsyncEngine) -> None:
        connection = await engine.execution_options(isolation_level="AUTOCOMMIT").connect()
        try:
            driver: Any = (await connection.get_raw_connection()).driver_connection
            process = await _process_of(driver, engine)
            await driver.fetchval(_IDLE_TIMEOUT, "idle_session_timeout")
            while True:
                # 63 bits, because lock numbers are signed 64-bit integers.
                number = secrets.randbits(63)
                if await driver.fetchval("SELECT pg_try_advisory_lock($1::bigint)", number):
                    break
            lost = asyncio.Event()
            driver.add_termination_listener(lambda _: lost.set())
            await driver.add_listener(CHANNEL, self._on_notification)
            if driver.is_closed():
                lost.set()
        except BaseException:
            await connection.invalidate()
            await connection.close()
            raise
        self._connection, self._driver, self._lost = connection, driver, lost
        self._is_leader, self._process = False, process
        self.replica = f"{number:016x}"

    async def _disconnect(self) -> None:
        """Close the connection; in the pool it would stay open and keep its locks."""
        connection, self._connection, self._driver = self._connection, None, None
        self._is_leader = False
        if connection is not None:
            with suppress(Exception):
                await connection.invalidate()
                await connection.close()

    async def _watch(self, engine: AsyncEngine) -> None:
        while True:
            while await self._heartbeat():
                pass
            _log.warning("store session lost", replica=self.replica)
            async with self._busy:
                await self._disconnect()
            await _RECONNECT.copy()(self._connect, engine)
            _log.info("store session resumed", replica=self.replica)
            self._notify_listener(None)

    async def _heartbeat(self) -> bool:
        """Wait for the interval; return whether the same PostgreSQL process still answers."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_HEARTBEAT_S):
                await self._lost.wait()
        async with self._busy:
            if self._lost.is_set():
                return False
            with suppress(Exception):
                process = await self._driver.fetchval(_PROCESS, timeout=_HEARTBEAT_TIMEOUT_S)
                return bool(process == self._process)
            return False

    def _on_notification(self, _: Any, __: int, ___: str, payload: str) -> None:
        sender, _, signal = payload.partition(" ")
        if sender != self._sender:
            self._notify_listener(signal)

    def _notify_listener(self, signal: str | None) -> None:
        try:
            if self._signals is not None:
                self._signals(signal)
        except Exception:
            # An error of the listener must not end the session.
            _log.error("signal not handled", traceback=traceback.format_exc())


async def _process_of(driver: Any, engine: AsyncEngine) -> int:
    """Return the id of the PostgreSQL process of a connection, which holds the connection's locks.

    Raises:
        FedOneError: A pooler distributes the connection's statements over several processes.
    """
    from asyncpg import InvalidSQLStatementNameError

    processes: list[int] = [await driver.fetchval(_PROCESS)]
    with suppress(InvalidSQLStatementNameError, TimeoutError):
        async with engine.connect() as other, other.begin():
            # Occupies the process that a pooler in transaction mode would reuse.
            await other.execute(text(_PROCESS))
            processes.append(await driver.fetchval(_PROCESS, timeout=_HEARTBEAT_TIMEOUT_S))
        # A pooler that rotates its processes sends each statement to another process.
        processes += [await driver.fetchval(_PROCESS) for _ in range(2)]
        if len({*processes}) == 1:
            return processes[0]
    raise FedOneError(
        "the store's connections use a pooler in transaction mode (such as PgBouncer's), in which "
        "advisory locks and LISTEN do not work; use session mode, or connect to the server itself"
    )


_RECONNECT = AsyncRetrying(wait=wait_random_exponential(multiplier=0.1, max=2.0))
