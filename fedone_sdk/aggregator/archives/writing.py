"""Export of runs as archives, page by page, in constant memory."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any

from fedone_sdk.aggregator.archives.lines import (
    Client,
    Closed,
    End,
    Entry,
    Header,
    Line,
    MemoryLine,
    Run,
    match_clients,
    referenced_clients,
    rounds_of,
)
from fedone_sdk.aggregator.rounds.codec import decode, encode_document
from fedone_sdk.aggregator.runtime import in_thread
from fedone_sdk.errors import ArchiveError
from fedone_sdk.stores import ClientRecord, LogEntry, RunRecord, RunSnapshot, Store, log_pages


async def export_run(store: Store, run_id: str, *, with_credentials: bool = False) -> bytes:
    """Return a consistent archive of a run; see `export_pages`."""
    pages = export_pages(store, run_id, with_credentials=with_credentials)
    return b"".join([page async for page in pages])


async def export_pages(
    store: Store, run_id: str, *, with_credentials: bool = False
) -> AsyncIterator[bytes]:
    """Yield a consistent archive of a run in pieces.

    Args:
        store: The store of the run; other processes may serve it meanwhile.
        run_id: The run.
        with_credentials: Whether to include the digests of its clients' credentials, so that they
            can continue to work for it elsewhere.

    Yields:
        The bytes of the archive.

    Raises:
        ArchiveError: The run does not exist, or was deleted during the export.
    """
    snapshot = await store.snapshot(run_id, log=False)
    if snapshot is None:
        raise ArchiveError(f"there is no run {run_id!r} in the store")
    writer = await in_thread(_Writer, snapshot)
    async for page in log_pages(store, run_id):
        # Later lines belong to a later state; existing lines do not change.
        kept = [entry for entry in page if entry.version <= snapshot.record.version]
        yield await in_thread(writer.log, kept)
    if (await store.size(run_id)).log < writer.num_log:
        raise ArchiveError(f"the log of run {run_id!r} was removed during the export")
    clients = await store.clients(limit=writer.num_clients) if writer.num_clients else []
    yield await in_thread(writer.end, clients, with_credentials)


def write_archive(
    snapshot: RunSnapshot, clients: Sequence[ClientRecord], with_credentials: bool = False
) -> bytes:
    """Return a run as an archive; equal runs give equal bytes."""
    writer = _Writer(snapshot)
    log = writer.log(snapshot.log)
    return log + writer.end(clients[: writer.num_clients], with_credentials)


class _Writer:
    """Writes an archive: first `log` for each page, then `end`.

    Args:
        snapshot: The run; its log may be missing.

    Attributes:
        num_log: Number of log lines so far.
        num_clients: 1 + the highest client index that the run refers to, so far.
    """

    def __init__(self, snapshot: RunSnapshot) -> None:
        self.num_log = 0
        self.num_clients = max(referenced_clients(snapshot), default=-1) + 1
        self._rounds: set[tuple[tuple[int, ...], str]] = set()
        self._digest = hashlib.sha256()
        self._num_lines = 0
        self._packed = io.BytesIO()
        self._file = gzip.GzipFile(fileobj=self._packed, mode="wb", filename="", mtime=0)
        self._write(_lines_without_log(snapshot))

    def log(self, entries: Sequence[LogEntry]) -> bytes:
        """Add a page of the log; return the next bytes."""
        self._write(
            Entry(entry=entry.kind, version=entry.version, body=entry.body) for entry in entries
        )
        for indices, names in rounds_of(entries):
            self._rounds.add((indices, names))
            self.num_clients = max(self.num_clients, *(index + 1 for index in indices))
        self.num_log += len(entries)
        return self._taken()

    def end(self, clients: Sequence[ClientRecord], with_credentials: bool) -> bytes:
        """Return the last bytes, given the first `num_clients` clients of the store."""
        if len(clients) == self.num_clients and match_clients(self._rounds, clients):
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


def _lines_without_log(snapshot: RunSnapshot) -> Iterator[Line]:
    """Yield all lines of a run except its log and its clients."""
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
    # In the format of this version, whichever version wrote it.
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
