"""What people tell a run, and what the service says of itself."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedone_sdk.budget import Usage
from fedone_sdk.messages.base import ONE_LINE, Message
from fedone_sdk.messages.bill import Billed
from fedone_sdk.messages.run import Cap, RunDevices, RunStatus
from fedone_sdk.spec import RunName

__all__ = ["About", "Check", "Health", "Quarantine", "Removal", "RollBack", "RunSummary"]


def _is_none(value: object) -> bool:
    return value is None


Reason = Annotated[str, Field(min_length=1, max_length=500), ONE_LINE]
"""Why, for the log and for other people."""


class RollBack(Message):
    """``POST /v1/runs/{id}/rollback``: a run goes on from an earlier round.

    Attributes:
        to_round: The round to do again first; later ones count as not done.
        reason: Why.
    """

    to_round: Annotated[int, Field(ge=0, le=2**31)]
    reason: Reason


class Quarantine(Message):
    """``POST /v1/runs/{id}/clients/{client_id}/quarantine``: a client gets no more of its seats.

    Attributes:
        reason: Why.
    """

    reason: Reason


class RunSummary(Billed):
    """A line of ``GET /v1/runs``.

    Attributes:
        run_id: The run.
        status: ``running`` or how it ended.
        round: Rounds done.
        rounds: Rounds planned.
        cap: The caps.
        spent: What was spent, training and evaluation (`queries`: training only).
        created_at: When the run was added, seconds since the epoch.
        ended_at: When it ended or paused, seconds since the epoch; None while it runs.
        metric: The newest value of the metric on the dev split; None where nothing is measured.
        metric_name: What that is.
        active_at: When a device last sent an update, seconds since the epoch; None where none did
            since the server started.
        devices: Who could be drawn, while it runs, without reasons.

    The last four are for people.
    """

    run_id: RunName
    status: RunStatus
    round: int
    rounds: int
    cap: Cap
    spent: Usage
    created_at: float | None = None
    ended_at: float | None = None
    metric: float | None = Field(default=None, exclude_if=_is_none)
    metric_name: str | None = Field(default=None, exclude_if=_is_none)
    active_at: float | None = Field(default=None, exclude_if=_is_none)
    devices: RunDevices | None = Field(default=None, exclude_if=_is_none)

    @property
    def for_devices(self) -> RunSummary:
        """As devices get it."""
        return self.model_copy(
            update=dict.fromkeys(("metric", "metric_name", "active_at", "devices"))
        )


class Removal(Message):
    """``DELETE /v1/runs/{id}``: what went, or would go.

    Attributes:
        run_id: The run.
        status: How it ended.
        spent: What it spent, training and evaluation (`queries`: training only).
        ended_at: When it ended, seconds since the epoch.
        log_lines: Lines of its log.
        closed_work: Pieces of work that ended.
        memories: Clients whose methods remember something.
        deleted: False where it was only asked what would go.
    """

    run_id: RunName
    status: RunStatus
    spent: Usage
    ended_at: float | None = None
    log_lines: int
    closed_work: int
    memories: int
    deleted: bool


class Check(Message):
    """One thing that the service needs.

    Attributes:
        ok: Whether it can be used now.
        detail: What is wrong; holds nothing secret, since anybody may read it.
    """

    ok: bool
    detail: str | None = None


class Health(Message):
    """``GET /healthz`` and ``GET /readyz``.

    Attributes:
        status: ``ok``, or ``unavailable`` when a check failed that decides: not ``model``.
        checks: What was looked at, by name.
    """

    status: Literal["ok", "unavailable"]
    checks: dict[str, Check] = Field(default_factory=dict)


class About(Message):
    """``GET /``: what answers here.

    Attributes:
        name: The service.
        version: Of the SDK that it runs.
        docs: Path of the page for people.
        openapi: Path of the contract.
    """

    name: str
    version: str
    docs: str
    openapi: str
