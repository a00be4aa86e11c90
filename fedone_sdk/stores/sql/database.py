"""Interface between the store and its database, and shielded transactions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from sqlalchemy import Connection

from fedone_sdk.stores.base import Replica
from fedone_sdk.stores.records import Commit

T = TypeVar("T")


class Database(Replica, Protocol):
    """Transactions and database-specific operations.

    `read`, `write` and `commit` raise the errors of their work, and `FedOneError` if the database
    is not available.
    """

    async def open(self, *, serving: bool, upgrading: bool) -> None:
        """Connect; see `SqlStore`."""
        ...

    async def close(self) -> None:
        """Disconnect after pending writes."""
        ...

    async def schema(self) -> str | None:
        """See `SqlStore.schema`."""
        ...

    async def ping(self) -> None:
        """Raise `FedOneError` if the database is not available."""
        ...

    async def read(self, work: Callable[[Connection], T], *, at_one_moment: bool = False) -> T:
        """Run `work`; `at_one_moment` gives all its statements the same snapshot."""
        ...

    async def write(self, work: Callable[[Connection], T], signals: Sequence[str] = ()) -> T:
        """Run `work` in a transaction, which may be repeated; an error rolls it back.

        Work that has started is completed even if the caller is cancelled. Signals are published in
        the same transaction, which is durable no later than any later write.
        """
        ...

    async def commit(self, run_id: str, version: int, commit: Commit) -> None:
        """See `Store.commit`."""
        ...


async def run_shielded(work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, which runs to completion even if the caller is cancelled.

    A thread cannot be cancelled, and closing the store would close its connection. The outcome of a
    cancelled PostgreSQL statement is unknown.
    """
    task = asyncio.create_task(work, name="store transaction")
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
