"""Open leases of a ledger file, and the processes that opened them."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from typing import Literal, Self

from fedone_sdk.errors import needs_extra
from fedone_sdk.usage import Usage

OwnerState = Literal["running", "ended", "unknown"]

_CLOCK_S = 2.0
"""Tolerance of a process's start time, seconds: some systems report whole seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOwner:
    """The process that opened a lease, and when.

    Attributes:
        opened_at: Time of the lease, seconds since the epoch.
    """

    host: str
    pid: int
    program: str
    opened_at: float

    @classmethod
    def here(cls, program: str) -> Self:
        """Return this process as the owner of a lease opened now."""
        return cls(host=platform.node(), pid=os.getpid(), program=program, opened_at=time.time())

    def state(self) -> OwnerState:
        """Return whether the process still runs; ``unknown`` for a process of another host.

        A process that started after the lease was opened is another one with the same id.

        Raises:
            MissingExtraError: psutil is not installed.
        """
        if self.host != platform.node():
            return "unknown"
        with needs_extra("looking for processes", "cli"):
            import psutil
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
    """A reservation that is not settled yet."""

    lease_id: str
    worst: Usage
    owner: LeaseOwner
