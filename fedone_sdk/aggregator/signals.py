"""Signals between the replicas of an aggregator. A lost signal only delays the other replicas.

Signals about waiting clients are sent in the transaction that stores the change, so that all
replicas draw from the same clients. The signal of a run's commit is sent after the transaction. If
this signal is lost, the other replicas notice the run's newer version later.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from fedone_sdk.messages import RunStatus
from fedone_sdk.stores import Member, Store

MAX_NAMED = 256
"""Maximal number of clients in a signal: PostgreSQL limits payloads to 8000 bytes."""


class _Signal(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class RunChanged(_Signal):
    """A run was changed by a commit.

    Attributes:
        due: The run's next deadline, seconds since the epoch.
        offered: Clients that can claim work of the round; None if they are more than `MAX_NAMED`.
        finished: Whether a round has ended.
    """

    kind: Literal["run"] = "run"
    run_id: str
    version: int
    due: float | None = None
    offered: tuple[int, ...] | None = ()
    finished: bool = False
    status: RunStatus = "running"


class RunsChanged(_Signal):
    """A run was added or deleted."""

    kind: Literal["runs"] = "runs"


class MemberJoined(_Signal):
    """A client waits for work on the sending replica."""

    kind: Literal["joined"] = "joined"
    member: Member


class MembersLeft(_Signal):
    """Clients no longer wait on the sending replica."""

    kind: Literal["left"] = "left"
    client_indices: tuple[int, ...]


class ClientChanged(_Signal):
    """A client was added or revoked, or has a new credential."""

    kind: Literal["client"] = "client"
    client_index: int


class PoolLoad(_Signal):
    """A replica's load: `num_away` clients must retry later; `rate` assignments end per second."""

    kind: Literal["load"] = "load"
    replica: str
    num_away: int
    rate: float


Signal = RunChanged | RunsChanged | MemberJoined | MembersLeft | ClientChanged | PoolLoad
SIGNAL: TypeAdapter[Signal] = TypeAdapter(Annotated[Signal, Field(discriminator="kind")])


async def publish(store: Store, signal: Signal) -> None:
    """Publish a signal if the store is shared."""
    if store.shared:
        await store.publish(signal.model_dump_json())


def encode_signals(store: Store, *signals: Signal) -> list[str]:
    """Return signals in the store's format; an empty list if the store is not shared."""
    return [signal.model_dump_json() for signal in signals] if store.shared else []
