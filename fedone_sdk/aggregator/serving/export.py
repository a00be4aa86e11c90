"""Runs written as archives, page by page: however long a log is, little of it is held."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any

from fedone_sdk.aggregator.rounds.codec import decode, encode_document
from fedone_sdk.aggregator.runtime.threads import in_thread
from fedone_sdk.aggregator.serving.archive_lines import (
    Client,
    Closed,
    End,
    Entry,
    Header,
    Line,
    MemoryLine,
    Run,
    are_its_own,
    rounds_of,
    used_at_rest,
)
from fedone_sdk.errors import ArchiveError
from fedone_sdk.stores import (
    ClientRecord,
    LogEntry,
    RunRecord,
    RunSnapshot,
    Store,
    log_pages,
)

__all__ = ["export_pages", "export_run", "write_archive"]


async def export_run(store: Store, run_id: str, *, with_credentials: bool = False) -> bytes:
    """A run as an archive, as it stands at one moment; see `export_pages`."""
    pages = export_pages(store, run_id, with_credentials=with_credentials)
    return b"".join([page async for page in pages])


async def export_pages(
    store: Store, run_id: str, *, with_credentials: bool = False
) -> AsyncIterator[bytes]:
    """A run as an archive, as it stands at one moment, piece by piece.

    Args:
        store: Where it is; other processes may serve it meanwhile.
        run_id: The run.
        with_credentials: Whether the digests of its clients' credentials go along, so that they
            can go on working for it elsewhere.

    Yields:
        Its bytes.

    Raises:
        ArchiveError: There is no such run, or it is deleted meanwhile.
    """
    snapshot = await store.snapshot(run_id, log=False)
    if snapshot is None:
        raise ArchiveError(f"there is no run {run_id!r} in the store")
    writer = await in_thread(_Writer, snapshot)
    async for page in log_pages(store, run_id):
        # What is appended later is of a later state; what was written stays as it is.
        kept = [entry for entry in page if entry.version <= snapshot.record.version]
        yield await in_thread(writer.log, kept)
    if (await store.size(run_id)).log < writer.num_log:
        raise ArchiveError(f"the log of run {run_id!r} was removed meanwhile")
    clients = await store.clients(limit=writer.num_clients) if writer.num_clients else []
    yield await in_thread(writer.end, clients, with_credentials)


def write_archive(
    snapshot: RunSnapshot, clients: Sequence[ClientRecord], with_credentials: bool = False
) -> bytes:
    """A run as an archive; the same run gives the same bytes.

    Args:
        snapshot: The run.
        clients: All clients of its store, in index order.
        with_credentials: Whether the digests of clients' credentials go along.
    """
    writer = _Writer(snapshot)
    log = writer.log(snapshot.log)
    return log + writer.end(clients[: writer.num_clients], with_credentials)


class _Writer:
    """Makes an archive of what it is given, in this order: the log, the end.

    Args:
        snapshot: The run; its log may be missing.

    Attributes:
        num_log: Lines of the log so far.
        num_clients: Clients that the run refers to, and all before them, so far.
    """

    def __init__(self, snapshot: RunSnapshot) -> None:
        self.num_log = 0
        self.num_clients = max(used_at_rest(snapshot), default=-1) + 1
        self._rounds: set[tuple[tuple[int, ...], str]] = set()
        self._digest = hashlib.sha256()
        self._num_lines = 0
        self._packed = io.BytesIO()
        self._file = gzip.GzipFile(fileobj=self._packed, mode="wb", filename="", mtime=0)
        self._write(_lines_at_rest(snapshot))

    def log(self, entries: Sequence[LogEntry]) -> bytes:
        """What a page of the log adds."""
        self._write(
            Entry(entry=entry.kind, version=entry.version, body=entry.body) for entry in entries
        )
        for indices, names in rounds_of(entries):
            self._rounds.add((indices, names))
            self.num_clients = max(self.num_clients, *(index + 1 for index in indices))
        self.num_log += len(entries)
        return self._taken()

    def end(self, clients: Sequence[ClientRecord], with_credentials: bool) -> bytes:
        """The rest, with the first `num_clients` clients of the store."""
        if len(clients) == self.num_clients and are_its_own(self._rounds, clients):
            self._write(Client.of(client, with_credentials) for client in clients)
        end = End(lines=self._num_lines, sha256=self._digest.hexdigest())
        self._file.write(end.model_dump_json().encode() + b"\n")
        self._file.close()
        return self._taken()

    def _write(self, lines: Iterable[Line]) -> None:
        for line in lines:
            text = line.model_dump_json(exclude_none=True).encode() + b"\n"
            self._digest.update(text)
            self._file.write(text)
            self._num_lines += 1

    def _taken(self) -> bytes:
        found = self._packed.getvalue()
        self._packed.seek(0)
        self._packed.truncate()
        return found


def _lines_at_rest(snapshot: RunSnapshot) -> Iterator[Line]:
    """All of a run but its log and its clients."""
    yield Header(run_id=snapshot.record.run_id)
    yield _run_line(snapshot.record)
    for work in snapshot.closed:
        yield Closed(
            assignment_id=work.assignment_id,
            client_index=work.client_index,
            outcome=work.outcome,
            body_sha256=work.body_sha256,
            receipt=work.receipt,
        )
    for index, value in snapshot.memories:
        yield MemoryLine(client_index=index, value=base64.b64encode(value).decode())


def _run_line(record: RunRecord) -> Run:
    # As this version writes it, whichever wrote it.
    document: dict[str, Any] = json.loads(record.document)
    counters = document.pop("counters")
    document = {**encode_document(decode(document, record.arrays)), "counters": counters}
    return Run(
        spec=record.spec,
        candidates=record.candidates,
        document=json.dumps(document, separators=(",", ":")),
        arrays=base64.b64encode(record.arrays).decode(),
        version=record.version,
        created_at=record.created_at,
    )
