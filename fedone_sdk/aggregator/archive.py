"""Archives: a run with all that belongs to it in one file, to be moved to another store.

An archive is gzipped JSON lines: a header, the run, the clients that it refers to, its closed
work, its log, what its clients' methods remember, and a last line with the digest of all others.
It is text through and through: reading one runs no code of its author's.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Annotated, Any, Literal, Self, get_args, get_type_hints

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from fedone_sdk.aggregator.codec import arrays_of, decode, encode_arrays, encode_document
from fedone_sdk.aggregator.events import Event, PauseAsked, Restarted
from fedone_sdk.aggregator.machine import MIN_SAMPLES, RoundMachine
from fedone_sdk.aggregator.replay import compare, machine_of
from fedone_sdk.aggregator.run import Counters
from fedone_sdk.aggregator.state import RunState, Seat
from fedone_sdk.algorithms import Memory, State
from fedone_sdk.errors import ArchiveError
from fedone_sdk.messages import LostWork, Receipt, RoundReport
from fedone_sdk.messages.base import Id, Name
from fedone_sdk.stores import (
    NO_CREDENTIAL,
    ClientRecord,
    ClosedWork,
    LogEntry,
    RunRecord,
    RunSnapshot,
    Store,
)

__all__ = [
    "Archive",
    "MAX_UNPACKED_BYTES",
    "export_run",
    "import_run",
    "read_archive",
    "write_archive",
]

FORMAT = "fedone-run"
VERSION = 1
MAX_UNPACKED_BYTES = 1 << 30
"""The largest archive, unpacked."""

_Index = Annotated[int, Field(ge=0, lt=2**31)]
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)


class _Header(_Line):
    kind: Literal["archive"] = "archive"
    format: Literal["fedone-run"] = "fedone-run"
    version: int = VERSION
    run_id: str


class _Run(_Line):
    """A `RunRecord`."""

    kind: Literal["run"] = "run"
    spec: str
    candidates: str
    document: str
    arrays: str
    version: _Index
    created_at: float


_NO_CREDENTIAL = "moved without it: "
"""No digest begins like this: a client that came without its credential is only a name."""


class _Credential(_Line):
    credential_sha256: _Sha256
    previous_sha256: _Sha256 | None = None
    enrolment_sha256: _Sha256 | None = None
    public_key: Annotated[str, Field(max_length=200)] | None = None
    token: Annotated[str, Field(max_length=200)] | None = None
    runs: tuple[Annotated[str, Field(max_length=200)], ...] | None = None
    revoked_at: float | None = None


class _Client(_Line):
    """A `ClientRecord`; digests of its secrets only where they were asked for."""

    kind: Literal["client"] = "client"
    index: _Index
    client_id: Id
    name: Name | None = None
    enrolled_at: float
    credential: _Credential | None = None

    def record(self) -> ClientRecord:
        """As a store has it."""
        secrets = {"credential_sha256": f"{_NO_CREDENTIAL}{self.client_id}"}
        return ClientRecord(
            index=self.index,
            client_id=self.client_id,
            name=self.name,
            enrolled_at=self.enrolled_at,
            **(secrets if self.credential is None else self.credential.model_dump()),
        )


class _Closed(_Line):
    """A `ClosedWork`."""

    kind: Literal["closed"] = "closed"
    assignment_id: Id
    client_index: _Index
    outcome: Annotated[str, Field(max_length=2000)]
    body_sha256: _Sha256 | None = None
    receipt: str | None = None

    @model_validator(mode="after")
    def _check_receipt(self) -> Self:
        if (self.receipt is None) != (self.outcome != "accepted"):
            raise ValueError("accepted work has a receipt, and no other")
        if self.receipt is not None:
            receipt = Receipt.model_validate_json(self.receipt)
            if (receipt.assignment_id, receipt.body_sha256) != (
                self.assignment_id,
                self.body_sha256,
            ):
                raise ValueError("the receipt is for other work")
        return self


class _Entry(_Line):
    """A `LogEntry`."""

    kind: Literal["log"] = "log"
    entry: Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")]
    version: _Index
    body: str


class _Memory(_Line):
    kind: Literal["memory"] = "memory"
    client_index: _Index
    value: str


class _End(_Line):
    kind: Literal["end"] = "end"
    lines: int
    sha256: _Sha256


_LINE: TypeAdapter[_Header | _Run | _Client | _Closed | _Entry | _Memory | _End] = TypeAdapter(
    Annotated[
        _Header | _Run | _Client | _Closed | _Entry | _Memory | _End, Field(discriminator="kind")
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """A run out of an archive; all of it was checked.

    Attributes:
        snapshot: The run.
        clients: Those that it refers to and all before them, in index order; empty where the
            run was kept apart from its clients.
        state: Where it stands.
    """

    snapshot: RunSnapshot
    clients: tuple[ClientRecord, ...]
    state: RunState

    @property
    def run_id(self) -> str:
        """Names the run."""
        return self.snapshot.record.run_id

    @property
    def has_ended(self) -> bool:
        """Whether it can never go on, so that nobody asks for its clients any more."""
        return not self.state.running and not machine_of(self.snapshot).can_resume(self.state)


# Out


async def export_run(store: Store, run_id: str, *, with_credentials: bool = False) -> bytes:
    """A run as an archive, as it stands at one moment.

    Args:
        store: Where it is; other processes may serve it meanwhile.
        run_id: The run.
        with_credentials: Whether the digests of its clients' credentials go along, so that they
            can go on working for it elsewhere.

    Raises:
        ArchiveError: There is no such run.
    """
    snapshot = await store.snapshot(run_id)
    if snapshot is None:
        raise ArchiveError(f"there is no run {run_id!r} in the store")
    clients = await store.clients()
    return await asyncio.to_thread(write_archive, snapshot, clients, with_credentials)


def write_archive(
    snapshot: RunSnapshot, clients: Sequence[ClientRecord], with_credentials: bool = False
) -> bytes:
    """A run as an archive; the same run gives the same bytes.

    Args:
        snapshot: The run.
        clients: All clients of its store, in index order.
        with_credentials: Whether the digests of clients' credentials go along.
    """
    record = snapshot.record
    used = clients[: max(_clients_of(snapshot), default=-1) + 1]
    if not _are_its_own(snapshot, used):
        used = []
    # As this version writes it, whichever wrote it.
    document = json.loads(record.document)
    counters = document.pop("counters")
    document = {**encode_document(decode(document, record.arrays)), "counters": counters}
    lines: list[_Line] = [
        _Header(run_id=record.run_id),
        _Run(
            spec=record.spec,
            candidates=record.candidates,
            document=json.dumps(document, separators=(",", ":")),
            arrays=base64.b64encode(record.arrays).decode(),
            version=record.version,
            created_at=record.created_at,
        ),
        *(_client_line(client, with_credentials) for client in used),
        *(
            _Closed(
                assignment_id=work.assignment_id,
                client_index=work.client_index,
                outcome=work.outcome,
                body_sha256=work.body_sha256,
                receipt=work.receipt,
            )
            for work in snapshot.closed
        ),
        *(
            _Entry(entry=entry.kind, version=entry.version, body=entry.body)
            for entry in snapshot.log
        ),
        *(
            _Memory(client_index=index, value=base64.b64encode(value).decode())
            for index, value in snapshot.memories
        ),
    ]
    digest = hashlib.sha256()
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", filename="", mtime=0) as file:
        for line in lines:
            text = line.model_dump_json(exclude_none=True).encode() + b"\n"
            digest.update(text)
            file.write(text)
        end = _End(lines=len(lines), sha256=digest.hexdigest())
        file.write(end.model_dump_json().encode() + b"\n")
    return packed.getvalue()


def _client_line(client: ClientRecord, with_credentials: bool) -> _Client:
    credential = None
    none = (_NO_CREDENTIAL, NO_CREDENTIAL)
    if with_credentials and not client.credential_sha256.startswith(none):
        credential = _Credential(
            credential_sha256=client.credential_sha256,
            previous_sha256=client.previous_sha256,
            enrolment_sha256=client.enrolment_sha256,
            public_key=client.public_key,
            token=client.token,
            runs=client.runs,
            revoked_at=client.revoked_at,
        )
    return _Client(
        index=client.index,
        client_id=client.client_id,
        name=client.name,
        enrolled_at=client.enrolled_at,
        credential=credential,
    )


def _clients_of(snapshot: RunSnapshot) -> set[int]:
    """The enrolment indices that a run refers to."""
    document = json.loads(snapshot.record.document)
    found = {seat["client"] for seat in document["seats"]} | set(document["passed"])
    found |= {work.client_index for work in snapshot.closed}
    found |= {index for index, _ in snapshot.memories}
    for seats, _ in _rounds(snapshot.log):
        found |= {seat["client"] for seat in seats}
    return found


def _rounds(log: Sequence[LogEntry]) -> Iterator[tuple[list[dict[str, Any]], str]]:
    """The seats of each round, and its clients' names."""
    for entry in log:
        if entry.kind == "round":
            body = json.loads(entry.body)
            yield body["seats"], body["report"]["client_id"]


def _are_its_own(snapshot: RunSnapshot, clients: Sequence[ClientRecord]) -> bool:
    """Whether these are the clients that the run worked with, not another store's."""
    for seats, names in _rounds(snapshot.log):
        indices = [seat["client"] for seat in seats]
        if max(indices) >= len(clients):
            return False
        if sorted(clients[index].client_id for index in indices) != sorted(names.split(",")):
            return False
    return True


# In


def read_archive(
    data: bytes, *, computes: bool = True, max_unpacked_bytes: int = MAX_UNPACKED_BYTES
) -> Archive:
    """Reads an archive and checks all of it.

    Args:
        data: The archive.
        computes: Whether the run is computed again from its log, too.
        max_unpacked_bytes: The most that it may hold.

    Raises:
        ArchiveError: It is damaged, too large, of a newer version, or does not agree with itself.
    """
    try:
        archive = _checked(_unpack(data, max_unpacked_bytes))
        report = compare(archive.snapshot) if computes else None
    except ArchiveError:
        raise
    # Whatever a stranger made of it: each part below has its own way to refuse what it is given.
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
        raise ArchiveError(f"the archive is damaged: {_one_line(exc)}") from exc
    if report is not None and report.difference is not None:
        raise ArchiveError(f"the archive does not agree with itself: {report.difference}")
    return archive


def _unpack(data: bytes, max_bytes: int) -> list[Any]:
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        text = file.read(max_bytes + 1)
    if len(text) > max_bytes:
        raise ArchiveError(f"the archive holds more than {max_bytes} bytes")
    head, _, _ = text.partition(b"\n")
    header = json.loads(head)
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ArchiveError("this is no archive of a run")
    if header.get("version") != VERSION:
        raise ArchiveError(
            f"the archive has version {header.get('version')!r}, this fedone-sdk reads {VERSION}"
        )
    end_at = text.rstrip(b"\n").rfind(b"\n") + 1
    lines = [_LINE.validate_json(line) for line in text.splitlines()]
    end = lines.pop()
    if not isinstance(end, _End) or end.lines != len(lines):
        raise ArchiveError("the archive is damaged: it has no end")
    if hashlib.sha256(text[:end_at]).hexdigest() != end.sha256:
        raise ArchiveError("the archive is damaged: its digest is another one")
    return lines


def _checked(lines: Sequence[Any]) -> Archive:
    header, run, *rest = lines
    if not isinstance(header, _Header) or not isinstance(run, _Run):
        raise ValueError("it does not begin with a run")
    groups: dict[type[_Line], list[Any]] = {_Client: [], _Closed: [], _Entry: [], _Memory: []}
    for line in rest:
        if type(line) not in groups:
            raise ValueError(f"{line.kind!r} stands twice")
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
            for line in groups[_Closed]
        ),
        log=tuple(
            LogEntry(kind=line.entry, body=line.body, version=line.version)
            for line in groups[_Entry]
        ),
        memories=tuple(
            (line.client_index, base64.b64decode(line.value, validate=True))
            for line in groups[_Memory]
        ),
    )
    clients = tuple(line.record() for line in groups[_Client])
    state = _check_run(snapshot)
    _check_references(snapshot, clients)
    return Archive(snapshot=snapshot, clients=clients, state=state)


def _check_run(snapshot: RunSnapshot) -> RunState:
    """Reads a run as a service would, more strictly."""
    record, machine = snapshot.record, machine_of(snapshot)
    spec = machine.spec
    if spec.name != record.run_id:
        raise ValueError(f"run {record.run_id!r} is described as {spec.name!r}")
    document = json.loads(record.document, parse_constant=_refuse)
    Counters.load(document.pop("counters"))
    state = decode(document, record.arrays)
    known = json.loads(json.dumps(encode_document(state)))
    for key, value in document.items():
        if key not in known or known[key] != value:
            raise ValueError(f"{key}: is no part of a run's state, or not as it should be")
    _check_types(state)
    if state.account.cap != spec.budget:
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
        body = json.loads(entry.body, parse_constant=_refuse)
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
    """Checks that a dataclass holds what it declares; arrays are checked by those who made them."""
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


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def _check_references(snapshot: RunSnapshot, clients: Sequence[ClientRecord]) -> None:
    if [client.index for client in clients] != list(range(len(clients))):
        raise ValueError("the clients have gaps")
    used = _clients_of(snapshot)
    if clients and max(used, default=-1) >= len(clients):
        raise ValueError(f"client {max(used)} is missing")
    if clients and not _are_its_own(snapshot, clients):
        raise ValueError("the log names other clients")


async def import_run(store: Store, data: bytes, now: float) -> RunRecord:
    """Takes a run in out of an archive; one that runs is paused, its open work kept.

    Its clients keep their enrolment indices, which the run's random draws are over. Where the
    store has other clients under them, only a run that has ended for good is taken in.

    Args:
        store: Where the run goes.
        data: The archive.
        now: Seconds since the epoch.

    Returns:
        The run as it was stored.

    Raises:
        ArchiveError: The archive cannot be used, or not in this store; nothing was written.
    """
    archive = await asyncio.to_thread(read_archive, data)
    clients = await _admitted(store, archive)
    snapshot = replace(archive.snapshot, record=_at_rest(archive, now))
    try:
        await store.restore(snapshot, clients)
    except ValueError as exc:
        raise ArchiveError(f"run {archive.run_id!r} cannot be taken in: {exc}") from exc
    return snapshot.record


async def _admitted(store: Store, archive: Archive) -> tuple[ClientRecord, ...]:
    """The clients to take in with a run."""
    here = await store.clients()
    trouble = None
    if not archive.clients and _clients_of(archive.snapshot):
        trouble = "its clients are not in the archive"
    for theirs, ours in zip(archive.clients, here, strict=False):
        if theirs.client_id != ours.client_id:
            trouble = (
                f"client {theirs.index} is {theirs.client_id!r} in the archive and "
                f"{ours.client_id!r} here; a store without clients takes it in"
            )
            break
    if trouble is None:
        return archive.clients
    if archive.has_ended:
        return ()
    raise ArchiveError(f"run {archive.run_id!r} could not go on here: {trouble}")


def _at_rest(archive: Archive, now: float) -> RunRecord:
    """The run without anything under way but its clients' work, and paused if it ran."""
    record, state = archive.snapshot.record, archive.state
    if archive.has_ended:
        return record
    machine = machine_of(archive.snapshot)
    events: list[Event] = [Restarted(alive=frozenset(), down=True)]
    if state.running:
        events.append(PauseAsked(reason="moved here; resume the run when it runs nowhere else"))
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


def _one_line(error: BaseException) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        return f"{place}: {first['msg']}" if place else first["msg"]
    return " ".join(str(error).split()) or type(error).__name__
