"""What a client tells the app around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import structlog

__all__ = ["ClientEvent", "EventKind", "EventSink", "OnEvent"]

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
"""``enrolled``: the device has an identity. ``waiting``: it has asked for work, or was told when
to ask again. ``assigned``: it has work. ``scored``: `done` of `total` prompts have their losses.
``updated``: the server has taken the work. ``declined``: the work was given back. ``refused``: the
server did not take it. ``paused``: the app's condition does not hold; ``resumed``: it does again.
``offline``: the server cannot be reached; ``online``: it can again. ``ended``: there will be no
more work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientEvent:
    """Something that a client did or met. It holds neither texts nor secrets.

    Attributes:
        kind: What.
        run_id: The run that the work is for.
        assignment_id: The work.
        round: Its round, from 0.
        done: Prompts of the work that have their losses.
        total: Prompts of the work.
        reason: Why, for people.
        retry_after_s: When the client asks again, seconds from now.
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


class EventSink:
    """Tells the app what happens; an app that fails at it harms nothing but its own display.

    Args:
        on_event: The app's function.
    """

    def __init__(self, on_event: OnEvent | None) -> None:
        self._on_event = on_event

    def tell(self, kind: EventKind, **facts: Any) -> None:
        """Tells of one event.

        Args:
            kind: What happened.
            facts: Other fields of `ClientEvent`.
        """
        if self._on_event is None:
            return
        try:
            self._on_event(ClientEvent(kind=kind, **facts))
        except Exception as exc:
            # Only the kind: what an app's function says may quote private text.
            _log.warning("on_event failed", kind=kind, error=type(exc).__name__)
