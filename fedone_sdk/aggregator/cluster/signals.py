"""What the replicas of an aggregator tell each other. A lost signal costs time, never a state.

Who waits for work is told of with the write itself, so that all replicas draw from the same clients
even where one dies right after it; commits are told of afterwards, and are found without that.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from fedone_sdk.messages import RunStatus
from fedone_sdk.stores import Store

__all__ = [
    "ClientChanged",
    "Crowd",
    "Joined",
    "Left",
    "MAX_NAMED",
    "RunAdded",
    "RunMoved",
    "RunRemoved",
    "SIGNAL",
    "Signal",
    "tell",
    "written",
]

MAX_NAMED = 256
"""A signal names at most so many clients: PostgreSQL carries 8000 bytes."""


class _Signal(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class RunMoved(_Signal):
    """A run was changed by a commit.

    Attributes:
        run_id: Which run.
        version: Its version now.
        due: When its next deadline is over, seconds since the epoch; None has none.
        offered: Clients that were offered a seat; None is too many to name.
        finished: Whether a round was finished.
        status: Whether the run runs, or how it ended.
    """

    kind: Literal["run"] = "run"
    run_id: str
    version: int
    due: float | None = None
    offered: tuple[int, ...] | None = ()
    finished: bool = False
    status: RunStatus = "running"


class RunAdded(_Signal):
    """There is a new run."""

    kind: Literal["added"] = "added"
    run_id: str


class RunRemoved(_Signal):
    """A run was deleted."""

    kind: Literal["removed"] = "removed"
    run_id: str


class Joined(_Signal):
    """A client waits for work."""

    kind: Literal["joined"] = "joined"
    client_index: int
    num_examples: int
    run_id: str | None
    until: float


class Left(_Signal):
    """Clients do not wait any more."""

    kind: Literal["left"] = "left"
    client_indices: tuple[int, ...]


class ClientChanged(_Signal):
    """A client is new, its credential was changed, or it was revoked."""

    kind: Literal["client"] = "client"
    client_index: int


class Crowd(_Signal):
    """How many clients a replica has sent away, and how fast places become free there.

    Attributes:
        replica: Which one.
        away: Clients that are expected back.
        rate: Pieces of work that ended, per second.
    """

    kind: Literal["crowd"] = "crowd"
    replica: str
    away: int
    rate: float


_Any = RunMoved | RunAdded | RunRemoved | Joined | Left | ClientChanged | Crowd
Signal = Annotated[_Any, Field(discriminator="kind")]
SIGNAL: TypeAdapter[_Any] = TypeAdapter(Signal)


async def tell(store: Store, signal: Signal) -> None:
    """Tells the other replicas, where there may be any."""
    if store.shared:
        await store.publish(signal.model_dump_json())


def written(store: Store, *signals: Signal) -> list[str]:
    """Signals as a store passes them on; none where there are no other replicas."""
    return [signal.model_dump_json() for signal in signals] if store.shared else []
