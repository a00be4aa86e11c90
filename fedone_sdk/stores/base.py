"""What an aggregator keeps: clients, runs, finished work and the log of rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = [
    "ClientRecord",
    "ClosedWork",
    "Commit",
    "LogEntry",
    "RunRecord",
    "Store",
    "VersionConflict",
]


class VersionConflict(Exception):
    """Somebody else has committed to the run since it was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRecord:
    """An enrolled client.

    Attributes:
        index: Enrolment index, from 0 without gaps; random draws are over this.
        client_id: Public name.
        credential_sha256: Digest of its secret; the secret itself is never stored.
        name: What people call it.
        enrolled_at: Seconds since the epoch.
    """

    index: int
    client_id: str
    credential_sha256: str
    name: str | None
    enrolled_at: float


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
    """One line of a run's log: its kind (``round``, ``metric`` ...) and a JSON body."""

    kind: str
    body: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Everything that one event changes in a run; stored whole or not at all.

    Attributes:
        document: The new state without its arrays.
        arrays: The new arrays; None while they are unchanged.
        closed: Work that ended.
        log: Lines to append, in order.
        memories: (client index, bytes): what clients' methods remember.
    """

    document: str
    arrays: bytes | None = None
    closed: tuple[ClosedWork, ...] = ()
    log: tuple[LogEntry, ...] = ()
    memories: tuple[tuple[int, bytes], ...] = ()


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

    async def add_client(
        self, *, client_id: str, credential_sha256: str, name: str | None, now: float
    ) -> ClientRecord:
        """Enrols a client under the next index; concurrent calls never share one."""
        ...

    async def clients(self) -> list[ClientRecord]:
        """All clients in index order."""
        ...

    async def add_run(self, record: RunRecord) -> None:
        """Adds a run; a known id is a ``ValueError``."""
        ...

    async def runs(self) -> list[RunRecord]:
        """All runs in the order they were added."""
        ...

    async def commit(self, run_id: str, version: int, commit: Commit) -> None:
        """Stores an event's changes on top of `version`; the run is then at ``version + 1``.

        Raises:
            VersionConflict: The run is at another version; nothing was changed.
            KeyError: There is no such run.
        """
        ...

    async def closed(self, assignment_id: str) -> ClosedWork | None:
        """How work ended, or None if it is not closed or not known."""
        ...

    async def memory(self, run_id: str, client_index: int) -> bytes | None:
        """What a client's method remembers."""
        ...

    async def log(self, run_id: str, kind: str | None = None) -> list[LogEntry]:
        """A run's log in the order it was written, all kinds or one."""
        ...
