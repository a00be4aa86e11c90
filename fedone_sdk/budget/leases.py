"""Open leases of a file, and the processes that opened them."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from typing import Literal, Self

from fedone_sdk.budget.usage import Usage
from fedone_sdk.errors import MissingExtraError

__all__ = ["LeaseOwner", "OpenLease", "OwnerState"]

OwnerState = Literal["running", "ended", "unknown"]

_CLOCK_S = 2.0
"""How far the start of a process may be off, seconds: some systems tell whole seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOwner:
    """The process that opened a lease, and when.

    Attributes:
        host: Name of its machine, or of its container.
        pid: Its process id there.
        program: What it does, as the ledger was told.
        opened_at: When the lease was opened, seconds since the epoch.
    """

    host: str
    pid: int
    program: str
    opened_at: float

    @classmethod
    def here(cls, program: str) -> Self:
        """This process, now."""
        return cls(host=platform.node(), pid=os.getpid(), program=program, opened_at=time.time())

    def state(self) -> OwnerState:
        """Whether the process still runs; ``unknown`` for a process of another host.

        A process that started after the lease was opened has the same id by chance.

        Raises:
            MissingExtraError: psutil is not installed.
        """
        if self.host != platform.node():
            return "unknown"
        try:
            import psutil
        except ImportError as exc:
            raise MissingExtraError("looking for processes", extra="cli") from exc
        try:
            process = psutil.Process(self.pid)
            another = process.create_time() > self.opened_at + _CLOCK_S
            ended = another or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return "ended"
        except psutil.AccessDenied:
            return "running"
        return "ended" if ended else "running"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLease:
    """A reservation that nothing has settled yet.

    Attributes:
        lease_id: Its name in the ledger.
        worst: What it holds back.
        owner: Who opened it; None where an older version of the SDK did.
    """

    lease_id: str
    worst: Usage
    owner: LeaseOwner | None

    def state(self) -> OwnerState:
        """Whether the process that may still settle it runs.

        Raises:
            MissingExtraError: psutil is not installed.
        """
        return "unknown" if self.owner is None else self.owner.state()
