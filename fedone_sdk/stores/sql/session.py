"""The one connection to PostgreSQL that stands for a replica.

Its locks say that the replica is alive and whether it leads, and it hears what others publish.
The server frees the locks when the connection ends, however the process does.
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

from fedone_sdk.stores.base import Signals

__all__ = ["CHANNEL", "REPLICAS", "Session"]

CHANNEL = "fedone"
"""What signals are notified on: each is its sender, a space and the signal."""

REPLICAS = text("""
SELECT lpad(to_hex((CAST(classid AS bigint) << 32) | CAST(objid AS bigint)), 16, '0') AS replica
FROM pg_locks JOIN pg_database ON pg_database.oid = pg_locks.database
WHERE locktype = 'advisory' AND objsubid = 1 AND granted AND datname = current_database()
""")
"""The replicas that hold their lock: an advisory lock on the number that is their name.

Locks on two small numbers (``objsubid`` 2) are others, such as the leader's.
"""

_LEADER = (0x0FED_0001, 1)
_HEARTBEAT_S = 2.0
_HEARTBEAT_TIMEOUT_S = 5.0

_log = structlog.get_logger(__name__)


class Session:
    """Stands for this replica while it is open.

    When the connection is lost, others may have taken the replica for dead already. So it comes
    back under a new name.
    """

    def __init__(self, sender: str) -> None:
        """Describes a session.

        Args:
            sender: Who sends the signals that are not to be heard here.
        """
        self._sender = sender
        self._replica = uuid.uuid4().hex
        self._connection: AsyncConnection | None = None
        self._driver: Any = None
        self._lost = asyncio.Event()
        # The driver does one thing at a time.
        self._busy = asyncio.Lock()
        self._leads = False
        self._signals: Signals | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def replica(self) -> str:
        """The name of this replica now."""
        return self._replica

    def listen(self, signals: Signals) -> None:
        """Sets who is told what others publish."""
        self._signals = signals

    async def open(self, engine: AsyncEngine) -> None:
        """Connects, and stays connected until it is closed."""
        engine = engine.execution_options(isolation_level="AUTOCOMMIT")
        await self._connect(engine)
        self._watching = asyncio.create_task(self._watch(engine), name="store session")

    async def close(self) -> None:
        """Frees the locks."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
            self._watching = None
        await self._drop()

    async def lead(self) -> bool:
        """Whether this replica leads; tries to."""
        async with self._busy:
            if self._driver is None or self._lost.is_set():
                return False
            if not self._leads:
                try:
                    self._leads = await self._driver.fetchval(
                        "SELECT pg_try_advisory_lock($1, $2)",
                        *_LEADER,
                        timeout=_HEARTBEAT_TIMEOUT_S,
                    )
                except Exception:
                    # The watch finds out what is wrong with the connection.
                    self._lost.set()
            return self._leads

    async def _connect(self, engine: AsyncEngine) -> None:
        connection = await engine.connect()
        try:
            driver: Any = (await connection.get_raw_connection()).driver_connection
            while True:
                # Lock numbers are signed.
                number = secrets.randbits(63)
                if await driver.fetchval("SELECT pg_try_advisory_lock($1::bigint)", number):
                    break
            lost = asyncio.Event()
            driver.add_termination_listener(lambda _: lost.set())
            await driver.add_listener(CHANNEL, self._hear)
            if driver.is_closed():
                lost.set()
        except BaseException:
            await connection.invalidate()
            await connection.close()
            raise
        self._connection, self._driver, self._lost = connection, driver, lost
        self._leads = False
        self._replica = f"{number:016x}"

    async def _drop(self) -> None:
        """Ends the connection, rather than give it back to the pool with its locks."""
        connection, self._connection, self._driver = self._connection, None, None
        self._leads = False
        if connection is not None:
            with suppress(Exception):
                await connection.invalidate()
                await connection.close()

    async def _watch(self, engine: AsyncEngine) -> None:
        while True:
            while await self._beats():
                pass
            _log.warning("store session lost", replica=self._replica)
            async with self._busy:
                await self._drop()
            await _RECONNECTING.copy()(self._connect, engine)
            _log.info("store session resumed", replica=self._replica)
            self._tell(None)

    async def _beats(self) -> bool:
        """Waits a while; whether the connection still works then."""
        try:
            async with asyncio.timeout(_HEARTBEAT_S):
                await self._lost.wait()
        except TimeoutError:
            pass
        async with self._busy:
            if self._lost.is_set():
                return False
            try:
                await self._driver.execute("SELECT 1", timeout=_HEARTBEAT_TIMEOUT_S)
            except Exception:
                return False
            return True

    def _hear(self, _: Any, __: int, ___: str, payload: str) -> None:
        sender, _, signal = payload.partition(" ")
        if sender != self._sender:
            self._tell(signal)

    def _tell(self, signal: str | None) -> None:
        if self._signals is None:
            return
        try:
            self._signals(signal)
        except Exception:
            # The session goes on, whatever its listener does.
            _log.error("signal not handled", traceback=traceback.format_exc())


_RECONNECTING = AsyncRetrying(wait=wait_random_exponential(multiplier=0.1, max=2.0))
