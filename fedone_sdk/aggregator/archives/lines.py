"""The lines of an archive, and the client indices that a run refers to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from fedone_sdk.messages import Receipt
from fedone_sdk.messages.base import Id, Name
from fedone_sdk.stores import NO_CREDENTIAL, ClientRecord, LogEntry, RunSnapshot

FORMAT = "fedone-run"
VERSION = 1

_Index = Annotated[int, Field(ge=0, lt=2**31)]
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Line(BaseModel):
    """A line, validated strictly."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)


class Header(Line):
    """The first line."""

    kind: Literal["archive"] = "archive"
    format: Literal["fedone-run"] = "fedone-run"
    version: int = VERSION
    run_id: str


class Run(Line):
    """A `RunRecord`."""

    kind: Literal["run"] = "run"
    spec: str
    candidates: str
    document: str
    arrays: str
    version: _Index
    created_at: float


NO_CREDENTIAL_PREFIX = "moved without it: "
"""In place of a digest: the client was imported without its credential and cannot log in."""


class _Credential(Line):
    credential_sha256: _Sha256
    previous_sha256: _Sha256 | None = None
    enrolment_sha256: _Sha256 | None = None
    token: Annotated[str, Field(max_length=200)] | None = None
    runs: tuple[Annotated[str, Field(max_length=200)], ...] | None = None
    revoked_at: float | None = None


class Client(Line):
    """A `ClientRecord`, with digests of its secrets only on request."""

    kind: Literal["client"] = "client"
    index: _Index
    client_id: Id
    name: Name | None = None
    enrolled_at: float
    credential: _Credential | None = None

    @classmethod
    def of(cls, client: ClientRecord, with_credentials: bool) -> Self:
        """Return the line of a client, with the digests of its credentials if requested."""
        credential = None
        none = (NO_CREDENTIAL_PREFIX, NO_CREDENTIAL)
        if with_credentials and not client.credential_sha256.startswith(none):
            credential = _Credential(
                credential_sha256=client.credential_sha256,
                previous_sha256=client.previous_sha256,
                enrolment_sha256=client.enrolment_sha256,
                token=client.token,
                runs=client.runs,
                revoked_at=client.revoked_at,
            )
        return cls(
            index=client.index,
            client_id=client.client_id,
            name=client.name,
            enrolled_at=client.enrolled_at,
            credential=credential,
        )

    def record(self) -> ClientRecord:
        """Return the client's store record."""
        secrets = {"credential_sha256": f"{NO_CREDENTIAL_PREFIX}{self.client_id}"}
        return ClientRecord(
            index=self.index,
            client_id=self.client_id,
            name=self.name,
            enrolled_at=self.enrolled_at,
            **(secrets if self.credential is None else self.credential.model_dump()),
        )


class Closed(Line):
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


class Entry(Line):
    """A `LogEntry`."""

    kind: Literal["log"] = "log"
    entry: Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")]
    version: _Index
    body: str


class MemoryLine(Line):
    """The method memory of a client."""

    kind: Literal["memory"] = "memory"
    client_index: _Index
    value: str


class End(Line):
    """The last line."""

    kind: Literal["end"] = "end"
    lines: int
    sha256: _Sha256


LINE: TypeAdapter[Header | Run | Client | Closed | Entry | MemoryLine | End] = TypeAdapter(
    Annotated[
        Header | Run | Client | Closed | Entry | MemoryLine | End, Field(discriminator="kind")
    ]
)


Seated = tuple[tuple[int, ...], str]
"""The clients of a round: enrolment indices, and client ids from the log."""


def rounds_of(log: Iterable[LogEntry]) -> Iterator[Seated]:
    """Yield the clients of each round."""
    for entry in log:
        if entry.kind == "round":
            body = json.loads(entry.body)
            yield tuple(seat["client"] for seat in body["seats"]), body["report"]["client_id"]


def referenced_clients(snapshot: RunSnapshot) -> set[int]:
    """Return the enrolment indices that a run's state and open work refer to."""
    document = json.loads(snapshot.record.document)
    found = {seat["client"] for seat in document["seats"]} | set(document["passed"])
    found |= {work.client_index for work in snapshot.closed}
    return found | {index for index, _ in snapshot.memories}


def clients_of(snapshot: RunSnapshot) -> set[int]:
    """Return all enrolment indices that a run refers to, its log included."""
    found = referenced_clients(snapshot)
    for indices, _ in rounds_of(snapshot.log):
        found |= set(indices)
    return found


def match_clients(rounds: Iterable[Seated], clients: Sequence[ClientRecord]) -> bool:
    """Whether the client ids in the log match these clients."""
    for indices, names in rounds:
        if max(indices) >= len(clients):
            return False
        if sorted(clients[index].client_id for index in indices) != sorted(names.split(",")):
            return False
    return True
