"""The interface of stores, their records, and code that stores share.

A memory is a method's state that is kept between rounds, such as AdamW's moments. A method may have
one for each client, and one for the server.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from fedone_sdk.errors import FedOneError

T = TypeVar("T")

_PAGE_BYTES = 1 << 20
"""Approximate size of a page of the log, bytes."""
_FIRST_PAGE, _LARGEST_PAGE = 16, 1024
"""Number of entries of the first page of a log, and maximum of any page."""

NO_CREDENTIAL = "retired: "
"""Prefix of the text that replaces the credential's digest when a client is retired (erased)."""

SERVER = -1
"""The client index under which the server's memory is stored."""

Signals = Callable[[str | None], None]
"""Listener for signals, short messages of other replicas; gets None if some may have been lost."""


class VersionConflict(FedOneError):
    """The run has another version than expected: another process committed to it."""


class RunDeleted(ValueError):
    """A deleted run had this id, which cannot be used again."""


class TokenRefused(FedOneError):
    """An enrolment token is unknown, expired, used up or revoked; the message says which."""


# Records. All times are seconds since the epoch.


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """An enrolment token; the secret itself is never stored.

    Attributes:
        token_sha256: Digest of the secret; unique.
        runs: Patterns of the runs that its clients may access, such as ``acme-*``; None is all.
        uses_left: Number of clients that can still enrol with it; None is unlimited.
        expires_at: Expiry; None is never.
    """

    name: str
    token_sha256: str
    runs: tuple[str, ...] | None = None
    uses_left: int | None = None
    expires_at: float | None = None
    created_at: float
    revoked_at: float | None = None

    def check(self, now: float) -> None:
        """Raise `TokenRefused` if the token was revoked or has expired."""
        if self.revoked_at is not None:
            raise TokenRefused("the enrolment token was revoked")
        if self.expires_at is not None and self.expires_at <= now:
            raise TokenRefused("the enrolment token has expired")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRecord:
    """An enrolled client.

    Attributes:
        index: Enrolment index, from 0 without gaps, for random draws; -1 before enrolment.
        credential_sha256: Digest of its secret, which itself is never stored.
        enrolment_sha256: Digest of the enrolment's nonce; a repeated enrolment has the same nonce.
            None if the device sent no nonce.
        runs: Patterns of the runs that it may access; None is all.
        previous_sha256: Digest of the credential before the last rotation. It stays valid until
            the client uses its new credential, because the response with it may get lost.
        seen_at: Time of its last request, updated at most once a day; None before the first update.
    """

    index: int
    client_id: str
    credential_sha256: str
    name: str | None = None
    enrolled_at: float
    enrolment_sha256: str | None = None
    token: str | None = None
    runs: tuple[str, ...] | None = None
    previous_sha256: str | None = None
    revoked_at: float | None = None
    seen_at: float | None = None

    def enrolled_again(self, client: ClientRecord, token: TokenRecord) -> ClientRecord:
        """Return this client with the credential of its repeated enrolment.

        Raises:
            TokenRefused: The client was revoked, or the token is for other runs.
        """
        if self.revoked_at is not None:
            raise TokenRefused("this client was revoked")
        if self.runs != token.runs:
            raise TokenRefused("this client was enrolled for other runs; enrol with a new nonce")
        return replace(self, credential_sha256=client.credential_sha256, previous_sha256=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A client that waits for work of `run_id`, or of any run if None, until the time `until`.

    Waiting clients are stored so that a restart does not change which clients are drawn.
    """

    client_index: int
    num_examples: int
    run_id: str | None
    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHead:
    """A `RunRecord` without its large parts.

    `document` is the state without its arrays, JSON. `version` is the number of commits.
    """

    run_id: str
    spec: str
    document: str
    version: int
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord(RunHead):
    """A run and its newest state; the store does not interpret them."""

    candidates: str
    arrays: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedWork:
    """A closed assignment, stored to answer repeated and late updates.

    `outcome`: ``accepted``, or why there was no update. `receipt`: the response to the update.
    """

    assignment_id: str
    run_id: str
    client_index: int
    outcome: str
    body_sha256: str | None = None
    receipt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """An entry of a run's log; `body` is JSON. The store sets `version` to the commit's version."""

    kind: str
    body: str
    version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMemory:
    """The memory of a client, or of the server (index `SERVER`), after `round` rounds."""

    client_index: int
    round: int
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """All changes of a run by one event, such as an update; committed atomically.

    Attributes:
        document: The new state without its arrays.
        arrays: The new arrays; None if unchanged.
        memories: New memories; each replaces the stored memory of the same client and round.
        back_to: Target round of a rollback, which deletes later memories; None without a rollback.
        signal: Signal to publish after the commit; lost if the process exits before that.
    """

    document: str
    arrays: bytes | None = None
    closed: tuple[ClosedWork, ...] = ()
    log: tuple[LogEntry, ...] = ()
    memories: tuple[StoredMemory, ...] = ()
    back_to: int | None = None
    signal: str | None = None


def check_run_of(closed: Iterable[ClosedWork], run_id: str) -> None:
    """Raise ``ValueError`` if closed work is of another run."""
    if any(work.run_id != run_id for work in closed):
        raise ValueError(f"closed work is not of run {run_id!r}")


@runtime_checkable
class Store(Protocol):
    """Durable state. Each method is one transaction, which is on disk when the method returns.

    The changes of `join` and `leave` may reach the disk later, with the next commit of a run.
    """

    async def open(self) -> None:
        """Connect; create the schema if it is missing."""

    async def close(self) -> None:
        """Disconnect."""

    async def ping(self) -> None:
        """Raise an error if the store is not available."""

    async def now(self) -> float:
        """Return the time, the same for all processes on this store, seconds since the epoch."""

    # Tokens and clients

    async def put_token(self, token: TokenRecord) -> None:
        """Add a token, or change ``runs`` and ``expires_at`` of the token with the same secret.

        Raises ``ValueError`` if another token has this name.
        """

    async def tokens(self) -> list[TokenRecord]:
        """Return all tokens in order of creation."""

    async def revoke_token(self, name: str, now: float) -> TokenRecord | None:
        """Revoke a token permanently; None if it does not exist."""

    async def enrol(self, client: ClientRecord, token_sha256: str, now: float) -> ClientRecord:
        """Enrol a client under the next index, with the token's name and runs.

        This takes one of the token's uses. If a client with the same ``enrolment_sha256`` exists,
        only its credential is replaced.

        Raises:
            TokenRefused: The token is unknown, used up, expired or revoked. For an existing client:
                the client was revoked, or the token is for other runs.
            ValueError: The client id exists.
        """

    async def clients(self, after: int = -1, limit: int | None = None) -> list[ClientRecord]:
        """Return clients with an index larger than `after`, in index order."""

    async def num_clients(self) -> int:
        """Return the number of clients without reading them."""

    async def client(self, credential_sha256: str) -> ClientRecord | None:
        """Return the client with this current or previous credential."""

    async def client_at(self, index: int) -> ClientRecord | None:
        """Return the client with this enrolment index."""

    async def client_named(self, client_id: str) -> ClientRecord | None:
        """Return the client with this public id."""

    async def change_client(self, index: int, **changes: Any) -> None:
        """Change fields of a `ClientRecord`; raise ``IndexError`` for an unknown index."""

    async def idle_clients(self, before: float, limit: int) -> list[int]:
        """Return the indices of clients, except retired ones, that were last seen before a time."""

    async def retire_client(self, index: int, now: float) -> None:
        """Erase a client permanently, except for its index and public id, which runs refer to."""

    # Waiting clients

    async def join(self, member: Member, signals: Sequence[str] = ()) -> None:
        """Add or replace a waiting client, and publish `signals` in the same transaction."""

    async def leave(self, client_indices: Collection[int], signals: Sequence[str] = ()) -> None:
        """Remove clients that no longer wait; `signals` as for `join`."""

    async def members(self) -> list[Member]:
        """Return waiting clients in index order, including expired ones."""

    # Runs

    async def add_run(self, record: RunRecord) -> None:
        """Add a run; raise ``ValueError`` if its id is in use, `RunDeleted` if it was deleted."""

    async def heads(self) -> list[RunHead]:
        """Return the heads of all runs in order of creation."""

    async def run(self, run_id: str) -> RunRecord | None:
        """Return a run; None if it does not exist."""

    async def versions(self) -> dict[str, int]:
        """Return the version of every run, in order of creation."""

    async def commit(self, run_id: str, version: int, commit: Commit) -> None:
        """Store an event's changes on top of `version`; the run then has ``version + 1``.

        Raises:
            VersionConflict: The run has another version; nothing was changed.
            KeyError: The run does not exist.
            StoreUnavailable: Whether the commit was stored is unknown.
        """

    async def closed(self, assignment_id: str) -> ClosedWork | None:
        """Return a closed assignment; None if it is open or unknown."""

    async def memory(
        self, run_id: str, client_index: int, at_round: int | None = None
    ) -> bytes | None:
        """Return a client's (or the server's) newest memory, or its memory of round `at_round`."""

    async def log(
        self, run_id: str, kind: str | None = None, after: int = -1, limit: int | None = None
    ) -> list[LogEntry]:
        """Return a run's log after the version `after`, in order; with `kind`, only this kind.

        The entries of one commit are never separated, so the list may be longer than `limit`.
        """

    async def trim(self, run_id: str, *, log: bool = False, closed: bool = False) -> None:
        """Delete a run's log and memories (`log`), its closed work (`closed`), or both."""

    async def delete_run(self, run_id: str, version: int, now: float) -> None:
        """Delete a run at `version` permanently, with all its data; errors as for `commit`.

        The id stays reserved, because a new run with it would spend the budget a second time.
        """

    async def deleted(self, run_id: str) -> float | None:
        """Return the time of deletion of a run; None if it was not deleted."""

    # Replicas

    shared: ClassVar[bool]
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


class SingleProcess:
    """The replica methods of a store that only one process uses."""

    shared: ClassVar[bool] = False

    def __init__(self) -> None:
        self._new_replica()

    @property
    def replica(self) -> str:
        """See `Store.replica`."""
        return self._replica

    async def now(self) -> float:
        """Return the machine's time."""
        return time.time()

    async def alive(self) -> frozenset[str]:
        """Return only this process."""
        return frozenset({self._replica})

    async def lead(self) -> bool:
        """Return True."""
        return True

    async def publish(self, signal: str) -> None:
        """Do nothing: there are no other replicas."""

    def listen(self, signals: Signals) -> None:
        """Do nothing: there are no other replicas."""

    def _new_replica(self) -> None:
        """Set a new id, so that calls that an earlier process left open are charged as lost."""
        self._replica = uuid.uuid4().hex


async def log_pages(
    store: Store, run_id: str, kind: str | None = None, after: int = -1
) -> AsyncIterator[list[LogEntry]]:
    """Yield a run's log in order, in non-empty pages of about 1 MiB; filters as in `Store.log`.

    The last page may include entries that are appended during the iteration.
    """
    limit = _FIRST_PAGE
    while page := await store.log(run_id, kind, after, limit):
        yield page
        after = page[-1].version
        mean = max(sum(len(entry.body) for entry in page) // len(page), 1)
        limit = min(max(_PAGE_BYTES // mean, 1), _LARGEST_PAGE)


async def run_shielded(work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; if the caller is cancelled, wait until `work` has ended.

    Otherwise SQLite's thread could use a connection after `close`, and a statement of PostgreSQL
    would have an unknown outcome.
    """
    task = asyncio.create_task(work, name="store transaction")
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
