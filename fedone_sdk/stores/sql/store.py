"""The SQL store: each method runs its statements in one transaction."""

from __future__ import annotations

import functools
import inspect
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
    async def method(self: SqlStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._read(lambda c: statement(c, *args, **kwargs))

    return _described(method, statement, 0)


def _writes(
    statement: Callable[Concatenate[Connection, P], T],
) -> Callable[Concatenate[SqlStore, P], Coroutine[Any, Any, T]]:
    async def method(self: SqlStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._write(lambda c: statement(c, *args, **kwargs))

    return _described(method, statement, 0)


def _writes_once(
    statement: Callable[Concatenate[Connection, bool, P], T],
) -> Callable[Concatenate[SqlStore, P], Coroutine[Any, Any, T]]:
    """Return the store's method that runs a statement in a write transaction.

    The database repeats a transaction whose outcome is unknown. The statement's second argument
    says whether an earlier attempt of the same call may have succeeded.
    """

    async def method(self: SqlStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        tries = itertools.count()
        return await self._write(lambda c: statement(c, next(tries) > 0, *args, **kwargs))

    return _described(method, statement, 1)


def _erases(
    write: Callable[Concatenate[SqlStore, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SqlStore, P], Coroutine[Any, Any, T]]:
    """Return a method that writes, and then removes what it deleted from the files."""

    @functools.wraps(write)
    async def method(self: SqlStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result = await write(self, *args, **kwargs)
        await self._erase()
        return result

    return method


def _described(method: M, statement: Callable[..., Any], num_hidden: int) -> M:
    """Give a method the name and signature of its statement, and the docstring of `Store`."""
    signature = inspect.signature(statement)
    _, *parameters = signature.parameters.values()
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = signature.replace(parameters=[own, *parameters[num_hidden:]])
    promised = getattr(Store, statement.__name__)
    described: Any = method
    described.__name__, described.__doc__ = statement.__name__, promised.__doc__
    described.__qualname__, described.__signature__ = f"SqlStore.{statement.__name__}", signature
    return method


class SqlStore(Store):
    """A `Store` in a SQLite file, for one server, or on PostgreSQL, for several.

    A write that has started is completed even if the caller is cancelled.
    """

    _kinds: ClassVar[dict[str, type[SqlStore]]] = {}
    """By the driver's name."""

    def __init_subclass__(cls, *, drivers: Sequence[str] = ()) -> None:
        cls._kinds.update(dict.fromkeys(drivers, cls))

    def __init__(
        self,
        url: URL,
        *,
        serving: bool = True,
        num_connections: int = 16,
    ) -> None:
        """Initialise without connecting; arguments as for `at`."""
        self._url = url
        self._serving = serving
        self._num_connections = num_connections

    @classmethod
    def at(
        cls,
        url: str | URL,
        *,
        password: str | None = None,
        serving: bool = True,
        num_connections: int = 16,
    ) -> SqlStore:
        """Return the store at a URL, or in a file.

        Args:
            url: A SQLite file, ``sqlite:///FILE`` or ``postgresql://USER:PASSWORD@HOST/DATABASE``.
            password: Replaces the URL's.
            serving: Whether this process serves runs: it locks a SQLite file, or registers as a
                replica on PostgreSQL. Tools pass False: they can use a store that is being served,
                and neither create nor upgrade a file.
            num_connections: Size of the PostgreSQL connection pool, without the replica's session.

        Raises:
            SpecError: The URL is malformed or names no supported database.
        """
        if isinstance(url, str) and "://" not in url:
            return cls.sqlite(url, serving=serving)
        try:
            url = make_url(url).set(password=password)
        except (ArgumentError, ValueError):
            # Without the cause, which may contain the URL with its password.
            raise SpecError(
                "must be a file, or a URL such as postgresql://user@host/database", source="store"
            ) from None
        kind = cls._kinds.get(url.drivername)
        if kind is None:
            raise SpecError(
                f"{url.drivername} is not supported, only sqlite and postgresql", source="store"
            )
        return kind(url, serving=serving, num_connections=num_connections)

    @classmethod
    def sqlite(cls, path: str | os.PathLike[str], *, serving: bool = True) -> SqlStore:
        """Return the store in a SQLite file of any name; `serving` as for `at`."""
        return cls.at(URL.create("sqlite", database=os.fspath(path)), serving=serving)

    def __str__(self) -> str:
        """Return the URL, with stars for a password."""
        return self._url.render_as_string(hide_password=True)

    def __repr__(self) -> str:
        return f"SqlStore({str(self)!r})"

    async def open(self) -> None:
        """Connect, and create the tables of an empty database.

        A SQLite file of an older version is upgraded; a PostgreSQL database is not.

        Raises:
            FedOneError: The database cannot be used: not reachable, not writable, locked, served by
                another process, not a database, of another program, or with a schema that must be
                upgraded or is newer than this SDK.
        """
        await self._connect(serving=self._serving, upgrading=False)

    # What the databases do

    where: str
    """The path, or the host and the name of the database."""

    @abstractmethod
    async def _connect(self, *, serving: bool, upgrading: bool) -> None:
        """Connect; create the tables of an empty database, or upgrade them if `upgrading`."""

    @abstractmethod
    async def _read(self, work: Callable[[Connection], T]) -> T:
        """Return the result of `work` in a transaction that reads."""

    @abstractmethod
    async def _write(self, work: Callable[[Connection], T], signals: Sequence[str] = ()) -> T:
        """Return the result of `work` in a transaction that writes and publishes the signals."""

    @abstractmethod
    async def _erase(self) -> None:
        """Remove deleted content from the files, where the database can."""

    @abstractmethod
    async def schema(self) -> str | None:
        """Return the schema version of the open or closed database; None if empty or missing."""

    @abstractmethod
    def _alone(self, *, empty: bool) -> AbstractAsyncContextManager[Connection]:
        """Return a connection in a transaction while no server uses the database.

        Args:
            empty: Whether to create a missing file, and the tables of an empty database.
        """

    async def copy_to(self, target: SqlStore, digest: Callable[[bytes], str]) -> Copied:
        """Copy everything to an empty store, in one transaction; both are closed.

        Args:
            target: An empty or missing store.
            digest: Digest of a run's arrays, by which the copy is checked.

        Raises:
            FedOneError: A server uses one of the stores, the target is not empty, or the copy
                differs; the target stays empty.
        """
        async with self._alone(empty=False) as source, target._alone(empty=True) as copy:
            return await greenlet_spawn(schema.copy, source, copy, digest)

    async def clear(self) -> None:
        """Delete all runs, clients and tokens in one transaction; the tables stay."""
        await self._write(statements.clear)
        await self._erase()

    # Schema

    async def check(self) -> str:
        """Return what `open` would do, without changes of the database, or raise its error."""
        revision, where = await self.schema(), self.where
        if revision is None:
            return f"would create the tables in {where}"
        if revision == schema.HEAD:
            return f"would use {where}"
        if self.shared:
            raise FedOneError(f"store {where} has schema {revision}; run `fedone db upgrade`")
        return f"would use {where}, and upgrade it from schema {revision} to {schema.HEAD}"

    async def upgrade(self) -> None:
        """Upgrade the database to the newest schema; it stays closed."""
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
        """Add a waiting client and publish signals; see `Store.join`."""
        await self._write(lambda c: statements.join(c, member), signals)

    async def leave(self, client_indices: Collection[int], signals: Sequence[str] = ()) -> None:
        """Remove clients that no longer wait and publish signals; see `Store.leave`."""
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
