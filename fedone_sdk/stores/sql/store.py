"""The SQL store: each method runs its statements in one transaction."""

from __future__ import annotations

import functools
import itertools
import os
from abc import abstractmethod
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.util import greenlet_spawn

from fedone_sdk.errors import FedOneError, SpecError
from fedone_sdk.stores.base import Member, Store
from fedone_sdk.stores.sql import schema, statements
from fedone_sdk.stores.sql.schema import Copied

P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M")


def _reads(
    statement: Callable[Concatenate[Connection, P], T],
) -> Callable[Concatenate[SqlStore, P], Coroutine[Any, Any, T]]:
    @_documented(statement)
    async def method(self: SqlStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._read(lambda c: statement(c, *args, **kwargs))

    return method


def _writes(
    statement: Callable[Concatenate[Connection, P], T],
) -> Callable[Concatenate[SqlStore, P], Coroutine[Any, Any, T]]:
    @_documented(statement)
    async def method(self: SqlStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._write(lambda c: statement(c, *args, **kwargs))

    return method


def _writes_once(
    statement: Callable[Concatenate[Connection, bool, P], T],
) -> Callable[Concatenate[SqlStore, P], Coroutine[Any, Any, T]]:
    """Return a method that changes the data once, even if its transaction is run again.

    A transaction whose outcome is unknown is run again. The statement's second argument, `again`,
    says whether an earlier attempt may have succeeded.
    """

    @_documented(statement)
    async def method(self: SqlStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        attempts = itertools.count()
        return await self._write(lambda c: statement(c, next(attempts) > 0, *args, **kwargs))

    return method


def _erases(
    write: Callable[Concatenate[SqlStore, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SqlStore, P], Coroutine[Any, Any, T]]:
    """Return a method that writes, and then removes deleted content from the files."""

    @functools.wraps(write)
    async def method(self: SqlStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result = await write(self, *args, **kwargs)
        await self._erase()
        return result

    return method


def _documented(statement: Callable[..., Any]) -> Callable[[M], M]:
    """Give a method the name, signature and docstring of the method of `Store`."""
    return functools.wraps(getattr(Store, statement.__name__))  # type: ignore[return-value]


class SqlStore(Store):
    """A `Store` in a SQLite file, for one server, or on PostgreSQL, for several servers.

    A write that has started is completed even if the caller is cancelled.
    """

    _databases: ClassVar[dict[str, type[SqlStore]]] = {}
    """Subclasses by the driver's name."""

    where: str
    """The path, or the host and the name of the database."""

    def __init_subclass__(cls, *, drivers: Sequence[str] = ()) -> None:
        cls._databases.update(dict.fromkeys(drivers, cls))

    def __init__(self, url: URL, *, serving: bool = True) -> None:
        """Initialise without connecting; arguments as for `at`."""
        self._url = url
        self._serving = serving

    @classmethod
    def at(cls, url: str | URL, *, password: str | None = None, serving: bool = True) -> SqlStore:
        """Return the store at a URL, or in a file.

        Args:
            url: A SQLite file, ``sqlite:///FILE`` or ``postgresql://USER:PASSWORD@HOST/DATABASE``.
            password: Replaces the password in the URL.
            serving: Whether this process serves runs. If so, it locks a SQLite file, or registers
                as a replica on PostgreSQL. With False, a tool can use the store of a running
                server; it does not create or upgrade a file.

        Raises:
            SpecError: The URL is malformed or names no supported database.
        """
        if isinstance(url, str) and "://" not in url:
            return cls.sqlite(url, serving=serving)
        try:
            url = make_url(url).set(password=password)
        except (ArgumentError, ValueError):
            # No cause, because it may contain the URL with its password.
            raise SpecError(
                "must be a file, or a URL such as postgresql://user@host/database", source="store"
            ) from None
        if url.drivername not in cls._databases:
            raise SpecError(
                f"{url.drivername} is not supported; use sqlite or postgresql", source="store"
            )
        return cls._databases[url.drivername](url, serving=serving)

    @classmethod
    def sqlite(cls, path: str | os.PathLike[str], *, serving: bool = True) -> SqlStore:
        """Return the store in a SQLite file, even if its name looks like a URL."""
        return cls.at(URL.create("sqlite", database=os.fspath(path)), serving=serving)

    def __str__(self) -> str:
        """Return the URL without its password."""
        return self._url.render_as_string(hide_password=True)

    def __repr__(self) -> str:
        return f"SqlStore({str(self)!r})"

    async def open(self) -> None:
        """Connect, and create the tables of an empty database.

        A SQLite file of an older version is upgraded; a PostgreSQL database is not.

        Raises:
            FedOneError: The database is not available, belongs to another program, is in use by
                another process, or has a schema that must be upgraded or is newer than this SDK.
        """
        await self._connect(serving=self._serving, upgrading=False)

    # Differences between the databases

    @abstractmethod
    async def _connect(self, *, serving: bool, upgrading: bool) -> None:
        """Connect; create the tables of an empty database; if `upgrading`, upgrade older tables."""

    @abstractmethod
    async def _read(self, work: Callable[[Connection], T]) -> T:
        """Return the result of `work` in a transaction that reads."""

    @abstractmethod
    async def _write(self, work: Callable[[Connection], T], signals: Sequence[str] = ()) -> T:
        """Return the result of `work` in a transaction that writes and publishes the signals."""

    @abstractmethod
    async def _erase(self) -> None:
        """Remove deleted content from the files, if the database supports it."""

    @abstractmethod
    async def schema(self) -> str | None:
        """Return the schema version of the database; None if it is empty or missing."""

    @abstractmethod
    def _alone(self, *, empty: bool) -> AbstractAsyncContextManager[Connection]:
        """Return a connection in a transaction; raise an error if a server uses the database.

        With `empty`, creates a missing file and its tables.
        """

    async def copy_to(self, target: SqlStore, digest: Callable[[bytes], str]) -> Copied:
        """Copy all tables to an empty or missing store in one transaction; close both stores first.

        The copy is checked by row counts and by `digest` of each run's arrays.

        Raises:
            FedOneError: A server uses one of the stores, the target is not empty, or the copy
                differs. In each case the target does not change.
        """
        async with self._alone(empty=False) as source:
            await greenlet_spawn(schema.check_source, source)
            async with target._alone(empty=True) as copy:
                return await greenlet_spawn(schema.copy, source, copy, digest)

    async def clear(self) -> None:
        """Delete all runs, clients and tokens in one transaction; the tables stay."""
        await self._write(statements.clear)
        await self._erase()

    # Schema

    async def check(self) -> str:
        """Return what `open` would do, or raise its error; the database is not changed."""
        revision, where = await self.schema(), self.where
        if revision is None:
            return f"would create the tables in {where}"
        if revision == schema.HEAD:
            return f"would use {where}"
        if self.shared:
            raise FedOneError(f"store {where} has schema {revision}; run `fedone db upgrade`")
        return f"would use {where}, and upgrade it from schema {revision} to {schema.HEAD}"

    def _not_open(self) -> FedOneError:
        return FedOneError(f"store {self.where} is not open")

    async def upgrade(self) -> None:
        """Upgrade the closed database to the newest schema."""
        await self._connect(serving=False, upgrading=True)
        await self.close()

    # Tokens and clients

    put_token = _writes(statements.put_token)
    tokens = _reads(statements.tokens)
    revoke_token = _writes(statements.revoke_token)
    enrol = _writes_once(statements.enrol)
    clients = _reads(statements.clients)
    num_clients = _reads(statements.num_clients)
    client = _reads(statements.client)
    client_at = _reads(statements.client_at)
    client_named = _reads(statements.client_named)
    change_client = _writes(statements.change_client)
    idle_clients = _reads(statements.idle_clients)
    retire_client = _erases(_writes(statements.retire_client))

    # Waiting clients

    async def join(self, member: Member, signals: Sequence[str] = ()) -> None:
        """See `Store.join`."""
        await self._write(lambda c: statements.join(c, member), signals)

    async def leave(self, client_indices: Collection[int], signals: Sequence[str] = ()) -> None:
        """See `Store.leave`."""
        await self._write(lambda c: statements.leave(c, client_indices), signals)

    members = _reads(statements.members)

    # Runs

    add_run = _writes_once(statements.add_run)
    heads = _reads(statements.heads)
    run = _reads(statements.run)
    versions = _reads(statements.versions)

    closed = _reads(statements.closed)
    memory = _reads(statements.memory)
    log = _reads(statements.log)
    trim = _erases(_writes(statements.trim))
    delete_run = _erases(_writes_once(statements.delete_run))
    deleted = _reads(statements.deleted)
