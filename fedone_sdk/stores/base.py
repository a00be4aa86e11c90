"""What an aggregator keeps: clients, runs, finished work and the log of rounds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from fedone_sdk.errors import FedOneError

__all__ = [
    "ClientRecord",
    "ClosedWork",
    "Commit",
    "LogEntry",
    "Member",
    "NO_CREDENTIAL",
    "RunDeleted",
    "RunHead",
    "RunRecord",
    "RunSize",
    "RunSnapshot",
    "Signals",
    "Store",
    "TokenRecord",
    "TokenRefused",
    "VersionConflict",
    "refuse_another",
]


class VersionConflict(FedOneError):
    """Somebody else has committed to the run since it was read."""


class RunDeleted(ValueError):
    """The id is that of a run that was deleted, and stays taken."""


class TokenRefused(FedOneError):
    """An enrolment token is not known, or not good any more; the message says which."""


NO_CREDENTIAL = "retired: "
"""No digest begins like this: a client that was retired can never be asked for again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """An enrolment token; the secret itself is never stored.

    Attributes:
        name: What people call it; unique.
        token_sha256: Digest of the secret; unique.
        runs: Patterns of the runs that its clients may see, such as ``acme-*``; None is all.
        uses_left: Clients that may still enrol with it; None is no limit.
        expires_at: When it stops working, seconds since the epoch; None is never.
        created_at: Seconds since the epoch.
        revoked_at: When it was revoked; None while it was not.
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
        index: Enrolment index, from 0 without gaps; random draws are over this. -1 before it is
            enrolled.
        client_id: Public name.
        credential_sha256: Digest of its secret; the secret itself is never stored.
        name: What people call it.
        enrolled_at: Seconds since the epoch.
        enrolment_sha256: Digest of the nonce that its enrolment was asked with: asked again, it
            is the same client. None where the device sent none.
        token: Name of the token that it enrolled with.
        runs: Patterns of the runs that it may see; None is all.
        public_key: Ed25519 key that its requests are signed with, base64; None does not sign.
        previous_sha256: Digest of the credential before the last rotation, until the new one is
            used: an answer that is lost must not lock a device out.
        revoked_at: When it was revoked, seconds since the epoch; None while it was not.
        seen_at: When it last asked for something, within a day, seconds since the epoch; None
            where that is less than a day after `enrolled_at`.
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
    """Refuses an enrolment that is asked again, unless it can be by the one who asked before.

    Whoever saw the nonce must not get the client: not without its key, nor by way of a token that
    lets into other runs.

    Raises:
        TokenRefused: Says why.
    """
    if known.revoked_at is not None:
        raise TokenRefused("this client was revoked")
    if known.public_key != client.public_key:
        raise TokenRefused("this client enrolled with another key: a new one needs a new nonce")
    if known.runs != token.runs:
        raise TokenRefused("this client enrolled for other runs: it needs a new nonce")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A client that waits for work; kept so that draws after a restart are the same.

    Attributes:
        client_index: Whose.
        num_examples: Examples that it holds.
        run_id: The only run that it works for; None is any.
        until: When it counts as gone, seconds since the epoch.
    """

    client_index: int
    num_examples: int
    run_id: str | None
    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A run and its newest state; the store does not look inside.

    Attributes:
        run_id: Names the run.
        spec: RunSpec, JSON.
        candidates: The vocabulary, JSON list of strings.
        document: The state without its arrays, JSON.
        arrays: The state's arrays.
        version: Counts commits, from 0.
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
    """A `RunRecord` without its candidates and arrays, which are most of it.

    Attributes:
        run_id: Names the run.
        spec: RunSpec, JSON.
        document: The state without its arrays, JSON.
        version: Counts commits, from 0.
        created_at: Seconds since the epoch.
    """

    run_id: str
    spec: str
    document: str
    version: int
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedWork:
    """Work that ended; kept so that a repeated or late update gets the right answer.

    Attributes:
        assignment_id: Which work.
        run_id: Of which run.
        client_index: Whose.
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
        version: The run's version after the commit that wrote it; the store sets it.
    """

    kind: str
    body: str
    version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Everything that one event changes in a run; stored whole or not at all.

    Attributes:
        document: The new state without its arrays.
        arrays: The new arrays; None while they are unchanged.
        closed: Work that ended.
        log: Lines to append, in order.
        memories: (client index, bytes): what clients' methods remember.
        signal: What listeners in other processes are told once it is safe; None tells nothing. It
            is lost when the process dies between both.
    """

    document: str
    arrays: bytes | None = None
    closed: tuple[ClosedWork, ...] = ()
    log: tuple[LogEntry, ...] = ()
    memories: tuple[tuple[int, bytes], ...] = ()
    signal: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """All that a store keeps of a run, at one moment.

    Attributes:
        record: The run.
        closed: Work that ended, by assignment id.
        log: The log in the order it was written, each entry with its version.
        memories: (client index, bytes): what clients' methods remember, in index order.
    """

    record: RunRecord
    closed: tuple[ClosedWork, ...] = ()
    log: tuple[LogEntry, ...] = ()
    memories: tuple[tuple[int, bytes], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSize:
    """How much a store keeps of a run.

    Attributes:
        log: Lines of its log.
        closed: Pieces of work that ended.
        memories: Clients whose methods remember something.
    """

    log: int = 0
    closed: int = 0
    memories: int = 0


Signals = Callable[[str | None], None]
"""Told what other processes on the same store publish; None when some of it may be lost."""


class Store(Protocol):
    """Durable state. Each method is one transaction: when it returns, the change is safe."""

    async def open(self) -> None:
        """Connects, and creates or migrates what is missing."""
        ...

    async def close(self) -> None:
        """Disconnects."""
        ...

    async def ping(self) -> None:
        """Raises if the store cannot be used now."""
        ...

    # Tokens and clients

    async def put_token(self, token: TokenRecord) -> None:
        """Adds a token, or replaces the one of this name; another's secret is a ``ValueError``.

        Replacing keeps ``created_at``, ``revoked_at`` and, while the secret stays the same,
        ``uses_left``: a restart with the same configuration gives nothing back.
        """
        ...

    async def tokens(self) -> list[TokenRecord]:
        """All tokens, in the order they were added."""
        ...

    async def revoke_token(self, name: str, now: float) -> TokenRecord | None:
        """Revokes a token for good; None if there is no such token."""
        ...

    async def enrol(self, client: ClientRecord, token_sha256: str, now: float) -> ClientRecord:
        """Enrols a client under the next index; concurrent calls never share one.

        The token gives its name and runs to the client, and loses a use. A client with the same
        ``enrolment_sha256`` is enrolled already: it gets the new credential, keeps everything
        else, and the token loses nothing.

        Args:
            client: Its ``index``, ``token`` and ``runs`` are set here.
            token_sha256: Digest of the token that it came with.
            now: Seconds since the epoch.

        Raises:
            TokenRefused: The token is not known, used up, expired or revoked; or the client is
                enrolled already, and was revoked, or comes with another key or a token for other
                runs now.
            ValueError: The client id is known.
        """
        ...

    async def clients(self, after: int = -1, limit: int | None = None) -> list[ClientRecord]:
        """Clients in index order.

        Args:
            after: Only clients with a larger index.
            limit: At most so many; None is all.
        """
        ...

    async def num_clients(self) -> int:
        """How many clients there are; reads none of them."""
        ...

    async def client(self, credential_sha256: str) -> ClientRecord | None:
        """The client with this credential, or with this one before its last rotation."""
        ...

    async def client_at(self, index: int) -> ClientRecord | None:
        """The client with this enrolment index."""
        ...

    async def client_named(self, client_id: str) -> ClientRecord | None:
        """The client with this public name."""
        ...

    async def set_credential(
        self, index: int, credential_sha256: str, previous_sha256: str | None
    ) -> None:
        """Changes the credential of a client."""
        ...

    async def revoke_client(self, index: int, now: float) -> None:
        """Revokes a client for good."""
        ...

    async def see_client(self, index: int, now: float) -> None:
        """Takes note that a client asked for something."""
        ...

    async def idle_clients(self, before: float, limit: int) -> list[int]:
        """Clients that were last seen before a moment and are not retired, in index order.

        Args:
            before: Seconds since the epoch.
            limit: At most so many.
        """
        ...

    async def retire_client(self, index: int, now: float) -> None:
        """Erases a client but for its index and public name, which runs refer to, for good.

        It has no credential any more: should its device come back, it enrols as another client.
        """
        ...

    async def use_nonce(self, nonce: str, now: float, until: float) -> bool:
        """Whether this nonce is seen for the first time; forgets it some time after `until`."""
        ...

    # Who waits for work

    async def join(self, member: Member, signals: Sequence[str] = ()) -> None:
        """Keeps that a client waits for work, in place of what was known of it.

        Args:
            member: The client.
            signals: What listeners in other processes are told of it: both happens, or neither.
                It is safe no later than any commit made afterwards.
        """
        ...

    async def leave(self, client_indices: Collection[int], signals: Sequence[str] = ()) -> None:
        """Forgets clients that do not wait any more; `signals` as of `join`."""
        ...

    async def members(self) -> list[Member]:
        """Who waits for work, in index order; also those whose time is over."""
        ...

    # Runs

    async def add_run(self, record: RunRecord) -> None:
        """Adds a run; a known id is a ``ValueError``, that of a deleted run a `RunDeleted`."""
        ...

    async def runs(self) -> list[RunRecord]:
        """All runs in the order they were added."""
        ...

    async def heads(self) -> list[RunHead]:
        """All runs in the order they were added, without what takes long to read."""
        ...

    async def run(self, run_id: str) -> RunRecord | None:
        """A run, or None."""
        ...

    async def versions(self) -> dict[str, int]:
        """The version of every run, in the order they were added."""
        ...

    async def commit(self, run_id: str, version: int, commit: Commit) -> None:
        """Stores an event's changes on top of `version`; the run is then at ``version + 1``.

        Raises:
            VersionConflict: The run is at another version; nothing was changed.
            KeyError: There is no such run.
            FedOneError: The store went away; whether the commit is stored shows when it is back.
        """
        ...

    async def closed(self, assignment_id: str) -> ClosedWork | None:
        """How work ended, or None if it is not closed or not known."""
        ...

    async def memory(self, run_id: str, client_index: int) -> bytes | None:
        """What a client's method remembers."""
        ...

    async def memories(self, run_id: str) -> dict[int, bytes]:
        """What all clients' methods remember, by client index."""
        ...

    async def log(
        self, run_id: str, kind: str | None = None, after: int = -1, limit: int | None = None
    ) -> list[LogEntry]:
        """A run's log in the order it was written, all kinds or one.

        Args:
            run_id: The run.
            kind: Only entries of this kind.
            after: Only entries of later commits than the one that made this version.
            limit: Only so many, and what else the last of their commits wrote; None is all. See
                `log_pages`.
        """
        ...

    async def size(self, run_id: str) -> RunSize:
        """How much is kept of a run."""
        ...

    async def trim(self, run_id: str, *, log: bool = False, closed: bool = False) -> None:
        """Drops a run's log, its closed work, or both, for good; the run stays."""
        ...

    async def delete_run(self, run_id: str, version: int, now: float) -> None:
        """Deletes a run that is at `version`, with all that belongs to it, for good.

        Its id stays taken: a new run of this name would spend its budget again.

        Raises:
            VersionConflict: The run is at another version; nothing was changed.
            KeyError: There is no such run.
        """
        ...

    async def deleted(self, run_id: str) -> float | None:
        """When the run of this id was deleted, seconds since the epoch; None if it was not."""
        ...

    async def snapshot(self, run_id: str, *, log: bool = True) -> RunSnapshot | None:
        """All that the store keeps of a run, read at one moment; None if there is no such run.

        Args:
            run_id: The run.
            log: Whether its log is read, too; what the log had then can be read later.
        """
        ...

    async def restore(self, snapshot: RunSnapshot, clients: Sequence[ClientRecord] = ()) -> None:
        """Adds a run with all that belongs to it, as another store had it.

        A run that was deleted here can come back as it was then, or from later: what it has spent
        since an earlier moment would be forgotten.

        Args:
            snapshot: The run.
            clients: Clients that it refers to, in index order. Those that this store lacks are
                added under their own index; those that it has stay as they are.

        Raises:
            RunDeleted: The run was deleted here after it had moved on from this snapshot.
            ValueError: The run, its work or a new client's id or credential is known here, a
                client's index belongs to another one, or its addition would leave a gap.
        """
        ...

    # Other processes on the same store

    @property
    def shared(self) -> bool:
        """Whether other processes may serve the same runs."""
        ...

    @property
    def replica(self) -> str:
        """Names this process among those on the store; new at every `open`."""
        ...

    async def alive(self) -> frozenset[str]:
        """The replicas that are running now, this one among them."""
        ...

    async def lead(self) -> bool:
        """Whether this replica does what only one of them should do; tries to become it."""
        ...

    async def publish(self, signal: str) -> None:
        """Tells the other replicas something, at most 4000 bytes; not durable."""
        ...

    def listen(self, signals: Signals) -> None:
        """Sets who is told what other replicas publish, now or with a commit."""
        ...
