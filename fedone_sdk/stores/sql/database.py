"""The seam between a store and the database that it is in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from sqlalchemy import Connection

from fedone_sdk.stores.base import Commit, Signals

__all__ = ["Database"]

T = TypeVar("T")


class Database(Protocol):
    """Transactions, and what databases do in ways of their own.

    `read`, `write` and `commit` raise what their work raises, and `FedOneError` where the database
    cannot be used.
    """

    async def open(self, *, serving: bool, upgrading: bool) -> None:
        """Connects; see `SqlStore`."""
        ...

    async def close(self) -> None:
        """Disconnects, after the writes under way."""
        ...

    async def schema(self) -> str | None:
        """See `SqlStore.schema`."""
        ...

    async def ping(self) -> None:
        """Raises `FedOneError` if the database cannot be read now."""
        ...

    async def read(self, work: Callable[[Connection], T], *, at_one_moment: bool = False) -> T:
        """Does `work`; if told so, all its statements read one moment."""
        ...

    async def write(self, work: Callable[[Connection], T], signals: Sequence[str] = ()) -> T:
        """Does `work` in a transaction that an error rolls back; it may be done several times.

        Whatever becomes of the caller, work that has begun is carried out. With signals, other
        processes are told them in the same transaction, and it is safe no later than whatever is
        written afterwards.
        """
        ...

    async def commit(self, run_id: str, version: int, commit: Commit) -> None:
        """See `Store.commit`."""
        ...

    @property
    def shared(self) -> bool:
        """See `Store.shared`."""
        ...

    @property
    def replica(self) -> str:
        """See `Store.replica`."""
        ...

    async def alive(self) -> frozenset[str]:
        """See `Store.alive`."""
        ...

    async def lead(self) -> bool:
        """See `Store.lead`."""
        ...

    async def publish(self, signal: str) -> None:
        """See `Store.publish`."""
        ...

    def listen(self, signals: Signals) -> None:
        """See `Store.listen`."""
        ...
