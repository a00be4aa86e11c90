"""When a device may work: while it charges, say, or is on a network that costs nothing."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable

import structlog

from fedone_sdk.client.batch import Declining
from fedone_sdk.client.events import EventSink
from fedone_sdk.client.lease import Lease
from fedone_sdk.errors import FedOneError

__all__ = ["CONDITION_POLL_S", "Condition", "Gate", "OnlyWhen", "PutOff"]

_log = structlog.get_logger(__name__)

OnlyWhen = Callable[[], "bool | Awaitable[bool]"]
"""Whether the device may work now. Plain or async."""

CONDITION_POLL_S = 10.0
"""How often a condition that does not hold is asked again, seconds."""

_MARGIN_S = 2.0
"""How long before its deadline a seat is given back, seconds."""


class PutOff(FedOneError):
    """The client stops while the app's condition does not hold: the work waits in its journal."""


class Condition:
    """The app's condition.

    Args:
        only_when: The app's function; None always holds.
        teller: Told when it stops or begins to hold.
    """

    def __init__(self, only_when: OnlyWhen | None, teller: EventSink) -> None:
        self._only_when = only_when
        self._teller = teller
        self._held = True
        self._failing = False

    async def holds(self) -> bool:
        """Whether the device may work now; not when the app's function fails."""
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
            self._teller.tell("resumed" if held else "paused")
        return held


class Gate:
    """Lets requests for scores through while the condition holds.

    Work under way waits for the condition as long as the server puts its deadline off, and is
    given back shortly before the deadline that it does not put off any more.

    Args:
        condition: The app's.
        lease: The work's time.
        pause: Waits so many seconds, or less when the client stops.
        stopping: Whether the client stops.
    """

    def __init__(
        self,
        condition: Condition,
        lease: Lease,
        *,
        pause: Callable[[float], Awaitable[None]],
        stopping: Callable[[], bool],
    ) -> None:
        self._condition = condition
        self._lease = lease
        self._pause = pause
        self._stopping = stopping
        self._turns = asyncio.Lock()

    async def ready(self) -> None:
        """Returns once a request may be sent.

        Raises:
            Declining: The time is over.
            PutOff: The client stops.
        """
        async with self._turns:  # many queries wait for one condition
            while not await self._condition.holds():
                if self._stopping():
                    raise PutOff
                wait_s = CONDITION_POLL_S
                if not self._lease.renewable:
                    left_s = self._lease.left_s - _MARGIN_S
                    if left_s <= 0:
                        raise Declining("the device may not work now, and its time is over")
                    wait_s = min(wait_s, left_s)
                await self._pause(wait_s)
