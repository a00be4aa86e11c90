"""The store: every method is some statements in one transaction of its database."""

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

__all__ = ["SqlStore"]

_NONCES_PER_SWEEP = 256


class SqlStore:
    """A `Store` in a SQLite file, for one server, or on PostgreSQL, for several.

    A write that has begun is carried out even if the caller is cancelled meanwhile.
    """

    def __init__(
        self,
        url: str | URL,
        *,
        serving: bool = True,
        busy_timeout_s: float = 5.0,
        num_connections: int = 16,
    ) -> None:
        """Describes a store; `open` connects.

        Args:
            url: ``sqlite:///FILE`` or ``postgresql://USER:PASSWORD@HOST/DATABASE``.
            serving: Whether runs are served from it. That keeps other servers away from a SQLite
                file, and makes one of the replicas on PostgreSQL. False is for tools, which may
                look at a store while others serve it, and make and upgrade no file.
            busy_timeout_s: How long a write to a SQLite file waits for another process's to end.
            num_connections: Connections to PostgreSQL, besides the one that stands for a server.

        Raises:
            SpecError: The URL is malformed or names no supported database.
        """
        try:
            url = make_url(url)
        except (ArgumentError, ValueError):
            # Not from it: it may quote the URL, and a password in it.
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
        """A store in the SQLite file `path`, whatever characters its name has."""
        url = URL.create("sqlite", database=os.fspath(path))
        return cls(url, serving=serving, busy_timeout_s=busy_timeout_s)

    def __repr__(self) -> str:
        return f"SqlStore({self._url.render_as_string(hide_password=True)!r})"

    async def open(self) -> None:
        """Connects, and creates the tables in an empty database.

        A SQLite file of an older version is upgraded; a PostgreSQL database is not.

        Raises:
            FedOneError: The database cannot be used: not reachable, not writable, locked, served
                by another process, not a database, another program's, or of a schema that has
                to be upgraded or is newer than this SDK.
        """
        await self._database.open(serving=self._serving, upgrading=False)

    async def close(self) -> None:
        """Disconnects, after the writes under way."""
        await self._database.close()

    async def ping(self) -> None:
        """Raises `FedOneError` if the database cannot be read now."""
        await self._database.ping()

    async def clear(self) -> None:
        """Removes all runs, clients and tokens in one transaction; the tables stay."""
        await self._database.write(statements.clear)

    # The schema

    async def schema(self) -> str | None:
        """The schema of the database, which may be closed; None if it is empty or missing.

        Raises:
            FedOneError: It cannot be read, is another program's, or a newer fedone-sdk's.
        """
        return await self._database.schema()

    async def upgrade(self) -> None:
        """Brings the database to the newest schema, and leaves it closed.

        Raises:
            FedOneError: As `open`.
        """
        await self._database.open(serving=False, upgrading=True)
        await self._database.close()

    # Tokens and clients

    async def put_token(self, token: TokenRecord) -> None:
        """Adds or replaces a token; see `Store.put_token`."""
        await self._database.write(lambda c: statements.put_token(c, token))

    async def tokens(self) -> list[TokenRecord]:
        """All tokens, in the order they were added."""
        return await self._database.read(statements.tokens)

    async def revoke_token(self, name: str, now: float) -> TokenRecord | None:
        """Revokes a token for good; None if there is no such token."""
        return await self._database.write(lambda c: statements.revoke_token(c, name, now))

    async def enrol(self, client: ClientRecord, token_sha256: str, now: float) -> ClientRecord:
        """Enrols a client; see `Store.enrol`."""
        tries = 0

        def enrol(connection: Connection) -> ClientRecord:
            nonlocal tries
            tries += 1
            return statements.enrol(connection, client, token_sha256, now, again=tries > 1)

        return await self._database.write(enrol)

    async def clients(self, after: int = -1, limit: int | None = None) -> list[ClientRecord]:
        """Clients in index order; see `Store.clients`."""
        return await self._database.read(lambda c: statements.clients(c, after, limit))

    async def num_clients(self) -> int:
        """How many clients there are; reads none of them."""
        return await self._database.read(statements.num_clients)

    async def client(self, credential_sha256: str) -> ClientRecord | None:
        """The client with this credential, or with this one before its last rotation."""
        return await self._database.read(lambda c: statements.client(c, credential_sha256))

    async def client_at(self, index: int) -> ClientRecord | None:
        """The client with this enrolment index."""
        return await self._database.read(lambda c: statements.client_at(c, index))

    async def client_named(self, client_id: str) -> ClientRecord | None:
        """The client with this public name."""
        return await self._database.read(lambda c: statements.client_named(c, client_id))

    async def set_credential(
        self, index: int, credential_sha256: str, previous_sha256: str | None
    ) -> None:
        """Changes the credential of a client; an unknown index is an ``IndexError``."""
        await self._database.write(
            lambda c: statements.set_credential(c, index, credential_sha256, previous_sha256)
        )

    async def revoke_client(self, index: int, now: float) -> None:
        """Revokes a client for good; an unknown index is an ``IndexError``."""
        await self._database.write(lambda c: statements.revoke_client(c, index, now))

    async def see_client(self, index: int, now: float) -> None:
        """Takes note that a client asked for something."""
        await self._database.write(lambda c: removal.see_client(c, index, now))

    async def idle_clients(self, before: float, limit: int) -> list[int]:
        """Clients that were last seen before a moment; see `Store.idle_clients`."""
        return await self._database.read(lambda c: removal.idle_clients(c, before, limit))

    async def retire_client(self, index: int, now: float) -> None:
        """Erases a client for good; see `Store.retire_client`."""
        await self._database.write(lambda c: removal.retire_client(c, index, now))

    async def use_nonce(self, nonce: str, now: float, until: float) -> bool:
        """Whether this nonce is seen for the first time; see `Store.use_nonce`."""
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
                raise FedOneError("the store cannot tell whether this nonce was used before")
            return first

        return await self._database.write(use)

    # Who waits for work

    async def join(self, member: Member, signals: Sequence[str] = ()) -> None:
        """Keeps that a client waits for work, and tells of it; see `Store.join`."""
        await self._database.write(lambda c: statements.join(c, member), signals)

    async def leave(self, client_indices: Collection[int], signals: Sequence[str] = ()) -> None:
        """Forgets clients that do not wait any more, and tells of it; see `Store.leave`."""
        await self._database.write(lambda c: statements.leave(c, client_indices), signals)

    async def members(self) -> list[Member]:
        """Who waits for work, in index order; also those whose time is over."""
        return await self._database.read(statements.members)

    # Runs

    async def add_run(self, record: RunRecord) -> None:
        """Adds a run; see `Store.add_run`."""
        tries = 0

        def add(connection: Connection) -> None:
            nonlocal tries
            tries += 1
            statements.add_run(connection, record, again=tries > 1)

        await self._database.write(add)

    async def runs(self) -> list[RunRecord]:
        """All runs in the order they were added."""
        return await self._database.read(statements.runs)

    async def heads(self) -> list[RunHead]:
        """All runs in the order they were added, without what takes long to read."""
        return await self._database.read(statements.heads)

    async def run(self, run_id: str) -> RunRecord | None:
        """A run, or None."""
        return await self._database.read(lambda c: statements.run(c, run_id))

    async def versions(self) -> dict[str, int]:
        """The version of every run, in the order they were added."""
        return await self._database.read(statements.versions)

    async def commit(self, run_id: str, version: int, commit: Commit) -> None:
        """Stores an event's changes on top of `version`; see `Store.commit`."""
        _check_run_of(commit.closed, run_id)
        await self._database.commit(run_id, version, commit)

    async def closed(self, assignment_id: str) -> ClosedWork | None:
        """How work ended, or None if it is not closed or not known."""
        return await self._database.read(lambda c: statements.closed(c, assignment_id))

    async def memory(self, run_id: str, client_index: int) -> bytes | None:
        """What a client's method remembers."""
        return await self._database.read(lambda c: statements.memory(c, run_id, client_index))

    async def memories(self, run_id: str) -> dict[int, bytes]:
        """What all clients' methods remember, by client index."""
        return await self._database.read(lambda c: statements.memories(c, run_id))

    async def log(
        self, run_id: str, kind: str | None = None, after: int = -1, limit: int | None = None
    ) -> list[LogEntry]:
        """A run's log in the order it was written, all kinds or one; see `Store.log`."""
        return await self._database.read(lambda c: statements.log(c, run_id, kind, after, limit))

    async def size(self, run_id: str) -> RunSize:
        """How much is kept of a run."""
        return await self._database.read(lambda c: removal.size(c, run_id))

    async def trim(self, run_id: str, *, log: bool = False, closed: bool = False) -> None:
        """Drops a run's log, its closed work, or both, for good; the run stays."""
        await self._database.write(lambda c: removal.trim(c, run_id, log=log, closed=closed))

    async def delete_run(self, run_id: str, version: int, now: float) -> None:
        """Deletes a run; see `Store.delete_run`."""
        tries = 0

        def remove(connection: Connection) -> None:
            nonlocal tries
            tries += 1
            removal.delete_run(connection, run_id, version, now, again=tries > 1)

        await self._database.write(remove)

    async def deleted(self, run_id: str) -> float | None:
        """When the run of this id was deleted; None if it was not."""
        return await self._database.read(lambda c: removal.deleted(c, run_id))

    async def snapshot(self, run_id: str, *, log: bool = True) -> RunSnapshot | None:
        """All that the store keeps of a run, read at one moment; see `Store.snapshot`."""
        return await self._database.read(
            lambda c: statements.snapshot(c, run_id, with_log=log), at_one_moment=True
        )

    async def restore(self, snapshot: RunSnapshot, clients: Sequence[ClientRecord] = ()) -> None:
        """Adds a run with all that belongs to it; see `Store.restore`."""
        _check_run_of(snapshot.closed, snapshot.record.run_id)
        tries = 0

        def restore(connection: Connection) -> None:
            nonlocal tries
            tries += 1
            statements.restore(connection, snapshot, clients, again=tries > 1)

        await self._database.write(restore)

    # Other processes on the same store

    @property
    def shared(self) -> bool:
        """Whether other processes may serve the same runs."""
        return self._database.shared

    @property
    def replica(self) -> str:
        """Names this process among those on the store; it changes when it has to be told anew."""
        return self._database.replica

    async def alive(self) -> frozenset[str]:
        """The replicas that are running now, this one among them."""
        return await self._database.alive()

    async def lead(self) -> bool:
        """Whether this replica does what only one of them should do; tries to become it."""
        return await self._database.lead()

    async def publish(self, signal: str) -> None:
        """Tells the other replicas something, at most 4000 bytes; not durable."""
        await self._database.publish(signal)

    def listen(self, signals: Signals) -> None:
        """Sets who is told what other replicas publish, now or with a commit."""
        self._database.listen(signals)


def _check_run_of(closed: Iterable[ClosedWork], run_id: str) -> None:
    if any(work.run_id != run_id for work in closed):
        raise ValueError(f"closed work is not of run {run_id!r}")
