"""When a device may work: for instance while it charges, or on an unmetered network."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable

import structlog

from fedone_sdk.client.batch import Declining
from fedone_sdk.client.events import EventSink
from fedone_sdk.client.lease import Lease
from fedone_sdk.client.stop import StopSignal
from fedone_sdk.errors import FedOneError

_log = structlog.get_logger(__name__)

OnlyWhen = Callable[[], "bool | Awaitable[bool]"]
"""Whether the device may work now. Plain or async."""

CONDITION_POLL_S = 10.0
"""Interval at which a condition that does not hold is evaluated again, seconds."""

_MARGIN_S = 2.0
"""How long before its deadline a seat is declined, seconds."""


class Paused(FedOneError):
    """The client stops while the app's condition does not hold; the journal keeps the work."""


class Condition:
    """The app's condition; the events ``paused`` and ``resumed`` report its changes."""

    def __init__(self, only_when: OnlyWhen | None, events: EventSink) -> None:
        self._only_when = only_when
        self._events = events
        self._held = True
        self._failing = False

    async def holds(self) -> bool:
        """Return whether the device may work now; False if the app's function fails."""
        if self._only_when is None:
            return True
        try:
            found = self._only_when()
            held = bool(await found if inspect.isawaitable(found) else found)
            self._failing = False
        except Exception as exc:
            if not self._failing:
                _log.warning("only_when failed: no work until it answers", error=type(exc).__name__)
            held, self._failing = False, True
        if held != self._held:
            self._held = held
            self._events.emit("resumed" if held else "paused")
        return held


class Gate:
    """Delays requests for scores until the condition holds.

    Work in progress waits for the condition as long as the server renews its lease, and is
    declined shortly before the last deadline.
    """

    def __init__(self, condition: Condition, lease: Lease, stop: StopSignal) -> None:
        self._condition = condition
        self._lease = lease
        self._stop = stop
        self._waiting = asyncio.Lock()

    async def ready(self) -> None:
        """Wait until a request may be sent.

        Raises:
            Declining: The deadline comes first.
            Paused: The client stops.
        """
        async with self._waiting:  # concurrent queries share one wait
            while not await self._condition.holds():
                if self._stop.is_set():
                    raise Paused
                wait_s = CONDITION_POLL_S
                if not self._lease.renewable:
                    left_s = self._lease.left_s - _MARGIN_S
                    if left_s <= 0:
                        raise Declining("the device may not work now, and its time is over")
                    wait_s = min(wait_s, left_s)
                await self._stop.sleep(wait_s)
