"""What a client reports to its app: its events, and the result of each turn."""

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
    """Passes events to the app, if it takes any, and logs exceptions of its function."""

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


Outcome = Literal["worked", "declined", "refused", "idle", "paused", "offline", "ended"]
"""How a turn ended.

``worked``: an update was accepted. ``declined``: the device returned the work undone. ``refused``:
the update was late or did not fit, or the run scores with another model than the device's.
``idle``: there was no work, or the device has no examples. ``paused``: the condition `only_when`
does not hold. ``offline``: the aggregator could not be reached, or did not answer as one.
``ended``: there will be no more work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The result of one turn.

    Attributes:
        outcome: How it ended.
        next_turn_s: How long to wait before the next turn, seconds: the server's ``Retry-After``
            or the backoff after a failure. 0 after accepted work.
        run_id: The run of the turn's work; None without work.
        assignment_id: The work.
        round: Its round, from 0.
        reason: Why it was declined or refused, for people.
    """

    outcome: Outcome
    next_turn_s: float = 0.0
    run_id: str | None = None
    assignment_id: str | None = None
    round: int | None = None
    reason: str | None = None
