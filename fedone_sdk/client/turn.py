"""The result of one turn of an edge client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
