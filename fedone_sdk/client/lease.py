"""The time that a device has for its work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fedone_sdk.client.patience import asked_s
from fedone_sdk.errors import MessageError, ProblemError, TransportError, is_retryable
from fedone_sdk.messages import Renewal

__all__ = ["Lease"]

_RETRY_S = 3.0
_RETRY_SHARE = 0.1
"""A renewal that fails is tried again after so many seconds, or this share of a short deadline."""


class Lease:
    """An assignment's deadline, put off by renewals while the work takes longer.

    The deadline is a span from now, measured by the monotonic clock of the event loop: the
    device's wall clock may be wrong.

    Args:
        deadline_s: Seconds that the server gives.
        renew: Asks the server for another deadline.
    """

    def __init__(self, deadline_s: float, renew: Callable[[], Awaitable[Renewal]]) -> None:
        self._deadline_s = deadline_s
        self._renew = renew
        self._until = asyncio.get_running_loop().time() + deadline_s
        self._keeping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Lease:
        self._keeping = asyncio.create_task(self._keep(), name="edge client renewal")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)

    @property
    def left_s(self) -> float:
        """Seconds until the seat is given to another client, if it is not renewed again."""
        return self._until - asyncio.get_running_loop().time()

    @property
    def renewable(self) -> bool:
        """Whether the server may still give more time."""
        return self._keeping is not None and not self._keeping.done()

    async def _keep(self) -> None:
        wait_s = self._deadline_s / 2
        while True:
            await asyncio.sleep(wait_s)
            asked = asyncio.get_running_loop().time()
            try:
                renewed = await self._renew()
            except (ProblemError, TransportError, MessageError) as exc:
                if isinstance(exc, ProblemError) and not is_retryable(exc):
                    return  # renewed as often as the run allows, or the seat is lost
                wait_s = max(min(_RETRY_S, self._deadline_s * _RETRY_SHARE), asked_s(exc))
            else:
                self._deadline_s = renewed.deadline_s
                self._until = asked + self._deadline_s
                wait_s = self._deadline_s / 2
