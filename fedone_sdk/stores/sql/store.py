"""The SQL store: each method runs its statements in one transaction."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from typing import Self

from sqlalchemy import Connection
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from fedone_sdk.errors import FedOneError, SpecError
from fedone_sdk.stores.base import (
    ClientRecord,
    ClosedWork,
    Commit,
    LogEntry,
    Member,
    RunHead,
    RunRecord,
    RunSize,
    RunSnapshot,
    Signals,
    TokenRecord,
)
from fedone_sdk.stores.sql import removal, statements
from fedone_sdk.stores.sql.database import Database
from fedone_sdk.stores.sql.postgres import PostgresDatabase
from fedone_sdk.stores.sql.sqlite import SqliteDatabase

_NONCES_PER_SWEEP = 256


class SqlStore:
    """A `Store` in a SQLite file, for one server, or on PostgreSQL, for several.

    A write that has started is completed even if the caller is cancelled.
    """

    def __init__(
        self,
        url: str | URL,
        *,
        serving: bool = True,
        busy_timeout_s: float = 5.0,
        num_connections: int = 16,
    ) -> None:
        """Initialise without connecting.

        Args:
            url: ``sqlite:///FILE`` or ``postgresql://USER:PASSWORD@HOST/DATABASE``.
            serving: Whether this process serves runs: it locks a SQLite file, or registers as a
                replica on PostgreSQL. Tools pass False: they can use a store that is being served,
                and neither create nor upgrade a file.
            busy_timeout_s: Maximal wait of a write to a SQLite file for another process, seconds.
            num_connections: Size of the PostgreSQL connection pool, without the replica's session.

        Raises:
            SpecError: The URL is malformed or names no supported database.
        """
        try:
            url = make_url(url)
        except (ArgumentError, ValueError):
            # Without the cause, which may contain the URL with its password.
            raise SpecError(
                "not a database URL such as sqlite:///fedone.db or postgresql://host/database",
                source="store",
            ) from None
        self._url = url
        self._serving = serving
        self._num_nonces = 0
        self._database: Database
        if url.drivername in ("sqlite", "sqlite+aiosqlite"):
            self._database = SqliteDatabase(url, busy_timeout_s=busy_timeout_s)
        elif url.drivername in ("postgresql", "postgresql+asyncpg"):
            self._database = PostgresDatabase(url, num_connections=num_connections)
        else:
            raise SpecError(
                f"{url.drivername} is not supported, only sqlite and postgresql", source="store"
            )

    @classmethod
    def sqlite(
        cls, path: str | os.PathLike[str], *, serving: bool = True, busy_timeout_s: float = 5.0
    ) -> Self:
        """Return a store in the SQLite file `path`; the name may have any characters."""
        url = URL.create("sqlite", database=os.fspath(path))
        return cls(url, serving=serving, busy_timeout_s=busy_timeout_s)

    def __repr__(self) -> str:
        return f"SqlStore({self._url.render_as_string(hide_password=True)!r})"

    async def open(self) -> None:
        """Connect, and create the tables of an empty database.

        A SQLite file of an older version is upgraded; a PostgreSQL database is not.

        Raises:
            FedOneError: The database cannot be used: not reachable, not writable, locked, served by
                another process, not a database, of another program, or with a schema that must be
                upgraded or is newer than this SDK.
        """
        await self._database.open(serving=self._serving, upgrading=False)

    async def close(self) -> None:
        """Disconnect after pending writes."""
        await self._database.close()

    async def ping(self) -> None:
        """Raise `FedOneError` if the database is not available."""
        await self._database.ping()

    async def clear(self) -> None:
        """Delete all runs, clients and tokens in one transaction; the tables stay."""
        await self._database.write(statements.clear)

    # Schema

    async def schema(self) -> str | None:
        """Return the schema version of the open or closed database; None if empty or missing.

        Raises:
            FedOneError: It cannot be read, or belongs to another program or a newer fedone-sdk.
        """
        return await self._database.schema()

    async def upgrade(self) -> None:
        """Upgrade the database to the newest schema; it stays closed.

        Raises:
            FedOneError: As for `open`.
        """
        await self._database.open(serving=False, upgrading=True)
        await self._database.close()

    # Tokens and clients

    async def put_token(self, token: TokenRecord) -> None:
        """Add or replace a token; see `Store.put_token`."""
        await self._database.write(lambda c: statements.put_token(c, token))

    async def tokens(self) -> list[TokenRecord]:
        """Return all tokens in order of creation."""
        return await self._database.read(statements.tokens)

    async def revoke_token(self, name: str, now: float) -> TokenRecord | None:
        """Revoke a token permanently; None if it does not exist."""
        return await self._database.write(lambda c: statements.revoke_token(c, name, now))

    async def enrol(self, client: ClientRecord, token_sha256: str, now: float) -> ClientRecord:
        """Enrol a client; see `Store.enrol`."""
        tries = 0

        def enrol(connection: Connection) -> ClientRecord:
            nonlocal tries
            tries += 1
            return statements.enrol(connection, client, token_sha256, now, again=tries > 1)

        return await self._database.write(enrol)

    async def clients(self, after: int = -1, limit: int | None = None) -> list[ClientRecord]:
        """Return clients in index order; see `Store.clients`."""
        return await self._database.read(lambda c: statements.clients(c, after, limit))

    async def num_clients(self) -> int:
        """Return the number of clients without reading them."""
        return await self._database.read(statements.num_clients)

    async def client(self, credential_sha256: str) -> ClientRecord | None:
        """Return the client with this current or previous credential."""
        return await self._database.read(lambda c: statements.client(c, credential_sha256))

    async def client_at(self, index: int) -> ClientRecord | None:
        """Return the client with this enrolment index."""
        return await self._database.read(lambda c: statements.client_at(c, index))

    async def client_named(self, client_id: str) -> ClientRecord | None:
        """Return the client with this public id."""
        return await self._database.read(lambda c: statements.client_named(c, client_id))

    async def set_credential(
        self, index: int, credential_sha256: str, previous_sha256: str | None
    ) -> None:
        """Change the credential of a client; an unknown index is an ``IndexError``."""
        await self._database.write(
            lambda c: statements.set_credential(c, index, credential_sha256, previous_sha256)
        )

    async def revoke_client(self, index: int, now: float) -> None:
        """Revoke a client permanently; an unknown index is an ``IndexError``."""
        await self._database.write(lambda c: statements.revoke_client(c, index, now))

    async def see_client(self, index: int, now: float) -> None:
        """Record the time of a client's request."""
        await self._database.write(lambda c: removal.see_client(c, index, now))

    async def idle_clients(self, before: float, limit: int) -> list[int]:
        """Return clients last seen before a time; see `Store.idle_clients`."""
        return await self._database.read(lambda c: removal.idle_clients(c, before, limit))

    async def retire_client(self, index: int, now: float) -> None:
        """Erase a client permanently; see `Store.retire_client`."""
        await self._database.write(lambda c: removal.retire_client(c, index, now))

    async def use_nonce(self, nonce: str, now: float, until: float) -> bool:
        """Return whether this nonce is new; see `Store.use_nonce`."""
        self._num_nonces += 1
        sweep = self._num_nonces % _NONCES_PER_SWEEP == 0
        tries = 0

        def use(connection: Connection) -> bool:
            nonlocal tries
            tries += 1
            if sweep:
                statements.forget_nonces(connection, now)
            first = statements.use_nonce(connection, nonce, now, until)
            if tries > 1 and not first:
                raise FedOneError("whether this nonce was used before is unknown")
            return first

        return await self._database.write(use)

    # Waiting clients

    async def join(self, member: Member, signals: Sequence[str] = ()) -> None:
        """Add a waiting client and publish signals; see `Store.join`."""
        await self._database.write(lambda c: statements.join(c, member), signals)

    async def leave(self, client_indices: Collection[int], signals: Sequence[str] = ()) -> None:
        """Remove clients that no longer wait and publish signals; see `Store.leave`."""
        await self._database.write(lambda c: statements.leave(c, client_indices), signals)

    async def members(self) -> list[Member]:
        """Return waiting clients in index order, including expired ones."""
        return await self._database.read(statements.members)

    # Runs

    async def add_run(self, record: RunRecord) -> None:
        """Add a run; see `Store.add_run`."""
        tries = 0

        def add(connection: Connection) -> None:
            nonlocal tries
            tries += 1
            statements.add_run(connection, record, again=tries > 1)

        await self._database.write(add)

    async def runs(self) -> list[RunRecord]:
        """Return all runs in order of creation."""
        return await self._database.read(statements.runs)

    async def heads(self) -> list[RunHead]:
        """Return the heads of all runs in order of creation."""
        return await self._database.read(statements.heads)

    async def run(self, run_id: str) -> RunRecord | None:
        """Return a run, or None."""
        return await self._database.read(lambda c: statements.run(c, run_id))

    async def versions(self) -> dict[str, int]:
        """Return the version of every run, in order of creation."""
        return await self._database.read(statements.versions)

    async def commit(self, run_id: str, version: int, commit: Commit) -> None:
        """Store an event's changes on top of `version`; see `Store.commit`."""
        _check_run_of(commit.closed, run_id)
        await self._database.commit(run_id, version, commit)

    async def closed(self, assignment_id: str) -> ClosedWork | None:
        """Return a closed assignment; None if it is open or unknown."""
        return await self._database.read(lambda c: statements.closed(c, assignment_id))

    async def memory(self, run_id: str, client_index: int) -> bytes | None:
        """Return the method memory of a client."""
        return await self._database.read(lambda c: statements.memory(c, run_id, client_index))

    async def memories(self, run_id: str) -> dict[int, bytes]:
        """Return the method memories of all clients, by client index."""
        return await self._database.read(lambda c: statements.memories(c, run_id))

    async def log(
        self, run_id: str, kind: str | None = None, after: int = -1, limit: int | None = None
    ) -> list[LogEntry]:
        """Return a run's log in order, of all kinds or one; see `Store.log`."""
        return await self._database.read(lambda c: statements.log(c, run_id, kind, after, limit))

    async def size(self, run_id: str) -> RunSize:
        """Return the number of stored records of a run."""
        return await self._database.read(lambda c: removal.size(c, run_id))

    async def trim(self, run_id: str, *, log: bool = False, closed: bool = False) -> None:
        """Delete a run's log, its closed work, or both permanently; the run stays."""
        await self._database.write(lambda c: removal.trim(c, run_id, log=log, closed=closed))

    async def delete_run(self, run_id: str, version: int, now: float) -> None:
        """Delete a run; see `Store.delete_run`."""
        tries = 0

        def remove(connection: Connection) -> None:
            nonlocal tries
            tries += 1
            removal.delete_run(connection, run_id, version, now, again=tries > 1)

        await self._database.write(remove)

    async def deleted(self, run_id: str) -> float | None:
        """Return when the run of this id was deleted; None if it was not."""
        return await self._database.read(lambda c: removal.deleted(c, run_id))

    async def snapshot(self, run_id: str, *, log: bool = True) -> RunSnapshot | None:
        """Return a consistent snapshot of a run; see `Store.snapshot`."""
        return await self._database.read(
            lambda c: statements.snapshot(c, run_id, with_log=log), at_one_moment=True
        )

    async def restore(self, snapshot: RunSnapshot, clients: Sequence[ClientRecord] = ()) -> None:
        """Add a run with all its data from a snapshot; see `Store.restore`."""
        _check_run_of(snapshot.closed, snapshot.record.run_id)
        tries = 0

        def restore(connection: Connection) -> None:
            nonlocal tries
            tries += 1
            statements.restore(connection, snapshot, clients, again=tries > 1)

        await self._database.write(restore)

    # Replicas

    @property
    def shared(self) -> bool:
        """Whether other processes may serve the same runs."""
        return self._database.shared

    @property
    def replica(self) -> str:
        """Id of this process among the replicas; it changes after a lost session."""
        return self._database.replica

    async def alive(self) -> frozenset[str]:
        """Return the ids of all running replicas, including this one."""
        return await self._database.alive()

    async def lead(self) -> bool:
        """Try to acquire the leader lock; return whether this replica holds it."""
        return await self._database.lead()

    async def publish(self, signal: str) -> None:
        """Publish a signal of at most 4000 bytes to the other replicas; not durable."""
        await self._database.publish(signal)

    def listen(self, signals: Signals) -> None:
        """Set the listener for signals of other replicas."""
        self._database.listen(signals)


def _check_run_of(closed: Iterable[ClosedWork], run_id: str) -> None:
    if any(work.run_id != run_id for work in closed):
        raise ValueError(f"closed work is not of run {run_id!r}")
