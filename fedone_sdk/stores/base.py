"""The store protocol and its records: tokens, clients, runs, closed work, logs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from fedone_sdk.errors import FedOneError


class VersionConflict(FedOneError):
    """The run has another version than expected: another process committed to it."""


class RunDeleted(ValueError):
    """The id is reserved by a deleted run."""


class TokenRefused(FedOneError):
    """An enrolment token is unknown, expired, used up or revoked; the message says which."""


NO_CREDENTIAL = "retired: "
"""In place of a digest: the client was retired and cannot log in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """An enrolment token; the secret itself is never stored.

    Attributes:
        name: Unique name.
        token_sha256: Digest of the secret; unique.
        runs: Patterns of the runs that its clients may access, such as ``acme-*``; None is all.
        uses_left: Number of clients that can still enrol with it; None is unlimited.
        expires_at: Expiry, seconds since the epoch; None is never.
        created_at: Seconds since the epoch.
        revoked_at: Seconds since the epoch; None if it is not revoked.
    """

    name: str
    token_sha256: str
    runs: tuple[str, ...] | None = None
    uses_left: int | None = None
    expires_at: float | None = None
    created_at: float
    revoked_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRecord:
    """An enrolled client.

    Attributes:
        index: Enrolment index, from 0 without gaps, over which random draws are made; -1 before
            enrolment.
        client_id: Public id.
        credential_sha256: Digest of its secret; the secret itself is never stored.
        name: Display name.
        enrolled_at: Seconds since the epoch.
        enrolment_sha256: Digest of the enrolment's nonce, by which repetitions are recognised; None
            if the device sent none.
        token: Name of the token that it enrolled with.
        runs: Patterns of the runs that it may access; None is all.
        public_key: Ed25519 public key of its signatures, base64; None if it does not sign.
        previous_sha256: Digest of the credential before the last rotation, valid until the new one
            is used, in case the response was lost.
        revoked_at: Seconds since the epoch; None if it is not revoked.
        seen_at: Time of its last request with a precision of a day, seconds since the epoch; None
            if that is less than a day after `enrolled_at`.
    """

    index: int
    client_id: str
    credential_sha256: str
    name: str | None = None
    enrolled_at: float
    enrolment_sha256: str | None = None
    token: str | None = None
    runs: tuple[str, ...] | None = None
    public_key: str | None = None
    previous_sha256: str | None = None
    revoked_at: float | None = None
    seen_at: float | None = None


def refuse_another(known: ClientRecord, client: ClientRecord, token: TokenRecord) -> None:
    """Refuse a repeated enrolment that may come from another device.

    A known nonce is not sufficient to take over the client: the key and the runs of the token must
    be the same.

    Raises:
        TokenRefused: With the reason.
    """
    if known.revoked_at is not None:
        raise TokenRefused("this client was revoked")
    if known.public_key != client.public_key:
        raise TokenRefused("this client enrolled with another key: a new one needs a new nonce")
    if known.runs != token.runs:
        raise TokenRefused("this client enrolled for other runs: it needs a new nonce")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A client that waits for work; stored so that draws after a restart are the same.

    Attributes:
        client_index: Its enrolment index.
        num_examples: Its number of examples.
        run_id: The only run that it works for; None is any.
        until: Expiry, seconds since the epoch.
    """

    client_index: int
    num_examples: int
    run_id: str | None
    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A run and its newest state, opaque to the store.

    Attributes:
        run_id: Id of the run.
        spec: RunSpec, JSON.
        candidates: The vocabulary, JSON list of strings.
        document: The state without its arrays, JSON.
        arrays: The state's arrays.
        version: Number of commits.
        created_at: Seconds since the epoch.
    """

    run_id: str
    spec: str
    candidates: str
    document: str
    arrays: bytes
    version: int
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHead:
    """A `RunRecord` without its large parts: candidates and arrays.

    Attributes:
        run_id: Id of the run.
        spec: RunSpec, JSON.
        document: The state without its arrays, JSON.
        version: Number of commits.
        created_at: Seconds since the epoch.
    """

    run_id: str
    spec: str
    document: str
    version: int
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedWork:
    """A closed assignment, stored to answer repeated and late updates.

    Attributes:
        assignment_id: The assignment.
        run_id: Its run.
        client_index: Its client.
        outcome: ``accepted``, or why it ended without an update.
        body_sha256: Digest of the accepted body.
        receipt: The receipt's JSON, if accepted.
    """

    assignment_id: str
    run_id: str
    client_index: int
    outcome: str
    body_sha256: str | None = None
    receipt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """One line of a run's log.

    Attributes:
        kind: ``round``, ``metric`` ...
        body: JSON.
        version: The run's version after its commit; set by the store.
    """

    kind: str
    body: str
    version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """All changes of one event, committed atomically.

    Attributes:
        document: The new state without its arrays.
        arrays: The new arrays; None if unchanged.
        closed: Closed assignments.
        log: Lines to append, in order.
        memories: (client index, bytes): method memories of clients.
        signal: Signal to publish after the commit; None for none. It is lost if the process exits
            in between.
    """

    document: str
    arrays: bytes | None = None
    closed: tuple[ClosedWork, ...] = ()
    log: tuple[LogEntry, ...] = ()
    memories: tuple[tuple[int, bytes], ...] = ()
    signal: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """A consistent snapshot of a run with all its data.

    Attributes:
        record: The run.
        closed: Closed assignments, by id.
        log: The log in order, each entry with its version.
        memories: (client index, bytes): method memories, in index order.
    """

    record: RunRecord
    closed: tuple[ClosedWork, ...] = ()
    log: tuple[LogEntry, ...] = ()
    memories: tuple[tuple[int, bytes], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSize:
    """Number of stored records of a run.

    Attributes:
        log: Log lines.
        closed: Closed assignments.
        memories: Clients with a method memory.
    """

    log: int = 0
    closed: int = 0
    memories: int = 0


Signals = Callable[[str | None], None]
"""Listener for signals of other replicas; None means that signals may have been lost."""


class Replica(Protocol):
    """This process among the replicas of a store."""

    @property
    def shared(self) -> bool:
        """Whether other processes may serve the same runs."""
        ...

    @property
    def replica(self) -> str:
        """Id of this process among the replicas; new at every `open`."""
        ...

    async def alive(self) -> frozenset[str]:
        """Return the ids of all running replicas, including this one."""
        ...

    async def lead(self) -> bool:
        """Try to acquire the leader lock; return whether this replica holds it."""
        ...

    async def publish(self, signal: str) -> None:
        """Publish a signal of at most 4000 bytes to the other replicas; not durable."""
        ...

    def listen(self, signals: Signals) -> None:
        """Set the listener for signals of other replicas."""
        ...


class Store(Replica, Protocol):
    """Durable state. Each method is one transaction, durable on return."""

    async def open(self) -> None:
        """Connect; create or migrate the schema if necessary."""
        ...

    async def close(self) -> None:
        """Disconnect."""
        ...

    async def ping(self) -> None:
        """Raise an error if the store is not available."""
        ...

    # Tokens and clients

    async def put_token(self, token: TokenRecord) -> None:
        """Add a token, or replace the one of this name; a duplicate secret is a ``ValueError``.

        A replacement keeps ``created_at``, ``revoked_at`` and, for the same secret, ``uses_left``,
        so that a restart with the same configuration does not reset it.
        """
        ...

    async def tokens(self) -> list[TokenRecord]:
        """Return all tokens in order of creation."""
        ...

    async def revoke_token(self, name: str, now: float) -> TokenRecord | None:
        """Revoke a token permanently; None if it does not exist."""
        ...

    async def enrol(self, client: ClientRecord, token_sha256: str, now: float) -> ClientRecord:
        """Enrol a client under the next index; concurrent calls never share one.

        The client gets the token's name and runs, and the token loses a use. If a client with the
        same ``enrolment_sha256`` exists, only its credential is replaced.

        Args:
            client: The client; its ``index``, ``token`` and ``runs`` are set by the store.
            token_sha256: Digest of its token.
            now: Seconds since the epoch.

        Raises:
            TokenRefused: The token is unknown, used up, expired or revoked; or the client exists
                and was revoked, or has another key or a token for other runs.
            ValueError: The client id exists.
        """
        ...

    async def clients(self, after: int = -1, limit: int | None = None) -> list[ClientRecord]:
        """Return clients in index order.

        Args:
            after: Only clients with a larger index.
            limit: Maximal number; None is all.
        """
        ...

    async def num_clients(self) -> int:
        """Return the number of clients without reading them."""
        ...

    async def client(self, credential_sha256: str) -> ClientRecord | None:
        """Return the client with this current or previous credential."""
        ...

    async def client_at(self, index: int) -> ClientRecord | None:
        """Return the client with this enrolment index."""
        ...

    async def client_named(self, client_id: str) -> ClientRecord | None:
        """Return the client with this public id."""
        ...

    async def set_credential(
        self, index: int, credential_sha256: str, previous_sha256: str | None
    ) -> None:
        """Change the credential of a client; an unknown index is an ``IndexError``."""
        ...

    async def revoke_client(self, index: int, now: float) -> None:
        """Revoke a client permanently; an unknown index is an ``IndexError``."""
        ...

    async def see_client(self, index: int, now: float) -> None:
        """Record the time of a client's request."""
        ...

    async def idle_clients(self, before: float, limit: int) -> list[int]:
        """Return clients last seen before a time and not retired, in index order.

        Args:
            before: Seconds since the epoch.
            limit: Maximal number.
        """
        ...

    async def retire_client(self, index: int, now: float) -> None:
        """Erase a client permanently, except for its index and public id, which runs refer to.

        Its credential is deleted; a returning device enrols as another client.
        """
        ...

    async def use_nonce(self, nonce: str, now: float, until: float) -> bool:
        """Return whether this nonce is new; it may be dropped after `until`."""
        ...

    # Waiting clients

    async def join(self, member: Member, signals: Sequence[str] = ()) -> None:
        """Add or replace a waiting client.

        Args:
            member: The client.
            signals: Signals to publish in the same transaction. It is durable no later than any
                later commit.
        """
        ...

    async def leave(self, client_indices: Collection[int], signals: Sequence[str] = ()) -> None:
        """Remove clients that no longer wait; `signals` as for `join`."""
        ...

    async def members(self) -> list[Member]:
        """Return waiting clients in index order, including expired ones."""
        ...

    # Runs

    async def add_run(self, record: RunRecord) -> None:
        """Add a run; a duplicate id is a ``ValueError``, that of a deleted run a `RunDeleted`."""
        ...

    async def runs(self) -> list[RunRecord]:
        """Return all runs in order of creation."""
        ...

    async def heads(self) -> list[RunHead]:
        """Return the heads of all runs in order of creation."""
        ...

    async def run(self, run_id: str) -> RunRecord | None:
        """Return a run, or None."""
        ...

    async def versions(self) -> dict[str, int]:
        """Return the version of every run, in order of creation."""
        ...

    async def commit(self, run_id: str, version: int, commit: Commit) -> None:
        """Store an event's changes on top of `version`; the run then has ``version + 1``.

        Raises:
            VersionConflict: The run has another version; nothing was changed.
            KeyError: The run does not exist.
            FedOneError: The store became unavailable; whether the commit was stored is unknown.
        """
        ...

    async def closed(self, assignment_id: str) -> ClosedWork | None:
        """Return a closed assignment; None if it is open or unknown."""
        ...

    async def memory(self, run_id: str, client_index: int) -> bytes | None:
        """Return the method memory of a client."""
        ...

    async def memories(self, run_id: str) -> dict[int, bytes]:
        """Return the method memories of all clients, by client index."""
        ...

    async def log(
        self, run_id: str, kind: str | None = None, after: int = -1, limit: int | None = None
    ) -> list[LogEntry]:
        """Return a run's log in order, of all kinds or one.

        Args:
            run_id: The run.
            kind: Only entries of this kind.
            after: Only entries of versions after this one.
            limit: Maximal number, extended to the end of the last commit; None is all. See
                `log_pages`.
        """
        ...

    async def size(self, run_id: str) -> RunSize:
        """Return the number of stored records of a run."""
        ...

    async def trim(self, run_id: str, *, log: bool = False, closed: bool = False) -> None:
        """Delete a run's log, its closed work, or both permanently; the run stays."""
        ...

    async def delete_run(self, run_id: str, version: int, now: float) -> None:
        """Delete a run at `version` with all its data permanently.

        Its id stays reserved: a new run of this name would spend its budget again.

        Raises:
            VersionConflict: The run has another version; nothing was changed.
            KeyError: The run does not exist.
        """
        ...

    async def deleted(self, run_id: str) -> float | None:
        """Return when this run was deleted, seconds since the epoch; None if it was not."""
        ...

    async def snapshot(self, run_id: str, *, log: bool = True) -> RunSnapshot | None:
        """Return a consistent snapshot of a run with all its data; None if it does not exist.

        Args:
            run_id: The run.
            log: Whether to include its log, which can also be read later.
        """
        ...

    async def restore(self, snapshot: RunSnapshot, clients: Sequence[ClientRecord] = ()) -> None:
        """Add a run with all its data from a snapshot.

        A deleted run can be restored from a snapshot of its last version or later; an earlier one
        would lose its spending since.

        Args:
            snapshot: The run.
            clients: Clients that it refers to, in index order. Missing ones are added under their
                index; existing ones stay unchanged.

        Raises:
            RunDeleted: The run was deleted here at a later version than the snapshot's.
            ValueError: The run, its work, or a new client's id or credential exists here, a
                client's index belongs to another client, or its addition would leave a gap.
        """
        ...
