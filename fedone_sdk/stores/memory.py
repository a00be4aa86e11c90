"""A store that lives and dies with the process, for tests and simulation."""

from __future__ import annotations

from dataclasses import replace

from fedone_sdk.stores.base import (
    ClientRecord,
    ClosedWork,
    Commit,
    LogEntry,
    RunRecord,
    VersionConflict,
)

__all__ = ["MemoryStore"]


class MemoryStore:
    """A `Store` of dictionaries.

    No method awaits anything, so each is one step of the event loop and therefore one
    transaction. The content outlasts `close`, so that a test can play a restart.
    """

    def __init__(self) -> None:
        self._clients: dict[str, ClientRecord] = {}
        self._runs: dict[str, RunRecord] = {}
        self._closed: dict[str, ClosedWork] = {}
        self._logs: dict[str, list[LogEntry]] = {}
        self._memories: dict[tuple[str, int], bytes] = {}

    async def open(self) -> None:
        """Does nothing."""

    async def close(self) -> None:
        """Does nothing."""

    async def ping(self) -> None:
        """Does nothing: memory can always be used."""

    async def add_client(
        self, *, client_id: str, credential_sha256: str, name: str | None, now: float
    ) -> ClientRecord:
        """Enrols a client under the next index; a known id is a ``ValueError``."""
        if client_id in self._clients:
            raise ValueError(f"client {client_id!r} is enrolled already")
        record = ClientRecord(
            index=len(self._clients),
            client_id=client_id,
            credential_sha256=credential_sha256,
            name=name,
            enrolled_at=now,
        )
        self._clients[client_id] = record
        return record

    async def clients(self) -> list[ClientRecord]:
        """All clients in index order."""
        return list(self._clients.values())

    async def add_run(self, record: RunRecord) -> None:
        """Adds a run; a known id is a ``ValueError``."""
        if record.run_id in self._runs:
            raise ValueError(f"run {record.run_id!r} exists already")
        self._runs[record.run_id] = record
        self._logs[record.run_id] = []

    async def runs(self) -> list[RunRecord]:
        """All runs in the order they were added."""
        return list(self._runs.values())

    async def commit(self, run_id: str, version: int, commit: Commit) -> None:
        """Stores an event's changes on top of `version`; see `Store.commit`."""
        run = self._runs[run_id]
        if run.version != version:
            raise VersionConflict(f"run {run_id!r} is at version {run.version}, not {version}")
        closed = {work.assignment_id: work for work in commit.closed}
        if any(work.run_id != run_id for work in commit.closed):
            raise ValueError(f"closed work is not of run {run_id!r}")
        if len(closed) < len(commit.closed) or closed.keys() & self._closed.keys():
            raise ValueError("work can be closed only once")
        # Nothing may raise from here on: this half is what makes the commit atomic.
        self._runs[run_id] = replace(
            run,
            document=commit.document,
            arrays=run.arrays if commit.arrays is None else commit.arrays,
            version=version + 1,
        )
        self._closed.update(closed)
        self._logs[run_id].extend(commit.log)
        self._memories.update({(run_id, index): value for index, value in commit.memories})

    async def closed(self, assignment_id: str) -> ClosedWork | None:
        """How work ended, or None if it is not closed or not known."""
        return self._closed.get(assignment_id)

    async def memory(self, run_id: str, client_index: int) -> bytes | None:
        """What a client's method remembers."""
        return self._memories.get((run_id, client_index))

    async def log(self, run_id: str, kind: str | None = None) -> list[LogEntry]:
        """A run's log in the order it was written, all kinds or one."""
        entries = self._logs.get(run_id, [])
        return [entry for entry in entries if kind is None or entry.kind == kind]
