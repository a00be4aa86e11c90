"""Events that a client reports to its app."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import structlog

_log = structlog.get_logger(__name__)

EventKind = Literal[
    "enrolled",
    "waiting",
    "assigned",
    "scored",
    "updated",
    "declined",
    "refused",
    "paused",
    "resumed",
    "offline",
    "online",
    "ended",
]
"""``enrolled``: the device has an identity. ``waiting``: it claims work, or has to wait
`retry_after_s` before the next claim. ``assigned``: it has work. ``scored``: `done` of `total`
prompts have their losses. ``updated``: the server has accepted the update. ``declined``: the device
has declined the work. ``refused``: the server has refused the update. ``paused``: the condition
`only_when` does not hold; ``resumed``: it holds again. ``offline``: the server cannot be reached;
``online``: it can be reached again. ``ended``: there will be no more work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientEvent:
    """One event of a client. It has neither texts nor secrets.

    Attributes:
        kind: What happened.
        run_id: The run of the work.
        assignment_id: The work.
        round: Its round, from 0.
        done: Prompts of the work that have their losses.
        total: Prompts of the work.
        reason: Why, for people.
        retry_after_s: Seconds until the next claim.
    """

    kind: EventKind
    run_id: str | None = None
    assignment_id: str | None = None
    round: int | None = None
    done: int | None = None
    total: int | None = None
    reason: str | None = None
    retry_after_s: float | None = None


OnEvent = Callable[[ClientEvent], object]
"""Receives each event; its result is ignored."""


class EventSink:
    """Passes events to the app, and logs exceptions of its function.

    Args:
        on_event: The app's function; None drops the events.
    """

    def __init__(self, on_event: OnEvent | None) -> None:
        self._on_event = on_event

    def emit(self, kind: EventKind, **facts: Any) -> None:
        """Report one event."""
        if self._on_event is None:
            return
        try:
            self._on_event(ClientEvent(kind=kind, **facts))
        except Exception as exc:
            # Only the type of an app's exception: its text may quote private data.
            _log.warning("on_event failed", kind=kind, error=type(exc).__name__)
