"""A store in memory, for tests and simulation."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from itertools import islice
from typing import Any

from fedone_sdk.stores import base


class MemoryStore(base.SingleProcess, base.Store):
    """A `Store` of dictionaries. The content survives `close`, so that tests can simulate restarts.

    No method awaits, so each is atomic on the event loop.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tokens: dict[str, base.TokenRecord] = {}
        self._clients: list[base.ClientRecord] = []
        # Positions in `_clients`, for fast look-ups: simulations enrol thousands of clients.
        self._by_name: dict[str, int] = {}
        self._by_enrolment: dict[str, int] = {}
        self._by_credential: dict[str, int] = {}
        self._members: dict[int, base.Member] = {}
        self._runs: dict[str, base.RunRecord] = {}
        self._closed: dict[str, base.ClosedWork] = {}
        self._logs: dict[str, list[base.LogEntry]] = {}
        # For each run id, the values by client and round.
        self._memories: dict[str, dict[tuple[int, int], bytes]] = {}
        self._deleted: dict[str, float] = {}

    async def open(self) -> None:
        """Simulate the start of a process."""
        self._new_replica()

    async def close(self) -> None:
        """Do nothing."""

    async def ping(self) -> None:
        """Do nothing: memory is always available."""

    # Tokens and clients

    async def put_token(self, token: base.TokenRecord) -> None:
        for known in self._tokens.values():
            if known.token_sha256 == token.token_sha256:
                token = replace(known, runs=token.runs, expires_at=token.expires_at)
                break
        else:
            if token.name in self._tokens:
                raise ValueError(f"there is an enrolment token {token.name!r} already")
        self._tokens[token.name] = token

    async def tokens(self) -> list[base.TokenRecord]:
        return list(self._tokens.values())

    async def revoke_token(self, name: str, now: float) -> base.TokenRecord | None:
        known = self._tokens.get(name)
        if known is None or known.revoked_at is not None:
            return known
        self._tokens[name] = replace(known, revoked_at=now)
        return self._tokens[name]

    async def enrol(
        self, client: base.ClientRecord, token_sha256: str, now: float
    ) -> base.ClientRecord:
        matching = [t for t in self._tokens.values() if t.token_sha256 == token_sha256]
        if not matching:
            raise base.TokenRefused("the enrolment token is not known")
        token = matching[0]
        token.check(now)
        index = self._by_enrolment.get(client.enrolment_sha256 or "")
        if index is not None:
            again = self._clients[index].enrolled_again(client, token)
            self._put(again)
            return again
        if token.uses_left == 0:
            raise base.TokenRefused("the enrolment token is used up")
        if client.client_id in self._by_name:
            raise ValueError(f"client {client.client_id!r} is enrolled already")
        if token.uses_left is not None:
            self._tokens[token.name] = replace(token, uses_left=token.uses_left - 1)
        client = replace(client, index=len(self._clients), token=token.name, runs=token.runs)
        self._put(client)
        return client

    async def clients(self, after: int = -1, limit: int | None = None) -> list[base.ClientRecord]:
        begin = max(after + 1, 0)
        return self._clients[begin : None if limit is None else begin + limit]

    async def num_clients(self) -> int:
        return len(self._clients)

    async def client(self, credential_sha256: str) -> base.ClientRecord | None:
        index = self._by_credential.get(credential_sha256)
        return None if index is None else self._clients[index]

    async def client_at(self, index: int) -> base.ClientRecord | None:
        return self._clients[index] if 0 <= index < len(self._clients) else None

    async def client_named(self, client_id: str) -> base.ClientRecord | None:
        index = self._by_name.get(client_id)
        return None if index is None else self._clients[index]

    async def change_client(self, index: int, **changes: Any) -> None:
        self._put(replace(self._clients[index], **changes))

    async def idle_clients(self, before: float, limit: int) -> list[int]:
        idle = (
            client.index
            for client in self._clients
            if (client.enrolled_at if client.seen_at is None else client.seen_at) < before
            and not client.credential_sha256.startswith(base.NO_CREDENTIAL)
        )
        return list(islice(idle, limit))

    async def retire_client(self, index: int, now: float) -> None:
        client = self._clients[index]
        self._by_enrolment.pop(client.enrolment_sha256 or "", None)
        await self.change_client(
            index,
            credential_sha256=f"{base.NO_CREDENTIAL}{client.client_id}",
            **dict.fromkeys(("name", "enrolment_sha256", "token", "previous_sha256")),
            revoked_at=now if client.revoked_at is None else client.revoked_at,
        )

    def _put(self, client: base.ClientRecord) -> None:
        if client.index < len(self._clients):
            before = self._clients[client.index]
            self._clients[client.index] = client
            for digest in (before.credential_sha256, before.previous_sha256):
                self._by_credential.pop(digest or "", None)
        else:
            self._clients.append(client)
        self._by_name[client.client_id] = client.index
        if client.enrolment_sha256 is not None:
            self._by_enrolment[client.enrolment_sha256] = client.index
        for digest in (client.credential_sha256, client.previous_sha256):
            if digest is not None:
                self._by_credential[digest] = client.index

    # Waiting clients

    async def join(self, member: base.Member, signals: Sequence[str] = ()) -> None:
        self._members[member.client_index] = member

    async def leave(self, client_indices: Collection[int], signals: Sequence[str] = ()) -> None:
        for index in client_indices:
            self._members.pop(index, None)

    async def members(self) -> list[base.Member]:
        return sorted(self._members.values(), key=lambda member: member.client_index)

    # Runs

    async def add_run(self, record: base.RunRecord) -> None:
        if record.run_id in self._runs:
            raise ValueError(f"run {record.run_id!r} exists already")
        if record.run_id in self._deleted:
            raise base.RunDeleted(f"run {record.run_id!r} was deleted")
        self._runs[record.run_id] = record
        self._logs[record.run_id] = []
        self._memories[record.run_id] = {}

    async def heads(self) -> list[base.RunHead]:
        names = [field.name for field in fields(base.RunHead)]
        return [
            base.RunHead(**{name: getattr(run, name) for name in names})
            for run in self._runs.values()
        ]

    async def run(self, run_id: str) -> base.RunRecord | None:
        return self._runs.get(run_id)

    async def versions(self) -> dict[str, int]:
        return {run_id: run.version for run_id, run in self._runs.items()}

    async def commit(self, run_id: str, version: int, commit: base.Commit) -> None:
        run = self._runs[run_id]
        if run.version != version:
            raise base.VersionConflict(f"run {run_id!r} is at version {run.version}, not {version}")
        closed = {work.assignment_id: work for work in commit.closed}
        base.check_run_of(commit.closed, run_id)
        if len(closed) < len(commit.closed) or closed.keys() & self._closed.keys():
            raise ValueError("work can be closed only once")
        # Nothing may raise from here on, so that the commit is atomic.
        self._runs[run_id] = replace(
            run,
            document=commit.document,
            arrays=run.arrays if commit.arrays is None else commit.arrays,
            version=version + 1,
        )
        self._closed.update(closed)
        self._logs[run_id].extend(replace(entry, version=version + 1) for entry in commit.log)
        memories = self._memories[run_id]
        if commit.back_to is not None:
            for key in [key for key in memories if key[1] > commit.back_to]:
                del memories[key]
        memories.update({(one.client_index, one.round): one.value for one in commit.memories})

    async def closed(self, assignment_id: str) -> base.ClosedWork | None:
        return self._closed.get(assignment_id)

    async def memory(
        self, run_id: str, client_index: int, at_round: int | None = None
    ) -> bytes | None:
        memories = self._memories.get(run_id, {})
        if at_round is None:
            rounds = [number for index, number in memories if index == client_index]
            at_round = max(rounds, default=0)
        return memories.get((client_index, at_round))

    async def log(
        self, run_id: str, kind: str | None = None, after: int = -1, limit: int | None = None
    ) -> list[base.LogEntry]:
        log = self._logs.get(run_id, [])
        begin = bisect_right(log, after, key=lambda entry: entry.version)
        entries: list[base.LogEntry] = []
        for entry in islice(log, begin, None):
            if kind not in (None, entry.kind):
                continue
            if limit is not None and len(entries) >= limit and entry.version > entries[-1].version:
                break
            entries.append(entry)
        return entries

    async def trim(self, run_id: str, *, log: bool = False, closed: bool = False) -> None:
        if log:
            self._logs[run_id], self._memories[run_id] = [], {}
        if closed:
            self._closed = {k: work for k, work in self._closed.items() if work.run_id != run_id}

    async def delete_run(self, run_id: str, version: int, now: float) -> None:
        run = self._runs[run_id]
        if run.version != version:
            raise base.VersionConflict(f"run {run_id!r} is at version {run.version}, not {version}")
        await self.trim(run_id, log=True, closed=True)
        del self._runs[run_id], self._logs[run_id], self._memories[run_id]
        self._deleted[run_id] = now

    async def deleted(self, run_id: str) -> float | None:
        return self._deleted.get(run_id)
