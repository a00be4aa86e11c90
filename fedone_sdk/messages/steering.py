"""Control of runs, summaries, health."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedone_sdk.budget import Usage
from fedone_sdk.messages.base import ONE_LINE, Message, is_none
from fedone_sdk.messages.bill import Billed
from fedone_sdk.messages.run import Cap, RunDevices, RunStatus
from fedone_sdk.spec import RunName

Reason = Annotated[str, Field(min_length=1, max_length=500), ONE_LINE]
"""A reason for the log."""


class RollBack(Message):
    """``POST /v1/runs/{id}/rollback``: roll a run back to an earlier round.

    Attributes:
        to_round: The round to repeat first; it and later ones are discarded.
    """

    to_round: Annotated[int, Field(ge=0, le=2**31)]
    reason: Reason


class Quarantine(Message):
    """``POST /v1/runs/{id}/clients/{client_id}/quarantine``: exclude a client from a run."""

    reason: Reason


class RunEntry(Message):
    """An entry of ``GET /v1/runs`` for devices.

    Attributes:
        status: ``running``, or how it ended.
        round: Number of rounds done.
    """

    run_id: RunName
    status: RunStatus
    round: int
    rounds: int


class RunSummary(RunEntry, Billed):
    """An entry of ``GET /v1/runs`` for people.

    Attributes:
        spent: Usage of training and evaluation (`queries`: training only).
        ended_at: Time of the end or pause, seconds since the epoch; null while it is running.
        metric: Newest value of the metric on the dev split; null if not measured.
        active_at: Time of the last update, seconds since the epoch; null for none since the server
            started.
        devices: Available devices while it is running, without reasons.
    """

    cap: Cap
    spent: Usage
    created_at: float | None = None
    ended_at: float | None = None
    metric: float | None = Field(default=None, exclude_if=is_none)
    metric_name: str | None = Field(default=None, exclude_if=is_none)
    active_at: float | None = Field(default=None, exclude_if=is_none)
    devices: RunDevices | None = Field(default=None, exclude_if=is_none)

    @property
    def entry(self) -> RunEntry:
        """The part that devices read."""
        return RunEntry(**{name: getattr(self, name) for name in RunEntry.model_fields})


class Removal(Message):
    """``DELETE /v1/runs/{id}``: the deleted run, or the run that would be deleted.

    Attributes:
        status: How it ended.
        spent: Usage of training and evaluation (`queries`: training only).
        deleted: False for a dry run.
    """

    run_id: RunName
    status: RunStatus
    spent: Usage
    ended_at: float | None = None
    deleted: bool


class Check(Message):
    """Check of a dependency of the service.

    Attributes:
        detail: The problem, without private details, since the response is public.
    """

    ok: bool
    detail: str | None = None


class Health(Message):
    """``GET /healthz`` and ``GET /readyz``.

    Attributes:
        status: ``ok``, or ``unavailable`` if a check other than ``model`` failed.
    """

    status: Literal["ok", "unavailable"]
    checks: dict[str, Check] = Field(default_factory=dict)


class About(Message):
    """``GET /``: name and version of the server, and the path of its OpenAPI document."""

    name: str
    version: str
    openapi: str
