"""The store protocol, and what stores share: replicas, log pages, commits, transactions."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from fedone_sdk.stores.records import (
    ClientRecord,
    ClosedWork,
    Commit,
    LogEntry,
    Member,
    RunHead,
    RunRecord,
    TokenRecord,
)

T = TypeVar("T")

_PAGE_BYTES = 1 << 20
"""Approximate size of a page, bytes."""
_FIRST, _MOST = 16, 1024
"""Number of lines of the first page, and maximal number of any page."""

Signals = Callable[[str | None], None]
"""Listener for signals of other replicas; None means that signals may have been lost."""


class Store(Protocol):
    """Durable state. Each method is one transaction, durable on return."""

    async def open(self) -> None:
        """Connect; create or migrate the schema if necessary."""

    async def close(self) -> None:
        """Disconnect."""

    async def ping(self) -> None:
        """Raise an error if the store is not available."""

    async def now(self) -> float:
        """Return the time by which all processes of the store agree, seconds since the epoch."""

    # Tokens and clients

    async def put_token(self, token: TokenRecord) -> None:
        """Add a token, or change ``runs`` and ``expires_at`` of the one with the same secret.

        Another token of this name is a ``ValueError``.
        """

    async def tokens(self) -> list[TokenRecord]:
        """Return all tokens in order of creation."""

    async def revoke_token(self, name: str, now: float) -> TokenRecord | None:
        """Revoke a token permanently; None if it does not exist."""

    async def enrol(self, client: ClientRecord, token_sha256: str, now: float) -> ClientRecord:
        """Enrol a client under the next index; concurrent calls never share one.

        The client gets the token's name and runs, and the token loses a use. If a client with the
        same ``enrolment_sha256`` exists, only its credential is replaced.

        Raises:
            TokenRefused: The token is unknown, used up, expired or revoked; or the client exists
                and was revoked, or has another key or a token for other runs.
            ValueError: The client id exists.
        """

    async def clients(self, after: int = -1, limit: int | None = None) -> list[ClientRecord]:
        """Return clients with an index larger than `after`, in index order; no `limit` is all."""

    async def num_clients(self) -> int:
        """Return the number of clients without reading them."""

    async def client(self, credential_sha256: str) -> ClientRecord | None:
        """Return the client with this current or previous credential."""

    async def client_at(self, index: int) -> ClientRecord | None:
        """Return the client with this enrolment index."""

    async def client_named(self, client_id: str) -> ClientRecord | None:
        """Return the client with this public id."""

    async def change_client(self, index: int, **changes: Any) -> None:
        """Change fields of a `ClientRecord`; an unknown index is an ``IndexError``."""

    async def idle_clients(self, before: float, limit: int) -> list[int]:
        """Return clients last seen before a time and not retired, in index order."""

    async def retire_client(self, index: int, now: float) -> None:
        """Erase a client permanently, except for its index and public id, which runs refer to."""

    # Waiting clients

    async def join(self, member: Member, signals: Sequence[str] = ()) -> None:
        """Add or replace a waiting client, and publish `signals` in the same transaction.

        It is durable no later than any later commit.
        """

    async def leave(self, client_indices: Collection[int], signals: Sequence[str] = ()) -> None:
        """Remove clients that no longer wait; `signals` as for `join`."""

    async def members(self) -> list[Member]:
        """Return waiting clients in index order, including expired ones."""

    # Runs

    async def add_run(self, record: RunRecord) -> None:
        """Add a run; a duplicate id is a ``ValueError``, that of a deleted run a `RunDeleted`."""

    async def heads(self) -> list[RunHead]:
        """Return the heads of all runs in order of creation."""

    async def run(self, run_id: str) -> RunRecord | None:
        """Return a run, or None."""

    async def versions(self) -> dict[str, int]:
        """Return the version of every run, in order of creation."""

    async def commit(self, run_id: str, version: int, commit: Commit) -> None:
        """Store an event's changes on top of `version`; the run then has ``version + 1``.

        Raises:
            VersionConflict: The run has another version; nothing was changed.
            KeyError: The run does not exist.
            FedOneError: The store became unavailable; whether the commit was stored is unknown.
        """

    async def closed(self, assignment_id: str) -> ClosedWork | None:
        """Return a closed assignment; None if it is open or unknown."""

    async def memory(
        self, run_id: str, client_index: int, at_round: int | None = None
    ) -> bytes | None:
        """Return the newest memory of a client or the server, or that of a round."""

    async def log(
        self, run_id: str, kind: str | None = None, after: int = -1, limit: int | None = None
    ) -> list[LogEntry]:
        """Return a run's log in order, of all kinds or one.

        Only entries of versions after `after` are returned, at most about `limit` of them: it is
        extended to the end of the last commit. See `log_pages`.
        """

    async def trim(self, run_id: str, *, log: bool = False, closed: bool = False) -> None:
        """Delete a run's log with its memories, its closed work, or both; the run stays."""

    async def delete_run(self, run_id: str, version: int, now: float) -> None:
        """Delete a run at `version` with all its data permanently.

        Its id stays reserved: a new run of this name would spend its budget again.

        Raises:
            VersionConflict: The run has another version; nothing was changed.
            KeyError: The run does not exist.
        """

    async def deleted(self, run_id: str) -> float | None:
        """Return when this run was deleted, seconds since the epoch; None if it was not."""

    # Replicas

    @property
    def shared(self) -> bool:
        """Whether other processes may serve the same runs."""

    @property
    def replica(self) -> str:
        """Id of this process among the replicas; new at every `open`."""

    async def alive(self) -> frozenset[str]:
        """Return the ids of all running replicas, including this one."""

    async def lead(self) -> bool:
        """Try to acquire the leader lock; return whether this replica holds it."""

    async def publish(self, signal: str) -> None:
        """Publish a signal of at most 4000 bytes to the other replicas; not durable."""

    def listen(self, signals: Signals) -> None:
        """Set the listener for signals of other replicas."""


class Alone:
    """Replica methods of a store for one process."""

    def __init__(self) -> None:
        self._replica = uuid.uuid4().hex

    @property
    def shared(self) -> bool:
        """Always False."""
        return False

    @property
    def replica(self) -> str:
        """Id of this process; new at every `open`."""
        return self._replica

    async def now(self) -> float:
        """Return the machine's time."""
        return time.time()

    async def alive(self) -> frozenset[str]:
        """Return only this process."""
        return frozenset({self._replica})

    async def lead(self) -> bool:
        """Return True: there are no other replicas."""
        return True

    async def publish(self, signal: str) -> None:
        """Do nothing: there are no other replicas."""

    def listen(self, signals: Signals) -> None:
        """Do nothing: there are no other replicas."""

    def _new_replica(self) -> None:
        """Set a new id, so that reservations of an earlier process are recognised as lost."""
        self._replica = uuid.uuid4().hex


async def log_pages(
    store: Store, run_id: str, kind: str | None = None, after: int = -1
) -> AsyncIterator[list[LogEntry]]:
    """Yield a run's log in order, in non-empty pages of about 1 MiB; filters as in `Store.log`.

    Entries of one commit are on the same page. The last page may include entries that are appended
    during the iteration.
    """
    limit = _FIRST
    while page := await store.log(run_id, kind, after, limit):
        yield page
        after = page[-1].version
        mean = max(sum(len(entry.body) for entry in page) // len(page), 1)
        limit = min(max(_PAGE_BYTES // mean, 1), _MOST)


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
