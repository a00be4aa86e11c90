"""Archives: a complete run in one file, to move it to another store.

An archive is gzipped JSON lines: a header, the run, its closed work, the memories of its clients'
methods, its log, the clients that it refers to, and a last line with the digest of all others.
Reading an archive executes no code from it.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, get_args, get_type_hints

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from fedone_sdk.aggregator.archives.lines import (
    FORMAT,
    LINE,
    VERSION,
    Client,
    Closed,
    End,
    Entry,
    Header,
    Line,
    MemoryLine,
    Run,
    clients_of,
    match_clients,
    rounds_of,
)
from fedone_sdk.aggregator.rounds import MIN_SAMPLES, RoundMachine
from fedone_sdk.aggregator.rounds.codec import arrays_of, decode, encode_arrays, encode_document
from fedone_sdk.aggregator.rounds.events import Event, PauseRequested, ReplicasLost
from fedone_sdk.aggregator.rounds.replay import compare, machine_of
from fedone_sdk.aggregator.rounds.state import RunState, Seat
from fedone_sdk.aggregator.runtime import in_thread
from fedone_sdk.aggregator.serving.run_view import Counters
from fedone_sdk.algorithms import Memory, State
from fedone_sdk.errors import ArchiveError, one_line
from fedone_sdk.messages import LostWork, RoundReport
from fedone_sdk.messages.forms import first_error
from fedone_sdk.spec import OwnMethodSpec, RunSpec
from fedone_sdk.stores import ClientRecord, ClosedWork, LogEntry, RunRecord, RunSnapshot, Store

MAX_UNPACKED_BYTES = 1 << 30
"""Maximal unpacked size of an archive, bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """The checked content of an archive.

    Attributes:
        snapshot: The run.
        clients: Clients 0 to the highest index that the run refers to, in index order; empty if
            the archive has no clients.
        state: The state of the run.
    """

    snapshot: RunSnapshot
    clients: tuple[ClientRecord, ...]
    state: RunState

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return self.snapshot.record.run_id

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended for good and needs its clients no more."""
        return not self.state.running and not machine_of(self.snapshot).can_resume(self.state)


def read_archive(
    data: bytes,
    *,
    computes: bool = True,
    own_method: bool = True,
    max_unpacked_bytes: int = MAX_UNPACKED_BYTES,
) -> Archive:
    """Read and check an archive.

    Args:
        data: The archive.
        computes: Whether to replay the run from its log as well.
        own_method: Whether to accept a run with a method of the user's own, which `load_method`
            has loaded.
        max_unpacked_bytes: Maximal unpacked size.

    Raises:
        ArchiveError: The archive is damaged, too large, inconsistent, or of a newer version.
    """
    try:
        archive = _parse_archive(_unpack(data, max_unpacked_bytes), own_method)
        report = compare(archive.snapshot) if computes else None
    except ArchiveError:
        raise
    # Untrusted input: each parser below raises its own errors.
    except (
        ArithmeticError,
        EOFError,
        LookupError,
        MemoryError,
        OSError,
        RecursionError,
        TypeError,
        ValueError,
        zlib.error,
    ) as exc:
        raise ArchiveError(f"the archive is damaged: {_reason(exc)}") from exc
    if report is not None and report.difference is not None:
        raise ArchiveError(f"the archive is inconsistent: {report.difference}")
    return archive


def _unpack(data: bytes, max_bytes: int) -> list[Any]:
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        text = file.read(max_bytes + 1)
    if len(text) > max_bytes:
        raise ArchiveError(f"the archive holds more than {max_bytes} bytes")
    head, _, _ = text.partition(b"\n")
    header = json.loads(head)
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ArchiveError("this is not an archive of a run")
    if header.get("version") != VERSION:
        raise ArchiveError(
            f"the archive has version {header.get('version')!r}, this fedone-sdk reads {VERSION}"
        )
    end_at = text.rstrip(b"\n").rfind(b"\n") + 1
    lines = [LINE.validate_json(line) for line in text.splitlines()]
    end = lines.pop()
    if not isinstance(end, End) or end.lines != len(lines):
        raise ArchiveError("the archive is damaged: it has no end")
    if hashlib.sha256(text[:end_at]).hexdigest() != end.sha256:
        raise ArchiveError("the archive is damaged: its digest does not match")
    return lines


def _parse_archive(lines: Sequence[Any], own_method: bool) -> Archive:
    header, run, *rest = lines
    if not isinstance(header, Header) or not isinstance(run, Run):
        raise ValueError("its first line is not a run")
    groups: dict[type[Line], list[Any]] = {Client: [], Closed: [], Entry: [], MemoryLine: []}
    for line in rest:
        if type(line) not in groups:
            raise ValueError(f"{line.kind!r} occurs twice")
        groups[type(line)].append(line)
    snapshot = RunSnapshot(
        record=RunRecord(
            run_id=header.run_id,
            spec=run.spec,
            candidates=run.candidates,
            document=run.document,
            arrays=base64.b64decode(run.arrays, validate=True),
            version=run.version,
            created_at=run.created_at,
        ),
        closed=tuple(
            ClosedWork(run_id=header.run_id, **line.model_dump(exclude={"kind"}))
            for line in groups[Closed]
        ),
        log=tuple(
            LogEntry(kind=line.entry, body=line.body, version=line.version)
            for line in groups[Entry]
        ),
        memories=tuple(
            (line.client_index, base64.b64decode(line.value, validate=True))
            for line in groups[MemoryLine]
        ),
    )
    spec = RunSpec.model_validate_json(snapshot.record.spec)
    if not own_method and isinstance(spec.method, OwnMethodSpec):
        raise ArchiveError(
            "a run with a method of its own cannot be imported over HTTP; import it into the "
            "server's store: fedone runs import FILE --store STORE --run RUN.yaml"
        )
    clients = tuple(line.record() for line in groups[Client])
    state = _check_run(snapshot)
    _check_references(snapshot, clients)
    return Archive(snapshot=snapshot, clients=clients, state=state)


def _check_run(snapshot: RunSnapshot) -> RunState:
    """Read a run like the service does, with stricter checks."""
    record, machine = snapshot.record, machine_of(snapshot)
    spec = machine.spec
    if spec.name != record.run_id:
        raise ValueError(f"run {record.run_id!r} is described as {spec.name!r}")
    document = json.loads(record.document, parse_constant=_refuse_constant)
    Counters.load(document.pop("counters"))
    state = decode(document, record.arrays)
    known = json.loads(json.dumps(encode_document(state)))
    for key, value in document.items():
        if key not in known or known[key] != value:
            raise ValueError(f"{key}: is not a valid part of a run's state")
    _check_types(state)
    cap = state.account.cap  # The replay checks the raises in the log.
    if cap != spec.budget and (not (cap and spec.budget) or spec.budget.raised(cap) != cap):
        raise ValueError("the caps are not those of the run's budget")
    if not 0 <= state.round <= spec.rounds:
        raise ValueError(f"round {state.round} is not one of {spec.rounds}")
    if len({(seat.slot, seat.client) for seat in state.seats}) < len(state.seats):
        raise ValueError("a client has two seats of one slot")
    for seat in state.seats:
        _check_seat(machine, state, seat)
    versions = [entry.version for entry in snapshot.log]
    if versions != sorted(versions) or max(versions, default=0) > record.version:
        raise ValueError("the log is not in order")
    for entry in snapshot.log:
        body = json.loads(entry.body, parse_constant=_refuse_constant)
        if entry.kind == "round":
            RoundReport.model_validate(body["report"])
        elif entry.kind == "metric":
            _METRIC.validate_python((body["round"], body["value"]))
        elif entry.kind == "lost":
            LostWork.model_validate(body)
        elif not isinstance(body, dict):
            raise ValueError(f"a line of the log is no {entry.kind}")
    return state


_METRIC: TypeAdapter[tuple[int, float]] = TypeAdapter(
    tuple[int, float], config=ConfigDict(strict=True)
)


def _check_seat(machine: RoundMachine, state: RunState, seat: Seat) -> None:
    method = machine.spec.method
    if seat.phase == "working":
        if seat.assignment_id is None or seat.assignment_id not in state.account.leases:
            raise ValueError(f"the work of seat {seat.slot} has no lease")
        if not min(MIN_SAMPLES, method.num_samples) <= seat.num_samples <= method.num_samples:
            raise ValueError(f"seat {seat.slot} has {seat.num_samples} prompts")
        if not 1 <= seat.num_steps <= method.local_steps:
            raise ValueError(f"seat {seat.slot} has {seat.num_steps} steps")
    if min(seat.slot, seat.client, seat.step) < 0 or seat.step > method.local_steps:
        raise ValueError(f"seat {seat.slot} of client {seat.client} is at step {seat.step}")
    if seat.local is not None:
        alpha = seat.local.alpha
        if not np.array_equal(machine.method.project(alpha), alpha):
            raise ValueError(f"seat {seat.slot} has an alpha that the method does not allow")
        machine.method.check(seat.local)


def _check_types(value: Any) -> None:
    """Check the field types of a dataclass; arrays are checked where they are built."""
    hints = get_type_hints(type(value))
    for field in fields(value):
        held, hint = getattr(value, field.name), hints[field.name]
        if isinstance(held, State) or hint == Memory or held == ():
            continue
        parts = held if isinstance(held, tuple) else (held,)
        if held is None and type(None) in get_args(hint):
            continue
        if all(is_dataclass(part) for part in parts):
            for part in parts:
                _check_types(part)
        else:
            TypeAdapter(hint).validate_python(held, strict=True)


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def _check_references(snapshot: RunSnapshot, clients: Sequence[ClientRecord]) -> None:
    if [client.index for client in clients] != list(range(len(clients))):
        raise ValueError("the clients have gaps")
    used = clients_of(snapshot)
    if clients and max(used, default=-1) >= len(clients):
        raise ValueError(f"client {max(used)} is missing")
    if clients and not match_clients(rounds_of(snapshot.log), clients):
        raise ValueError("the log names other clients")


async def import_run(
    store: Store, data: bytes, now: float, *, own_method: bool = True
) -> RunRecord:
    """Import a run from an archive; a running one is paused, with its open work kept.

    Clients keep their enrolment indices, because the run's random draws depend on them. If the
    store has other clients with these indices, only runs that have ended for good are imported.

    Returns:
        The run as it was stored.

    Raises:
        ArchiveError: The archive is invalid or does not fit this store; nothing was written.
    """
    archive = await in_thread(partial(read_archive, data, own_method=own_method))
    clients = await _importable_clients(store, archive)
    snapshot = replace(archive.snapshot, record=_paused_record(archive, now))
    try:
        await store.restore(snapshot, clients)
    except ValueError as exc:
        raise ArchiveError(f"run {archive.run_id!r} cannot be imported: {exc}") from exc
    return snapshot.record


async def _importable_clients(store: Store, archive: Archive) -> tuple[ClientRecord, ...]:
    """Return the clients to import with a run."""
    here = await store.clients(limit=len(archive.clients))
    obstacle = None
    if not archive.clients and clients_of(archive.snapshot):
        obstacle = "its clients are not in the archive"
    for imported, existing in zip(archive.clients, here, strict=False):
        if imported.client_id != existing.client_id:
            obstacle = (
                f"client {imported.index} is {imported.client_id!r} in the archive and "
                f"{existing.client_id!r} here; import it into a store without clients"
            )
            break
    if obstacle is None:
        return archive.clients
    if archive.has_ended:
        return ()
    raise ArchiveError(f"run {archive.run_id!r} cannot continue here: {obstacle}")


def _paused_record(archive: Archive, now: float) -> RunRecord:
    """Return the run with pending calls charged, and paused if it was running."""
    record, state = archive.snapshot.record, archive.state
    if archive.has_ended:
        return record
    machine = machine_of(archive.snapshot)
    events: list[Event] = [ReplicasLost(alive=frozenset(), down=True)]
    if state.running:
        events.append(
            PauseRequested(reason="imported; resume the run once no other server runs it")
        )
    for event in events:
        state, _ = machine.step(state, event, now)
    document = {
        **encode_document(state),
        "counters": json.loads(record.document)["counters"],
    }
    return replace(
        record,
        document=json.dumps(document, separators=(",", ":")),
        arrays=encode_arrays(arrays_of(state)),
    )


def _reason(error: BaseException) -> str:
    if isinstance(error, ValidationError):
        return first_error(error)
    return one_line(error) or type(error).__name__
